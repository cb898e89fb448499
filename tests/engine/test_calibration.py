"""What calibration makes of measured rounds: those of a pass's new width, outliers, and too few of them."""

from __future__ import annotations

import pytest

from foretoken import Engine, SamplingParams, load
from foretoken.drafters import Cascade, PromptLookup
from foretoken.engine import calibration
from tiny import tiny_llama

PLAIN = [2.4, 2.0, 1.6, 1.4, 1.3, 1.2, 1.2, 1.2, 1.2, 1.2, 1.2, 1.2]
"""Milliseconds of one round after the other, the prompt's first: the caches fill with what the new width needs."""
WIDE = [3.2, 2.6, 2.3, 2.2, 2.1, 2.1, 2.1, 2.1, 2.1, 2.1, 2.1, 2.1]


@pytest.fixture
def calibrated(monkeypatch):
    """Costs from given rounds, and how many of each kind were wanted in each sweep."""
    target, wanted = load(tiny_llama(seed=1), runner="hf"), []

    def run(plain, wide):
        def rounds(target, cascade, kind, verifier, params, limits, count, by_turns=()):
            wanted.append((kind[1], count))
            longest = {0: plain, 8: wide}.get(kind[1], [4.7] * 12)
            return iter([(seconds / 1e3, 0.0) for seconds in longest[:count]])

        monkeypatch.setattr(calibration, "_rounds", rounds)
        cascade = Cascade([PromptLookup()])
        calibration.calibrate(target, cascade, Engine(target).verifier, sampled=False)
        return cascade.policy.costs

    return run, wanted


def test_each_kind_of_round_is_measured_many_times_in_a_row(calibrated):
    run, wanted = calibrated
    costs = run(PLAIN, WIDE)
    assert wanted[:4] == [(0, 4), (8, 4), (0, 12), (8, 12)]
    mean = {size: sum(rounds[2:]) / 10 for size, rounds in ((1, PLAIN), (9, WIDE))}
    assert costs.target(9) / costs.target(1) == pytest.approx(mean[9] / mean[1], rel=0.03)


def test_one_slow_round_is_hardly_counted(calibrated):
    run, _ = calibrated
    usual, slow = run(PLAIN, WIDE), run([*PLAIN[:6], 30.0, *PLAIN[7:]], WIDE)
    assert slow.target(1) == pytest.approx(usual.target(1), rel=0.05)


def test_of_slow_rounds_two_are_measured_and_the_faster_one_counts(calibrated):
    """Of a large model, whose first round may have prepared what it needs."""
    run, wanted = calibrated
    costs = run([90.0, 80.0, 400.0, 60.0], [130.0, 120.0, 400.0, 72.0])
    assert [count for _, count in wanted] == [4, 4]
    assert costs.target(1) == pytest.approx(0.060, rel=0.03)
    assert costs.target(9) == pytest.approx(0.072, rel=0.03)
    assert costs.change == 0.0


@pytest.mark.parametrize("runner", ["hf", "native"])
def test_a_target_of_a_few_tokens_has_nothing_to_measure(runner):
    target, drafter = (load(tiny_llama(seed=seed, max_position_embeddings=6), runner=runner) for seed in (1, 2))
    params = SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True)
    assert len(Engine(target, drafter).generate([1, 2], params).token_ids) == 2


def test_a_change_of_width_costs_what_the_rounds_after_it_take_longer():
    """The first block follows the prompt's pass, which makes more new than the width."""
    block, later = [9.0, 8.0, 1.0], [[1.5, 1.2, 1.0], [2.6, 2.1, 2.0]]
    assert calibration._change([*block, *(later[1] + later[0]) * 5]) == pytest.approx(0.7)
    assert calibration._change([*block, *(later[1] + later[0]) * 5, 30.0, 1.0]) == pytest.approx(0.7)  # no whole block
    assert calibration._change(block) == 0.0
    assert calibration._change([*block, *[1.0, 1.0, 1.3] * 6]) == 0.0  # of another cause


@pytest.mark.parametrize("passes", [1, 8])
def test_plain_passes_that_go_together_are_measured_where_there_are_such(passes, monkeypatch):
    """As a share of rounds of one pass, of which those that follow a prompt or another width are left out."""
    target = load(tiny_llama(seed=1), runner="hf")

    def rounds(target, cascade, kind, verifier, params, limits, count, by_turns=()):
        each = PLAIN if kind[1] == 0 else WIDE
        share = 0.6 if limits.plain_passes > 1 else 1.0
        return iter([(share * seconds / 1e3, 0.0) for seconds in ([*each, *each])[:count]])

    monkeypatch.setattr(calibration, "_rounds", rounds)
    monkeypatch.setattr(calibration, "passes_together", lambda target, rows, most: min(passes, most))
    cascade = Cascade([PromptLookup()])
    calibration.calibrate(target, cascade, Engine(target).verifier, sampled=False)
    together = cascade.policy.costs.together
    assert together(2) == 1.0
    assert 0.6 <= together(1) < 0.9 if passes > 1 else together(1) == 1.0


@pytest.mark.parametrize("slow", [(), range(4), range(4, 10), range(4, 5), range(5, 6), range(5, 7), range(9, 10)])
def test_what_several_passes_take_is_measured_by_turns_with_rounds_of_one(slow, monkeypatch):
    """While some rounds are measured, all take twice as long: the share was off by as much."""
    target, blocks = load(tiny_llama(seed=1), runner="hf"), []

    def rounds(target, cascade, kind, verifier, params, limits, count, by_turns=()):
        several, factor = limits.plain_passes > 1, 2.0 if len(blocks) in slow else 1.0
        blocks.append(several)
        each = [0.9 * PLAIN[-1]] * 12 if several else PLAIN if kind[1] == 0 else WIDE
        return iter([(factor * seconds / 1e3, 0.0) for seconds in each[:count]])

    monkeypatch.setattr(calibration, "_rounds", rounds)
    monkeypatch.setattr(calibration, "passes_together", lambda target, rows, most: min(6, most))
    cascade = Cascade([PromptLookup()])
    calibration.calibrate(target, cascade, Engine(target).verifier, sampled=False)
    assert blocks[4:8] == [False, True] * 2  # a third time where rounds are fast
    assert sum(blocks) == (2 if slow == range(4) else 3)
    assert cascade.policy.costs.together(1) == pytest.approx(0.9, abs=0.01)


def test_rounds_of_several_passes_are_measured_by_the_pass():
    target = load(tiny_llama(seed=1), runner="native", device="cpu")
    engine, cascade = Engine(target), Cascade([PromptLookup()])
    params = calibration.SamplingParams(temperature=0.0, max_new_tokens=64, ignore_eos=True)
    found = {}
    for most in (1, 16):
        limits = calibration.replace(calibration.DEFAULT_LIMITS, plain_passes=most)
        steps = []
        step = calibration.DecodeLoop.step

        def spy(loop, *args, steps=steps, step=step, **named):
            stats = loop.rows[0].stats
            before, spent = stats.rounds, sum(stats.seconds.values())
            result = step(loop, *args, **named)
            steps.append((stats.rounds - before, sum(stats.seconds.values()) - spent))
            return result

        calibration.DecodeLoop.step = spy
        try:
            measured = [*calibration._rounds(target, cascade, (-1, 0), engine.verifier, params, limits, 4)]
        finally:
            calibration.DecodeLoop.step = step
        assert len(measured) == 4
        passes, seconds = zip(*steps[:4], strict=True)
        each = [took / max(count, 1) for took, count in zip(seconds, passes, strict=True)]
        assert [took for took, _ in measured] == pytest.approx(each)
        found[most] = max(passes)
    assert found[1] == 1
    assert found[16] == 16


def test_rounds_by_turns_have_the_widths_that_are_asked_for():
    target = load(tiny_llama(seed=1), runner="native", device="cpu")
    engine, cascade, widths = Engine(target), Cascade([PromptLookup()]), []
    params = calibration.SamplingParams(temperature=0.0, max_new_tokens=64, ignore_eos=True)
    forward = type(target).forward

    def spy(self, tokens, *args, **kwargs):
        widths.append(tokens.shape[-1])
        return forward(self, tokens, *args, **kwargs)

    type(target).forward = spy
    try:
        rounds = [
            *calibration._rounds(
                target, cascade, (-1, 8), engine.verifier, params, calibration.DEFAULT_LIMITS, 9, [0, 0, 0, 8, 8, 8]
            )
        ]
    finally:
        type(target).forward = forward
    assert len(rounds) == 9
    assert [width for width in widths if width != 4][-8:] == [1, 1, 9, 9, 9, 1, 1, 1]
