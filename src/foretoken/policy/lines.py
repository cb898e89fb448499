"""Seconds of rounds and drafts by size: a line for each, measured before the first token and refined by every round.

A `Line` is ``fixed + each * size``, the bytes that are read whatever the size, and the arithmetic that grows with it;
times a correction by size, for what is not linear (a processor that is bound by memory first and by arithmetic later,
padded kernels, a full cache). What makes everything slower for a while, such as other work on the machine, is one
factor that all lines share (`Drift`): choices go by ratios, which it does not change.

A measured round tells of both its size's correction and the drift. A Kalman filter divides the difference from the
estimate between them, by how uncertain each is. The logarithms of corrections are modelled as a Brownian motion in the
logarithm of the size: between two measured sizes they are interpolated, and beyond them uncertain. So a difference at
an unmeasured size changes the corrections there and beyond, and one at well known sizes changes the drift.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import exp, log
from operator import add, sub
from statistics import median

SIZES = (1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512)
"""Sizes with corrections of their own; other sizes use the nearest one's."""

_OUTLIER = 0.3
"""Difference of a measurement from its estimate, as a logarithm (35%), above which it is less certain; also the most
that one measurement changes an estimate. So a single round that other work slows down rules out no length."""

LONGER = exp(_OUTLIER)
"""Most that a measured round counts, as a multiple of its estimate."""

_STEADY = 24.0  # measurements over which the drift is averaged, half as many; well known corrections over twice as many

_NOISE = 0.02  # variance of a measurement's logarithm: 14%

_KNOWN, _TOGETHER = 6, 3
"""After `_KNOWN` measurements of a size, further ones are averaged by `_TOGETHER`, as their median, unless they are
outliers: to learn from each takes a hundredth of a round of the shipped pair, and improves little."""

_BEND = 0.16
"""Variance of a correction's logarithm for each e-fold of size beyond what was measured: 40%."""

_FLATTEST = 0.01
"""Least cost of a further unit of size, as a share of the median measurement: a fitted line is never flat."""

_LOGS = [log(size) for size in SIZES]
_BUCKET = [0, *(min(range(len(SIZES)), key=lambda i: abs(log(SIZES[i] / size))) for size in range(1, SIZES[-1] + 1))]


def bucket(size: int) -> int:
    """Which of `SIZES` is nearest."""
    return _BUCKET[size] if size < len(_BUCKET) else len(SIZES) - 1


class Drift:
    """How much longer everything takes now than its line says, as a logarithm.

    Attributes:
        value: the estimate.
        variance: of the estimate.
    """

    def __init__(self) -> None:
        self.value, self.variance = 0.0, _NOISE

    def follow(self, change: float, variance: float, count: int) -> None:
        """Change the estimate after `count` measurements; its variance grows, since other work may begin or end."""
        gain = 2.0 / _STEADY
        self.value += change
        self.variance = variance + count * gain * gain * _NOISE / (1.0 - gain)

    def surprise(self, surprise: float, count: int) -> None:
        """Learn from `count` measurements of a well known size that took longer than expected, by this logarithm.

        Outliers count less.
        """
        gain = 1.0 - (1.0 - 2.0 / _STEADY) ** count
        self.value += gain * max(min(surprise, _OUTLIER), -_OUTLIER)


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
        self._seen = [0]  # measurements
        self._waiting: list[list[float]] = [[]]  # logarithms of measurements that are not averaged yet

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Line:
        """The line through (size, seconds), corrected towards these seconds; a line of almost 0 without points."""
        line = cls(*fitted(points)) if points else cls(0.0, 0.0)
        for size, seconds in points:
            line.record(int(size), max(seconds, 1e-9), None)
        return line

    def __call__(self, size: int) -> float:
        """Seconds, drift left out."""
        place = _BUCKET[size] if size < len(_BUCKET) else len(SIZES) - 1  # as `bucket`, which is called more often
        at = self._indices.get(place)
        return (self.fixed + self.each * size) * exp(self._log(place) if at is None else self._logs[at])

    def up_to(self, longest: int, rows: int = 1) -> list[float]:
        """Seconds of the sizes ``rows * 1`` … ``rows * longest``, drift left out."""
        sizes = range(rows, rows * longest + 1, rows)
        factors = {at: exp(self._log(at)) for at in set(map(bucket, sizes))}
        return [(self.fixed + self.each * size) * factors[bucket(size)] for size in sizes]

    def doubt(self) -> None:
        """Make the line less certain: it is assumed, and no size was measured."""
        self._covariance[0][0] += _BEND

    def record(self, size: int, seconds: float, drift: Drift | None) -> None:
        """Learn from a measurement; without `drift`, from one that the drift has been divided out of."""
        if seconds <= 0.0:
            return
        place = bucket(size)
        if place not in self._indices:
            self._enter(place)
        at = self._indices[place]
        measured, count = log(seconds / (self.fixed + self.each * size)), 1
        usual = drift is not None and abs(measured - self._logs[at] - drift.value) < _OUTLIER
        if usual and self._seen[at] >= _KNOWN:
            waiting = self._waiting[at]
            waiting.append(measured)
            count = len(waiting)
            if count < _TOGETHER:
                return
            measured = sorted(waiting)[_TOGETHER // 2]  # the median
            waiting.clear()
        own, shared = self._covariance[at], 0.0  # covariances with the measurement: of all corrections, of the drift
        surprise, noise = measured - self._logs[at], _NOISE / count
        if drift:
            if drift.variance < self._drift_variance:  # other lines' measurements made it more certain
                narrower = drift.variance / self._drift_variance
                self._with_drift = [one * narrower for one in self._with_drift]
            own = [*map(add, own, self._with_drift)]
            shared, surprise = self._with_drift[at] + drift.variance, surprise - drift.value
        outlying = max(abs(surprise) / _OUTLIER, 1.0)
        known = own[at] + shared
        spread = max(known + outlying * noise, outlying * known)  # variance of the surprise
        more = count * _NOISE / (2.0 * _STEADY) ** 2
        for index, one in enumerate(own):
            gain = one / spread
            self._logs[index] += gain * surprise
            self._covariance[index] = row = [*map(sub, self._covariance[index], map(gain.__mul__, own))]
            row[index] += more
            self._with_drift[index] -= gain * shared
        self._seen[at] += count
        if drift:
            drift.follow(shared / spread * surprise, drift.variance - shared / spread * shared, count)
            self._drift_variance = drift.variance

    def _log(self, place: int) -> float:
        at = self._indices.get(place)
        if at is not None:
            return self._logs[at]
        below, above, share = self._around(place)
        return (1.0 - share) * self._logs[below] + share * self._logs[above]

    def _around(self, place: int) -> tuple[int, int, float]:
        """Indices of the measured sizes below and above a place, and its distance from the lower one as a share."""
        above = bisect_left(self._places, place)
        if above == len(self._places):
            return above - 1, above - 1, 0.0
        start, end = _LOGS[self._places[above - 1]], _LOGS[self._places[above]]
        return above - 1, above, (_LOGS[place] - start) / (end - start)

    def _enter(self, place: int) -> None:
        """Add a size that is measured for the first time; its correction follows from the others."""
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
        self._waiting.insert(below + 1, [])
        self._indices = {place: at for at, place in enumerate(self._places)}

    def as_json(self) -> list[float]:
        """What another process starts from: the line through the corrected sizes that were measured."""
        sizes = [SIZES[place] for place, seen in zip(self._places, self._seen, strict=True) if seen >= 3]
        points = [(float(size), self(size)) for size in sizes]
        fixed, each = fitted(points) if len(points) > 1 else (self.fixed, self.each)
        return [float(f"{fixed:.4g}"), float(f"{each:.4g}")]


def fitted(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The Theil-Sen line through (size, seconds), as fixed and each: medians of all slopes, and of what they leave.

    A single slow measurement does not bend it. With one point the line is nearly flat.
    """
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for at, a in enumerate(points) for b in points[at + 1 :] if b[0] != a[0]]
    # Where noise is larger than the differences between sizes, the slope must not become 0.
    least = _FLATTEST * median(seconds for _, seconds in points)
    each = max(median(slopes), least) if slopes else least
    return max(median(seconds - each * size for size, seconds in points), 0.0), each
