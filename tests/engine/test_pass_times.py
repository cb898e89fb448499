"""What the passes of plain rounds take, by a clock that is given."""

from __future__ import annotations

import pytest

from foretoken.engine.pass_times import SETTLED, PassTimes


def round_of(times: PassTimes, seconds, *, changed=False, begin=100.0):
    times.begin(begin, changed=changed)
    for one in seconds:
        begin += one
        times.add(begin)
    times.end()
    return times


def test_one_pass_takes_what_the_round_took():
    assert round_of(PassTimes(), [3.0]).seconds_of(1, 5.0, 12) == 5.0


@pytest.mark.parametrize("count", [2, SETTLED - 1, SETTLED, 3 * SETTLED])
def test_the_first_pass_counts_as_often_as_plain_decoding_has_one(count):
    times = round_of(PassTimes(), [4.0] + [2.0] * (count - 1))
    assert times.seconds_of(count, 0.0, 8) == pytest.approx(count * (2.0 + 2.0 / 8))
    assert times.returning is None


def test_behind_another_width_later_passes_show_what_passes_take():
    slow = [8.0, 5.0, 4.0, 3.0, 2.5, 2.2]
    times = PassTimes()
    for _ in range(100):
        round_of(times, [3.0] + [2.0] * 11)
    round_of(times, slow + [2.0] * 8, changed=True)
    # The first pass counts as in rounds behind others like it.
    assert times.seconds_of(14, 0.0, 10) == pytest.approx(14 * (2.0 + 1.0 / 10), rel=1e-3)
    assert times.returning == pytest.approx(sum(slow) - 6 * 2.0 - 1.0, rel=1e-3)


def test_few_passes_behind_another_width_do_not_show_what_returning_costs():
    times = round_of(PassTimes(), [8.0] + [2.0] * (SETTLED - 2), changed=True)
    assert times.returning is None
    assert times.seconds_of(1, 0.0, 6) == pytest.approx(2.0 + 6.0 / 6)


def test_rounds_behind_another_width_do_not_count_as_usual_ones():
    times = PassTimes()
    for _ in range(50):
        round_of(times, [20.0] + [2.0] * 11, changed=True)
    assert times.seconds_of(12, 0.0, 12) == pytest.approx(24.0)


def test_one_slow_pass_among_later_ones_changes_nothing():
    times = round_of(PassTimes(), [2.0] * 10 + [50.0] + [2.0] * 5)
    assert times.seconds_of(16, 0.0, 12) == pytest.approx(32.0)


@pytest.mark.parametrize("count", [SETTLED - 4, 2 * SETTLED])
def test_what_goes_on_between_two_passes_is_left_out(count):
    times, now = PassTimes(), 100.0
    times.begin(now, changed=False)
    for done in range(1, count + 1):
        now += 2.0
        times.add(now)
        if done % 2 == 0:
            now += 7.0
            times.leave_out(now)
    times.end()
    assert times.seconds_of(count, 0.0, 8) == pytest.approx(2.0 * count)
