"""What an audit tells before it starts, by a clock that only samples move; and claims that leave nothing to test."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from audit.samplers import PlainSampler
from foretoken.audit import AuditError, AuditPlan, CallableSubject, audit_model, audit_worlds
from foretoken.audit.forecast import wanted, wanted_tokens
from foretoken.audit.indirect import audit_pair
from foretoken.audit.sequential import Ledger
from foretoken.audit.statistics import detectable_tv
from foretoken.sampling import SamplingParams

ONE = SamplingParams(top_k=1)
SECONDS_PER_TOKEN, SECONDS_PER_CALL, SECONDS_TO_LOAD = 0.01, 0.05, 20.0


class Clocked(PlainSampler):
    """A sampler that takes its time, by a clock of its own."""

    def __init__(self, world, clock):
        super().__init__(world)
        self.clock, self.calls = clock, 0

    def __call__(self, prompt, count, num_tokens, params, seed):
        self.clock[0] += SECONDS_PER_CALL + count * num_tokens * SECONDS_PER_TOKEN
        self.calls += 1
        return super().__call__(prompt, count, num_tokens, params, seed)


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def forecast(states):
    """The first state that tells how long it takes, and how many samples are wanted."""
    return next(state for state in states if state.wanted and state.seconds_left is not None)


@pytest.mark.grid
@pytest.mark.parametrize("tv", [0.3, 0.15])
def test_the_time_of_small_worlds_is_foretold(worlds, clock, tv):
    states, plan = [], AuditPlan(tv=tv, max_seconds=100_000)

    def load(world):
        clock[0] += SECONDS_TO_LOAD
        return CallableSubject(Clocked(world, clock), "plain")

    report = audit_worlds(load, worlds[:2], plan, states.append, greedy=False)
    assert report.verdict == "PASS"
    told = forecast(states)
    assert told.samples < 0.1 * told.wanted  # before it starts
    assert told.wanted == pytest.approx(report.samples, rel=0.15)
    took = report.seconds - SECONDS_TO_LOAD
    assert told.seconds_left == pytest.approx(took, rel=0.15)


@pytest.mark.grid
@pytest.mark.parametrize("tv", [0.1, 0.05])
def test_the_time_of_a_model_is_foretold(world, clock, tv):
    states, plan = [], AuditPlan(tv=tv, max_seconds=100_000)
    subject = CallableSubject(Clocked(world, clock), "plain")
    report = audit_model(
        subject, world.target_reference, world.prompts, world.params, plan, states.append, num_tokens=8, greedy=False
    )
    assert report.verdict == "PASS"
    told = forecast(states)
    assert told.samples <= 0.1 * told.wanted
    assert told.wanted == pytest.approx(report.samples, rel=0.15)
    assert told.seconds_left == pytest.approx(report.seconds, rel=0.2)


def compare(world, clock, plan):
    """The report of two lossless systems, and what was told of it beforehand."""
    states = []
    one, other = (CallableSubject(Clocked(world, clock), name) for name in ("subject", "reference"))
    prompts = [list(world.prompts[0])]
    report = audit_pair(one, other, prompts, SamplingParams(), plan, states.append, num_tokens=3)
    return report, next(state for state in states if state.detectable is not None)


def test_the_power_of_two_samples_is_foretold(world, clock):
    plan = AuditPlan(tv=0.15, max_seconds=100_000)
    report, told = compare(world, clock, plan)
    assert report.verdict == "PASS"
    assert told.samples < 0.5 * told.wanted
    assert told.detectable <= plan.tv  # the limits allow more than is wanted
    assert 0.5 * told.wanted < report.samples < 2.5 * told.wanted  # it looks after 256 pairs, 512, 1,024, …
    assert (
        told.seconds_left < report.seconds < 2.5 * (told.seconds_left + report.seconds * told.samples / report.samples)
    )


@pytest.mark.grid
@pytest.mark.parametrize("limits", [{"max_samples": 1100}, {"max_seconds": 70}])
def test_limits_that_end_two_samples_too_early_are_foretold(world, clock, limits):
    report, told = compare(world, clock, AuditPlan(tv=0.05, **limits))
    assert report.verdict == "INCONCLUSIVE"
    assert told.detectable == pytest.approx(report.findings[0].detectable_tv, rel=0.3)
    assert told.detectable > 0.05


@pytest.mark.parametrize("tv", [0.3, 0.1, 0.03])
def test_as_many_as_are_foretold_reach_the_power_and_not_many_more_than_needed(worlds, tv):
    ledger = Ledger(AuditPlan(tv=tv, max_samples=1_000_000), planned=50)

    def reach(count, probs):
        return detectable_tv([(p, int(count) // len(probs)) for p in probs], ledger.threshold, 0.99)

    for world in worlds:
        need = wanted(world, ledger)
        assert reach(need.short, world.joint_probs) <= tv
        assert need.short == 500 or reach(0.8 * need.short, world.joint_probs) > tv
        assert need.long * 24 >= wanted_tokens(ledger) > (need.long - 2) * 24
    assert wanted(worlds[0], Ledger(AuditPlan(tv=tv, max_samples=700), planned=50)).short <= 700


def peaked(world):
    return replace(world, params=ONE)


def test_a_world_with_one_possible_output_is_told_before_anything_is_sampled(world, clock):
    sampler = Clocked(world, clock)
    with pytest.raises(AuditError, match="top_k 1 each prompt of a small world has one possible output: nothing is"):
        audit_worlds(lambda _: CallableSubject(sampler, "plain"), [peaked(world)])
    assert sampler.calls == 0


def test_a_model_with_one_possible_token_is_told_after_each_prompt_had_its_turn(world, clock):
    sampler = Clocked(peaked(world), clock)
    prompts = [(1, 2), (2, 3), (4,)]
    with pytest.raises(
        AuditError, match=r"each of the first \d+ tokens of .* was the only possible one: .*temperature"
    ):
        audit_model(CallableSubject(sampler, "plain"), world.target_reference, prompts, ONE, num_tokens=8, greedy=False)
    assert sampler.calls == len(prompts)


def test_who_writes_other_tokens_than_the_only_possible_one_fails_nonetheless(world):
    wrong = CallableSubject(lambda prompt, count, length, params, seed: [[0, 1, 2]] * count, "wrong")
    assert audit_model(wrong, world.target_reference, world.prompts, ONE, num_tokens=3).verdict == "FAIL"


@pytest.mark.parametrize("prompts", [[(1, 2)], [(1, 2), (3,)]])
def test_two_systems_with_one_possible_first_token_are_told_at_once(prompts, clock):
    calls = []

    def one_answer(prompt, count, length, params, seed):
        calls.append(count)
        return [[prompt[0], 2, 3]] * count

    subject = CallableSubject(one_answer, "plain")
    with pytest.raises(AuditError, match="begin with the same token after each prompt: nothing is drawn at random"):
        audit_pair(subject, subject, prompts, SamplingParams(), num_tokens=3)
    assert sum(calls) < 2048


def test_two_systems_that_begin_in_different_ways_fail_though_each_has_one(clock):
    def answers(token):
        return CallableSubject(lambda prompt, count, length, params, seed: [[token]] * count, str(token))

    assert audit_pair(answers(1), answers(2), [(1, 2)], SamplingParams(), num_tokens=1).verdict == "FAIL"
