"""How many tokens to draft, and whether to draft at all: from measured costs and from what was accepted so far.

A round that drafts up to k tokens emits ``1 + Σ_{d ≤ k} P(d tokens are accepted)`` tokens a row on average and takes a
pass over k + 1 positions, k steps of the drafter and some work around them. `Controller` learns both sides while it
runs and takes the k, 0 included, with which the whole batch is ready soonest: a row that gets further than the others
leaves them in a smaller batch, whose rounds give fewer tokens a second. Where others wait for its place that does not
matter, and tokens a second count. What it learns is kept for the next process.

Of a drafter of trees k is the number of nodes, and what trees of each number had accepted is learnt as a whole.

The choice is made before a round drafts anything, from the past alone. A round of any lossless verifier has the
target's law whatever k is, given the past, so choosing k this way changes nothing about the output's law. It does mean
that a text depends on k where the verifier rejects and replaces; requests that name a seed are therefore left at a
fixed k (see `DraftLengths`), unless their text does not depend on it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from statistics import median
from typing import ClassVar, Literal

from foretoken.policy import store as learnt
from foretoken.policy.costs import Acceptance, Costs, bucket

AUTO: Literal["auto"] = "auto"
DEFAULT_K = 5
"""Tokens drafted a round where nothing is known yet, or where the number must not depend on the clock."""
LARGEST_K = 16
BUDGETS = (0, 4, 8, 16, 32)
"""Nodes of a tree that are tried."""
DEFAULT_NODES = 8
"""What `DEFAULT_K` is for drafters of trees."""


@dataclass(frozen=True)
class Choice:
    """What a policy decides for a round.

    Attributes:
        draft_length: tokens to draft in each row that drafts; of a drafter of trees, nodes.
        rows: the rows that draft, by index among those that were asked about; None for all.
    """

    draft_length: int
    rows: tuple[int, ...] | None = None


_GAIN = 1.02  # how much faster than plain decoding speculation must promise to be
_PROBE_SHARE = 0.01  # of the time may go into finding out whether a drafter has become useful
_SAMPLE = 8  # of so many rows one is drafted for to find that out: the others' texts need not be read
_WHOLE = 4  # of so many such rounds one drafts for all rows, which tells what that costs by now
_NOTICED = 16  # unread tokens that take long enough to be measured
_REFRESH = 512  # rounds with speculation after which plain decoding is measured again
_SETTLED = 6  # rounds of a kind until a runtime that gets ready for each change has got used to it
_MEASURED = 3  # of them that are then measured
_EVERY = 16  # of the rounds that follow one is: others use the machine too, and for seconds at a time all takes longer
_BURST = 2 + _MEASURED  # rounds with drafts that are tried together
_HOPE = 0.7  # of what a kind of round was last seen to take: what it may take by now
_NEIGHBOURS = 24  # rounds with trees after which the next larger number of nodes, or the next smaller, is tried
_CURVE_ROUNDS = 8  # after which costs are looked at anew
_BY_NODES = (0.0, 1.4, 1.85, 2.25, 2.6)  # tokens that trees of the `BUDGETS` are taken to get accepted, up to a factor


class Yields(Acceptance):
    """How many tokens trees of each of the `BUDGETS` had accepted, the past weighing less the longer ago it is."""

    def record(self, limit: int, accepted: int) -> None:
        """A round that might draft `limit` nodes had `accepted` accepted."""
        if not self.tried:
            self.tried, self.kept = [0.0] * len(BUDGETS), [0.0] * len(BUDGETS)
        self.tried = [tried * self._keep for tried in self.tried]
        self.kept = [kept * self._keep for kept in self.kept]
        place = min(range(1, len(BUDGETS)), key=lambda place: abs(BUDGETS[place] - limit))
        self.tried[place] += 1.0
        self.kept[place] += accepted

    def expected(self, prior: Sequence[float], weight: float) -> list[float]:
        """Tokens that a tree of each budget gets accepted.

        Args:
            prior: what is expected where nothing was tried; it is scaled to what was accepted at other budgets.
            weight: rounds that it counts as.
        """
        if not self.tried:
            return list(prior)
        promised = sum(tried * value for tried, value in zip(self.tried, prior, strict=True))
        scale = (sum(self.kept) + weight) / (promised + weight)
        return [
            (kept + weight * scale * value) / (tried + weight)
            for tried, kept, value in zip(self.tried, self.kept, prior, strict=True)
        ]


@dataclass
class Controller:
    """Chooses k for a batch; one for a pair of target and drafter, shared by all of an engine's requests.

    Args:
        key: names machine, models and drafter: what is learnt is kept under it. None keeps nothing.
    """

    key: str | None = None
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        self._overall = self.new_record(memory=400)
        self._offers = 1.0  # share of the rounds that might draft in which something was drafted
        self._idle = 0  # plain rounds since the last that drafted
        self._busy = 0  # rounds with a draft since the last plain one
        self._opening = self.new_record(memory=100)  # of the first round of each request: nothing is copied yet
        self._reading = deque[float](maxlen=15)  # seconds that the drafter takes for a token which it has not followed
        self._looks = 0  # rounds in which a few rows were drafted for
        self._burst = 0, 0  # tokens that are tried, and for how many rounds more
        self._trial = 0  # plain rounds that are still to come, to see what they take
        self._rows = 0  # of the last round
        self._plain: tuple[int, tuple[int, ...]] = 0, ()  # until which round these rows are not drafted for
        self._rounds = 0
        self._seen: set[tuple[int, int, int]] = set()  # rows, and tokens that were allowed, and drafted, in some round
        self._curves: dict[int, list[float]] = {}  # seconds by k, by size of batch; good for some rounds
        self._curves_until = 0
        if self.key is not None:
            saved = learnt.read().get(self.key, {})
            with suppress(AttributeError, KeyError, TypeError, ValueError):  # another version's, or damaged
                self.costs.read(saved.get("costs", {}))
                self._reading.extend(map(float, saved.get("reading", ())))
                for record, name in ((self._overall, "acceptance"), (self._opening, "opening")):
                    tried, kept = saved.get(name, ([], []))
                    record.tried = [min(float(value), 20.0) for value in tried]
                    record.kept = [
                        float(k) * min(1.0, 20.0 / float(t)) if t else 0.0 for k, t in zip(kept, tried, strict=True)
                    ]

    sizes: ClassVar[tuple[int, ...]] = tuple(range(LARGEST_K + 1))
    """What is chosen from, rising from 0."""
    new_record: ClassVar[Callable[..., Acceptance]] = Acceptance
    """What is kept of a request."""
    first: ClassVar[int] = DEFAULT_K
    """What is tried first."""
    probe: ClassVar[int] = 2
    """What is tried to see whether a drafter has become useful."""

    def choose(
        self,
        requests: Sequence[Acceptance],
        rooms: Sequence[int],
        unread: Sequence[int] | None = None,
        crowded: bool = False,
    ) -> Choice:
        """The k of the next round, and the rows that draft.

        Args:
            requests: what was accepted of each row's drafts so far.
            rooms: most tokens that each row may still get.
            unread: tokens of each row that the drafter would have to read first. None: of all rows none.
            crowded: other requests wait for the place of the first that is ready.
        """
        sizes = self._within(max(rooms))
        rows, most = len(requests), sizes[-1]
        if most == 0:
            return Choice(0)
        until, whose = self._plain
        if self._rounds < until and whose == tuple(map(id, requests)):
            return self._went(0)
        if self._trial:
            self._trial -= 1
            return self._went(0)
        k, left = self._burst
        if left:
            self._burst = k, left - 1
            return self._went(min(k, most))
        if not self.costs.known("target", rows, 1) and self._busy >= 2:
            return self._try_plain()
        seconds = self._curve(rows)
        if seconds is None:
            # Nothing is known: a round of either kind, then there is something to choose by.
            return self._went(min(self.first, most) if self._busy < 2 else 0)
        yields = self._yields(requests, len(sizes))
        plain = seconds[0]
        if crowded:
            given = map(sum, yields)
            whole = [sum(rooms) / tokens * spent for tokens, spent in zip(given, seconds[: len(sizes)], strict=True)]
        else:
            whole = self._until_ready(yields, rooms)
        entry = self._entry(unread or (), rows)
        best = min(range(len(sizes)), key=whole.__getitem__)
        if (entry + whole[best]) * _GAIN > whole[0]:
            best = 0
        if best and self._busy >= _REFRESH:
            return self._try_plain()
        if best == 0:
            hope = min(range(1, len(sizes)), key=whole.__getitem__)
            if _HOPE * whole[hope] < whole[0] and _HOPE * sum(yields[hope]) > rows:
                # Its drafts are accepted often enough; what they cost is looked at again.
                lost = _BURST * max(seconds[hope] - plain * sum(yields[hope]) / rows, 0.0) + entry + plain
                if self._idle * plain * _PROBE_SHARE >= lost and self._idle >= 8:
                    self._burst = sizes[hope], _BURST - 1
                    return self._went(sizes[hope])
            probe = sizes.index(min(self.probe, most))
            few = rows if self._looks % _WHOLE == _WHOLE - 1 else max(1, rows // _SAMPLE)
            gained = plain * (sum(yields[probe]) - rows) / rows * few / rows
            # The plain rounds that follow are disturbed by it: taken for one more.
            lost = seconds[probe] + self._entry(unread or (), few) - gained
            if self._idle * plain * _PROBE_SHARE >= lost and self._idle >= 8:
                self._looks += 1
                # Those that the drafter has the least to catch up with.
                by_lag = sorted(range(rows), key=lambda row: (unread or [0] * rows)[row])
                return self._went(sizes[probe], tuple(sorted(by_lag[:few])) if few < rows else None)
            if all(request.rounds for request in requests):
                # Nothing that is chosen by changes soon, and going through many rows' acceptance takes its time.
                self._plain = self._rounds + max(_CURVE_ROUNDS, self._idle // 8), tuple(map(id, requests))
            return self._went(0)
        return self._went(sizes[self._varied(best, len(sizes))])

    def _try_plain(self) -> Choice:
        """As many plain rounds as it takes to see what plain decoding costs by itself."""
        self._trial = _SETTLED + _MEASURED - 1
        return self._went(0)

    def _entry(self, unread: Sequence[int], rows: int) -> float:
        """Seconds that reading takes the drafter before it drafts for the rows of which that many are the quickest."""
        return median(self._reading) * sum(sorted(unread)[:rows]) if self._reading else 0.0

    def _varied(self, best: int, count: int) -> int:
        """The best of `count` sizes, or another one that is to be tried again; by place."""
        return best

    def _within(self, limit: int) -> tuple[int, ...]:
        """The sizes that make sense where a text has room for so many tokens."""
        return self.sizes[: limit + 1]

    def _until_ready(self, yields: Sequence[Sequence[float]], rooms: Sequence[int]) -> list[float]:
        """Seconds until the last row has got all its tokens, with each of the first sizes.

        Args:
            yields: by size, the tokens that a round gives each row.
            rooms: of the rows.
        """
        curves = [self._curve(count) for count in range(1, len(rooms) + 1)]
        result = []
        for place, each in enumerate(yields):
            rounds = sorted(room / given for room, given in zip(rooms, each, strict=True))
            seconds, before = 0.0, 0.0
            for number, ready in enumerate(rounds):
                curve = curves[len(rooms) - number - 1]
                assert curve is not None  # there is one for as many rows as now, and it serves for fewer
                seconds += (ready - before) * curve[place]
                before = ready
            result.append(seconds)
        return result

    def _yields(self, requests: Sequence[Acceptance], count: int) -> list[list[float]]:
        """Expected tokens of each row in a round, by size: of the first `count` ones."""
        most = count - 1
        prior = self._prior(most)
        opening = self._opening.rates(most, prior, weight=4.0)
        by_row = []
        for request in requests:
            rates = request.rates(most, prior, weight=4.0) if request.rounds else opening
            by_row.append(list(accumulate(accumulate(rates, mul), initial=1.0)))
        return [list(each) for each in zip(*by_row, strict=True)]

    def learn(
        self,
        limits: Sequence[int],
        width: int,
        accepted: Sequence[int],
        requests: Sequence[Acceptance],
        seconds: Mapping[str, float],
        clean: bool,
        unread: Sequence[int] | None = None,
    ) -> None:
        """What a round took and gave.

        Args:
            limits: tokens that each row might draft.
            width: tokens of the longest draft.
            accepted: accepted draft tokens of each row.
            requests: of the rows; they are brought up to date.
            seconds: by part of the round, as in `DecodeStats.seconds`.
            clean: nothing but the round itself was done in that time (no prompt was read by the target).
            unread: tokens of each row that the drafter had to read first. None: of all rows none.
        """
        self._rounds += 1
        rows, k = len(limits), max(limits)
        drafted = [place for place, limit in enumerate(limits) if limit]
        for place in drafted:
            request = requests[place]
            for record in (request, self._overall, *(() if request.rounds else (self._opening,))):
                record.record(limits[place], accepted[place])
        for request in requests:
            request.rounds += 1
        if k:
            self._offers += ((width > 0) - self._offers) / 32
        # What is done for the first time in a process may be compiled first, and a batch of another size than the last
        # is got ready for.
        new = (rows, k, width) not in self._seen or rows != self._rows
        self._seen.add((rows, k, width))
        self._rows = rows
        reading = sum(unread[place] for place in drafted) if unread is not None else 0
        if clean and not new and not reading and len(drafted) in (0, rows):
            rest = seconds["verification"] + seconds["other"]
            whole = seconds["target"] + rest + (seconds["drafter"] if k else 0.0)
            # Rounds right after those of another kind take longer: that is no fault of plain decoding, which would not
            # be disturbed if nothing was drafted. They count where they show that a kind takes less than was thought.
            stretch, settled = (self._busy, 2) if k else (self._idle, _SETTLED)
            tells = stretch < settled + _MEASURED or stretch % _EVERY == 0
            if (tells and stretch >= settled) or (stretch < settled and whole < self._expected(rows, k, width)):
                self.costs.record("target", rows, width + 1, seconds["target"])
                self.costs.record("rest", rows, width + 1, rest)
                if k:
                    self.costs.record("drafter", rows, k, seconds["drafter"])
        elif reading >= _NOTICED:
            usual = self.costs.estimate("drafter", len(drafted), k) or 0.0
            self._reading.append(max(seconds["drafter"] - usual, 0.0) / reading)
        if self.key is not None and (self._rounds == 64 or self._rounds % 1024 == 0):
            self.save()

    def _expected(self, rows: int, k: int, width: int) -> float:
        """Seconds of a round with so many tokens allowed and drafted; infinite where nobody knows."""
        parts = [
            self.costs.estimate("target", rows, width + 1),
            self.costs.estimate("rest", rows, width + 1),
            self.costs.estimate("drafter", rows, k) if k else 0.0,
        ]
        return sum(math.inf if part is None else part for part in parts)

    def save(self) -> None:
        """Keep what was learnt; where that can't be written, it is let go."""
        if self.key is not None:
            everything = learnt.read()
            everything[self.key] = {
                "costs": self.costs.as_json(),
                "reading": [median(self._reading)] if self._reading else [],
                "acceptance": [self._overall.tried, self._overall.kept],
                "opening": [self._opening.tried, self._opening.kept],
            }
            learnt.write(everything)

    def _went(self, k: int, rows: tuple[int, ...] | None = None) -> Choice:
        if k:
            self._idle = 0
            self._busy += 1
        else:
            self._busy = 0
            self._idle += 1
        return Choice(k, rows)

    def _prior(self, depth: int) -> list[float]:
        """Rates over all requests: 0.7 before anything was tried, and deep down as above until tried often enough."""
        overall, rates = self._overall, list[float]()
        for place in range(depth):
            tried, kept = (overall.tried[place], overall.kept[place]) if place < len(overall.tried) else (0.0, 0.0)
            above, weight = (rates[-1], 4.0) if rates else (0.7, 1.0)
            rates.append((kept + weight * above) / (tried + weight))
        return rates

    def _curve(self, rows: int) -> list[float] | None:
        """Seconds of a round with each of the sizes; None before both kinds were measured."""
        key = bucket(rows)
        if key in self._curves and self._rounds < self._curves_until:
            return self._curves[key]
        passes = []
        for size in self.sizes:
            target, rest = (self.costs.estimate(part, rows, size + 1) for part in ("target", "rest"))
            if target is None:
                return None
            passes.append(target + (rest or 0.0))
        curve = [passes[0]]
        for size, seconds in zip(self.sizes[1:], passes[1:], strict=True):
            drafting = self.costs.estimate("drafter", rows, size)
            if drafting is None:
                return None
            curve.append(drafting + self._offers * seconds + (1.0 - self._offers) * passes[0])
        if self._rounds >= self._curves_until:
            self._curves.clear()
            self._curves_until = self._rounds + _CURVE_ROUNDS
        self._curves[key] = curve
        return curve


class TreeController(Controller):
    """Chooses the number of nodes for a drafter of trees, by what trees of each number had accepted."""

    sizes = BUDGETS
    new_record = Yields
    first = DEFAULT_NODES
    probe = BUDGETS[1]

    def _within(self, limit: int) -> tuple[int, ...]:
        return self.sizes if limit else self.sizes[:1]

    def _varied(self, best: int, count: int) -> int:
        # A tree says nothing of what a larger one would have had accepted: only trying does.
        if self._busy % _NEIGHBOURS != _NEIGHBOURS - 1:
            return best
        other = best + (1 if self._busy // _NEIGHBOURS % 2 == 0 else -1)
        return other if 0 < other < count else best

    def _yields(self, requests: Sequence[Acceptance], count: int) -> list[list[float]]:
        assert isinstance(self._overall, Yields)
        prior = self._overall.expected(_BY_NODES, weight=4.0)
        by_row = []
        for request in requests:
            assert isinstance(request, Yields)
            by_row.append([1.0 + accepted for accepted in request.expected(prior, weight=4.0)[:count]])
        return [list(each) for each in zip(*by_row, strict=True)]
