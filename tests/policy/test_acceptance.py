"""Acceptance: priors, how an engine's and a request's drafts move them, and what is not recorded."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from foretoken.policy.acceptance import BEGINNING, LOOKUP, MODEL, TREES, Acceptance, EngineRates


def record(acceptance: Acceptance, rate: float, rounds: int, length: int, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    for _ in range(rounds):
        acceptance.record(length, int((random.random(length) < rate).cumprod().sum()))


def test_before_anything_was_drafted_the_kinds_rates_hold():
    assert Acceptance(EngineRates(MODEL)).reach(1) == [pytest.approx(MODEL.rates[0])]
    copies = Acceptance(EngineRates(LOOKUP))
    assert sum(copies.reach(4, match=6)) > 2 * sum(copies.reach(4, match=1))


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6, 0.9])
def test_the_estimate_approaches_a_requests_rate(rate):
    acceptance = Acceptance(EngineRates(MODEL))
    record(acceptance, rate, 60, 4)
    truth = sum(rate**depth for depth in range(1, 5))
    assert sum(acceptance.reach(4)) == pytest.approx(truth, abs=0.15 + 0.2 * truth)


def test_the_next_request_starts_from_the_engines_rates_and_not_from_the_kind():
    engine = EngineRates(MODEL)
    record(Acceptance(engine), 0.1, 60, 2)
    assert Acceptance(engine).reach(1)[0] < 0.25


def test_short_drafts_move_the_estimate_of_longer_ones():
    acceptance = Acceptance(EngineRates(MODEL))
    record(acceptance, 0.95, 80, 2)
    assert acceptance.reach(8)[7] > 1.5 * Acceptance(EngineRates(MODEL)).reach(8)[7]


def test_matches_of_each_length_have_estimates_of_their_own():
    acceptance = Acceptance(EngineRates(LOOKUP))
    for _ in range(20):
        acceptance.record(1, 0, match=1)
        acceptance.record(8, 8, match=6)
    assert sum(acceptance.reach(4, match=6)) > 3.0
    assert acceptance.reach(1, match=1)[0] < 0.15


def test_an_empty_draft_is_no_evidence():
    acceptance = Acceptance(EngineRates(LOOKUP))
    before = acceptance.reach(4, match=2)
    acceptance.record(0, 0, match=2)
    assert acceptance.reach(4, match=2) == before


def test_estimates_of_longer_chains_than_there_are_levels_and_of_long_matches():
    reach = Acceptance(EngineRates(LOOKUP)).reach(64, match=400)
    assert len(reach) == 64
    assert all(0.0 < after <= before for before, after in pairwise(reach))


def test_trees_have_one_factor_for_all_sizes():
    engine = EngineRates(TREES)
    acceptance = Acceptance(engine)
    before = acceptance.tree(8)
    for _ in range(30):
        acceptance.record_tree(8, 4)
    assert acceptance.tree(8) == pytest.approx(4.0, rel=0.1)
    assert acceptance.tree(16) > acceptance.tree(8) > before
    assert Acceptance(engine).tree(8) > 1.4 * before


def test_saved_rates_of_another_process_weigh_little():
    engine = EngineRates(MODEL)
    record(Acceptance(engine), 0.0, 300, 1)
    again = Acceptance(EngineRates(MODEL, (engine.all.observed, engine.all.expected)))
    assert 0.1 < again.reach(1)[0] < MODEL.rates[0]


def test_tokens_at_the_beginning_of_an_output_are_expected_to_be_wrong_more_often():
    acceptance = Acceptance(EngineRates(MODEL))
    first, later = acceptance.reach(3, emitted=1), acceptance.reach(3)
    assert first[0] < 0.8 * later[0]
    across = acceptance.reach(3, emitted=BEGINNING - 1)  # one token of it, then others
    assert across[0] == pytest.approx(first[0])
    assert across[1] / across[0] == pytest.approx(later[1] / later[0])


def test_hard_beginnings_say_less_of_a_model_than_later_rejections():
    hard, late = Acceptance(EngineRates(MODEL)), Acceptance(EngineRates(MODEL))
    for number in range(12):  # right for every second first token
        hard.record(3, number % 2, emitted=4)
        late.record(3, number % 2)
    assert hard.reach(1)[0] > 1.15 * late.reach(1)[0]
    assert hard.reach(1)[0] > 0.55


def test_copies_know_no_beginning():
    copies = Acceptance(EngineRates(LOOKUP))
    assert copies.reach(4, match=3, emitted=0) == copies.reach(4, match=3)


def test_a_model_that_is_never_right_is_soon_taken_for_useless_and_two_tokens_that_are_right_refute_it():
    engine = EngineRates(MODEL)
    acceptance, seen = Acceptance(engine), []
    for _ in range(16):
        acceptance.record(3, 0, emitted=2)
        seen.append(engine.use)
    assert seen == sorted(seen, reverse=True)
    assert seen[1] > 0.7  # two are none
    assert seen[-1] < 0.06
    assert sum(acceptance.reach(8)) < 0.05
    acceptance.record(3, 1)
    assert engine.use > 0.4
    acceptance.record(3, 1)
    assert engine.use > 0.9


def test_a_useful_model_stays_one_through_a_passage_that_is_hard():
    engine = EngineRates(MODEL)
    acceptance = Acceptance(engine)
    for number in range(40):
        acceptance.record(3, number % 4)
    for _ in range(10):
        acceptance.record(3, 0)
    assert engine.use > 0.6
