"""How wide passes are where a change of width costs something."""

from __future__ import annotations

import pytest

from foretoken.models.widths import PassWidths, own_widths


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


@pytest.mark.parametrize(("tells", "own"), [(1, (1,)), (7, (1, 2, 5, 7))])
def test_few_tokens_are_not_padded_where_that_would_tell(tells, own):
    """Neither to the width of the pass before, nor to one that is held or planned."""
    sizes = (1, 2, 5, 7, 8)
    widths = PassWidths(28, tells=tells)
    for size in sizes:
        for hold in (0, 9, 12):
            with own_widths(0):
                assert widths.fit(12) == 12
            widths.hold(hold)
            with own_widths(1):
                assert widths.peek(size) == widths.fit(size) == (size if size in own else hold or 12)
    for size in sizes:  # padded again once that is over
        widths.fit(12)
        assert widths.fit(size) == 12


def test_few_tokens_that_would_tell_are_padded_to_the_least_width_alone():
    widths = PassWidths(28, least=4, tells=1)
    widths.fit(12)
    with own_widths(1):
        assert widths.fit(1) == 4


def test_a_plan_for_tokens_that_would_tell_is_the_narrowest_graph():
    widths = PassWidths(28, tells=7)
    widths.narrow = (1, 4, 9, 17)
    with own_widths(1):
        assert widths.plan(2, 17, alone=True)[0] == widths.narrow_for(2) == 4
        assert widths.plan(8, 17, alone=True)[0] == widths.narrow_for(8) == 17
    assert widths.plan(2, 17, alone=True)[0] == widths.narrow_for(2) == 17


def test_a_token_of_each_row_is_not_padded_where_that_would_tell():
    widths = PassWidths(28)
    widths.fit(12)
    with own_widths(3):
        assert [widths.fit(tokens) for tokens in (12, 4, 3, 12, 2)] == [12, 12, 3, 12, 2]
