"""What is learnt while decoding: how often drafts are right, by depth, and how long a round's parts take, by size."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, combinations
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

Part = Literal["target", "drafter", "rest"]

_WINDOW = 15  # measurements of one kind that are kept
_MANY = 6  # measurements of which a single slow one no longer tells for much
_PASSED_ON = 4  # measurements that those of an earlier process count for at most
_BELIEVED = 1.5  # times of what another size promises that a few measurements are believed to be
_OUTLIER = 2.0  # medians beyond which a measurement counts as so many: somebody else had the machine
_ENOUGH = 3  # measurements of one kind from which on they are relied on
_SLOPE = 0.04  # what a further position adds to a pass, as a share, before it was measured


class Acceptance:
    """How often a draft was accepted down to each depth, the past weighing less the longer ago it is.

    Args:
        memory: a round's weight falls to 1/e over so many rounds.

    Attributes:
        rounds: that a request has had, with drafts or without; for who keeps count of them.
    """

    def __init__(self, memory: float) -> None:
        self._keep = 1.0 - 1.0 / memory
        self.rounds = 0
        self.tried: list[float] = []
        self.kept: list[float] = []

    def record(self, limit: int, accepted: int) -> None:
        """A round that might draft `limit` tokens had `accepted` accepted.

        A drafter that proposed fewer than it might counts as rejected where it stopped: that is what the limit bought.
        """
        deepest = min(accepted + 1, limit)
        missing = deepest - len(self.tried)
        self.tried.extend([0.0] * missing)
        self.kept.extend([0.0] * missing)
        for depth in range(deepest):
            self.tried[depth] = self.tried[depth] * self._keep + 1.0
            self.kept[depth] = self.kept[depth] * self._keep + (depth < accepted)

    def rates(self, depth: int, prior: Sequence[float], weight: float) -> list[float]:
        """The chance that a token is accepted once those above it are, at depths 1 … `depth`."""
        result: list[float] = []
        for place in range(depth):
            known = place < len(self.tried)
            tried, kept = (self.tried[place], self.kept[place]) if known else (0.0, 0.0)
            result.append((kept + weight * prior[place]) / (tried + weight))
        return result


class _Point(NamedTuple):
    """What the latest measurements of one size come to, and their number."""

    size: int
    seconds: float
    number: int


class Costs:
    """Seconds that the parts of a round take, by rows and by positions.

    Means of the latest measurements where there are many, for what is often slow must count as slow; but no single one
    counts for more than `_OUTLIER` medians.
    """

    def __init__(self) -> None:
        self._measured: dict[tuple[Part, int], dict[int, deque[float]]] = {}
        self._lines: dict[
            tuple[Part, int], tuple[list[_Point], Callable[[int], float]]
        ] = {}  # and what they are made of
        self._points_of: dict[tuple[Part, int], list[_Point]] = {}  # by size, rising; made when asked for

    def record(self, part: Part, rows: int, size: int, seconds: float) -> None:
        """One measurement.

        Args:
            part: what was done.
            rows: of the batch.
            size: positions of a row that a pass scored; for the drafter, tokens that it might draft.
            seconds: how long it took.
        """
        sizes = self._measured.setdefault((part, bucket(rows)), {})
        sizes.setdefault(size, deque(maxlen=_WINDOW)).append(seconds)
        self._points_of.pop((part, bucket(rows)), None)

    def known(self, part: Part, rows: int, size: int) -> int:
        """How many measurements there are of just this."""
        return len(self._measured.get((part, bucket(rows)), {}).get(size, ()))

    def estimate(self, part: Part, rows: int, size: int) -> float | None:
        """Seconds, between and beyond the sizes that were measured too; None where nothing was.

        Sizes that were measured often speak for themselves, and for others that were not.
        """
        points = self._points(part, rows)
        if not points:
            return None
        if len(points) == 1:
            return _beside(part, points[0], size)
        own = next((point for point in points if point.size == size), _Point(size, 0.0, 0))
        weight = min(own.number / _MANY, 1.0)
        return weight * own.seconds + (1.0 - weight) * self._around(part, rows, points, size)

    def _around(self, part: Part, rows: int, points: Sequence[_Point], size: int) -> float:
        """What other sizes say of one: those beside it that were measured often, or else the `line`."""
        known = [point for point in points if point.number >= _MANY and point.size != size]
        if known and not known[0].size <= size <= known[-1].size:
            line = self.line(part, rows)
            assert line is not None
            return line(size)
        points = known or points
        after = next((i for i, (at, _, _) in enumerate(points) if at >= size), len(points) - 1)
        (x0, y0, _), (x1, y1, _) = points[max(after - 1, 0)], points[max(after, 1)]
        slope = (y1 - y0) / (x1 - x0)
        if size > x1 or size < x0:
            slope = max(slope, 0.0)  # beyond what was measured noise must not promise that more costs less
        return max(y0 + slope * (size - x0), 0.0)

    def line(self, part: Part, rows: int) -> Callable[[int], float] | None:
        """Seconds by size: a line through what was measured; never less than half of the least that was.

        To choose among many sizes by: single measurements err, and the cheapest size would be one that errs most. The
        line is Theil and Sen's, the median of the slopes between any two sizes, weighted by their measurements and
        their distance: a single slow round must not bend it. None before two sizes were measured.
        """
        points = self._points(part, rows)
        if len(points) < 2:
            return None
        found = self._lines.get((part, rows))
        if found is not None and found[0] is points:
            return found[1]
        slopes = [
            ((b.seconds - a.seconds) / (b.size - a.size), a.number * b.number * (b.size - a.size))
            for a, b in combinations(points, 2)
        ]
        slope = max(_weighted_median(slopes), 0.0)
        base = _weighted_median([(point.seconds - slope * point.size, point.number) for point in points])
        least = max(min(point.seconds for point in points) / 2, 1e-9)

        def line(size: int) -> float:
            return max(base + slope * size, least)

        self._lines[part, rows] = points, line
        return line

    def _points(self, part: Part, rows: int) -> list[_Point]:
        wanted = bucket(rows)
        if (part, wanted) not in self._measured:
            buckets = [rows for name, rows in self._measured if name == part]
            if not buckets:
                return []
            wanted = min(buckets, key=lambda rows: abs(math.log2(rows / wanted)))
        points = self._points_of.get((part, wanted))
        if points is None:
            sizes = self._measured[part, wanted]
            points = _credible(part, [_Point(size, _typical(values), len(values)) for size, values in sizes.items()])
            self._points_of[part, wanted] = points
        return points

    def as_json(self, least: int = 1) -> dict[str, Any]:
        """What `read` takes: of sizes that were measured so often at least."""
        result: dict[str, Any] = {}
        for (part, rows), sizes in self._measured.items():
            found = {
                str(size): [_typical(values), min(len(values), _PASSED_ON)]
                for size, values in sizes.items()
                if len(values) >= least
            }
            if found:
                result.setdefault(part, {})[str(rows)] = found
        return result

    def read(self, saved: Mapping[str, Any]) -> None:
        """Take over what an earlier process learnt."""
        for part in ("target", "drafter", "rest"):
            for rows, sizes in saved.get(part, {}).items():
                for size, (seconds, number) in sizes.items():
                    for _ in range(number):
                        self.record(part, int(rows), int(size), float(seconds))


def bucket(rows: int) -> int:
    """Batches that are taken to cost the same: 1, 2, 3, 4, 8, 16, …"""
    return rows if rows <= 4 else 1 << (rows - 1).bit_length()


def _beside(part: Part, point: _Point, size: int) -> float:
    """Seconds of another size than the only one that was measured."""
    if part == "drafter":
        return point.seconds * size / point.size if point.size else point.seconds
    return point.seconds * (1 + _SLOPE * (size - 1)) / (1 + _SLOPE * (point.size - 1))


def _credible(part: Part, points: Sequence[_Point]) -> list[_Point]:
    """The points to go by, by size: one slow round must not put a size off for ever.

    Until a size was measured some times, others that were speak for it; where there is just one of them, it says what
    may be believed at most.
    """
    solid = [point for point in points if point.number >= _ENOUGH]
    if len(solid) >= 2 or not solid:
        return sorted(solid or points)
    most = {point.size: _BELIEVED * _beside(part, solid[0], point.size) for point in points}
    return sorted(
        point if point.number >= _ENOUGH else point._replace(seconds=min(point.seconds, most[point.size]))
        for point in points
    )


def _typical(values: Sequence[float]) -> float:
    """The mean of measurements of which none counts for more than `_OUTLIER` medians; of few, their median."""
    middle = median(values)
    if len(values) < _MANY:
        return middle
    most = _OUTLIER * middle
    return fmean(min(value, most) for value in values)


def _weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """Of values and their weights: where half of the weight is below, between the two nearest if that is at an end."""
    ordered = sorted(values)
    sums = list(accumulate(weight for _, weight in ordered))
    half = sums[-1] / 2
    low = next(place for place, so_far in enumerate(sums) if so_far >= half)
    high = next(place for place, so_far in enumerate(sums) if so_far > half)
    return (ordered[low][0] + ordered[high][0]) / 2
