"""State of a cascade: of each sequence, of the current round, and of rounds in which all rows rest."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from weakref import ref

from foretoken.draft import Listed
from foretoken.drafters.base import Batch, Drafter
from foretoken.models.widths import PassWidths
from foretoken.policy import store
from foretoken.policy.acceptance import LOOKUP, MODEL, PREDICTION, TREES, Kind
from foretoken.policy.lessons import is_heard
from foretoken.policy.policy import Policy
from foretoken.policy.request import LARGEST, LONGEST, READ, Offer, Request, Row
from foretoken.sequence import Sequence

_SAVE_ROUNDS = 64  # costs and rates are stored after so many rounds, and whenever the rounds have doubled since


@dataclass
class State:
    """State of one sequence.

    Attributes:
        request: its state in the policy.
        lengths: of each drafter, the tokens that the sequence had when it was last asked for; before that, minus the
            tokens of its source.
        asked: of each drafter, whether it was asked in the round before.
        resting: the row for the rounds in which it rests.
    """

    request: Request
    lengths: list[int]
    asked: list[bool]
    resting: Row

    @classmethod
    def of(cls, batch: Batch, row: int, policy: Policy, copied: bool, drafters: int) -> State:
        """The state of a new sequence.

        Args:
            batch: of the round.
            row: index of the sequence.
            policy: that decides on it.
            copied: whether free drafters may draft for it.
            drafters: how many there are.
        """
        sequence = batch.sequences[row]
        # Scratch requests, which the engine decodes to warm up, must not influence later ones.
        reproducible = sequence.scratch or bool(batch.reproducible and batch.reproducible[row])
        sampled, predicted = not sequence.params.greedy, bool(sequence.prediction)
        request = policy.open(sampled=sampled, reproducible=reproducible, predicted=predicted, copied=copied)
        request.fixed = bool(batch.exact and batch.exact[row])
        resting = Row(request, room=0, lags=[0] * drafters)
        return cls(request, [-len(sequence.source or ())] * drafters, [False] * drafters, resting)

    def row(
        self,
        batch: Batch,
        row: int,
        limit: int,
        offered: AbstractSequence[tuple[Offer, list[int], list[int]]],
        drafters: AbstractSequence[Drafter],
    ) -> Row:
        """The row of a round as the policy sees it.

        Args:
            batch: of the round.
            row: index of the sequence.
            limit: most draft tokens.
            offered: drafts that are made already.
            drafters: of the cascade.
        """
        sequence = batch.sequences[row]
        self.request.emitted = len(sequence.tokens) - sequence.prompt_length
        lags = [self.lag(at, drafter, sequence) if drafter.models else 0 for at, drafter in enumerate(drafters)]
        alone = len(batch.sequences) == 1
        readers = [at for at, drafter in enumerate(drafters) if drafter.reads(batch)] if alone else ()
        return Row(
            self.request,
            room=min(limit, batch.depths[row]) if batch.depths else limit,
            lags=lags,
            offers=[offer for offer, _, _ in offered] if offered else (),
            trees=batch.trees[row],
            most=limit,
            barred=barred_in(batch, row, drafters),
            reads=frozenset(readers),
        )

    def lag(self, at: int, drafter: Drafter, sequence: Sequence) -> int:
        """Tokens that the model with index `at` has not seen; 0 if it was asked in the round before."""
        if self.asked[at] or not drafter.models or drafter.hidden_layers:
            return 0
        return len(sequence.tokens) - self.lengths[at]


@dataclass
class Round:
    """The current round; one in which all rows rest has no `rows`."""

    sequences: list[Sequence]
    rows: list[Row]
    awake: list[int]  # rows that do not rest
    offered: list[list[tuple[Offer, list[int], list[int]]]]  # of each row: tokens and parents of each offer
    turns: list[list[bool]]  # of each drafter, whether each row's draft is its own; empty where all rows rest
    asked: bool  # free drafters were asked for some row
    calls: list[tuple[int, int, int, int, float]] = field(default_factory=list)
    positions: int = 0
    changed: bool = False  # the pass is not as wide as the one before
    copied: float = 0.0  # seconds that free drafters took
    deciding: float = 0.0  # seconds that the choice took
    reading: float = 0.0  # seconds in which a model read, see `Lessons.read`
    emitted: list[int] = field(default_factory=list)

    @property
    def is_rest(self) -> bool:
        """Whether all rows rest."""
        return not self.turns

    def used_of(self, source: int, used: AbstractSequence[int]) -> tuple[int, ...]:
        """How many of each row's draft tokens come from the free drafter with index `source`; `used` counts all."""
        return tuple(
            count if row.chosen.drafter == source else row.chosen.copied if row.chosen.source == source else 0
            for count, row in zip(used, self.rows, strict=True)
        )


def read_before(
    drafter: Drafter, policy: Policy, batch: Batch, state: State, row: Row, clock: Callable[[], float]
) -> float:
    """Before a model drafts in a hope or a look, have it tell what it foresees of the output so far (`Row.reading`).

    Reading costs a good part of what a draft does, and tells of as many tokens as five drafts.

    Args:
        drafter: the model.
        policy: of the cascade, which learns from it.
        batch: of the row.
        state: of the row.
        row: as it was decided; it is to be decided on anew.
        clock: returns seconds.

    Returns:
        The seconds that it took.
    """
    at, start = row.chosen.drafter, clock()
    right = drafter.read(batch, READ)
    seconds = clock() - start
    state.lengths[at] = len(batch.sequences[0].tokens) - 1
    policy.lessons.read(row.request, at, right, seconds, row.lags[at])
    return seconds


class Sleep:
    """A rest of all rows until a given round of the policy; it ends early if other rows, or in another order, come.

    Args:
        sequences: of the rows; empty for no rest.
        until: number of the policy's round before which they rest.
        alone: those of their requests that are reproducible.
    """

    def __init__(
        self, sequences: AbstractSequence[Sequence] = (), until: int = 0, alone: AbstractSequence[Request] = ()
    ) -> None:
        self._rows, self._until, self._alone = [ref(sequence) for sequence in sequences], until, alone
        self._at_begin = 0, 0  # padding and changes of width when the round began
        self._rested = 0  # rounds that the policy has not counted yet: one by one, that would take as long as deciding

    @classmethod
    def of(cls, sequences: AbstractSequence[Sequence], requests: AbstractSequence[Request], policy: Policy) -> Sleep:
        """The rest of these rows, whose first round begins."""
        return cls(sequences, policy.rests.asleep_until(requests), policy.rests.alone(requests))

    def round(self, sequences: AbstractSequence[Sequence], widths: PassWidths | None, policy: Policy) -> Round:
        """The next round of the rest. A single row that rests for long is not padded to the pass before."""
        size, made = len(sequences), Round(list(sequences), [], [], [], [], False)
        if widths is not None and size == 1:
            widths.leave(size, min(policy.passes, self.left(policy)))
        made.positions, made.changed = widths.plan(size, 0, alone=size == 1) if widths else (size, False)
        self._at_begin = (widths.padding, widths.changes) if widths else (0, 0)
        return made

    def counts(self, current: Round, policy: Policy) -> bool:
        """Whether a finished round was a rest from which the policy learns nothing; it is counted here, see `tell`."""
        padded = current.positions > len(current.sequences)
        if not current.is_rest or padded or current.changed or is_heard(policy.rounds + self._rested + 1):
            return False
        self._rested += 1
        return True

    def begin(self, rounds: int = 1) -> None:
        """Begin so many rounds of rest, after the one in which the rest was decided."""
        for request in self._alone:
            for _ in range(min(rounds, request.rests_alone)):
                request.rest_alone()

    def over(
        self, current: Round, policy: Policy, rounds: int, seconds: float, widths: PassWidths | None = None
    ) -> None:
        """Count rounds of rest that went together, of which the first was begun.

        The widths of their passes may differ from what was planned for the first, when their number was not known.

        Args:
            current: the first one.
            policy: learns from them.
            rounds: how many.
            seconds: of all.
            widths: of these passes; None where widths don't matter.
        """
        self.begin(rounds - 1)
        padding, changed, rows = 0, current.changed, len(current.sequences)
        if widths is not None:
            padding, changed = widths.padding - self._at_begin[0], widths.changes > self._at_begin[1]
        # The seconds of several passes hardly include the first one, which has the new width.
        within = rounds == 1
        policy.lessons.rested_together(rounds, rows, seconds, padding=padding, changed=changed, within=within)
        self._rested += rounds

    def end(self) -> None:
        """End it with the round in progress."""
        self._until = 0

    def left(self, policy: Policy) -> int:
        """How many rounds of the rest are left."""
        return self._until - policy.rounds - self._rested

    def tell(self, policy: Policy) -> None:
        """Give the policy the rounds that were counted."""
        if self._rested:
            policy.lessons.rested(self._rested, len(self._rows))
            self._rested = 0

    def holds(self, sequences: AbstractSequence[Sequence], policy: Policy) -> bool:
        """Whether these are the rows of the rest, and it is not over."""
        return self.left(policy) > 0 and [one() for one in self._rows] == [*sequences]


class Saved:
    """Stores a policy's costs and rates from time to time.

    Args:
        key: of the store; None to store nothing.
    """

    def __init__(self, key: str | None = None) -> None:
        self.key, self._rounds = key, 0

    def after(self, policy: Policy, rounds: int = 1) -> None:
        """Count further rounds, and store if it is time."""
        before = self._rounds.bit_length()
        self._rounds += rounds
        if self.key is not None and self._rounds >= _SAVE_ROUNDS and self._rounds.bit_length() > before:
            store.write(self.key, policy.as_json())


def kinds_of(drafters: AbstractSequence[Drafter], free: AbstractSequence[bool], trees: bool) -> list[Kind]:
    """Kinds of drafters, and that of the prediction after them.

    Args:
        drafters: all of a cascade.
        free: of each, whether it drafts before the choice.
        trees: whether they may draft trees.
    """
    kinds = [
        LOOKUP if is_free else TREES if trees and drafter.trees else MODEL
        for drafter, is_free in zip(drafters, free, strict=False)
    ]
    return [*kinds, PREDICTION]


def barred_in(batch: Batch, row: int, drafters: AbstractSequence[Drafter]) -> frozenset[int]:
    """Indices of the drafters that may not draft in a row, or can't: its sequence is too long for them."""
    allowed = batch.drafters[row] if batch.drafters else None
    sequence, barred = batch.sequences[row], []
    for at, drafter in enumerate(drafters):
        most = drafter.max_length
        too_long = most is not None and max(len(sequence.tokens), len(sequence.source or ())) > most
        if too_long or (allowed is not None and drafter.name not in allowed):
            barred.append(at)
    return frozenset(barred)


def offers_of(
    drafter: Drafter, at: int, draft: Listed, sequences: AbstractSequence[Sequence]
) -> list[list[tuple[Offer, list[int], list[int]]]]:
    """What a free drafter has drafted in each row, if anything: the offer, its tokens and its parents.

    Args:
        drafter: whose draft it is.
        at: its index.
        draft: of all rows.
        sequences: of the rows.
    """
    tokens, parents, counts = draft
    found: list[list[tuple[Offer, list[int], list[int]]]] = [[] for _ in sequences]
    for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        if count:
            reach = drafter.estimates[sequence] if drafter.estimates is not None else []
            match = min(drafter.matches[sequence], LONGEST) if drafter.matches is not None else 0
            chain = parents[row][:count] == list(range(count))
            offer = Offer(at, min(count, LARGEST), match, tuple(reach[:count]), chain)
            found[row].append((offer, tokens[row][:count], parents[row][:count]))
    return found
