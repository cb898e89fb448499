"""Seconds of rounds and drafts: the target's passes, each drafter's calls, free drafts, changes of a pass's width.

Lines (`foretoken.policy.lines`) hold the seconds by size; every round refines them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import exp, log
from typing import Any, NamedTuple

from foretoken.policy.calls import DrafterCosts
from foretoken.policy.lines import Drift, Line, bucket
from foretoken.policy.together import Together

BYTES_PER_POSITION = 0.04
"""Cost of a further position as a share of a pass, where costs must not depend on the clock; assumed."""

ASKED_SECONDS = 4e-4
"""Seconds to ask free drafters for a row, for requests whose costs must not depend on the clock: a quarter of a round
with 10.5 MB of weights on a CPU, and a sixth of one with 20 MB."""

CALLED_SECONDS = 1e-3
"""Likewise seconds of a model's call, besides reading its weights for each token: 2, 3 and 5 tokens drawn by 2.9 MB
took 1.8, 2.3 and 3.0 ms beside plain rounds of 2.7, on an AMD EPYC with AVX2."""

ROUND_SECONDS = 2e-3
"""Likewise seconds of a round with a draft besides its pass and its model's call, where several plain passes go
together (`plain_passes`), which share them. One of one pass took 1.3 ms beside 0.25 for each plain pass of six, on the
same machine, and 0.8 beside 0.1 on one that multiplies bfloat16 numbers; the plain passes behind a draft then took 2 ms
longer, since what the wider pass read had driven their weights out of the processor's caches. It counts as no more than
two passes: one over few bytes takes longer than they say."""

PLAIN_SECONDS = 1 / 60
"""Most seconds of a round of several plain passes, by the assumed time of a pass: a screen is not refreshed more often,
and requests that join or are cancelled wait no longer for the next round. On a CPU models above some 60 MB have one
pass, and above 125 MB on one that multiplies bfloat16 numbers."""

_LAG_SHARE = 0.05
"""Cost of a token of lag, as a share of a draft token's, until rounds measure it; assumed."""

_REUSED = 8  # rounds for which tables of costs are reused: making them is slow beside a choice
_AVERAGED = 12.0  # rounds over which the cost of a change of width, and the tokens of free drafts, are averaged
_CHECKED = 8  # passes that a share of plain passes (`Together`) from calibration or an earlier process counts as


def plain_passes(seconds: float, position: float | None, rows: int, most: int) -> int:
    """How many plain passes a round may have.

    Args:
        seconds: assumed for a pass over one token; 0 where nothing is known.
        position: cost of a further token, as a share of that; None for `BYTES_PER_POSITION`.
        rows: of the passes.
        most: limit of the passes.
    """
    if not seconds:
        return 1
    share = BYTES_PER_POSITION if position is None else position
    return max(1, min(most, int(PLAIN_SECONDS / (seconds * (1.0 + share * (rows - 1))))))


class Table(NamedTuple):
    """Seconds in a batch of a given number of rows.

    Attributes:
        plain: of a plain pass (`Costs.plain`).
        apart: what a round of one pass takes longer (`time_apart`), whatever it drafts.
        extra: what a draft of 0, 1, 2, … tokens in one row adds to such a round, where all rows have as many.
        calls: of each drafter, its call in one row for 0, 1, 2, … tokens.
        token: the least that a token of a draft adds.
        asking: of asking free drafters for all rows, and of each token that they draft.
    """

    plain: float
    apart: float
    extra: list[float]
    calls: list[list[float]]
    token: float
    asking: tuple[float, float]


class Costs:
    """Costs of a target and its drafters, in seconds, or in passes of the target where they are by bytes (`by_bytes`).

    Args:
        target: seconds of a round by positions of the pass, over all rows; drafters left out.
        drafters: costs of each drafter.

    Attributes:
        change: seconds that a pass takes longer if it is not as wide as the one before; drift left out.
        alone: widths that passes over one row are padded to, in rising order; wider passes are not padded.
        together: what plain passes take that go together.
        rounds: seconds that a round takes longer than the lines say, compared with plain passes that go together; 0
            where `together` is measured.
        copying: seconds of free drafters by rows and tokens together; None before they are measured.
        copies: average of rows and tokens of free drafts, for each row.
        anchored: whether the drift is known: costs were measured, or a round was, in this process.
    """

    def __init__(self, target: Line, drafters: Sequence[DrafterCosts]) -> None:
        self._met: set[tuple[int, int]] = set()  # sizes of passes (-1) and of drafters' calls that were run
        self.drafters: list[DrafterCosts] = []
        self.become(target, drafters)

    def become(self, target: Line, drafters: Sequence[DrafterCosts]) -> None:
        """Replace the lines, those of the same drafters, and forget what was learnt."""
        for new, old in zip(drafters, self.drafters, strict=False):
            new.sizes = old.sizes
        self.target, self.drafters = target, list(drafters)
        self.drift = Drift()
        self.anchored = False
        self.change, self._changes = 0.0, 0
        self._returning: float | None = None
        self.copying: Line | None = None
        self.copies = 1.0
        self._tables: dict[tuple[Any, ...], tuple[int, Table]] = {}
        self._rounds = 0
        self.alone: tuple[int, ...] = ()
        self.together = Together()
        self.rounds = 0.0

    def measure(
        self,
        target: Sequence[tuple[int, float]],
        drafters: Sequence[Sequence[tuple[int, float]]],
        change: float = 0.0,
        together: float | None = None,
    ) -> None:
        """Take over the measurements of calibration; arguments as for `Cascade.measure`."""
        lines = [Line.through(points) for points in drafters]
        calls = [DrafterCosts(line, lag=_LAG_SHARE * line.each) for line in lines]
        self.become(Line.through(target), calls)
        self.change, self._changes = change, int(change > 0.0)
        if together is not None:
            self.together.record(1, together, _CHECKED)
            self.together.took(1, self.plain(1), _CHECKED)
        self.anchored = True

    @classmethod
    def by_bytes(
        cls,
        target: float,
        drafters: Sequence[float],
        position: float | None = None,
        asking: float = 0.0,
        calling: float = 0.0,
        rounds: float = 0.0,
    ) -> Costs:
        """Costs that do not depend on the clock: in passes of the target, by the bytes of weights that a pass reads.

        Args:
            target: bytes of the target's weights.
            drafters: bytes that each drafter reads for a draft token.
            position: cost of a further position of the target's, as a share of a pass over one; None for
                `BYTES_PER_POSITION` of a pass.
            asking: cost of asking free drafters.
            calling: cost of a call of another drafter, besides its draft tokens.
            rounds: cost of a round, besides its pass and calls, compared with plain passes that go together.
        """
        shares = [size / max(target, 1.0) for size in drafters]
        lines = [
            DrafterCosts(Line(calling if share else 0.0, share), lag=share * BYTES_PER_POSITION) for share in shares
        ]
        each = BYTES_PER_POSITION if position is None else position
        costs = cls(Line(1.0 - each, each), lines)
        costs.rounds = rounds
        costs.copying = Line(asking, 0.0) if asking else None
        return costs

    @property
    def returning(self) -> float:
        """Seconds that plain passes that go together take longer behind a wider pass; drift left out.

        The first one pays for the change of width, and the caches hold their weights only after some.
        """
        return self.change if self._returning is None else self._returning

    def returned(self, seconds: float) -> None:
        """Learn from plain passes behind a wider one, which took so much longer."""
        # A round may be slow by chance, the first one too, before which a return is taken to cost what a change does.
        now = min(seconds * exp(-self.drift.value), 2.0 * self.returning + self.target(1))
        if self._returning is None:
            self._returning = now
        self._returning += (now - self._returning) / _AVERAGED

    def draft(self, drafter: int, tokens: int, rows: int, lag: int) -> float:
        """Seconds of a drafter's call for so many tokens in so many rows; `lag` is the sum of the rows' lags."""
        costs = self.drafters[drafter]
        return costs.seconds(tokens) * (1.0 + costs.row * (rows - 1)) + costs.lag * lag

    def plain(self, rows: int) -> float:
        """Seconds of a plain pass over so many roots, in a round of several passes where such rounds are known."""
        return self.together.plain(rows, self.target(rows), self.drift)

    def copy(self, units: int) -> float:
        """Seconds that free drafters take for so many rows and tokens together; 0 before they are measured."""
        return self.copying(units) if self.copying is not None and units else 0.0

    def table(self, rows: int, longest: int) -> Table:
        """The table for so many rows and up to `longest` draft tokens; one of the last few rounds is reused."""
        key = (rows, *[one.sizes for one in self.drafters])
        made, found = self._tables.get(key, (0, None))
        if found is None or self._rounds >= made + _REUSED:
            seconds, extra = self.target.up_to(1 + longest, rows), [0.0]
            if rows == 1 and self.alone:
                padded = [*self.alone, *range(self.alone[-1] + 1, 2 + longest)]
                widths = [min(padded[bisect_left(padded, size)], 1 + longest) for size in range(1, 2 + longest)]
                seconds = [seconds[width - 1] for width in widths]
            shortest, *longer = seconds
            for whole in longer:  # a longer draft that costs less is noise
                extra.append(max((whole - shortest) / rows, extra[-1]))
            calls = [one.up_to(longest) for one in self.drafters]
            token = min([extra[size] / size for size in range(1, len(extra))], default=0.0)
            units = max(round(rows * self.copies), 1)  # of rows that are all asked
            asking = self.copy(units)
            made_token = max(self.copy(2 * units) - asking, 0.0) / units
            found = Table(self.plain(rows), time_apart(self, rows), extra, calls, token, (asking, made_token))
            self._tables[key] = self._rounds, found
        return found

    def runs_alone_at(self, widths: tuple[int, ...]) -> None:
        """Set `alone`: from now on passes over one row are padded to the next of these widths, where there is one."""
        if widths != self.alone:
            self.alone = widths
            self._tables.clear()

    def round(
        self, positions: int, units: int = 0, calls: Sequence[tuple[int, int, int, int, float]] = (), *, changed: bool
    ) -> float:
        """Seconds of a round with these calls (as for `record`) and so many rows and tokens of free drafters."""
        passed = self.target(positions) + self.change * changed + self.copy(units)
        return passed + sum([self.draft(*call[:4]) for call in calls])

    def is_first(self, positions: int, calls: Sequence[tuple[int, int, int, int, float]]) -> bool:
        """Whether a round's pass, or one of its calls (as for `record`), is the first one of about its size."""
        before = len(self._met)
        self._met.add((-1, bucket(positions)))
        for drafter, tokens, *_ in calls:
            self._met.add((drafter, bucket(tokens)))
        return len(self._met) > before

    def record(
        self,
        positions: int,
        seconds: float,
        calls: Sequence[tuple[int, int, int, int, float]],
        copied: tuple[int, int, float] = (0, 0, 0.0),
        *,
        changed: bool = False,
        behind: bool = False,
    ) -> None:
        """Learn from a round.

        Where the pass was not as wide as the one before, only the cost of a change is learnt from it. Where costs were
        not measured in this process, the first other round sets the drift, which saved costs and costs by bytes do not
        know.

        Args:
            positions: of the pass, over all rows.
            seconds: of the round, drafters left out.
            calls: of drafters that are not free: index, tokens, rows, sum of the rows' lags, seconds.
            copied: rows that free drafters drafted for, tokens that they drafted, and seconds of that.
            changed: the pass was not as wide as the one before.
            behind: a plain pass after passes that went together, or one of another width after a prompt's: it is slower
                than others, so nothing is learnt from it, but the cost of a change while none is known.
        """
        self._rounds += 1
        if changed:
            if self.anchored and not (behind and self._changes):
                self._changes += 1
                usual = self.target(positions)
                most = max(2.0 * self.change, self.target(1) / 4.0)  # one slow round rules out no width
                more = min(max(seconds * exp(-self.drift.value) - usual, 0.0), most)
                self.change += (more - self.change) / min(self._changes, _AVERAGED)
        elif not (behind and self.anchored):
            if not self.anchored and seconds > 0.0:
                self.drift.value, self.anchored = log(seconds / self.target(positions)), True
            self.target.record(positions, seconds, self.drift)
        rows, drafted, took = copied
        if rows:
            units, now = rows + drafted, took * exp(-self.drift.value)
            if self.copying is not None:
                self.copying.record(units, now, None)
            elif took > 0.0:  # half of it is assumed to be independent of rows and tokens
                self.copying = Line(now / 2.0, now / (2.0 * units))
                self.copying.doubt()
            self.copies += (units / rows - self.copies) / _AVERAGED
        for drafter, tokens, rows, lag, took in calls:
            costs, now = self.drafters[drafter], took * exp(-self.drift.value)
            usual = self.draft(drafter, tokens, rows, 0)
            if costs.lag * lag > 0.2 * usual or lag > 16:
                each = max(now - usual, 0.0) / lag
                costs.lag += 0.3 * (min(each, 4.0 * costs.lag) - costs.lag)
            elif rows > 1:
                share = (now / costs.seconds(tokens) - 1.0) / (rows - 1)
                costs.row = max(costs.row + 0.1 * min(max(share - costs.row, -0.1), 0.1), 0.0)
            else:
                costs.record(tokens, took, self.drift)

    def as_json(self) -> dict[str, Any]:
        """These costs as JSON values, as `read` takes them."""
        drafters = [[*one.call.as_json(), round(one.row, 3), float(f"{one.lag:.3g}")] for one in self.drafters]
        costs = {"target": self.target.as_json(), "drafters": drafters, "change": float(f"{self.change:.3g}")}
        return costs | {"together": round(self.together(1), 3), "returning": float(f"{self.returning:.3g}")}

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> Costs:
        """Costs that an earlier process measured, from `as_json`.

        Raises:
            ValueError, TypeError, KeyError: they are damaged.
        """
        drafters = [
            DrafterCosts(Line(float(fixed), float(each)), float(row), float(lag))
            for fixed, each, row, lag in saved["drafters"]
        ]
        fixed, each = saved["target"]
        costs = cls(Line(float(fixed), float(each)), drafters)
        costs.change, costs._changes = max(float(saved["change"]), 0.0), 1
        costs._returning = max(float(saved.get("returning", saved["change"])), 0.0)
        costs.together.record(1, float(saved["together"]), _CHECKED)
        return costs


def time_apart(costs: Costs, rows: int) -> float:
    """How much longer a plain round of one pass over so many roots takes than one pass of a plain round of several.

    In seconds, or in passes of the target where costs are by bytes.
    """
    return costs.rounds + costs.target(rows) - costs.plain(rows)
