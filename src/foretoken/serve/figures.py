"""Live figures for the page: what the choices of the last minute did, second by second."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from foretoken.engine.outputs import DecodeStats

WINDOW = 60
"""Seconds that are kept."""


@dataclass
class _Tally:
    """What was counted in one second, or before those that are kept.

    Attributes:
        second: on the clock.
        stats: of all choices; their seconds are left out.
        lengths: rounds by draft tokens.
    """

    second: int
    stats: DecodeStats = field(default_factory=DecodeStats)
    lengths: Counter[int] = field(default_factory=Counter)


class Figures:
    """Counts what choices do.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._older = _Tally(0)  # what is not in the seconds any more
        self._seconds: deque[_Tally] = deque()

    def count(self, added: DecodeStats) -> None:
        """Count what an event of a choice added, see `Progress`.

        Rounds that came together with the one before count as one draft length each, their mean. Of a round that was
        read while it was being counted the rest comes with the next event.
        """
        if not (added.rounds or added.emitted or added.drafted or added.accepted):
            return
        tally = self._now()
        _add(tally.stats, added)
        if added.rounds > 0:
            tally.lengths[round(added.drafted / added.rounds)] += added.rounds

    def as_json(self) -> dict[str, Any]:
        """Counts since the start and of the last minute, and tokens and rounds of each of its seconds."""
        self._drop()
        now = int(self._clock())
        by_second = {tally.second: tally for tally in self._seconds}
        seconds = [by_second.get(second, _Tally(second)) for second in range(now - WINDOW, now)]
        return {
            "window_seconds": WINDOW,
            "tokens_by_second": [tally.stats.emitted for tally in seconds],
            "rounds_by_second": [tally.stats.rounds for tally in seconds],
            "recent": _told(self._seconds),
            "total": _told([self._older, *self._seconds]),
        }

    def _now(self) -> _Tally:
        second = int(self._clock())
        if not self._seconds or self._seconds[-1].second != second:
            self._drop()
            self._seconds.append(_Tally(second))
        return self._seconds[-1]

    def _drop(self) -> None:
        oldest = int(self._clock()) - WINDOW
        while self._seconds and self._seconds[0].second < oldest:
            tally = self._seconds.popleft()
            _add(self._older.stats, tally.stats)
            self._older.lengths += tally.lengths


def _add(stats: DecodeStats, added: DecodeStats) -> None:
    stats.rounds += added.rounds
    stats.drafts += added.drafts
    stats.emitted += added.emitted
    stats.drafted += added.drafted
    stats.accepted += added.accepted
    if not (added.drafted or added.accepted):
        return
    for mine, theirs in (
        (stats.drafted_by_position, added.drafted_by_position),
        (stats.accepted_by_position, added.accepted_by_position),
    ):
        mine += [0] * (len(theirs) - len(mine))
        for at, value in enumerate(theirs):
            mine[at] += value


def _told(tallies: Iterable[_Tally]) -> dict[str, Any]:
    lengths: Counter[int] = Counter()
    for tally in tallies:
        lengths += tally.lengths
    stats = DecodeStats.total(tally.stats for tally in tallies)
    return {
        "rounds": stats.rounds,
        "tokens": stats.emitted,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "drafted_by_position": stats.drafted_by_position,
        "accepted_by_position": stats.accepted_by_position,
        "mean_acceptance_length": round(stats.mean_acceptance_length, 4) if stats.rounds else None,
        "draft_lengths": {str(length): count for length, count in sorted(lengths.items())},
    }
