"""What models foresee of an output that nobody asked for counts as a few chains, and says whether they are of use."""

from __future__ import annotations

from math import exp, log
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay import FIXED, MODEL_AT, Engine, Machine, fixed, outputs
from test_hopes import NEARLY

from foretoken.engine.rehearsal import TOKENS
from foretoken.policy.acceptance import LOOKUP, MODEL, Acceptance, EngineRates, chains_in


@given(st.lists(st.booleans(), max_size=60))
def test_chains_cover_what_is_foreseen_and_end_with_the_first_wrong_token(right):
    chains = chains_in(right)
    assert [begin for begin, *_ in chains] == [0, *np.cumsum([tried for _, tried, _ in chains])][: len(chains)]
    assert sum(tried for _, tried, _ in chains) == len(right)
    for begin, tried, accepted in chains:
        assert all(right[begin : begin + accepted])
        assert tried == accepted + 1 or begin + tried == len(right)
        assert tried == accepted or not right[begin + accepted]


def after(*right, kind=MODEL, rates=True):
    found = EngineRates(kind)
    found.rehearse(right, rates=rates)
    return found


def test_a_model_that_foresees_nothing_is_taken_for_useless_until_it_is_right():
    rates = after(*[False] * TOKENS)
    assert rates.use < 0.1
    rates.record(1, 4, 2)
    assert rates.use > 0.4
    rates.record(1, 4, 2)
    assert rates.use > 0.9


def test_a_model_that_foresees_some_is_of_use():
    assert after(*[False, True] * 8).use > 0.99


def test_however_long_the_rehearsal_is_it_counts_as_a_few_chains():
    short, long = (after(*[True, True, False] * count) for count in (16, 160))
    assert all(3.0 < one.all.observed < 4.1 for one in (short, long))
    assert after(False).all.observed == 1.0  # and each chain as one at most


def test_it_moves_the_rates_toward_what_was_foreseen():
    often, seldom = (after(*[*[True] * count, False] * (80 // count)) for count in (9, 1))
    usual = sum(Acceptance(EngineRates(MODEL)).reach(4))
    assert sum(Acceptance(seldom).reach(4)) < usual - 0.15 < usual + 0.15 < sum(Acceptance(often).reach(4))


def test_of_sampled_requests_it_says_only_whether_the_model_is_of_use():
    rates = after(*[True, False] * 24, rates=False)
    assert rates.use > 0.99
    assert rates.all.expected == 0.0
    assert rates.rates()[1:] == EngineRates(MODEL).rates()[1:]


@pytest.mark.parametrize("right", [(), [True] * TOKENS, [True, False] * 20])
def test_requests_still_have_to_show_that_the_model_is_of_use(right):
    rates = after(*right)
    assert rates.judged == 0
    assert rates.is_doubtful
    assert not rates.was_useful
    assert rates.is_new == (not right)


def test_of_kinds_that_are_never_useless_it_moves_the_rates_alone():
    rates = after(*[False] * 8, kind=LOOKUP)
    assert rates.use == 1.0
    assert rates.rates()[0] < LOOKUP.rates[0]


def shares(machine: Machine, workload: str, rate: float, rehearsed: float | None) -> float:
    """Time of the best fixed length by that of an engine, in its first three requests; geometric mean."""
    found = []
    for seed in range(1, 7):
        right = [] if rehearsed is None else outputs("answer", rehearsed, TOKENS, 1, 900 + seed)[0].right
        engine = Engine(machine, (MODEL_AT,), seed=seed, error=1.15, reads=True, rehearsed=right)
        rows = [[one] for one in outputs(workload, rate, 128, 3, 40 + seed)]
        best = min(sum(fixed(machine, rows, MODEL_AT, length)) for length in (0, *FIXED))
        found.append(best / sum(map(engine.run, rows)))
    return exp(fmean(map(log, found)))


@pytest.mark.parametrize(("workload", "rate", "gain"), [("random", 0.0, 0.01), ("code", 0.85, 0.005)])
def test_first_requests_are_faster_with_a_rehearsal(workload, rate, gain):
    with_it, without = (fmean(shares(one, workload, rate, told) for one in NEARLY.values()) for told in (rate, None))
    assert with_it > without + gain


@pytest.mark.parametrize(("workload", "rate", "told"), [("code", 0.9, 0.2), ("random", 0.0, 0.7), ("code", 0.9, 0.5)])
def test_a_rehearsal_that_misleads_costs_little(workload, rate, told):
    """A model of code says nothing of the sea, and one of the sea nothing of code."""
    misled, without = (fmean(shares(one, workload, rate, each) for one in NEARLY.values()) for each in (told, None))
    assert misled > without - 0.06
