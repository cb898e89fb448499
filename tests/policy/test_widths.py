"""The width of passes as a metrical task system."""

from __future__ import annotations

import numpy as np
import pytest

from foretoken.policy.acceptance import LOOKUP
from foretoken.policy.costs import Costs, DrafterCosts
from foretoken.policy.lines import Line
from foretoken.policy.policy import Policy
from foretoken.policy.request import Row
from foretoken.policy.widths import Widths, widths_from


def play(rounds, charge, start):
    """What the rounds are worth, changes paid, and how many there were."""
    widths, last, worth, changes = Widths(), start, 0.0, 0
    for values in rounds:
        width = widths.next(values, last, charge)
        changes += width != last
        worth += values[width] - charge * (width != last)
        last = width
    return worth, changes


def best(rounds, charge, start):
    """The most that they can be worth, the rounds to come known."""
    worth = {start: 0.0}
    for values in rounds:
        worth = {
            width: max(before - charge * (width != last) for last, before in worth.items()) + value
            for width, value in values.items()
        }
    return max(worth.values())


@pytest.mark.parametrize("charge", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("seed", range(6))
def test_it_loses_no_more_than_the_competitive_ratio_allows(charge, seed):
    """2 N - 1 times the least cost, for any rounds (Borodin, Linial and Saks 1992). Here costs are worths below 0."""
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 6))
    rounds = []
    for _ in range(300):
        costs = random.exponential(1.0, count) * (random.random(count) < 0.5)
        rounds.append(dict(enumerate((-costs).tolist())))
    worth, _ = play(rounds, charge, 0)
    assert worth >= (2 * count - 1) * best(rounds, charge, 0) - 2 * count * charge


@pytest.mark.parametrize("charge", [0.5, 2.0])
def test_it_is_near_the_best_where_rounds_are_of_kinds_that_last(charge):
    random = np.random.default_rng(0)
    rounds = []
    while len(rounds) < 600:
        kind = random.random(4)
        for _ in range(int(random.integers(20, 60))):
            rounds.append(dict(enumerate((kind + random.normal(0.0, 0.1, 4)).tolist())))
    worth, changes = play(rounds, charge, 0)
    assert worth > best(rounds, charge, 0) - 2.0 * charge * 20
    assert changes <= 30


def test_what_alternates_changes_no_width():
    rounds = [{1: 0.0, 9: (2.0 if turn % 3 == 0 else -0.4)} for turn in range(100)]
    assert play(rounds, 1.5, 1)[1] == 1
    assert play(rounds, 1.5, 9)[1] == 0


def test_a_change_that_costs_nothing_is_made_at_once():
    rounds = [{1: 0.0, 5: value} for value in (1.0, -1.0, 1.0, -1.0)]
    assert play(rounds, 0.0, 1) == (2.0, 4)


@pytest.mark.parametrize(
    ("least", "most", "last"), [(1, 1, 0), (1, 17, 1), (4, 20, 13), (4, 2, 4), (32, 400, 57), (1, 5, 300)]
)
def test_the_widths_that_are_considered(least, most, last):
    found = widths_from(least, most, last)
    assert found[0] == least
    assert found == sorted(set(found))
    assert found[-1] >= most
    assert len(found) < 32
    if least <= last <= least * 33:
        assert last in found  # staying is possible
    else:
        assert last not in found  # a prompt's


def test_a_pass_is_not_wide_for_good_where_nothing_is_drafted():
    """By what was measured its width costs nothing, which no narrower pass could tell to be wrong."""
    costs = Costs(Line(1.0, 0.0), [DrafterCosts(Line(0.0, 0.0))])
    costs.anchored, costs.change = True, 0.5
    policy = Policy([LOOKUP], [True], costs, Costs.by_bytes(1.0, [0.0]))
    request, last, rounds = policy.open(sampled=True), 4, 0
    while last > 1:
        row = Row(request, 100, [0])
        last = policy.choose([row], (last, 1))
        assert not row.chosen.tokens
        rounds += 1
        assert rounds < 200
    assert rounds > 50  # a copy may come, and a change costs half a pass
