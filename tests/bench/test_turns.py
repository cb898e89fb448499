from __future__ import annotations

import pytest

from foretoken.bench.turns import Spread, order, seconds_left


def test_orders_are_reproducible_and_nobody_is_always_first() -> None:
    orders = [order("abc", turn) for turn in range(30)]
    assert orders == [order("abc", turn) for turn in range(30)]
    assert all(sorted(one) == ["a", "b", "c"] for one in orders)
    assert {one[0] for one in orders} == {"a", "b", "c"}


def test_ratios_are_formed_within_a_turn() -> None:
    # The machine is ten times slower in the second turn; the third is ours alone.
    assert Spread.of_ratios({0: 200.0, 1: 30.0, 2: 1e9}, {0: 100.0, 1: 10.0}) == Spread(2.5, 2.0, 3.0)
    assert Spread.of_ratios({0: 1.0}, {1: 1.0}) is None
    assert Spread.of([]) is None
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)


def test_the_time_left_is_extrapolated() -> None:
    assert seconds_left(0, 10, 5.0) is None
    assert seconds_left(4, 10, 20.0) == pytest.approx(30.0)
    assert seconds_left(10, 10, 50.0) == 0.0
