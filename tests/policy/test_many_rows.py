"""Decisions on many rows: what new requests share, and when a batch is too large for any model."""

from __future__ import annotations

import pytest

from foretoken.policy.acceptance import BEGINNING, LOOKUP, MODEL, PREDICTION
from foretoken.policy.costs import Costs, DrafterCosts
from foretoken.policy.lines import Line
from foretoken.policy.options import Chains, may_pay
from foretoken.policy.policy import Policy
from foretoken.policy.request import LONGEST, Offer, Request, Row

FREE = DrafterCosts(Line(0.0, 0.0))


def policy_of(position: float, step: float) -> Policy:
    """Lookups, and a model that takes `step` for a token in one row, beside a pass of 10 with `position` for a row."""
    costs = Costs(Line(10.0, position), [FREE, DrafterCosts(Line(0.0, step)), FREE])
    return Policy([LOOKUP, MODEL, PREDICTION], [True, False, True], costs, Costs.by_bytes(1.0, [0.0, 0.3, 0.0]))


def decide(policy: Policy, requests: list[Request], emitted: int = 1, deciding: float = 0.0) -> list[Row]:
    """A round of them: which rows did not rest."""
    rest = policy.resting(requests)
    rows = [Row(request, 60, [0, 0, 0]) for request, rests in zip(requests, rest, strict=True) if not rests]
    beside = len(requests) - len(rows)
    policy.ask([row.request for row in rows], beside)
    policy.choose(rows, beside=beside)
    drafted = [row.chosen.tokens for row in rows if row.chosen.drafter == 1]
    calls = (
        [(1, max(drafted), len(drafted), 0, policy.costs.draft(1, max(drafted), len(drafted), 0))] if drafted else []
    )
    positions = len(requests) + sum(row.chosen.total for row in rows)
    seconds = policy.costs.target(positions)
    policy.lessons.learn(
        rows, [emitted] * len(rows), positions, calls, seconds, beside=beside, deciding=deciding * bool(rows)
    )
    return rows


@pytest.mark.parametrize("sampled", [False, True])
def test_new_requests_of_one_decision_share_their_options(sampled):
    """Others have options of their own, as if each were decided by itself."""
    policy = policy_of(0.1, 0.1)
    chains = Chains()
    new = [policy.open(sampled=sampled) for _ in range(3)]
    seen = policy.open(sampled=sampled)
    policy.judge(seen, 1, 4, 4)
    greedy = [chains(request.acceptance[1], LONGEST, 20, None) for request in new]
    assert greedy[0] is greedy[1] is greedy[2]
    assert greedy[0] == Chains()(new[0].acceptance[1], LONGEST, 20, None)
    assert chains(new[0].acceptance[1], LONGEST, 3, None) != greedy[0]
    assert chains(new[0].acceptance[1], 4, 20, None) == greedy[0][:4]
    assert chains(new[0].acceptance[1], LONGEST, BEGINNING, None) is greedy[0]
    own = chains(seen.acceptance[1], LONGEST, 20, None)
    assert own[0].accepted > greedy[0][0].accepted
    other = policy.open(sampled=not sampled)
    assert chains(other.acceptance[1], LONGEST, 20, None) is not greedy[0]
    worths = [[2.0] * LONGEST, [1.0] * LONGEST, [0.5] * LONGEST]
    worth = chains(new[0].acceptance[1], LONGEST, 20, worths)
    assert [one.foreseen for one in worth] == pytest.approx([2.0 * one.accepted for one in greedy[0]])
    assert [one.behind for one in worth] == pytest.approx([0.5 * one.accepted for one in greedy[0]])


def test_what_tokens_are_worth_to_new_requests_follows_the_engine():
    policy = policy_of(0.1, 0.1)
    first, second = policy.open(sampled=False), policy.open(sampled=False)
    above = first.above[1]
    before = first.runs.worth(above, 8)
    assert all(one is other for one, other in zip(second.runs.worth(above, 8)[:3], before[:3], strict=True))
    assert len(second.runs.worth(above, 4)[0]) == 4
    for _ in range(40):
        above.add([True, True, False])
    after = policy.open(sampled=False).runs.worth(above, 8)
    assert after[3] > before[3]  # more tokens for each that is not foreseen
    assert second.runs.worth(above, 8)[3] == after[3]
    second.runs.add([False] * 8)
    assert second.runs.worth(above, 8)[3] < after[3]


def test_no_model_may_pay_where_its_tokens_cost_what_they_save():
    costs = policy_of(1.0, 2.0).costs
    rho = 64 / costs.target(64)  # a token in each row
    assert may_pay(costs, 1, MODEL, 2, 2 / costs.target(2), 1.0, 0.0)
    assert not may_pay(costs, 1, MODEL, 64, rho, 1.0, 0.0)
    assert may_pay(costs, 1, MODEL, 64, rho, 4.0, 0.0)  # where tokens of some row are worth as much
    assert not may_pay(costs, 1, MODEL, 2, 2 / costs.target(2), 1.0, 1000.0)


def test_in_a_batch_that_is_too_large_new_requests_are_no_reason_to_consider_a_model():
    policy = policy_of(1.0, 2.0)
    requests = [policy.open(sampled=False) for _ in range(48)]
    decide(policy, requests, deciding=100.0)
    assert policy.rests.too_many == 48
    considered = 0
    for _ in range(96):
        requests = [*requests[1:], policy.open(sampled=False)]
        assert not any(row.chosen.drafter == 1 for row in decide(policy, requests, deciding=100.0))
        considered += policy.rests._considered == policy.rounds
    assert considered <= 1  # requests were replaced twice, by halves four times
    few = requests[:24]
    assert decide(policy, few, deciding=100.0)  # in half as many it is considered at once
    assert policy.rests._considered == policy.rounds


def test_where_the_batch_shrinks_models_are_considered_again():
    """By a quarter or more, though most requests are known: after a rest of several rows, not of one without hope."""
    policy = policy_of(1.0, 2.0)
    requests = [policy.open(sampled=False) for _ in range(48)]
    decide(policy, requests, deciding=100.0)
    begun = policy.rounds
    due = policy.rests._models_due(48)
    assert due - begun > 64
    assert policy.rests._models_due(37) == due
    assert policy.rests._models_due(35) - begun <= 33
    assert policy.rests.asleep_until(requests[:30]) - begun <= 33


def test_a_batch_of_few_rows_is_decided_with_its_models():
    policy = policy_of(1.0, 0.05)
    requests = [policy.open(sampled=False) for _ in range(2)]
    rows = decide(policy, requests, emitted=3)
    assert not policy.rests.too_many
    assert [row.chosen.drafter for row in rows] == [1, 1]


def test_copies_are_drafted_in_a_batch_that_is_too_large_for_models():
    policy = policy_of(0.02, 30.0)
    requests = [policy.open(sampled=False) for _ in range(24)]
    rows = [Row(request, 60, [0, 0, 0], [Offer(0, 8, 12)]) for request in requests]
    policy.resting(requests)
    policy.ask(requests)
    policy.choose(rows)
    assert policy.rests.too_many == 24
    assert all(row.chosen.drafter == 0 and row.chosen.tokens for row in rows)


def test_rows_that_depend_on_no_other_do_not_count_in_how_many_are_too_many():
    policy = policy_of(1.0, 2.0)
    many = [policy.open(sampled=False) for _ in range(48)]
    decide(policy, many, deciding=100.0)
    assert policy.rests.too_many == 48
    seeded = [policy.open(sampled=True, reproducible=True) for _ in range(46)]
    few = [policy.open(sampled=False) for _ in range(2)]
    policy.resting([*few, *seeded])
    assert policy.rests.considers  # for the two


def test_rows_that_copy_are_no_reason_not_to_consider_a_model_for_others():
    """A second costs them more tokens."""
    policy = policy_of(0.05, 2.0)
    copying = [policy.open(sampled=False) for _ in range(8)]
    for _ in range(100):
        for request in copying:
            request.pace.add(9.0, 1.0)
            request.above[0].add(9.0, 1.0)
    rows = [Row(request, 60, [0, 0, 0]) for request in copying]
    policy.resting(copying)
    policy.ask(copying)
    policy.choose(rows)
    assert not any(row.chosen.drafter == 1 for row in rows)
    assert not policy.rests.too_many
    assert policy.rests.sharing == 8


def test_calls_that_take_longer_with_each_row_may_pay_in_one_row():
    costs = Costs(Line(10.0, 0.1), [FREE, DrafterCosts(Line(0.0, 0.2), row=20.0), FREE])
    assert may_pay(costs, 1, MODEL, 8, 8 / costs.target(8), 1.0, 0.0)
