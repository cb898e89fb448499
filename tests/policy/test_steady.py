"""Rounds that go by the prices of an earlier one: the same choices and account, no more than it can pay for."""

from __future__ import annotations

from random import Random

import pytest

from foretoken.policy.acceptance import LOOKUP, MODEL
from foretoken.policy.account import CREDIT, HELD
from foretoken.policy.copies import Copies
from foretoken.policy.costs import Costs, DrafterCosts
from foretoken.policy.lines import Line
from foretoken.policy.policy import Policy
from foretoken.policy.request import LARGEST, LONGEST, Offer, Row
from foretoken.policy.steady import MOST, Told

PLAIN, POSITION = 0.004, 0.0002


def policy_of(kinds=(LOOKUP,), given=False):
    """A policy of measured costs."""
    costs = Costs(Line(PLAIN, POSITION), [DrafterCosts(Line(0.0, 0.0)) for _ in kinds])
    calls = [[] if kind is LOOKUP else [(1, 0.001), (5, 0.003)] for kind in kinds]
    costs.measure([(size, PLAIN + POSITION * size) for size in (1, 9, 33)], calls)
    fixed = Costs.by_bytes(1.0, [0.1] * len(kinds))
    return Policy(list(kinds), [kind is LOOKUP for kind in kinds], costs, fixed, given=given)


def offer_of(random, size, chain=True):
    reach, found = 1.0, []
    for _ in range(size):
        reach *= random.uniform(0.5, 1.0)
        found.append(reach)
    return Offer(0, size, 0, tuple(found), chain)


def decided(policy, request, offers=(), room=40):
    policy.resting([request])
    (least,) = policy.ask([request])
    row = Row(request, room, [0] * len(policy.kinds), list(offers))
    policy.choose([row])
    return row, least


def follow(policy, request, random, rounds):
    """Rounds that are decided each by itself."""
    for _ in range(rounds):
        size = random.choice([0, 2, 5, 16])
        row, _ = decided(policy, request, [offer_of(random, size)] if size else [])
        emitted = 1 + random.randint(0, row.chosen.tokens)
        positions = 1 + row.chosen.tokens
        policy.lessons.learn([row], [emitted], positions, [], PLAIN + POSITION * positions, 0.0003)


@pytest.mark.parametrize("chain", [True, False], ids=["chains", "trees"])
def test_prices_give_what_a_decision_gives(chain):
    policy, random = policy_of(), Random(3)
    request = policy.open(sampled=False)
    follow(policy, request, random, 30)
    compared = set()
    for _ in range(200):
        offer, most = offer_of(random, random.randint(1, LARGEST), chain), random.choice([1, 3, 7, 40])
        row, least = decided(policy, request, [offer], most)
        row.most = most
        policy.choose([row])
        prices = policy.prices(row, least)
        assert prices is not None
        tokens, gain = prices.best(Copies.of(row, offer), most)
        assert tokens == row.chosen.tokens
        assert gain == pytest.approx(row.gain)
        assert prices.price(tokens) == pytest.approx(row.price)
        compared.add(tokens)
    assert len(compared) > 4


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_rounds_that_are_told_together_teach_the_same(share):
    states = []
    for together in (False, True):
        policy, random = policy_of(), Random(5)
        policy.costs.together.record(1, share, 64)
        request = policy.open(sampled=False)
        follow(policy, request, random, 20)
        row, least = decided(policy, request)
        assert policy.prices(row, least) is not None
        told = []
        for number in range(12):
            offer, positions = offer_of(random, 5), 6 if number % 3 else 1
            row, _ = decided(policy, request, [offer] if positions > 1 else [])
            seconds = 1.2 * (PLAIN + POSITION * (1 + row.chosen.tokens))
            emitted = 1 + random.randint(0, row.chosen.tokens)
            if together:
                gain = row.gain if row.chosen.tokens else 0.0
                tokens, offered = row.chosen.tokens, sum(one.size for one in row.offers)
                price = row.price
                told.append(
                    Told(tokens, offered, emitted, gain, 1 + tokens, False, seconds, 0.0004, 0.0001, price=price)
                )
            else:
                policy.lessons.learn([row], [emitted], 1 + row.chosen.tokens, [], seconds, 0.0004, deciding=0.0001)
        if together:
            policy.lessons.learn_together(request, told)
        states.append(
            [
                *(guard.balance for guard in policy.guards),
                request.pace.of(request.above[0]),
                request.late,
                policy.costs.drift.value,
                policy.costs.target(6),
                policy.costs.copy(6),
                policy.lessons.awake,
                request.copying._gains.tokens,
            ]
        )
        assert (request.rounds, policy.rounds) == (32, 32)
    assert states[1] == pytest.approx(states[0], rel=0.1, abs=0.05)


def test_prices_hold_for_no_more_rounds_than_the_account_can_pay_for():
    policy = policy_of()
    request = policy.open(sampled=False)
    follow(policy, request, Random(1), 40)
    held = []
    for balance in (0.0, 1.0, 3.0, CREDIT, HELD):
        policy.guards[0].balance = balance
        row, least = decided(policy, request)
        prices = policy.prices(row, least)
        held.append(0 if prices is None else 1 + prices.rounds)
        table = policy.costs.table(1, LARGEST)
        assert held[-1] * (table.extra[LONGEST] + table.asking[0]) / table.plain <= balance
    assert held == sorted(held)
    assert (held[0], held[-1]) == (0, MOST)


def test_prices_hold_for_no_more_than_half_as_many_rounds_as_the_request_has_had():
    policy = policy_of()
    request, random, held = policy.open(sampled=False), Random(1), []
    for _ in range(8):
        row, least = decided(policy, request)
        prices = policy.prices(row, least)
        held.append(0 if prices is None else 1 + prices.rounds)
        follow(policy, request, random, 1)
    assert held == [0, 0, 0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("rounds", [1, 5, 12, 30])
def test_a_models_draft_length_is_kept_as_long_as_its_account_can_pay(rounds):
    """Even if, from then on, all that it drafts were rejected."""
    policy = policy_of((MODEL,))
    request = policy.open(sampled=False, copied=False)
    call = seconds = 0.0
    for _ in range(rounds):
        row, _ = decided(policy, request)
        tokens = row.chosen.tokens
        assert tokens > 0
        call, seconds = 0.0005 + 0.0005 * tokens, PLAIN + POSITION * (1 + tokens)
        policy.judge(request, 0, tokens, tokens)
        policy.lessons.learn([row], [1 + tokens], 1 + tokens, [(0, tokens, 1, 0, call)], seconds)
    row, _ = decided(policy, request)
    prices = policy.prices(row, 0.0)
    if rounds == 1:
        assert prices is None
        return
    assert prices.tokens == row.chosen.tokens
    assert 1 <= prices.rounds < min(rounds // 2, MOST)
    before = policy.guards[0].balance
    told = Told(prices.tokens, 0, 1, 0.0, 1 + prices.tokens, False, seconds, 0.0, 0.0, call)
    policy.lessons.learn_together(request, [told] * prices.rounds)
    assert policy.guards[1].balance > 0.0
    assert policy.guards[0].balance >= before  # that of copies pays for none of it


@pytest.mark.parametrize(("others", "held"), [(0, 0), (3, 0), (4, 0), (8, 1), (12, 2), (16, 3), (100, 3)])
def test_a_request_begins_with_what_is_known_of_others(others, held):
    """So its first rounds are not decided each by itself: they were half of those of a short answer."""
    policy = policy_of((MODEL,))
    before = policy.open(sampled=False, copied=False)
    for _ in range(others):
        policy.judge(before, 0, 4, 4)
    request = policy.open(sampled=False, copied=False)
    row, _ = decided(policy, request)
    assert row.chosen.tokens
    prices = policy.prices(row, 0.0)
    assert (0 if prices is None else prices.rounds) == held
    for _ in range(8):  # and goes on with what is known of itself
        policy.judge(request, 0, 4, 4)
    prices = policy.prices(row, 0.0)
    assert prices is not None
    assert max(held, 3) <= prices.rounds <= 7


def test_each_round_is_decided_where_prices_would_not_do():
    """Models, costs that were given or must depend on no clock, and copies that do not pay."""
    for policy, reproducible in (
        (policy_of((LOOKUP, MODEL)), False),
        (policy_of(given=True), False),
        (policy_of(), True),
    ):
        request = policy.open(sampled=True, reproducible=reproducible)
        follow(policy, request, Random(1), 10)
        row, least = decided(policy, request)
        assert policy.prices(row, least or 0.0) is None
    policy = policy_of()
    request = policy.open(sampled=False)
    for _ in range(300):
        row, least = decided(policy, request)
        assert row.chosen.tokens == 0
        policy.lessons.learn([row], [1], 1, [], PLAIN, 0.0005)
    assert policy.prices(row, least or 0.0) is None
