"""The policy's input and output: requests, their rows in a round, drafts that are made already, and choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from foretoken.policy.acceptance import BEGINNING, Acceptance
from foretoken.policy.account import FORESEEN, PACE, Guard, Look, Missed, Pace, Runs
from foretoken.policy.copying import Copying
from foretoken.policy.costs import Costs

AUTO: Literal["auto"] = "auto"
"""The value of `num_speculative_tokens` that lets the policy choose."""

LONGEST = 16
"""Most tokens of a chain that are considered."""

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Draft lengths of chains that are compared."""

NODES = (4, 8, 16, 32)
"""Numbers of nodes of trees that are compared."""

LARGEST = NODES[-1]
"""Most draft tokens that are considered: nodes of a tree, or tokens of a copy."""

READ = 16
"""Tokens of an output of which a model tells whether it foresees them, before it drafts in a hope or a look."""

_CHANCE = 4.0
"""Most plain rounds that a row of a batch may be behind the mean by chance. Without this, an unlucky one of four rows
with the same acceptance emptied the account of all: 0.80 of the best fixed choice with half of the seeds (a small
target, acceptance 0.8), and 0.97 with it. Without a limit, sixteen rows lost 4% where plain decoding is best."""


class Offer(NamedTuple):
    """A draft that a free drafter has made already.

    Attributes:
        drafter: its index.
        size: its tokens, or nodes.
        match: tokens of the match that it continues, 0 for drafters without matches.
        reach: the drafter's own estimate, for each token or node, of the probability that it is accepted with all
            before it; empty if it makes none.
        chain: each token follows the one before it.
    """

    drafter: int
    size: int
    match: int = 0
    reach: tuple[float, ...] = ()
    chain: bool = True


class Choice(NamedTuple):
    """What a row does in a round.

    Attributes:
        drafter: whose draft is verified, -1 for none.
        tokens: of the draft, or nodes.
        copied: tokens of `source`'s draft that come before it: the drafter extends a copy.
        source: the free drafter that they are from, -1 for none.
    """

    drafter: int
    tokens: int
    copied: int = 0
    source: int = -1

    @property
    def total(self) -> int:
        """Tokens that are verified."""
        return self.tokens + self.copied


PLAIN = Choice(-1, 0)

_EACH = [1.0] * LONGEST, [1.0] * LONGEST, [1.0] * LONGEST, 1.0


class Request:
    """What the policy knows of one request; made by `Policy.open`."""

    def __init__(
        self,
        acceptance: list[Acceptance],
        costs: Costs,
        guards: tuple[Guard, Guard],
        above: tuple[Pace, Runs] | None = None,
        copying: Copying | None = None,
    ) -> None:
        self.acceptance, self.costs, self.guards = acceptance, costs, guards
        self.looks = [Look() for _ in acceptance]
        self.pace = Pace(PACE)  # emitted tokens by the time of a plain round
        self.runs = Runs()
        self.above = above or (Pace(4 * PACE, 1.0), Runs(FORESEEN))  # the engine's
        self.copying = Copying(copying or Copying())
        self.copied = True  # free drafters may draft for it
        self.asked = True  # free drafters are asked for it in this round
        self.fixed = False  # its draft length is not the policy's to choose
        self.foreseen: Sequence[bool] = ()  # of the last round's tokens, whether a free drafter would have drafted them
        self.missed: Missed | None = None  # a draft that could not be paid for, while its tokens are emitted
        self.rounds = 0
        self.emitted = BEGINNING  # tokens of the output before the round, as far as they matter; set by the caller
        self.late = 0.0  # plain rounds that it is behind plain decoding
        self.spread = 0.0  # variances of the rows' tokens, added up over rounds in which a model drafted
        self.looking = False  # the round is a look
        self.hoping = False  # the round, and those decided with it, are hopes
        self.considered = -1  # the policy's round in which models were last considered for it
        self.waits = True  # if it begins among others that all rest, it waits until those wake
        self._rests_from = self.rests_until = 0  # rounds of the policy; the second is 0 where it does not rest
        # Of reproducible requests, which depend on no other request:
        self.rests_alone = 0  # further rounds of its own for which it rests
        self.idle = 0  # plain decisions since the last draft
        self.drafted = True  # its last round drafted, or was its first

    def too_early(self, drafter: int) -> bool:
        """Whether this is an output's beginning, where a first draft would say least of a model."""
        return self.emitted < BEGINNING and not self.acceptance[drafter].engine.judged

    def may_look(self, drafter: int, *, by_itself: bool) -> bool:
        """Whether a look at a model is due; a reproducible request, `by_itself`, has its first one at once."""
        return (by_itself or not self.too_early(drafter)) and self.looks[drafter].due <= self.rounds

    def worths(self) -> tuple[list[float], list[float], list[float], float]:
        """What further tokens of a model's draft are worth (`Runs.worth`): 1 each while copies earn nothing."""
        return self.runs.worth(self.above[1], LONGEST) if self.copying.earns else _EACH

    def rest(self, now: int, until: int) -> None:
        """Rest in the policy's rounds from `now` to before `until`, unless `wake` is called."""
        self._rests_from, self.rests_until = now, until if until > now else 0

    def rest_alone(self) -> None:
        """Begin one of the rounds of `rests_alone`."""
        self.rests_alone -= 1
        self.drafted = False
        self.rounds += 1
        self.pace.add(1.0, 1.0)
        self.above[0].add(1.0, 1.0)
        for guard in self.guards:
            guard.settle(1.0, 1.0)

    def rests(self, now: int) -> bool:
        """Whether it rests in the policy's round `now`."""
        return now < self.rests_until and not self.copying.called

    def wake(self, now: int, among: int) -> None:
        """End a rest before the policy's round `now`, and count its rounds, which had so many rows."""
        rounds = now - self._rests_from
        if self.rests_until and rounds:
            self.rounds += rounds
            self.pace.add(1.0, 1.0, rounds)
            self.above[0].add(1.0 / among, 1.0 / among, rounds)
        self.rests_until = 0


@dataclass(slots=True)
class Row:
    """A row of the round that is being decided.

    Attributes:
        request: its state.
        room: most depth of a draft.
        lags: of each drafter, the tokens that it has not seen.
        offers: drafts that are made already.
        trees: whether the row takes trees.
        most: most draft tokens, or nodes, if the user has set a limit.
        barred: drafters that may not be asked.
        calls: of each drafter, the sizes of its calls in this row (`DrafterCosts.sizes`); empty to leave these as they
            were.
        reads: drafters that can tell, before they draft, which tokens of the output they foresee, as soon as there are
            `READ` that they have not seen (`Lessons.read`).
        chosen: the choice; this and the following are filled by `Policy.choose`.
        reading: the drafter of the choice is to tell that first; then the row is to be decided anew.
        reserved: plain rounds of the account of models that drafts leave, for a reading.
        weight: what a token of the row is worth.
        alone: the best choice without a model.
        gain: expected gain of `alone` over a plain round of one pass, in tokens.
        price: cost of verifying the copied tokens of `chosen`, in tokens.
        lasts: whether the choice would also pay in rounds that do not ask free drafters, where plain passes could go
            together. False for hopes in a round that asks.
        hopeless: plain rounds before a model that drafts in every round would be faster than plain decoding: until the
            output's beginning is over, or `sys.maxsize`; 0 where a model is faster now, or by its upper confidence
            bound.
        refused: tokens of the best draft without a model if the account can't pay for it, else 0.
        refused_cost: seconds of verifying that draft.
    """

    request: Request
    room: int
    lags: Sequence[int]
    offers: Sequence[Offer] = ()
    trees: bool = False
    most: int = LARGEST
    barred: frozenset[int] = frozenset()
    calls: Sequence[tuple[int, ...]] = ()
    reads: frozenset[int] = frozenset()
    chosen: Choice = PLAIN
    reading: bool = False
    reserved: float = 0.0
    weight: float = 1.0
    alone: Choice = PLAIN
    gain: float = 0.0
    price: float = 0.0
    lasts: bool = True
    hopeless: int = 0
    refused: int = 0
    refused_cost: float = 0.0


def fell_behind(rows: Sequence[tuple[Row, int]], took: float, *, chance: bool = False) -> float:
    """Plain rounds by which a round puts the row that is latest further behind plain decoding.

    Args:
        rows: with the tokens that the round emitted in each.
        took: time of the round, in plain rounds.
        chance: differences between rows may be chance, since a model drafted in them.
    """
    if not rows:
        return 0.0
    before, spread = _latest(rows), 0.0
    if chance:
        mean = sum(tokens for _, tokens in rows) / len(rows)
        spread = sum((tokens - mean) ** 2 for _, tokens in rows) / len(rows)
    for row, tokens in rows:
        row.request.late += took - tokens
        row.request.spread += spread
    return _latest(rows) - before


def _latest(rows: Sequence[tuple[Row, int]]) -> float:
    """Plain rounds by which the latest row is behind plain decoding, chance left out.

    By chance a row is behind the mean by about the square root of the variance among rows, added up over rounds. Where
    its drafts are accepted less often than those of others, it falls behind in proportion to the rounds, which soon
    counts in full. So its distance from the mean is shrunk, as in a James-Stein estimator.
    """
    if len(rows) == 1:
        return rows[0][0].request.late
    mean = sum(row.request.late for row, _ in rows) / len(rows)
    behind = ((row.request.late - mean, row.request.spread) for row, _ in rows)
    return mean + max((by - min(by, spread / by, _CHANCE) for by, spread in behind if by > 0.0), default=0.0)


def planned_alone(row: Row, free: Sequence[bool]) -> float:
    """Plain rounds (of one pass) that a row's round takes by its fixed costs."""
    costs, choice = row.request.costs, row.chosen
    seconds = costs.target(1 + choice.total) + costs.rounds * (choice.tokens > 0)
    if choice.tokens and not free[choice.drafter]:
        seconds += costs.draft(choice.drafter, choice.tokens, 1, row.lags[choice.drafter])
    return seconds / costs.target(1)


def miss(guard: Guard, row: Row, rows: int, plain: float) -> None:
    """Follow a draft of one of so many rows that could not be paid for: the account gets what it would have gained."""
    request = row.request
    if row.chosen.tokens:
        request.missed = None
    elif request.missed is None and row.refused:
        request.missed = Missed(row.refused, row.weight / rows, row.refused_cost / plain)
    if request.missed is not None and request.missed.follow(request.foreseen):
        guard.miss(request.missed.gained)
        request.missed = None
