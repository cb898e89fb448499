"""Audits: what is drawn, in what order, and until when."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretoken.audit.endpoint import EndpointSubject, coarse_laws, plain
from foretoken.audit.errors import AuditError
from foretoken.audit.evidence import (
    Cells,
    Evidence,
    Greedy,
    Positions,
    Texts,
    Tokens,
    drafter_cells,
    joint_cells,
)
from foretoken.audit.law import ReferenceLaw, contexts, probabilities, shape
from foretoken.audit.pair import views
from foretoken.audit.report import Report
from foretoken.audit.sequential import Ledger, Plan, Progress, Verdict, Watcher
from foretoken.audit.statistics import Floats
from foretoken.audit.subjects import Request, Sample, Subject, check
from foretoken.audit.worlds import World, describe, make_worlds
from foretoken.sampling.params import SamplingParams

Factory = Callable[[World], Subject]
"""Makes the subject for a world: loads ``world.target_path`` and ``world.drafter_path``, or takes ``world.target``."""

LONG = 24
"""Tokens of the longer texts of a small world."""

ROUNDS_SHARE = 0.4
"""Share of the longer texts that rounds are asked for: most subjects tell them for one text at a time only."""

SLACK = 0.02
"""How much filters are loosened before a token counts as impossible, in logits and in probability."""

SECONDS_PER_BATCH = 4.0

PICTURE_TEXTS, PICTURE_SECONDS = 1500, 8.0
"""How much more is drawn, at most, once the answer is FAIL: it changes nothing but shows more clearly where."""


def audit_worlds(
    factory: Factory,
    worlds: Sequence[World] | None = None,
    plan: Plan | None = None,
    watch: Watcher | None = None,
    *,
    greedy: bool = True,
) -> Report:
    """Audit a system on small worlds.

    Args:
        factory: makes the subject for a world; worlds with the same models and k share one.
        worlds: from `make_worlds`; None makes the usual three in a temporary folder.
        plan: error level, wanted power, budget.
        watch: called as the audit goes on.
        greedy: also test greedy decoding.

    Raises:
        AuditError: the subject failed, or returned something that is not a sample; no report is made of it.
    """
    if worlds is None:
        with tempfile.TemporaryDirectory(prefix="foretoken-audit-") as folder:
            return audit_worlds(factory, make_worlds(folder), plan, watch, greedy=greedy)
    plan = plan or Plan()
    sampled = [world for world in worlds if not world.params.greedy]
    # Cells, positions, drafter's cells, four kinds on longer texts, places in the round; greedy.
    ledger = Ledger(plan, planned=max(1, 8 * len(sampled) + len(worlds)))
    run = _Run(ledger, watch, len(worlds))
    enough = True
    subjects: dict[tuple[Path, int], Subject] = {}
    try:
        for number, world in enumerate(worlds):
            run.begin(world.name, number)
            key = (world.path, world.num_speculative_tokens)
            if key not in subjects:
                _close(subjects)
                subjects[key] = factory(world)
            subject = subjects[key]
            run.meet(subject)
            if greedy or world.params.greedy:
                _greedy(run, subject, world)
            if not world.params.greedy:
                share = (number + 1) / len(worlds)
                enough &= _sample_world(run, subject, world, share * plan.max_seconds)
            if ledger.failed or ledger.out_of_time:
                enough &= number == len(worlds) - 1
                break
    finally:
        _close(subjects)
    claim = f"the target's law in {len(worlds)} small worlds: " + "; ".join(world.name for world in worlds)
    return run.report(claim, enough)


def audit_model(
    subject: Subject,
    law: ReferenceLaw,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    plan: Plan | None = None,
    watch: Watcher | None = None,
    *,
    drafter_law: ReferenceLaw | None = None,
    num_tokens: int = 64,
    num_speculative_tokens: int = 0,
    greedy: bool = True,
    ends: Sequence[int] = (),
) -> Report:
    """Audit a system on a real model, token by token.

    Args:
        subject: the system.
        law: the claim: the target, run plainly.
        prompts: token ids; taken in turn.
        params: the claimed sampling parameters.
        plan: error level, wanted power, budget; `Plan.tv` is about the transform of single tokens.
        watch: called as the audit goes on.
        drafter_law: the drafter, if it is at hand: sharpens the audit.
        num_tokens: tokens of each text.
        num_speculative_tokens: k, for the places in a round; 0 if the subject does not tell its rounds.
        greedy: also test greedy decoding.
        ends: the tokens that end a text.

    Raises:
        AuditError: see `audit_worlds`; also an empty list of prompts.
    """
    plan = plan or Plan()
    if not prompts:
        raise AuditError("no prompts: give at least one")
    scope = law.name
    ledger = Ledger(plan, planned=6)
    run = _Run(ledger, watch, 1)
    run.begin(scope, 0)
    run.meet(subject)
    if greedy or params.greedy:
        _greedy_model(run, subject, law, prompts, params, num_tokens, ends)
    enough = True
    if not params.greedy and not ledger.failed:
        tokens = Tokens(scope, plan.seed, drafter_law is not None, num_speculative_tokens + 1)
        ledger.add(tokens.parts())
        enough = _sample_model(
            run,
            subject,
            law,
            prompts,
            params,
            tokens,
            drafter_law=drafter_law,
            num_tokens=num_tokens,
            wants_rounds=num_speculative_tokens > 0,
            ends=ends,
        )
    return run.report(f"the law of {law.name} at {describe(params)}", enough and not ledger.out_of_time)


def _close(subjects: dict[tuple[Path, int], Subject]) -> None:
    while subjects:
        subjects.popitem()[1].close()


class _Run:
    """An audit that is going on."""

    def __init__(self, ledger: Ledger, watch: Watcher | None, parts: int) -> None:
        self.ledger = ledger
        self.texts = 0
        self.tokens = 0
        self.subject = ""
        self.details: dict[str, str] = {}
        self._watch, self._parts = watch, parts
        self._scope, self._part = "", 0
        self._requests = 0

    def begin(self, scope: str, part: int) -> None:
        """Turn to the next part."""
        self._scope, self._part = scope, part
        self.progress(0.0)

    def meet(self, subject: Subject) -> None:
        """Note who is audited."""
        self.subject, self.details = subject.name, dict(subject.details)

    def progress(self, fraction: float) -> None:
        """Tell whoever watches."""
        if self._watch is not None:
            share = (self._part + min(fraction, 1.0)) / self._parts
            ten = 0.4342944819032518
            self._watch(Progress(self._scope, share, self.texts, self.ledger.log_e * ten, self.ledger.limit * ten))

    def ask(self, subject: Subject, request: Request, vocab_size: int | None, ends: Sequence[int] = ()) -> list[Sample]:
        """Samples of a request that gets a seed of its own."""
        self._requests += 1
        entropy = np.random.SeedSequence([self.ledger.plan.seed, self._requests]).generate_state(1)[0]
        request = replace(request, seed=int(entropy) >> 1)
        samples = subject.sample(request)
        check(samples, request, vocab_size, ends)
        self.texts += len(samples)
        self.tokens += sum(len(sample.tokens) for sample in samples)
        return samples

    def report(self, claim: str, enough: bool) -> Report:
        """The answer."""
        ledger = self.ledger
        findings = ledger.findings()
        verdict: Verdict = "FAIL" if ledger.failed else "PASS" if enough else "INCONCLUSIVE"
        return Report(
            verdict,
            _summary(verdict, ledger, findings),
            self.subject,
            self.details,
            claim,
            ledger.plan,
            max(ledger.log_e, ledger.peak),
            ledger.threshold,
            self.texts,
            self.tokens,
            ledger.seconds,
            findings,
        )


def _summary(verdict: Verdict, ledger: Ledger, findings: Sequence[Any]) -> str:
    plan = ledger.plan
    if verdict == "FAIL":
        worst = max(findings, key=lambda finding: finding.log_e)
        if worst.plot.get("kind") == "count":
            return f"It does not sample from the claimed law: {worst.plot['found']:,} wrong tokens ({worst.name})."
        sized = [one for one in findings if one.observed_tv is not None and one.log_e >= ledger.threshold]
        sized.sort(key=lambda one: (one.name != "joint law", -one.log_e))
        if not sized:
            return f"It does not sample from the claimed law ({worst.name}, {worst.scope})."
        first = sized[0]
        return (
            f"It does not sample from the claimed law. Its texts ({first.name}, {first.scope}) are "
            f"{first.observed_tv:.2f} away from it in total variation, where {first.expected_tv or 0.0:.2f} would be "
            "chance."
        )
    seen = [one.detectable_tv for one in findings if one.detectable_tv is not None]
    joint = [one.detectable_tv for one in findings if one.name in ("joint law", "transform", "two samples")]
    reach = max((value for value in joint or seen if value is not None), default=None)
    if verdict == "PASS":
        if reach is None:
            return "No deviation found: every greedy token is the best one."
        return (
            f"No deviation found. One of {reach:.3f} in total variation or more would have been found with probability "
            f"{plan.power:g}."
        )
    if reach is None or reach >= 1:
        return "Not enough data for an answer within the budget; no deviation found so far."
    return (
        f"No deviation found, but the budget ended before the wanted power was reached: only one of {reach:.3f} or "
        f"more would have been found with probability {plan.power:g}, and {plan.tv:g} was asked for."
    )


def _needed(evidence: Cells, counts: Sequence[Floats], threshold: float, plan: Plan) -> int:
    """About how many texts reach the wanted power."""
    from foretoken.audit.statistics import detectable_tv

    guess = 4000
    reach = detectable_tv([(law, guess // len(counts)) for law in counts], threshold, plan.power)
    return max(500, int(1.15 * guess * (reach / plan.tv) ** 2))


def _sample_world(run: _Run, subject: Subject, world: World, until: float) -> bool:
    """Gather all statistical evidence of a world; whether the wanted power was reached.

    Args:
        run: the audit.
        subject: the system.
        world: what to ask it.
        until: seconds of the audit after which it is the next world's turn.
    """
    ledger, plan, params = run.ledger, run.ledger.plan, world.params
    size, prompts = world.vocab_size, world.prompts
    texts = Texts(world.joints, size, world.depth)
    cells = joint_cells(texts, world.name)
    positions = Positions(texts, world.name, world.num_speculative_tokens)
    leaning = drafter_cells(texts, world.drafter_joints, world.name)
    tokens = Tokens(world.name, plan.seed, True, world.num_speculative_tokens + 1)
    evidence: list[Evidence] = [cells, positions, leaning, *tokens.parts()]
    ledger.add(evidence)
    wanted = min(_needed(cells, world.joints, ledger.threshold, plan), plan.max_texts)
    long_wanted = _long_texts(ledger.threshold, plan)
    batch, done, long_done = 64, 0, 0
    refuted: float | None = None
    while True:
        began = time.monotonic()
        for number, prompt in enumerate(prompts):
            request = Request(prompt, batch // len(prompts), world.depth, params)
            samples = run.ask(subject, request, size)
            texts.add(number, np.array([sample.tokens for sample in samples]))
        done += batch // len(prompts) * len(prompts)
        if long_done < long_wanted:
            share = max(2, min(long_wanted - long_done, long_wanted * batch // wanted + 1))
            for prompt in prompts:
                rounds = long_done < ROUNDS_SHARE * long_wanted
                request = Request(prompt, max(1, share // len(prompts)), LONG, params, rounds=rounds)
                samples = run.ask(subject, request, size)
                _add_tokens(tokens, world.target_law, world.drafter_law, prompt, samples, params)
                long_done += len(samples)
        run.progress(done / wanted)
        if ledger.failed:
            refuted = refuted or time.monotonic()
            if done >= PICTURE_TEXTS or time.monotonic() - refuted > PICTURE_SECONDS or ledger.out_of_time:
                return True
        out_of_budget = ledger.seconds >= until or done >= plan.max_texts
        if out_of_budget or (done >= wanted and long_done >= long_wanted):
            reached = cells.detectable_tv(ledger.threshold, plan.power)
            reached = max(reached, tokens.likely.detectable_tv(ledger.threshold, plan.power))
            if reached <= plan.tv or out_of_budget:
                return reached <= plan.tv
            wanted = int(wanted * max(1.1, min((reached / plan.tv) ** 2, 2.0)))
            long_wanted = int(long_wanted * 1.2)
        seconds = max(time.monotonic() - began, 1e-3)
        batch = int(min(2 * batch, max(16, batch * SECONDS_PER_BATCH / seconds), 4096))
        batch = max(2 * len(prompts), min(batch, max(wanted, plan.max_texts) - done, max(wanted - done, 64)))


def _long_texts(threshold: float, plan: Plan) -> int:
    from foretoken.audit.evidence import BINS
    from foretoken.audit.statistics import detectable_tv

    uniform = np.full(BINS, 1 / BINS)
    guess = 4000
    reach = detectable_tv([(uniform, guess)], threshold, plan.power)
    return int(1.15 * guess * (reach / plan.tv) ** 2 / LONG) + 1


def _add_tokens(
    tokens: Tokens,
    law: ReferenceLaw,
    drafter_law: ReferenceLaw | None,
    prompt: Sequence[int],
    samples: Sequence[Sample],
    params: SamplingParams,
) -> None:
    outputs = [sample.tokens for sample in samples]
    scores = law.scores(prompt, outputs)
    drafters = drafter_law.scores(prompt, outputs) if drafter_law is not None else [None] * len(outputs)
    for sample, score, drafter in zip(samples, scores, drafters, strict=True):
        if not sample.tokens:
            continue
        texts = contexts(prompt, sample.tokens)
        shaped = shape(score, params, texts)
        drafter_laws = None
        if drafter is not None:
            drafter_laws = _fit(probabilities(shape(drafter, params, texts), params), shaped.shape[1])
        tokens.add(
            probabilities(shaped, params),
            np.array(sample.tokens),
            drafter_laws,
            sample.rounds,
            probabilities(shaped, params, SLACK),
        )


def _fit(laws: Floats, size: int) -> Floats:
    """A law over another padded size of the same vocabulary."""
    if laws.shape[1] >= size:
        return laws[:, :size]
    return np.pad(laws, ((0, 0), (0, size - laws.shape[1])))


def _sample_model(
    run: _Run,
    subject: Subject,
    law: ReferenceLaw,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    tokens: Tokens,
    *,
    drafter_law: ReferenceLaw | None,
    num_tokens: int,
    wants_rounds: bool,
    ends: Sequence[int],
) -> bool:
    ledger, plan = run.ledger, run.ledger.plan
    count, done, turn = 1, 0, 0
    reach = 1.0
    while True:
        began = time.monotonic()
        prompt = tuple(prompts[turn % len(prompts)])
        turn += 1
        request = Request(prompt, count, num_tokens, params, rounds=wants_rounds)
        samples = run.ask(subject, request, law.vocab_size, ends)
        _add_tokens(tokens, law, drafter_law, prompt, samples, params)
        done += len(samples)
        seen = int(tokens.likely.counts.sum())
        if seen >= 200:
            reach = tokens.likely.detectable_tv(ledger.threshold, plan.power)
        run.progress(min(1.0, (plan.tv / reach) ** 2) if reach < 1 else 0.0)
        if ledger.failed or reach <= plan.tv:
            return True
        if ledger.out_of_time or done >= plan.max_texts:
            return False
        if turn >= len(prompts) and time.monotonic() - began < SECONDS_PER_BATCH / 2:
            count = min(2 * count, 64)


# Greedy.

GREEDY_TOKENS = 24
NOISE_FACTOR = 8.0
LEAST_NOISE = 2e-5
MOST_NOISE = 0.25


def _greedy(run: _Run, subject: Subject, world: World) -> None:
    rng = np.random.default_rng([run.ledger.plan.seed, 11])
    prompts = [*world.prompts]
    while len(prompts) < 6:
        prompts.append(tuple(int(token) for token in rng.integers(0, world.vocab_size, 8)))
    greedy = Greedy(world.name)
    run.ledger.add([greedy])
    _add_greedy(run, subject, greedy, world.target_law, prompts, replace(world.params, temperature=0.0), GREEDY_TOKENS)


def _greedy_model(
    run: _Run,
    subject: Subject,
    law: ReferenceLaw,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    num_tokens: int,
    ends: Sequence[int],
) -> None:
    greedy = Greedy(law.name)
    run.ledger.add([greedy])
    chosen = [tuple(prompt) for prompt in prompts[:6]]
    _add_greedy(run, subject, greedy, law, chosen, replace(params, temperature=0.0), num_tokens, ends)


def _add_greedy(
    run: _Run,
    subject: Subject,
    greedy: Greedy,
    law: ReferenceLaw,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    num_tokens: int,
    ends: Sequence[int] = (),
) -> None:
    params = replace(params, top_k=0, top_p=1.0, min_p=0.0)
    for prompt in prompts:
        request = Request(prompt, 1, num_tokens, params, logprobs=0)
        (sample,) = run.ask(subject, request, law.vocab_size, ends)
        if not sample.tokens:
            continue
        raw = law.scores(prompt, [sample.tokens])[0]
        scores = shape(raw, params, contexts(prompt, sample.tokens))
        gaps = scores.max(axis=1) - scores[np.arange(len(sample.tokens)), sample.tokens]
        greedy.add(gaps.tolist(), measured_noise(law, prompt, sample, raw))


def measured_noise(law: ReferenceLaw, prompt: Sequence[int], sample: Sample, scores: Floats) -> float:
    """How much a subject's logits may differ from the reference's.

    From the subject's own log-probabilities where it reports them (their median difference from the reference's, which
    faults in some places do not move), else from what the reference itself loses in float32; times a safety factor, and
    within limits.
    """
    differences = []
    if sample.top_logprobs is not None:
        logs = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
        for place, (token, told) in enumerate(zip(sample.tokens, sample.top_logprobs, strict=False)):
            if token in told and np.isfinite(told[token]):
                differences.append(abs(told[token] - float(logs[place, token])))
    if not differences:
        with torch.inference_mode():
            text = torch.tensor([[*prompt, *sample.tokens[:-1]]], device=law.module.device)
            again = law.module(text, use_cache=False).logits[0, len(prompt) - 1 :, : law.vocab_size]
            rounded = again.float().double().cpu().numpy()
        differences.extend(np.abs(rounded - scores).max(axis=1).tolist())
    return float(min(max(NOISE_FACTOR * float(np.median(differences)), LEAST_NOISE), MOST_NOISE))


# Subjects whose law nobody computes here.


def audit_pair(
    subject: Subject,
    reference: Subject,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    plan: Plan | None = None,
    watch: Watcher | None = None,
    *,
    num_tokens: int = 8,
    ends: Sequence[int] = (),
) -> Report:
    """Audit a system against another one that is known not to speculate (two-sample test).

    Args:
        subject: the system.
        reference: the same model without speculation.
        prompts: token ids; few, because every prompt is a question of its own.
        params: the sampling parameters that both are asked for.
        plan: error level, wanted power (of telling first tokens apart), budget.
        watch: called as the audit goes on.
        num_tokens: tokens of each text.
        ends: the tokens that end a text.

    Raises:
        AuditError: see `audit_worlds`.
    """
    plan = plan or Plan()
    if not prompts:
        raise AuditError("no prompts: give at least one")
    scope = f"against {reference.name}"
    looks = views(scope, num_tokens)
    ledger = Ledger(plan, planned=len(looks))
    run = _Run(ledger, watch, 1)
    run.begin(scope, 0)
    run.meet(subject)
    ledger.add(looks)
    count, reach, wanted = 16, 1.0, 256
    enough = False
    while not enough and not ledger.out_of_time and run.texts < 2 * plan.max_texts:
        began = time.monotonic()
        for number, prompt in enumerate(prompts):
            request = Request(tuple(prompt), count, num_tokens, params)
            mine = [sample.tokens for sample in run.ask(subject, request, None, ends)]
            other = [sample.tokens for sample in run.ask(reference, request, None, ends)]
            for look in looks:
                look.add(number, mine, other)
        if ledger.failed:
            break
        if looks[0].pairs >= wanted:
            reach = looks[0].detectable_tv(ledger.threshold, plan.power)
            enough = reach <= plan.tv
            wanted *= 2
        run.progress(min(1.0, (plan.tv / reach) ** 2) if reach < 1 else 0.0)
        if time.monotonic() - began < SECONDS_PER_BATCH:
            count = min(2 * count, 512)
    return run.report(f"the law of {reference.name} at {describe(params)}", enough)


def audit_own_logprobs(
    subject: EndpointSubject,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    plan: Plan | None = None,
    watch: Watcher | None = None,
    *,
    num_tokens: int = 32,
    top: int = 5,
) -> Report:
    """Audit a server by the log-probabilities that it reports itself.

    A server that reports another law than its target's, and samples from that, passes.

    Args:
        subject: the server.
        prompts: token ids; taken in turn.
        params: the sampling parameters; temperature 1 without truncation, for what is reported is the model's own law.
        plan: error level, wanted power, budget.
        watch: called as the audit goes on.
        num_tokens: tokens of each text.
        top: log-probabilities to ask for at each place.

    Raises:
        AuditError: see `audit_worlds`; also parameters that shape the law.
    """
    plan = plan or Plan()
    if not prompts:
        raise AuditError("no prompts: give at least one")
    if not plain(params):
        raise AuditError(
            f"claim {describe(params)}: a server's logprobs are those of the model's own law; audit it at temperature "
            "1 without filters or penalties, or give the target with --target"
        )
    scope = f"{subject.model}, its own logprobs"
    ledger = Ledger(plan, planned=4)
    run = _Run(ledger, watch, 1)
    run.begin(scope, 0)
    run.meet(subject)
    tokens = Tokens(scope, plan.seed, False, 0)
    ledger.add(tokens.parts())
    count, reach, turn, enough = 4, 1.0, 0, False
    while not enough and not ledger.failed and not ledger.out_of_time and run.texts < plan.max_texts:
        began = time.monotonic()
        prompt = tuple(prompts[turn % len(prompts)])
        turn += 1
        seed = int(np.random.SeedSequence([plan.seed, turn]).generate_state(1)[0]) >> 1
        for choice in subject.choices(Request(prompt, count, num_tokens, params, seed, logprobs=top)):
            laws, cells = coarse_laws(choice, top, subject.url)
            tokens.add(laws, cells)
            run.texts += 1
            run.tokens += len(cells)
        if int(tokens.likely.counts.sum()) >= 200:
            reach = tokens.likely.detectable_tv(ledger.threshold, plan.power)
            enough = reach <= plan.tv
        run.progress(min(1.0, (plan.tv / reach) ** 2) if reach < 1 else 0.0)
        if time.monotonic() - began < SECONDS_PER_BATCH:
            count = min(2 * count, 64)
    return run.report(f"the law that {subject.model} reports in its own logprobs", enough)
