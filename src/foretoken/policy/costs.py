"""How long rounds and drafts take: a line for each, measured before the first token and refined by every round.

`Line` is seconds by size: ``fixed + each * size``, the bytes that are read whatever the size, and the arithmetic that
grows with it; times a correction by size, for what is not linear in size (a processor that first waits for memory and
then for arithmetic, padded kernels, a full cache). What makes everything slower for a while, such as other work on the
machine, is one factor that all lines share (`Drift`): choices go by ratios, which it leaves alone.

A measured round says something of both, of its size's correction and of the drift. They are told apart as a Kalman
filter does, by how uncertain each is. The logarithms of corrections are taken for a Brownian motion in the logarithm of
the size: between two measured sizes they are interpolated, and beyond them uncertain, so that a surprise there is its
correction's, and that of all sizes beyond; a surprise at sizes that are known well is the drift's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from operator import add
from statistics import median
from typing import Any, NamedTuple

SIZES = (1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512)
"""Sizes with corrections of their own; other sizes use the nearest one's."""

_OUTLIER = 0.3
"""Difference of a measurement from its estimate, as a logarithm (35%), from which on it counts as less certain, and
most that one measurement changes an estimate. So a single round that other work slows down rules out no length."""

LONGER = exp(_OUTLIER)
"""Times its estimate that a measured round may count at most."""

_STEADY = 24.0  # measurements over which the drift is averaged, half as many; well known corrections over twice as many

_NOISE = 0.02  # variance of a measurement's logarithm: 14%
_BEND = 0.16
"""Variance of a correction's logarithm for each e-fold of size beyond what was measured: 40%."""

_FLATTEST = 0.01
"""Least cost of a further unit of size, as a share of the median measurement: a fitted line is never flat."""

BYTES_PER_POSITION = 0.04
"""Cost of a further position where costs must not depend on the clock, as a share of a pass; assumed."""

_LAG_SHARE = 0.05
"""Cost of a token of lag, as a share of a draft token's, until rounds measure it; assumed."""

_REUSED = 8  # rounds for which tables of costs are reused: making them is slow beside a choice

_LOGS = [log(size) for size in SIZES]
_BUCKET = [0, *(min(range(len(SIZES)), key=lambda i: abs(log(SIZES[i] / size))) for size in range(1, SIZES[-1] + 1))]


def bucket(size: int) -> int:
    """Which of `SIZES` is nearest."""
    return _BUCKET[size] if size < len(_BUCKET) else len(SIZES) - 1


def _cut(value: float, most: float = _OUTLIER) -> float:
    return min(max(value, -most), most)


class Drift:
    """How much longer everything takes than its line says, lately; a logarithm.

    Attributes:
        value: the estimate.
        variance: of it.
    """

    def __init__(self) -> None:
        self.value, self.variance = 0.0, _NOISE

    def follow(self, change: float, variance: float) -> None:
        """A measurement changed the estimate; until the next one, other work may begin or end."""
        gain = 2.0 / _STEADY
        self.value += change
        self.variance = variance + gain * gain * _NOISE / (1.0 - gain)


class Line:
    """Seconds by size.

    Args:
        fixed: seconds whatever the size.
        each: seconds for each unit of size.
    """

    def __init__(self, fixed: float, each: float) -> None:
        self.fixed, self.each = max(fixed, 0.0), max(each, 0.0)
        if self.fixed + self.each <= 0.0:
            self.fixed = 1e-6
        # Corrections of measured sizes, and their covariances; others follow from them.
        self._places = [0]  # in `SIZES`, in rising order
        self._indices = {0: 0}  # of places in the lists below
        self._logs = [0.0]
        self._covariance = [[_NOISE / 2.0]]
        self._with_drift = [0.0]  # covariances with the drift, when that had this variance:
        self._drift_variance = 0.0
        self._seen = [0]

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Line:
        """The line through (size, seconds), corrected towards these seconds. Nothing for no points."""
        line = cls(*fitted(points)) if points else cls(0.0, 0.0)
        for size, seconds in points:
            line.record(int(size), max(seconds, 1e-9), None)
        return line

    def __call__(self, size: int) -> float:
        """Seconds, drift left out."""
        return (self.fixed + self.each * size) * exp(self._log(bucket(size)))

    def up_to(self, longest: int, rows: int = 1) -> list[float]:
        """Seconds of the sizes ``rows * 1`` … ``rows * longest``, drift left out."""
        sizes = range(rows, rows * longest + 1, rows)
        factors = {at: exp(self._log(at)) for at in set(map(bucket, sizes))}
        return [(self.fixed + self.each * size) * factors[bucket(size)] for size in sizes]

    def doubt(self) -> None:
        """The line is a guess, and no size's seconds were measured."""
        self._covariance[0][0] += _BEND

    def record(self, size: int, seconds: float, drift: Drift | None) -> None:
        """A measurement; without `drift` it says nothing of that, and has been divided by it."""
        if seconds <= 0.0:
            return
        place = bucket(size)
        if place not in self._indices:
            self._enter(place)
        at = self._indices[place]
        own, shared = self._covariance[at], 0.0  # covariances of all corrections, and of the drift, with the seconds
        surprise = log(seconds / (self.fixed + self.each * size)) - self._logs[at]
        if drift:
            if drift.variance < self._drift_variance:  # other lines' measurements made it more certain
                narrower = drift.variance / self._drift_variance
                self._with_drift = [one * narrower for one in self._with_drift]
            own = [*map(add, own, self._with_drift)]
            shared, surprise = self._with_drift[at] + drift.variance, surprise - drift.value
        outlying = max(abs(surprise) / _OUTLIER, 1.0)
        known = own[at] + shared
        spread = max(known + outlying * _NOISE, outlying * known)  # variance of the surprise
        for index, one in enumerate(own):
            gain, row = one / spread, self._covariance[index]
            self._logs[index] += gain * surprise
            self._covariance[index] = row = [old - gain * other for old, other in zip(row, own, strict=True)]
            row[index] += _NOISE / (2.0 * _STEADY) ** 2
            self._with_drift[index] -= gain * shared
        self._seen[at] += 1
        if drift:
            drift.follow(shared / spread * surprise, drift.variance - shared / spread * shared)
            self._drift_variance = drift.variance

    def _log(self, place: int) -> float:
        at = self._indices.get(place)
        if at is not None:
            return self._logs[at]
        below, above, share = self._around(place)
        return (1.0 - share) * self._logs[below] + share * self._logs[above]

    def _around(self, place: int) -> tuple[int, int, float]:
        """The measured sizes on both sides of another, by index, and how far it is from the lower to the upper one."""
        above = bisect_left(self._places, place)
        if above == len(self._places):
            return above - 1, above - 1, 0.0
        start, end = _LOGS[self._places[above - 1]], _LOGS[self._places[above]]
        return above - 1, above, (_LOGS[place] - start) / (end - start)

    def _enter(self, place: int) -> None:
        """A size is measured for the first time: its correction follows from the others."""
        below, above, share = self._around(place)

        def between(values: Sequence[float]) -> float:
            return (1.0 - share) * values[below] + share * values[above]

        beyond = _LOGS[place] - _LOGS[self._places[below]]
        own = [between(row) for row in self._covariance]
        own.insert(below + 1, between(own) + _BEND * beyond * (1.0 - share))
        for row, one in zip(self._covariance, own[: below + 1] + own[below + 2 :], strict=True):
            row.insert(below + 1, one)
        self._covariance.insert(below + 1, own)
        self._logs.insert(below + 1, between(self._logs))
        self._with_drift.insert(below + 1, between(self._with_drift))
        self._places.insert(below + 1, place)
        self._seen.insert(below + 1, 0)
        self._indices = {place: at for at, place in enumerate(self._places)}

    def as_json(self) -> list[float]:
        """What another process starts from: the line through the corrected sizes that were measured."""
        sizes = [SIZES[place] for place, seen in zip(self._places, self._seen, strict=True) if seen >= 3]
        points = [(float(size), self(size)) for size in sizes]
        fixed, each = fitted(points) if len(points) > 1 else (self.fixed, self.each)
        return [float(f"{fixed:.4g}"), float(f"{each:.4g}")]


def fitted(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """A line through (size, seconds): the median of the slopes between any two, and of what that leaves (Theil, Sen).

    A single slow measurement does not bend it. With one point, seconds whatever the size.
    """
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for at, a in enumerate(points) for b in points[at + 1 :] if b[0] != a[0]]
    # Where noise is larger than the differences between sizes, the slope must not become 0.
    least = _FLATTEST * median(seconds for _, seconds in points)
    each = max(median(slopes), least) if slopes else least
    return max(median(seconds - each * size for size, seconds in points), 0.0), each


@dataclass
class DrafterCosts:
    """Of one drafter.

    Attributes:
        call: seconds of a call by draft tokens (by nodes, for trees).
        row: share of a call that each further row adds.
        lag: seconds for each token that the drafter has not seen.
    """

    call: Line
    row: float = 0.1
    lag: float = 0.0


class Table(NamedTuple):
    """Seconds in a batch of so many rows.

    Attributes:
        plain: of a round without drafts.
        extra: what a draft of 0, 1, 2, … tokens in one row adds to it, where all rows have as many.
        calls: of each drafter, a call in one row for so many tokens.
        token: the least that a token of a draft adds.
    """

    plain: float
    extra: list[float]
    calls: list[list[float]]
    token: float


class Costs:
    """Of one pair of a target and its drafters.

    Args:
        target: seconds of a round by positions of the pass, over all rows; drafters left out.
        drafters: in their order.

    Attributes:
        change: seconds that a pass takes longer if it is not as wide as the one before; drift left out.
    """

    def __init__(self, target: Line, drafters: Sequence[DrafterCosts]) -> None:
        self.become(target, drafters)

    def become(self, target: Line, drafters: Sequence[DrafterCosts]) -> None:
        """Take over other lines."""
        self.target, self.drafters = target, list(drafters)
        self.drift = Drift()
        self.anchored = False
        self.change, self._changes = 0.0, 0
        self.copying: Line | None = None
        self.copies = 1.0
        self._tables: dict[int, tuple[int, Table]] = {}
        self._rounds = 0

    def measure(
        self,
        target: Sequence[tuple[int, float]],
        drafters: Sequence[Sequence[tuple[int, float]]],
        change: float = 0.0,
    ) -> None:
        """Take over what calibration found, given as for `Cascade.measure`."""
        lines = [Line.through(points) for points in drafters]
        calls = [DrafterCosts(line, lag=_LAG_SHARE * line.each) for line in lines]
        self.become(Line.through(target), calls)
        self.change, self._changes = change, int(change > 0.0)
        self.anchored = True

    @classmethod
    def by_bytes(cls, target: float, drafters: Sequence[float], position: float | None = None) -> Costs:
        """Costs that depend on no clock: in passes of the target, by the bytes of weights that a pass reads.

        Args:
            target: bytes of the target's weights.
            drafters: bytes that each drafter reads for a draft token.
            position: cost of a further position of the target's, as a share of a pass over one; None for
                `BYTES_PER_POSITION` of a pass.
        """
        shares = [size / max(target, 1.0) for size in drafters]
        lines = [DrafterCosts(Line(0.0, share), lag=share * BYTES_PER_POSITION) for share in shares]
        each = BYTES_PER_POSITION if position is None else position
        return cls(Line(1.0 - each, each), lines)

    def draft(self, drafter: int, tokens: int, rows: int, lag: int) -> float:
        """Seconds of a call of a drafter for so many tokens, in so many rows that it lags so far behind in all."""
        costs = self.drafters[drafter]
        return costs.call(tokens) * (1.0 + costs.row * (rows - 1)) + costs.lag * lag

    def copy(self, units: int) -> float:
        """Seconds that free drafters take for so many rows and tokens together; 0 before they were measured."""
        return self.copying(units) if self.copying is not None and units else 0.0

    def table(self, rows: int, longest: int) -> Table:
        """Seconds by draft tokens, up to `longest`; those of the last few rounds are reused."""
        made, found = self._tables.get(rows, (0, None))
        if found is None or self._rounds >= made + _REUSED:
            plain, *longer = self.target.up_to(1 + longest, rows)
            extra = [0.0]
            for seconds in longer:  # a longer draft that costs less is noise
                extra.append(max((seconds - plain) / rows, extra[-1]))
            calls = [[0.0, *one.call.up_to(longest)] for one in self.drafters]
            token = min((extra[size] / size for size in range(1, len(extra))), default=0.0)
            found = Table(plain, extra, calls, token)
            self._tables[rows] = self._rounds, found
        return found

    def round(self, positions: int, changed: bool) -> float:
        """Seconds of a round with a pass over so many positions, its width changed or not."""
        return self.target(positions) + self.change * changed

    def record(
        self,
        positions: int,
        seconds: float,
        calls: Sequence[tuple[int, int, int, int, float]],
        copied: tuple[int, int, float] = (0, 0, 0.0),
        *,
        changed: bool = False,
    ) -> None:
        """A round's pass over so many positions, and its calls of drafters: index, tokens, rows, lag in all, seconds.

        Where the pass was not as wide as the one before, only what that costs is learnt from it. Where costs were not
        measured in this process, the first other round sets the drift, which saved costs and costs by bytes do not
        know. `copied` are the rows that free drafters drafted for, the tokens that they drafted, and the seconds of
        that.
        """
        self._rounds += 1
        if changed:
            if self.anchored:
                self._changes += 1
                usual = self.target(positions)
                most = max(2.0 * self.change, self.target(1) / 4.0)  # one slow round rules out no width
                more = min(max(seconds * exp(-self.drift.value) - usual, 0.0), most)
                self.change += (more - self.change) / min(self._changes, _STEADY / 2.0)
        else:
            self._record_pass(positions, seconds)
        rows, drafted, took = copied
        if rows:
            units = rows + drafted
            if self.copying is None and took > 0.0:  # half of it taken to be for the round itself
                now = took * exp(-self.drift.value)
                self.copying = Line(now / 2.0, now / (2.0 * units))
                self.copying.doubt()
            elif self.copying is not None:
                self.copying.record(units, took * exp(-self.drift.value), None)
            self.copies += (units / rows - self.copies) / (_STEADY / 2.0)
        for drafter, tokens, rows, lag, took in calls:
            costs, now = self.drafters[drafter], took * exp(-self.drift.value)
            usual = self.draft(drafter, tokens, rows, 0)
            if costs.lag * lag > 0.2 * usual or lag > 16:
                each = max(now - usual, 0.0) / lag
                costs.lag += 0.3 * (min(each, 4.0 * costs.lag) - costs.lag)
            elif rows > 1:
                share = (now / costs.call(tokens) - 1.0) / (rows - 1)
                costs.row = max(costs.row + 0.1 * _cut(share - costs.row, 0.1), 0.0)
            else:
                costs.call.record(tokens, took, self.drift)

    def _record_pass(self, positions: int, seconds: float) -> None:
        if not self.anchored and seconds > 0.0:
            self.drift.value, self.anchored = log(seconds / self.target(positions)), True
        self.target.record(positions, seconds, self.drift)

    def as_json(self) -> dict[str, Any]:
        """These costs as JSON values, as `read` takes them."""
        drafters = [[*one.call.as_json(), round(one.row, 3), float(f"{one.lag:.3g}")] for one in self.drafters]
        return {"target": self.target.as_json(), "drafters": drafters, "change": float(f"{self.change:.3g}")}

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> Costs:
        """What an earlier process measured.

        Raises:
            ValueError, TypeError, KeyError: it is damaged.
        """
        drafters = [
            DrafterCosts(Line(float(fixed), float(each)), float(row), float(lag))
            for fixed, each, row, lag in saved["drafters"]
        ]
        fixed, each = saved["target"]
        costs = cls(Line(float(fixed), float(each)), drafters)
        costs.change, costs._changes = max(float(saved["change"]), 0.0), 1
        return costs
