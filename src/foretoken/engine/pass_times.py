"""What the passes of plain rounds take: one after another, and behind passes of another width."""

from __future__ import annotations

from operator import sub
from statistics import median

SETTLED = 8
"""Passes of a round from which on its later half shows what a pass takes that follows others like it. Behind a pass of
another width they get faster one by one: 1.69, 1.08, 0.85, 0.78, 0.73, 0.70 and then 0.67 ms, with 17 MB of weights on
a processor that keeps 32 MB in its cache."""

_AVERAGED = 12.0  # rounds over which the first pass's further time is averaged


class PassTimes:
    """Times of the passes of a plain round, and of the rounds before.

    Attributes:
        changed: whether the pass before the first one had another width.
    """

    def __init__(self) -> None:
        self.changed, self._start = False, 0.0
        self._ends: list[float] = []
        self._left_out = 0.0
        self._each = self._first = 0.0  # seconds of a pass, and what the first one took longer; of the last round
        self._usual_first = 0.0  # the latter where nothing has another width

    def begin(self, now: float, *, changed: bool) -> None:
        """A round begins, at `now` seconds of `perf_counter`."""
        self.changed, self._start, self._ends, self._left_out = changed, now, [], 0.0

    def add(self, now: float) -> None:
        """A pass is over, and its tokens are chosen."""
        self._ends.append(now - self._left_out)

    def leave_out(self, now: float) -> None:
        """What went on since the last pass counts as no pass's."""
        self._left_out = now - self._ends[-1]

    def end(self) -> None:
        """The round is over."""
        ends = self._ends
        if len(ends) < 2:
            return
        if self._settled:
            later = ends[len(ends) // 2 - 1 :]
            self._each = median(map(sub, later[1:], later))
        else:
            self._each = (ends[-1] - ends[0]) / (len(ends) - 1)
        self._first = max(ends[0] - self._start - self._each, 0.0)
        if self._settled and not self.changed:
            self._usual_first += (self._first - self._usual_first) / _AVERAGED

    def seconds_of(self, passes: int, spent: float, together: int) -> float:
        """Seconds that so many passes take in plain decoding; the seconds `spent` where there was one pass alone.

        The first pass of a round is slower than the others: its weights have left the processor's caches. Plain
        decoding has one such pass in each round of `together` passes; with drafts in between they are more frequent.
        """
        if len(self._ends) < 2:
            return spent
        first = min(self._first, self._usual_first) if self.changed and self._settled else self._first
        return passes * (self._each + first / together)

    @property
    def returning(self) -> float | None:
        """Seconds that the round took longer since a pass of another width came before; None where that is not known.

        All of its passes count: each is faster than the one before until the caches hold what these need.
        """
        if not (self.changed and self._settled):
            return None
        return max(self._ends[-1] - self._start - len(self._ends) * self._each - self._usual_first, 0.0)

    @property
    def _settled(self) -> bool:
        return len(self._ends) >= SETTLED
