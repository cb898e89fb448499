"""Acceptance: priors, how an engine's and a request's drafts move them, and what is not recorded."""

from __future__ import annotations

import numpy as np
import pytest

from foretoken.policy.acceptance import LOOKUP, MODEL, TREES, EngineRates, RequestRates


def record(rates: RequestRates, engine: EngineRates, rate: float, rounds: int, length: int, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    for _ in range(rounds):
        accepted = int((random.random(length) < rate).cumprod().sum())
        rates.record(length, accepted)
        engine.record(1, length, accepted)


def test_before_anything_was_drafted_the_kinds_rates_hold():
    rates = RequestRates(EngineRates(MODEL))
    assert rates.expected(1) == [0.0, pytest.approx(MODEL.rate(1))]
    assert (
        RequestRates(EngineRates(LOOKUP)).expected(4, match=6)[4]
        > 2 * RequestRates(EngineRates(LOOKUP)).expected(4, 1)[4]
    )


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6, 0.9])
def test_the_estimate_approaches_a_requests_rate(rate):
    engine = EngineRates(MODEL)
    rates = RequestRates(engine)
    record(rates, engine, rate, 60, 4)
    truth = sum(rate**depth for depth in range(1, 5))
    assert rates.expected(4)[4] == pytest.approx(truth, abs=0.15 + 0.2 * truth)


def test_the_next_request_starts_from_the_engines_rates_and_not_from_the_kind():
    engine = EngineRates(MODEL)
    record(RequestRates(engine), engine, 0.1, 60, 2)
    assert RequestRates(engine).expected(1)[1] < 0.25


def test_short_drafts_move_the_estimate_of_longer_ones():
    engine = EngineRates(MODEL)
    rates = RequestRates(engine)
    record(rates, engine, 0.95, 80, 2)
    assert rates.reach(8)[7] > 1.5 * RequestRates(EngineRates(MODEL)).reach(8)[7]


def test_matches_of_each_length_have_estimates_of_their_own():
    engine = EngineRates(LOOKUP)
    rates = RequestRates(engine)
    for _ in range(20):
        rates.record(1, 0, match=1)
        rates.record(8, 8, match=6)
    assert rates.expected(4, match=6)[4] > 3.0
    assert rates.expected(1, match=1)[1] < 0.15


def test_an_empty_draft_is_no_evidence():
    engine = EngineRates(LOOKUP)
    rates = RequestRates(engine)
    before = rates.expected(4, match=2)
    rates.record(0, 0, match=2)
    engine.record(2, 0, 0)
    assert rates.expected(4, match=2) == before


def test_trees_have_one_factor_for_all_sizes():
    engine = EngineRates(TREES)
    rates = RequestRates(engine)
    before = rates.tree(8)
    for _ in range(30):
        rates.record_tree(TREES.accepted(8), 4)
        engine.record_tree(8, 4)
    assert rates.tree(8) == pytest.approx(4.0, rel=0.1)
    assert rates.tree(16) > rates.tree(8) > before
    assert RequestRates(engine).tree(8) > 1.5 * before


def test_a_drafters_own_estimates_are_corrected_by_acceptance():
    rates = RequestRates(EngineRates(LOOKUP))
    assert rates.given([0.5, 0.25]) == [0.0, 0.5, 0.75]
    for _ in range(30):
        rates.record_tree(0.75, 0)
    assert rates.given([0.5, 0.25])[2] < 0.2


def test_saved_rates_of_another_process_weigh_little():
    engine = EngineRates(MODEL)
    record(RequestRates(engine), engine, 0.0, 300, 1)
    again = EngineRates(MODEL, engine.as_json())
    assert 0.3 < again.rates()[1] < MODEL.rate(1)
