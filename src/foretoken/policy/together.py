"""What a pass of a plain round of several takes: that is what drafts are compared with.

Plain decoding takes as much: rounds in which nothing is drafted go together.
"""

from __future__ import annotations

from math import exp, log

from foretoken.policy.lines import Drift

_AVERAGED = 48.0  # plain passes over which what they take is averaged
_SETTLED = 10.0 * _AVERAGED  # the same where the drift follows it
_LEAST = 0.5  # what it can be at least, beside a round of one pass: less is noise


class Together:
    """By rows, in seconds, and as a share of a plain round of one pass.

    How many of the passes lately went together is of no account. Where most rounds draft, a plain one is by itself, and
    drafts that seem to pay beside such rounds can keep rows from the faster ones for good.
    """

    def __init__(self) -> None:
        self._shares: dict[int, tuple[float, float]] = {}  # and over how many passes it is averaged
        self._seconds: dict[int, tuple[float, float]] = {}  # what a pass of such a round took, drift included; likewise
        self.unseen = 0  # rounds of a row by itself since its plain passes were measured
        self._known: set[int] = set()  # rows of which calibration or an earlier process found it

    def __call__(self, rows: int) -> float:
        """The share with so many rows; 1 where it is not known."""
        return self._shares[rows][0] if rows in self._shares else 1.0

    def record(self, rows: int, share: float, passes: int, drift: Drift | None = None) -> None:
        """So many passes of one round took this share each; averaged over the last `_AVERAGED`.

        With `drift`, which the share is without, a known share hardly changes: what machines do is the drift's.
        """
        before, seen = self._shares.get(rows, (1.0, 0.0))
        self._known.update((rows,) if drift is None else ())
        now = min(max(share, _LEAST), 1.0)
        if drift is not None and (rows in self._known or seen >= _AVERAGED):
            own = min(passes / _SETTLED, 1.0)
            drift.surprise((1.0 - own) * log(now / before), passes)
        else:
            own = passes / (seen := max(min(seen + passes, _AVERAGED), passes))
        self._shares[rows] = before + (now - before) * own, seen

    def plain(self, rows: int, one: float, drift: Drift) -> float:
        """Seconds of a plain pass in rounds of several, `one` being those of a round of one; both without the drift.

        No more than such passes took when there were some last: where all rounds draft, passes find the processor's
        caches empty and get slower than they were when that was measured, which plain ones would not. If it is the
        machine that got slower, or sequences that got longer, drafts seem to lose until there are plain passes again.
        """
        usual = one * self(rows)
        seconds = self._seconds.get(rows)
        if seconds is None:
            return usual
        return max(min(seconds[0] * exp(-drift.value), usual), _LEAST * usual)

    def took(self, rows: int, seconds: float, passes: int) -> None:
        """So many passes of one round took these seconds each, drift included; averaged over `_AVERAGED`."""
        before, seen = self._seconds.get(rows, (seconds, 0.0))
        seen = max(min(seen + passes, _AVERAGED), passes)
        self._seconds[rows] = before + (seconds - before) * passes / seen, seen
        if rows == 1:
            self.unseen = 0

    @property
    def is_measured(self) -> bool:
        """Whether plain passes of a row by itself were."""
        return 1 in self._seconds
