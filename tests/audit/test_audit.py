from __future__ import annotations

import io
import json
import math
import time
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from audit.samplers import PlainSampler, colder, draw, leaning, permuted, truncated
from foretoken.audit import AuditError, AuditPlan, CallableSubject, ReferenceModel, Sample, audit_model, audit_worlds
from foretoken.audit.greedy import Greedy, measured_noise
from foretoken.audit.indirect import audit_pair
from foretoken.audit.reference import probabilities
from foretoken.audit.report import EXIT_STATUS, odds
from foretoken.audit.sequential import Ledger
from foretoken.audit.subjects import Speculation
from foretoken.audit.tokens import Possible
from foretoken.sampling import SamplingParams

QUICK = AuditPlan(tv=0.3)


def audit(worlds, plan=QUICK, fault=None, **options):
    return audit_worlds(lambda world: CallableSubject(PlainSampler(world, fault), "plain"), worlds, plan, **options)


@pytest.fixture(scope="module")
def passed(worlds):
    return audit(worlds)


@pytest.fixture(scope="module")
def failed(worlds):
    return audit(worlds, fault=leaning)


def test_a_correct_sampler_passes(passed):
    assert passed.verdict == "PASS"
    assert passed.passed
    scopes = {finding.scope for finding in passed.findings}
    assert len(scopes) == 3 + 2  # the worlds; known faults, and outputs among one another, through all of them
    for finding in passed.findings:
        if finding.name in ("joint distribution", "transform"):
            assert finding.detectable_tv <= QUICK.tv
    assert "would have been found with probability 0.99" in passed.summary


@pytest.mark.grid
@pytest.mark.usefixtures("without_picture")
@pytest.mark.parametrize("fault", [colder, leaning, truncated, permuted])
def test_a_wrong_sampler_fails(worlds, fault):
    report = audit(worlds[:1], AuditPlan(), fault)
    assert report.verdict == "FAIL"
    assert report.log_e >= math.log(100)
    assert any(report.refutes(finding) for finding in report.findings)


def test_a_small_budget_is_inconclusive(worlds):
    report = audit(worlds[:1], AuditPlan(max_samples=200))
    assert report.verdict == "INCONCLUSIVE"
    assert "0.1 was asked for" in report.summary
    assert audit(worlds[:1], AuditPlan(max_seconds=1e-6)).verdict == "INCONCLUSIVE"


def alarms(worlds, audits):
    """Failed audits of a correct sampler, out of `audits`. Greedy decoding, where nothing is random, is left out."""
    plans = [AuditPlan(tv=0.3, level=0.01, seed=seed) for seed in range(audits)]
    return sum(audit(worlds, plan, greedy=False).verdict == "FAIL" for plan in plans)


def test_false_alarms_are_rare(worlds):
    """An audit that raises one every second time is noticed with probability 15/16; the long run counts 300."""
    assert alarms(worlds[:1], 4) == 0


@pytest.mark.full
def test_false_alarms_of_300_audits(worlds):
    """All three worlds, looked at after every batch."""
    assert alarms(worlds, 300) <= 8


def test_the_ledger_never_exceeds_its_level():
    """The audit's e-value is the mean over what was planned, looked at or not."""

    class Fixed:
        scope = ""

        def __init__(self, log_e):
            self.log_e = log_e

    ledger = Ledger(AuditPlan(level=0.01), planned=10)
    assert ledger.log_e == pytest.approx(0)
    ledger.add([Fixed(math.log(500)), Fixed(-math.inf)])
    assert ledger.log_e == pytest.approx(math.log((500 + 0 + 8) / 10))
    assert not ledger.failed
    ledger.evidence[1].log_e = math.log(1000)
    assert ledger.failed
    ledger.evidence[1].log_e = 0.0
    assert ledger.failed  # what was found stays found


@pytest.mark.parametrize("fields", [{"level": 0}, {"tv": 1.0}, {"power": 0.4}, {"max_samples": 0}, {"max_seconds": 0}])
def test_bad_plans(fields):
    with pytest.raises(AuditError, match=next(iter(fields))):
        AuditPlan(**fields)


# Greedy.


class GreedyWith(PlainSampler):
    """Greedy, but the token at `place` is the runner-up in every text whose margin there is below `below`."""

    below = math.inf

    def __call__(self, prompt, count, num_tokens, params, seed):
        texts = super().__call__(prompt, count, num_tokens, params, seed)
        if params.greedy:
            scores = self.world.target_reference.scores(prompt, texts)[0]
            best, second = np.sort(scores, axis=1)[:, :-3:-1].T
            place = int((best - second).argmin())
            if best[place] - second[place] < self.below:
                texts[0][place] = int(np.argsort(scores[place])[-2])
                texts[0][place + 1 :] = super().__call__(
                    [*prompt, *texts[0][: place + 1]], 1, num_tokens - place - 1, params, seed
                )[0]
        return texts


def test_a_greedy_mistake_fails(world):
    report = audit_worlds(lambda one: CallableSubject(GreedyWith(one), "mistaken"), [world], QUICK)
    assert report.verdict == "FAIL"
    assert "wrong tokens (greedy)" in report.summary


def test_ties_are_no_mistakes():
    greedy = Greedy("")
    greedy.add([0.0, 1e-6, 0.0], 1e-4)
    assert (greedy.wrong, greedy.ties, greedy.log_e) == (0, 1, 0.0)
    greedy.add([2e-4], 1e-4)
    assert greedy.wrong == 1
    assert greedy.log_e == math.inf


def test_noise_is_measured_on_the_subject(world):
    reference, prompt, tokens = world.target_reference, world.prompts[0], [1, 2, 3, 4, 5]
    scores = reference.scores(prompt, [tokens])[0]
    logs = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
    told = [{t: float(logs[i, t]) + 1e-3} for i, t in enumerate(tokens)]
    told[2] = {3: -50.0}  # one broken position does not excuse the others
    assert measured_noise(reference, prompt, Sample(tokens, None, told), scores) == pytest.approx(8e-3)
    assert measured_noise(reference, prompt, Sample(tokens), scores) < 1e-4


def test_noise_is_measured_where_it_decides(world):
    """Most tokens are nearly certain: their log-probabilities hide what rounding does to a logit."""
    rng = np.random.default_rng(0)
    exact = rng.normal(0.0, 1.0, (48, 200))
    exact[:36, 0] = 14.0
    exact[36:, 1] = exact[36:].max(axis=1) + 0.004  # near ties
    rounded = exact + rng.normal(0.0, 0.02, exact.shape)
    tokens = rounded.argmax(axis=1).tolist()
    gaps = exact.max(axis=1) - exact[np.arange(48), tokens]
    assert gaps.max() > 1e-3
    logs = rounded - np.logaddexp.reduce(rounded, axis=1, keepdims=True)
    told = [{token: float(logs[i, token])} for i, token in enumerate(tokens)]
    noise = measured_noise(world.target_reference, world.prompts[0], Sample(tokens, None, told), exact)
    assert gaps.max() < noise < 0.2


def test_rounding_is_hardly_ever_called_a_mistake(world):
    """Greedy parts of 300 audits of an engine in bfloat16, whose logits are off by 0.03: near ties are frequent."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        exact = rng.normal(0.0, 2.0, (144, 8))
        rounded = exact + rng.normal(0.0, 0.03, exact.shape)
        tokens = rounded.argmax(axis=1).tolist()
        logs = rounded - np.logaddexp.reduce(rounded, axis=1, keepdims=True)
        told = [{token: float(logs[i, token])} for i, token in enumerate(tokens)]
        noise = measured_noise(world.target_reference, world.prompts[0], Sample(tokens, None, told), exact)
        greedy = Greedy("")
        greedy.add((exact.max(axis=1) - exact[np.arange(144), tokens]).tolist(), noise)
        assert greedy.wrong == 0


class Coarse(PlainSampler):
    """Its logits are multiples of an eighth, as large ones in bfloat16 are; it tells their log-probabilities."""

    def _probs(self, reference, prompt, outputs, params):
        rows = reference.scores(prompt, [[*output, 0] for output in outputs])
        return probabilities(np.stack([np.round(row[-1] * 8) / 8 for row in rows]), params)

    def __call__(self, prompt, count, num_tokens, params, seed):
        outputs = super().__call__(prompt, count, num_tokens, params, seed)
        samples = []
        for output, scores in zip(outputs, self.world.target_reference.scores(prompt, outputs), strict=True):
            logs = np.round(scores * 8) / 8
            logs -= np.logaddexp.reduce(logs, axis=1, keepdims=True)
            samples.append(
                Sample(output, None, [{token: float(row[token])} for token, row in zip(output, logs, strict=True)])
            )
        return samples


def test_a_token_that_rounding_lets_through_a_filter_is_possible(world):
    """As far as the subject's own log-probabilities show that it rounds; one that ignores the filter fails."""
    prompts, claim, plan = world.prompts, SamplingParams(top_k=2), AuditPlan(tv=0.5)

    def run(params):
        sampler = Coarse(world)
        subject = CallableSubject(lambda *asked: sampler(*asked[:3], params(asked[3]), asked[4]), "coarse")
        return audit_model(subject, world.target_reference, prompts, claim, plan, num_tokens=24)

    right = run(lambda params: params)
    (possible,) = (one for one in right.findings if one.name == "impossible tokens")
    assert right.verdict == "PASS"
    assert possible.plot["excused"] > 0
    assert run(lambda params: replace(params, top_k=0)).verdict == "FAIL"


class Bigram(torch.nn.Module):
    """A model whose logits ``[V, V]`` follow from the last token alone."""

    dtype, device = torch.float64, torch.device("cpu")

    def __init__(self, table):
        super().__init__()
        self.table, self.config = torch.tensor(table), SimpleNamespace(vocab_size=len(table))

    def forward(self, tokens, use_cache):
        return SimpleNamespace(logits=self.table[tokens])


def bigram_subject(table, change=lambda params: params, told=0.0):
    """Samples from a `Bigram` by changed parameters; its own log-probabilities are off by `told`."""

    def sample(prompt, count, num_tokens, params, seed):
        rng, outputs = np.random.default_rng(seed), np.full((count, 1), prompt[-1])
        for _ in range(num_tokens):
            tokens = draw(probabilities(table[outputs[:, -1]], change(params)), rng)
            outputs = np.concatenate([outputs, tokens[:, None]], axis=1)
        logs = table - np.logaddexp.reduce(table, axis=1, keepdims=True) + told
        return [Sample(one[1:], None, [{b: float(logs[a, b])} for a, b in pairwise(one)]) for one in outputs.tolist()]

    return CallableSubject(sample, "bigram")


def test_noise_of_a_sharp_model_is_measured_on_all_outputs_together():
    """Each output has but two tokens that are not nearly certain: too few to measure rounding on."""
    rng = np.random.default_rng(0)
    exact = rng.normal(0.0, 1.0, (100, 100))
    following = (np.arange(100) + 1) % 100
    exact[np.arange(100), following] = 16.0
    open_ = np.arange(0, 100, 12)
    exact[open_, following[open_]] = 4.0
    exact[open_, following[open_] + 1] = 4.004  # near ties
    rounded = exact + rng.normal(0.0, 0.02, exact.shape)
    prompts = [[start] for start in (1, 15, 30, 45, 60, 70)]
    claim, plan = SamplingParams(temperature=0.0), AuditPlan()
    report = audit_model(bigram_subject(rounded), ReferenceModel(Bigram(exact)), prompts, claim, plan, num_tokens=24)
    (greedy,) = report.findings
    assert report.verdict == "PASS"
    assert greedy.plot["excused"] > 0
    assert 1e-3 < greedy.plot["noise"] <= 0.25


@pytest.mark.parametrize("told", [0.0, 0.03])
def test_a_filter_off_by_one_fails(told):
    """Of a subject that rounds, too: with logits 0.12 apart its noise excuses each of the tokens, but not so many."""
    rng = np.random.default_rng(0)
    table = rng.permuted(np.tile(-0.12 * np.arange(12), (12, 1)), axis=1)

    def run(more):
        subject = bigram_subject(table, lambda asked: replace(asked, top_k=asked.top_k and asked.top_k + more), told)
        claim, reference = SamplingParams(top_k=2), ReferenceModel(Bigram(table))
        return audit_model(subject, reference, [[0], [1]], claim, AuditPlan(tv=0.25), num_tokens=24)

    assert run(0).verdict == "PASS"
    wide = run(1)
    assert wide.verdict == "FAIL"
    (possible,) = (one for one in wide.findings if one.name == "impossible tokens")
    assert (possible.plot["excused"] > 0, possible.plot["found"] > 0) == (told > 0, told == 0)


def test_impossible_tokens():
    possible = Possible("")
    possible.add(100, 0, 2)
    assert possible.log_e == 0
    possible.add(100, 1, 0)
    assert possible.log_e == math.inf


# Real models: the same world, but nothing enumerated.


def test_a_model_is_audited_token_by_token(world):
    reference = ReferenceModel(world.target)
    prompts = [list(prompt) for prompt in world.prompts]
    plan = AuditPlan(tv=0.25)

    def run(fault):
        subject = CallableSubject(PlainSampler(world, fault), "plain")
        return audit_model(
            subject,
            reference,
            prompts,
            SamplingParams(),
            plan,
            drafter_reference=ReferenceModel(world.drafter),
            num_tokens=16,
        )

    good = run(None)
    assert good.verdict == "PASS"
    assert {finding.name for finding in good.findings} >= {"transform", "drafter's order", "log-likelihood"}
    plan = AuditPlan(tv=0.1)
    assert run(colder).verdict == "FAIL"


def test_rounds_are_looked_into(world):
    """Only the third token after a round began is wrong: the report says so."""

    class Rounds(PlainSampler):
        def __call__(self, prompt, count, num_tokens, params, seed):
            if params.greedy:
                return super().__call__(prompt, count, num_tokens, params, seed)
            rng, texts = np.random.default_rng(seed), [[] for _ in range(count)]
            for place in range(num_tokens):
                probs = self._probs(self.world.target_reference, prompt, texts, params)
                if place % 3 == 2:
                    probs = np.full_like(probs, 1 / 8)
                for text, reference in zip(texts, probs, strict=True):
                    text.append(int(rng.choice(8, p=reference / reference.sum())))
            return [Sample(text, [3] * (num_tokens // 3)) for text in texts]

    reference = ReferenceModel(world.target)
    report = audit_model(
        CallableSubject(Rounds(world), "rounds"),
        reference,
        world.prompts,
        SamplingParams(),
        AuditPlan(tv=0.1),
        num_tokens=24,
        num_speculative_tokens=2,
    )
    assert report.verdict == "FAIL"
    (finding,) = (one for one in report.findings if one.name == "position in the round")
    evidence = [row["log_e"] for row in finding.plot["rows"]]
    assert int(np.argmax(evidence)) == 2
    assert max(evidence[:2]) < math.log(100)


def test_two_samples(world):
    other = CallableSubject(PlainSampler(world), "reference")
    prompts = [list(world.prompts[0])]

    def run(fault, plan):
        subject = CallableSubject(PlainSampler(world, fault), "subject")
        return audit_pair(subject, other, prompts, SamplingParams(), plan, num_tokens=3)

    assert run(None, AuditPlan(tv=0.3)).verdict == "PASS"
    report = run(colder, AuditPlan(tv=0.1))
    assert report.verdict == "FAIL"
    assert "against reference" in report.findings[0].scope


# Reports.


def test_reports_as_json(passed, failed):
    for report in (passed, failed):
        data = json.loads(report.to_json())
        assert data["verdict"] == report.verdict
        assert data["plan"]["level"] == 0.01
        assert len(data["findings"]) == len(report.findings)
        assert 0 <= data["p_value"] <= 1


def test_reports_as_html(passed, failed):
    for report in (passed, failed):
        page = report.to_html()
        assert page.startswith("<!doctype html>")
        assert report.verdict in page
        assert "http" not in page.replace("http://www.w3.org", "")  # nothing is loaded from anywhere
        assert "nan" not in page.replace("tenance", "")
        assert page.count("<svg") == page.count("</svg>") >= 4
    assert 'class="refutes"' in failed.to_html()
    assert 'class="refutes"' not in passed.to_html()


def test_a_report_escapes_names(passed):
    page = replace(passed, subject="<script>alert(1)</script>").to_html()
    assert "<script>" not in page


@pytest.mark.parametrize("width", [80, 100, 140])
def test_reports_on_a_terminal(failed, passed, width):
    """Nothing is cut, however narrow: not even a number of six digits."""
    many = replace(passed.findings[0], samples=123_456, log_e=math.log(1e12), observed_tv=None, z=-123.4)
    for report in (failed, replace(passed, findings=[*passed.findings, many])):
        text = shown(report, width)
        assert report.verdict in text
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= width
    assert "✗ towards the drafter" in shown(failed, width)


def shown(report, width):
    console = Console(width=width, record=True, file=io.StringIO())
    report.show(console)
    return console.export_text()


def test_a_report_says_whether_there_was_speculation(passed):
    assert "not known: the subject does not report" in " ".join(shown(passed, 200).split())
    told = replace(passed, speculation=Speculation(200, 150))
    assert "200 tokens drafted, 150 accepted (75%)" in shown(told, 100)
    assert "200 tokens drafted, 150 accepted (75%)" in told.to_html()
    assert "150 drafted tokens accepted" in shown(replace(passed, speculation=Speculation(None, 150)), 100)
    assert json.loads(told.to_json())["speculation"] == {"drafted": 200, "accepted": 150}


def test_a_pass_without_speculation_is_said_to_mean_little(world):
    idle = CallableSubject(PlainSampler(world), "idle")
    idle.speculation = Speculation()
    report = audit_worlds(lambda _: idle, [world], QUICK)
    assert report.verdict == "PASS"
    assert "this says nothing about speculation" in report.summary


def test_odds():
    assert odds(math.inf) == "certain"
    assert odds(0.0) == "1"
    assert odds(math.log(1e9)) == "10^9"
    assert EXIT_STATUS == {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}


class Slow(PlainSampler):
    """A clock of its own, which goes on by a second a text."""

    def __init__(self, world, clock):
        super().__init__(world)
        self.clock = clock

    def __call__(self, prompt, count, num_tokens, params, seed):
        self.clock[0] += count
        return super().__call__(prompt, count, num_tokens, params, seed)


def test_the_time_limit_is_kept(world, monkeypatch):
    """A batch of 64 samples is not waited for: what is there when the time is up counts."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr("foretoken.audit.session.PIECE_SECONDS", 2.0)
    report = audit_worlds(
        lambda _: CallableSubject(Slow(world, clock), "slow"), [world], AuditPlan(max_seconds=40), greedy=False
    )
    assert report.verdict == "INCONCLUSIVE"
    assert 40 <= report.seconds <= 44
    assert report.samples == report.seconds


def test_progress_is_told(world):
    states = []
    audit([world], watch=states.append)
    assert 0.5 < states[-1].samples / states[0].wanted < 2
    assert states[-1].seconds_left is not None
    fractions = [state.fraction for state in states]
    assert fractions == sorted(fractions)
    assert fractions[-1] >= 0.99
