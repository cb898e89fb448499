"""Hopes: a row by itself drafts with a model that would pay if it were better than was found."""

from __future__ import annotations

import pytest

from foretoken.policy.acceptance import BEGINNING, HOPE, MODEL, Acceptance, EngineRates, Kind
from foretoken.policy.account import CREDIT, HOPES, Guard
from foretoken.policy.costs import Costs, DrafterCosts
from foretoken.policy.lines import Line
from foretoken.policy.policy import Policy
from foretoken.policy.request import Row

POSITION, CALL, STEP = 0.05, 0.6, 0.15
"""Plain passes that a position of a pass takes, a call of the model, and a token of it."""


def seconds(tokens):
    return 1.0 + POSITION * tokens, CALL + STEP * tokens


def policy_of(kind=MODEL):
    costs = Costs(Line(1.0 - POSITION, POSITION), [DrafterCosts(Line(CALL, STEP))])
    costs.measure([(size, seconds(size - 1)[0]) for size in (1, 9, 33)], [[(n, seconds(n)[1]) for n in (1, 5, 16)]])
    return Policy([kind], [False], costs, Costs.by_bytes(1.0, [0.1]))


def play(policy, right, rounds, requests=1):
    """Rounds, of which `right(round)` says how many tokens a draft has right; returns the tokens of their drafts."""
    drafts, lost, at = [], 0.0, 0
    for _ in range(requests):
        request = policy.open(sampled=True, copied=False)
        for number in range(rounds):
            request.emitted, tokens, emitted = BEGINNING + number, 0, 1
            if not policy.resting([request])[0]:
                row = Row(request, 200, [0])
                policy.choose([row])
                tokens = row.chosen.tokens
                if tokens:
                    found = min(right(at), tokens)
                    policy.judge(request, 0, tokens, found)
                    emitted, at = 1 + found, at + 1
                passed, call = seconds(tokens)
                calls = [(0, tokens, 1, 0, call)] if tokens else []
                policy.lessons.learn([row], [emitted], 1 + tokens, calls, passed)
                lost += passed + call * (tokens > 0) - emitted
            else:
                policy.lessons.rested(1, 1)
            drafts.append(tokens)
    return drafts, lost


def test_hope_is_for_fewer_rejections_and_fades_with_what_is_known():
    def gain(observed):
        engine = EngineRates(MODEL)
        engine.all.observed, engine.all.expected = observed, observed
        one = Acceptance(engine)
        before, hoping = one.reach(5), one.reach(5, hoping=True)
        assert all(after > usual for after, usual in zip(hoping, before, strict=True))
        return sum(hoping) / sum(before)

    assert gain(0.0) > gain(4.0) > gain(16.0) > gain(100.0) > 1.0
    assert gain(10_000.0) < 1.01
    certain = EngineRates(Kind((1.0,)))
    assert max(Acceptance(certain).reach(3, hoping=True)) < 1.0


@pytest.mark.parametrize("begun", [3, 6])
def test_a_model_that_began_badly_is_found_again_in_the_same_request(begun):
    """Its first drafts were wrong in the second token, which says that it does not pay."""
    policy = policy_of()
    drafts, _ = play(policy, lambda at: 1 if at < begun else 16, 200)
    assert sum(tokens > 0 for tokens in drafts[-40:]) > 30


def test_what_is_hoped_for_is_drafted_and_charged():
    policy = policy_of()
    request = policy.open(sampled=True, copied=False)
    for _ in range(5):
        policy.judge(request, 0, 4, 1)
    request.emitted, row = BEGINNING, Row(request, 200, [0])
    assert policy.rates(0, sampled=True).was_useful
    request.looks[0].due = 1_000
    policy.choose([row])
    assert row.chosen.tokens > 0
    assert request.hoping
    guard = policy.guards[1]
    assert guard.hopes == HOPES
    before = guard.spare
    prices = policy.prices(row, 0.0)
    policy.lessons.learn([row], [1], 1 + row.chosen.tokens, [(0, row.chosen.tokens, 1, 0, 1.0)], 1.2)
    assert guard.hopes < HOPES - 0.5
    assert guard.spare > before  # that of looks
    if prices is not None:  # no further rounds than it can pay for
        assert prices.rounds * 1.2 < HOPES
    guard.hopes = 0.0
    request.rounds, row = 0, Row(request, 200, [0])
    policy.choose([row])
    assert not row.chosen.tokens
    assert not request.hoping
    assert row.hopeless


def test_there_is_no_hope_for_a_model_of_which_nothing_was_right():
    policy = policy_of()
    request = policy.open(sampled=True, copied=False)
    assert not policy.rates(0, sampled=True).was_useful  # nothing was drafted
    policy.judge(request, 0, 4, 0)
    assert not policy.rates(0, sampled=True).was_useful
    request.emitted, row = BEGINNING, Row(request, 200, [0])
    request.looks[0].due = 1_000
    policy.choose([row])
    assert not row.chosen.tokens


@pytest.mark.parametrize(("rounds", "requests"), [(600, 1), (40, 15)])
def test_hopes_of_a_model_that_never_pays_lose_no_more_than_their_account_has(rounds, requests):
    """Two tokens of three are right for good: it takes 1.2 plain rounds for each token."""
    policy = policy_of()
    drafts, lost = play(policy, lambda at: at % 2, rounds, requests)
    assert any(drafts)
    assert lost < CREDIT / 4 + HOPES + 0.01 * rounds * requests + seconds(16)[1] + 1.0


def test_gains_of_hopes_pay_for_further_ones():
    guard = Guard()
    for _ in range(4):
        guard.settle(3.0, 1.0, hoped=True)
    assert guard.hopes < 0.0
    guard.settle(1.0, 6.0)
    assert guard.hopes < 0.0  # what others gained
    guard.settle(1.0, 6.0, hoped=True)
    assert guard.hopes > 0.0
    assert HOPE > 0.0
