"""What one pass of a plain round of several passes takes.

Drafts are compared with that, since it is what plain decoding takes: plain passes go together where nothing is drafted.
"""

from __future__ import annotations

from math import exp, log

from foretoken.policy.lines import Drift

_AVERAGED = 48.0  # plain passes over which what they take is averaged
_SETTLED = 10.0 * _AVERAGED  # the same once a share is known, when differences mostly change the drift
_LEAST = 0.5  # the smallest share of a round of one pass: less is noise


class Together:
    """Time of such a pass, by rows: in seconds, and as a share of a plain round of one pass.

    It does not matter how many recent passes did go together. Where most rounds draft, plain rounds have one pass each,
    and drafts that pay compared with these could keep rows from faster plain decoding for good.

    Attributes:
        unseen: rounds of a single row since its plain passes were measured.
    """

    def __init__(self) -> None:
        self._shares: dict[int, tuple[float, float]] = {}  # by rows; and over how many passes it is averaged
        self._seconds: dict[int, tuple[float, float]] = {}  # likewise: seconds of a pass, drift included
        self.unseen = 0
        self._known: set[int] = set()  # rows whose share is from calibration or from an earlier process

    def __call__(self, rows: int) -> float:
        """The share with so many rows; 1 where it is not known."""
        return self._shares[rows][0] if rows in self._shares else 1.0

    def record(self, rows: int, share: float, passes: int, drift: Drift | None = None) -> None:
        """Learn the share of each pass of a round of so many; averaged over the last `_AVERAGED` passes.

        With `drift`, which is divided out of the share, a known share hardly changes: the drift does instead.
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
        """Seconds of a plain pass in rounds of several, by those of a round of one pass; both without the drift.

        No more than the last measured passes of this kind took: where all rounds draft, passes get slower, since their
        weights are evicted from the processor's caches, which would not be so in plain decoding. If the machine got
        slower instead, or sequences longer, drafts seem to lose until plain passes are measured again.
        """
        usual = one * self(rows)
        seconds = self._seconds.get(rows)
        if seconds is None:
            return usual
        return max(min(seconds[0] * exp(-drift.value), usual), _LEAST * usual)

    def took(self, rows: int, seconds: float, passes: int) -> None:
        """Learn the seconds of each pass of a round of so many, drift included; averaged over `_AVERAGED` passes."""
        before, seen = self._seconds.get(rows, (seconds, 0.0))
        seen = max(min(seen + passes, _AVERAGED), passes)
        self._seconds[rows] = before + (seconds - before) * passes / seen, seen
        if rows == 1:
            self.unseen = 0

    @property
    def is_measured(self) -> bool:
        """Whether plain passes of a single row were measured."""
        return 1 in self._seconds
