"""Hopes: a row by itself drafts with a model that would pay if it were better than was found."""

from __future__ import annotations

from math import exp, log
from statistics import fmean

import pytest
from replay import FIXED, LOOKUP_AT, MODEL_AT, Engine, Machine, fixed, outputs

from foretoken.policy.acceptance import BEGINNING, HOPE, LOOKUP, MODEL, Acceptance, EngineRates, Kind
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


NEARLY = {
    "small": Machine(0.0, 1.6, 0.2, call=0.5, step=0.35, read=0.02, free=0.03, apart=0.3, change=0.6, patience=28),
    "smaller": Machine(0.0, 0.62, 0.08, call=0.2, step=0.12, read=0.01, free=0.02, apart=0.3, change=0.4, patience=28),
    "large": Machine(1.0, 40.0, 3.0, call=4.0, step=12.0, read=0.2),
}
"""Machines where drafts cost nearly what a model of which nothing is known is expected to gain."""


@pytest.mark.grid
@pytest.mark.parametrize("drafters", [(MODEL_AT,), (LOOKUP_AT, MODEL_AT)], ids=["alone", "beside copies"])
def test_a_model_that_is_mostly_right_is_found_in_the_first_requests(drafters):
    """Nothing drafted for hundreds of tokens there, where the model would have gained a fifth or more."""
    shares, begun = [], []
    for machine in NEARLY.values():
        for seed in range(1, 9):
            rows = outputs("code", 0.9, 128, 3, 40 + seed)
            engine = Engine(machine, drafters, seed=seed, error=1.15, follows=len(drafters) > 1 and machine.apart > 0.0)
            own = sum(engine.run([one]) for one in rows)
            begun.append(any(choice[0] == len(drafters) - 1 and choice[1] for choice in engine.choices))
            best = min(sum(fixed(machine, [[one] for one in rows], MODEL_AT, k)) for k in (0, *FIXED))
            shares.append(best / own)
    assert all(begun)
    assert exp(fmean(map(log, shares))) > 0.91, shares


@pytest.mark.parametrize("right", [0.0, 0.3])
@pytest.mark.parametrize("machine", NEARLY)
def test_hopes_for_a_model_of_which_nothing_is_known_lose_little(machine, right):
    machine = NEARLY[machine]
    for seed in range(1, 5):
        rows = outputs("random", right, 128, 6, seed)
        plain = sum(fixed(machine, [[one] for one in rows], MODEL_AT, 0))
        engine = Engine(machine, (MODEL_AT,), seed=seed, error=1.15)
        assert plain / sum(engine.run([one]) for one in rows) > 0.95


def test_a_first_hope_is_not_at_an_outputs_beginning():
    policy = policy_of(Kind((0.5, 0.55), beginning=1.6, useless=0.09))
    request = policy.open(sampled=True, copied=False)
    request.emitted, row = BEGINNING - 1, Row(request, 200, [0])
    policy.choose([row])
    assert not row.chosen.tokens
    request.emitted, row = BEGINNING, Row(request, 200, [0])
    policy.choose([row])
    assert row.chosen.tokens
    assert request.hoping


def test_a_reproducible_request_has_a_look_in_place_of_a_first_hope():
    """It learns from no other request, and its account is its own: all requests would hope anew."""
    policy = policy_of(Kind((0.5, 0.55), beginning=1.6, useless=0.09))
    policy.fixed_costs = Costs(Line(1.0 - POSITION, POSITION), [DrafterCosts(Line(CALL, STEP))])
    request = policy.open(sampled=True, reproducible=True, copied=False)
    request.emitted, row = BEGINNING, Row(request, 200, [0])
    policy.choose([row])
    assert row.chosen.tokens
    assert request.looking
    assert not request.hoping


def test_what_a_pace_was_with_better_drafts_is_no_reason_to_decode_plainly():
    """A draft gains two tokens in the time of 2.6 plain rounds, and the rounds before emitted 2 in the time of one."""
    chosen = []
    for pace in (1.0, 2.0):
        policy = policy_of(Kind((0.9, 0.9, 0.9, 0.5)))
        request = policy.open(sampled=True, copied=False)
        request.pace.add(40.0 * pace, 40.0)
        request.emitted, row = BEGINNING, Row(request, 200, [0])
        policy.choose([row])
        chosen.append(row.chosen)
    assert chosen[0].tokens > 0
    assert chosen[0] == chosen[1]


def test_foreseen_tokens_are_worth_less_to_a_model_only_while_copies_earn():
    request = Policy([LOOKUP, MODEL], [True, False], *[Costs.by_bytes(1.0, [0.0, 0.1])] * 2).open(sampled=False)
    for _ in range(30):
        request.runs.add([True, True, False])
        request.above[1].add([True, True, False])
    request.asked, request.copying.cost = True, 0.5
    for gain, earns in ((0.0, False), (3.0, True)):
        for number in range(40):
            request.copying.gained(gain, number)
        assert request.copying.earns == earns
        assert (min(request.worths()[0]) < 0.9) == earns
