"""How wide passes are where a change of width costs something."""

from __future__ import annotations

import pytest

from foretoken.models.widths import PassWidths


def widths_behind(size, patience=28, least=1):
    widths = PassWidths(patience, least)
    assert widths.fit(size) == max(size, least)
    return widths


def test_a_wide_pass_is_padded_to_until_that_has_cost_as_much_as_a_change():
    widths = widths_behind(10)
    assert [widths.fit(1) for _ in range(5)] == [10, 10, 10, 1, 1]


@pytest.mark.parametrize(("passes", "expected"), [(1, 10), (3, 10), (4, 1), (12, 1)])
def test_a_wide_pass_is_left_at_once_for_as_many_as_would_cost_more_than_a_change(passes, expected):
    widths = widths_behind(10)
    widths.leave(1, passes)
    assert widths.fit(1) == expected


def test_a_pass_is_left_for_none_that_is_narrower_than_the_least():
    widths = widths_behind(10, least=4)
    widths.leave(1, 12)
    assert widths.fit(1) == 4


def test_a_batch_that_gets_smaller_by_a_row_keeps_its_width():
    widths = widths_behind(16)
    widths.leave(15, 12)
    assert widths.fit(15) == 16


@pytest.mark.parametrize("least", [1, 4])
def test_padding_and_changes_are_counted(least):
    widths = widths_behind(10, least=least)
    before = widths.padding, widths.changes
    found = [widths.fit(1) for _ in range(5)]  # the last ones are as wide as the least
    padding = 9 * found.count(10) + 7
    assert set(found) == {10, least}
    widths.fit(10)
    widths.fit(3)
    assert (widths.padding - before[0], widths.changes - before[1]) == (padding, 2)
    widths.narrow = (1, 6)
    for tokens in (1, 1, 4):
        widths.narrow_for(tokens)
    assert (widths.padding - before[0], widths.changes - before[1]) == (padding + 2, 4)
