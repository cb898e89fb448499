"""Choosing k: against a simulated machine whose costs are known, and that the choice leaves the law alone."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from foretoken.engine.draft_length import DraftLengths
from foretoken.engine.engine import Engine
from foretoken.errors import ParameterError
from foretoken.policy import controller as control
from foretoken.policy.controller import AUTO, Choice, Controller
from foretoken.policy.costs import Acceptance, Costs
from foretoken.sampling import SamplingParams
from laws import g_test, joint_law
from tiny import tiny_llama

PLAIN = 10.0  # a plain pass; all times of the simulation are in units of a tenth of it


class Machine:
    """A target and a drafter with known costs and acceptance, and a clock."""

    def __init__(self, rate, *, step=1.0, slope=0.02, catch_up=3.0, noise=0.1, seed=0):
        self.rate, self.step, self.slope, self.catch_up, self.noise = rate, step, slope, catch_up, noise
        self.random = np.random.default_rng(seed)
        self.clock = 0.0
        self.tokens = 0

    def round(self, k, rows, was_drafting, few):
        """One round of rows of which a few draft `k` tokens."""
        rate = self.rate(self.tokens) if callable(self.rate) else self.rate
        accepted = [int((self.random.random(k) < rate).cumprod().sum()) for _ in range(few)] + [0] * (rows - few)
        wobble = 1 + self.noise * self.random.random(3)
        seconds = {
            "target": PLAIN * (1 + self.slope * k) * wobble[0],
            "drafter": k * self.step * wobble[1] + (self.catch_up if k and not was_drafting else 0.0),
            "verification": 0.2 * wobble[2],
            "other": 0.1,
        }
        self.clock += sum(seconds.values())
        self.tokens += rows + sum(accepted)
        return accepted, seconds

    def run(self, controller, tokens, rows=1, request=200):
        """Requests one after another; tokens per unit of time, and the ks."""
        ks, drafting = [], False
        while self.tokens < tokens:
            requests, end = [Acceptance(30) for _ in range(rows)], self.tokens + request * rows
            drafting = False
            while self.tokens < end:
                unread = [0 if drafting else 50] * rows
                k, few = controller, rows
                if isinstance(controller, Controller):
                    choice = controller.choose(requests, [100] * rows, unread)
                    k = choice.draft_length
                    few = rows if choice.rows is None else len(choice.rows)
                accepted, seconds = self.round(k, rows, drafting, few)
                if isinstance(controller, Controller):
                    limits = [k] * few + [0] * (rows - few)
                    controller.learn(limits, k, accepted, requests, seconds, True, unread)
                drafting = k > 0
                ks.append(k)
        return self.tokens / self.clock, ks


@pytest.mark.parametrize("rows", [1, 4, 32])
@pytest.mark.parametrize("step", [0.2, 2.0, 8.0])
def test_a_useless_drafter_costs_two_percent_at_most(rows, step):
    plain, _ = Machine(0.0, step=step).run(0, 5_000 * rows, rows)
    with_drafter, ks = Machine(0.0, step=step).run(Controller(), 5_000 * rows, rows)
    assert with_drafter > 0.98 * plain
    assert np.mean(np.array(ks) > 0) < 0.1
    assert sum(k > 0 for k in ks[500:]) > 0  # it looks again from time to time


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("step", [0.2, 1.0, 3.0])
def test_it_finds_the_best_number(rate, step):
    fixed = {k: Machine(rate, step=step).run(k, 5_000)[0] for k in range(control.LARGEST_K + 1)}
    # The best of many is lucky by a percent or two: it is held against an average.
    found, ks = zip(*(Machine(rate, step=step, seed=seed).run(Controller(), 8_000) for seed in range(3)), strict=True)
    assert np.mean(found) > 0.95 * max(fixed.values()), (max(fixed, key=fixed.get), [np.bincount(k) for k in ks])


def test_a_drafter_that_becomes_useful_is_taken_up_again():
    machine = Machine(lambda tokens: 0.0 if tokens < 5_000 else 0.9)
    controller = Controller()
    _, ks = machine.run(controller, 5_000)
    assert np.mean(np.array(ks[-500:]) == 0) > 0.9
    _, ks = machine.run(controller, 20_000)
    assert np.mean(np.array(ks[-500:]) > 2) > 0.9


def test_a_drafter_that_becomes_useless_is_left_out():
    _, ks = Machine(lambda tokens: 0.9 if tokens < 5_000 else 0.0).run(Controller(), 15_000)
    assert np.mean(np.array(ks[-500:]) == 0) > 0.9


def test_drafts_that_are_seldom_offered_are_cheap():
    """A look-up that finds nothing costs next to nothing: it goes on looking where a model would be left out."""
    controller, acceptance = Controller(), Acceptance(30)
    found = 0
    for number in range(400):
        k = controller.choose([acceptance], [100]).draft_length
        width = k if number % 8 == 0 else 0
        found += width > 0
        seconds = {"target": 10.0 * (1 + 0.05 * width), "drafter": 0.01, "verification": 0.1, "other": 0.1}
        controller.learn([k], width, [width], [acceptance], seconds, clean=True)
    assert found > 40


def test_no_room_means_no_draft():
    assert Controller().choose([Acceptance(30)], [0]).draft_length == 0


def test_acceptance_forgets():
    acceptance = Acceptance(memory=10)
    for _ in range(100):
        acceptance.record(3, 0)
    for _ in range(40):
        acceptance.record(3, 3)
    assert all(rate > 0.9 for rate in acceptance.rates(3, [0.0] * 3, weight=0.1))
    assert Acceptance(30).rates(2, [0.5, 0.25], weight=4.0) == [0.5, 0.25]


def test_costs_between_and_beyond_what_was_measured():
    costs = Costs()
    assert costs.estimate("target", 1, 3) is None
    for size, seconds in ((1, 10.0), (6, 12.0), (6, 99.0), (6, 12.0)):
        costs.record("target", 1, size, seconds)
    for _ in range(2):
        costs.record("target", 1, 1, 10.0)
        costs.record("target", 1, 9, 500.0)  # too few to be relied on
    assert costs.estimate("target", 1, 1) == 10.0
    assert costs.estimate("target", 1, 6) == 12.0  # the median does not see one slow round
    assert costs.estimate("target", 1, 3) == pytest.approx(10.8)
    assert costs.estimate("target", 1, 11) == pytest.approx(14.0)
    assert costs.estimate("target", 32, 6) == 12.0  # the nearest batch size that was measured
    costs.record("drafter", 1, 4, 2.0)
    assert costs.estimate("drafter", 1, 2) == 1.0


def test_what_was_learnt_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    first = Controller("pair")
    _, ks = Machine(0.0, step=3.0).run(first, 3_000)
    assert max(ks[:5]) > 0
    first.save()
    second = Controller("pair")
    assert second.choose([Acceptance(30)], [100]).draft_length == 0  # it knows from the start
    assert Controller("another").choose([Acceptance(30)], [100]).draft_length > 0
    file = tmp_path / "foretoken" / "costs.json"
    assert list(json.loads(file.read_text())) == ["pair"]
    for damage in ("{", "[]", '{"pair": 3}', '{"pair": {"costs": {"target": 1}, "acceptance": 2}}'):
        file.write_text(damage)
        assert Controller("pair").choose([Acceptance(30)], [100]).draft_length > 0


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "file"))
    Controller("pair").save()


class ByHistory(Controller):
    """Chooses by nothing but the past: as unlike chance as a choice can be, and the same in every run."""

    def choose(self, requests, rooms, unread=None, crowded=False):
        counted = sum(math.floor(1e6 * sum(request.kept)) for request in requests)
        rows = range(min(1 + counted % 5, len(requests))) if counted % 3 else None
        return Choice(min(max(rooms), counted % 4), None if rows is None else tuple(rows))


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_the_choice_leaves_the_law_alone(verifier, monkeypatch):
    monkeypatch.setattr(DraftLengths, "matters", lambda self, row: False)
    target, prompt = tiny_llama(vocab_size=8, seed=1, num_hidden_layers=1), [1, 2, 3, 1, 2]
    engine = Engine(target, tiny_llama(vocab_size=8, seed=2, num_hidden_layers=1), verifier, AUTO, max_batch_size=8)
    engine.policy = ByHistory()
    params = [SamplingParams(seed=seed, max_new_tokens=5, ignore_eos=True) for seed in range(3_000)]
    samples = [completion.token_ids[:3] for completion in engine.generate([prompt] * len(params), params)]
    assert g_test(samples, joint_law(target, prompt, SamplingParams(), 3)) > 0.01 / 2


def test_a_seed_gives_one_text_whatever_the_clock_says():
    target, drafter = tiny_llama(seed=1), tiny_llama(seed=2)
    params = SamplingParams(seed=3, max_new_tokens=30, ignore_eos=True)
    wanted = Engine(target, drafter, "token", control.DEFAULT_K).generate([1, 2, 3], params)
    engine = Engine(target, drafter, "token")
    assert engine.num_speculative_tokens == AUTO
    assert engine.generate([1, 2, 3], params).token_ids == wanted.token_ids


@pytest.mark.parametrize(("verifier", "temperature"), [("coupled", 1.0), ("token", 0.0)])
def test_where_the_text_does_not_depend_on_k_the_clock_decides(verifier, temperature):
    target = tiny_llama(seed=1)
    engine = Engine(target, tiny_llama(seed=2), verifier)
    params = SamplingParams(seed=3, temperature=temperature, max_new_tokens=60, ignore_eos=True)
    completion = engine.generate([1, 2, 3], params)
    assert completion.token_ids == Engine(target, None, verifier).generate([1, 2, 3], params).token_ids
    assert engine.policy.costs.known("target", 1, 1)  # it has tried plain decoding


@pytest.mark.parametrize("value", ["many", "Auto", -1, 2.5, None])
def test_other_values_are_refused(value):
    with pytest.raises(ParameterError, match="num_speculative_tokens"):
        Engine(tiny_llama(), None, num_speculative_tokens=value)


def test_a_slow_round_does_not_bend_the_line_through_costs():
    costs = Costs()
    for size, seconds, times in ((2, 0.0114, 1), (4, 0.0019, 9), (16, 0.0062, 1)):
        for _ in range(times):
            costs.record("drafter", 1, size, seconds)
    line = costs.line("drafter", 1)
    assert line(4) == pytest.approx(0.0019)
    assert line(16) == pytest.approx(0.0062)


def test_the_line_through_costs_never_promises_that_something_is_free():
    costs = Costs()
    assert costs.line("target", 1) is None
    for size, seconds in ((5, 0.003), (6, 0.010)):
        for _ in range(3):
            costs.record("target", 1, size, seconds)
    line = costs.line("target", 1)
    assert line(6) == pytest.approx(0.010)
    assert line(9) == pytest.approx(0.031)
    assert line(1) == pytest.approx(0.0015)  # and not less than nothing
    falling = Costs()
    for size, seconds in ((2, 0.010), (8, 0.006)):
        falling.record("target", 1, size, seconds)
    assert falling.line("target", 1)(20) == pytest.approx(0.008)


class Unsettled(Machine):
    """One whose passes take half as long again for a while after rounds of another kind."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.last, self.since = None, 0

    def round(self, k, rows, was_drafting, few):
        self.since = self.since + 1 if (k > 0) == self.last else 0
        self.last = k > 0
        accepted, seconds = super().round(k, rows, was_drafting, few)
        if self.since < 5:
            self.clock += seconds["target"] / 2
            seconds["target"] *= 1.5
        return accepted, seconds


@pytest.mark.parametrize("rows", [1, 8])
def test_plain_decoding_is_judged_by_itself(rows):
    """Measured between rounds with drafts it takes longer than it would if there were none: here they don't pay."""
    plain, _ = Unsettled(0.4, step=5.0).run(0, 8_000 * rows, rows)
    assert Unsettled(0.4, step=5.0).run(1, 8_000 * rows, rows)[0] < 0.98 * plain
    with_drafter, ks = Unsettled(0.4, step=5.0).run(Controller(), 8_000 * rows, rows)
    assert with_drafter > 0.97 * plain
    assert np.mean(np.array(ks) > 0) < 0.1


def test_where_it_pays_unsettled_rounds_do_not_put_it_off():
    plain, _ = Unsettled(0.8, step=1.0).run(0, 8_000)
    best = max(Unsettled(0.8, step=1.0).run(k, 8_000)[0] for k in range(3, 9))
    found, _ = Unsettled(0.8, step=1.0).run(Controller(), 8_000)
    assert found > 0.95 * best > plain


def test_the_slowest_rows_decide_when_a_batch_is_ready():
    """One row of eight gets three tokens a round, the others one: together they are slower with drafts than without."""
    controller = Controller()
    for rows in (1, 8):
        for _ in range(3):
            for size, seconds in ((1, 10.0), (3, 13.0)):
                controller.costs.record("target", rows, size, seconds)
            controller.costs.record("drafter", rows, 2, 0.5)
    requests = [Acceptance(30) for _ in range(8)]
    for number, request in enumerate(requests):
        for _ in range(50):
            request.record(2, 2 if number < 3 else 0)
            request.rounds += 1
    controller._overall = Acceptance(400)
    for _ in range(50):
        controller._overall.record(2, 0)
    assert (
        controller.choose(requests, [100] * 8, crowded=True).draft_length == 2
    )  # whoever is ready makes room for another
    assert controller.choose(requests[:3], [100] * 3).draft_length == 2
    assert controller.choose(requests, [100] * 8).draft_length == 0


def test_a_few_rows_are_enough_to_see_whether_a_drafter_has_become_useful():
    machine, controller, samples = Machine(0.0, step=2.0, catch_up=20.0), Controller(), []
    choose = controller.choose

    def noted(*arguments):
        choice = choose(*arguments)
        samples.append(None if choice.rows is None else len(choice.rows))
        return choice

    controller.choose = noted
    _, ks = machine.run(controller, 60_000, rows=16)
    looked = [sample for k, sample in zip(ks[100:], samples[100:], strict=True) if k]
    assert looked.count(2) > 2 * looked.count(None) > 0
