"""What a cascade keeps of each sequence, and of the round that is going on."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from weakref import ref

from foretoken.draft import Draft
from foretoken.drafters.base import Batch, Drafter
from foretoken.models.widths import PassWidths
from foretoken.policy import store
from foretoken.policy.acceptance import LOOKUP, MODEL, PREDICTION, TREES, Kind
from foretoken.policy.lessons import is_heard
from foretoken.policy.policy import Policy
from foretoken.policy.request import LARGEST, LONGEST, Offer, Request, Row
from foretoken.sequence import Sequence

_SAVE_ROUNDS = 64  # after which costs and rates are stored, and again whenever the rounds have doubled


@dataclass
class State:
    """Of one sequence.

    Attributes:
        request: the policy's.
        lengths: of each drafter, the tokens that the sequence had when it was last asked; the source's are negative.
        asked: of each drafter, whether it was asked in the round before.
        resting: its row of the rounds in which it rests.
    """

    request: Request
    lengths: list[int]
    asked: list[bool]
    resting: Row

    @classmethod
    def of(cls, batch: Batch, row: int, policy: Policy, copied: bool, drafters: int) -> State:
        """A sequence is new.

        Args:
            batch: of the round.
            row: the sequence's.
            policy: that decides on it.
            copied: free drafters may draft for it.
            drafters: their number.
        """
        sequence = batch.sequences[row]
        # What the engine decodes to be ready teaches nothing of requests to come.
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
        """The sequence's row of a round, number `row`, as the policy sees it.

        Args:
            batch: of the round.
            row: its number.
            limit: most draft tokens.
            offered: drafts that are made already.
            drafters: of the cascade.
        """
        sequence = batch.sequences[row]
        self.request.emitted = len(sequence.tokens) - sequence.prompt_length
        return Row(
            self.request,
            room=min(limit, batch.depths[row]) if batch.depths else limit,
            lags=[self.lag(at, drafter, sequence) if drafter.models else 0 for at, drafter in enumerate(drafters)],
            offers=[offer for offer, _, _ in offered] if offered else (),
            trees=batch.trees[row],
            most=limit,
            barred=barred_in(batch, row, drafters),
        )

    def lag(self, at: int, drafter: Drafter, sequence: Sequence) -> int:
        """Tokens that a drafter with weights, number `at`, has not seen; those of one round don't count."""
        if self.asked[at] or not drafter.models or drafter.hidden_layers:
            return 0
        return len(sequence.tokens) - self.lengths[at]


@dataclass
class Round:
    """The round that is going on; a round of resting rows alone has no `rows`."""

    sequences: list[Sequence]
    rows: list[Row]
    awake: list[int]  # rows that do not rest
    offered: list[list[tuple[Offer, list[int], list[int]]]]  # of each row: tokens and parents of each offer
    turns: list[list[bool]]  # of each drafter: the rows whose draft is its own; empty where all rows rest
    asked: bool  # free drafters were, for some row
    calls: list[tuple[int, int, int, int, float]] = field(default_factory=list)
    positions: int = 0
    changed: bool = False  # the pass is not as wide as the one before
    copied: float = 0.0  # seconds that free drafters took
    deciding: float = 0.0  # seconds that the choice took
    emitted: list[int] = field(default_factory=list)

    @property
    def is_rest(self) -> bool:
        """Whether all rows rest."""
        return not self.turns

    def used_of(self, source: int, used: AbstractSequence[int]) -> tuple[int, ...]:
        """How many of each row's draft tokens, so many in all, are of a free drafter: `source` is its index."""
        return tuple(
            count if row.chosen.drafter == source else row.chosen.copied if row.chosen.source == source else 0
            for count, row in zip(used, self.rows, strict=True)
        )


class Sleep:
    """Rows that all rest until a round of the policy: the same ones in the same order, or they are asked again.

    Args:
        sequences: of the rows; none for no such rows.
        until: the round.
        alone: those of their requests that depend on no other one.
    """

    def __init__(
        self, sequences: AbstractSequence[Sequence] = (), until: int = 0, alone: AbstractSequence[Request] = ()
    ) -> None:
        self._rows, self._until, self._alone = [ref(sequence) for sequence in sequences], until, alone
        self._at_begin = 0, 0  # padding and changes of width when the round began
        self._rested = 0  # rounds that the policy has not heard of: to tell it of each takes as long as to decide

    @classmethod
    def of(cls, sequences: AbstractSequence[Sequence], requests: AbstractSequence[Request], policy: Policy) -> Sleep:
        """The rest of these rows, whose first round begins."""
        return cls(sequences, policy.rests.asleep_until(requests), policy.rests.alone(requests))

    def round(self, sequences: AbstractSequence[Sequence], widths: PassWidths | None, policy: Policy) -> Round:
        """The round of rest that begins. A row by itself is not padded to the pass before where it rests for long."""
        size, made = len(sequences), Round(list(sequences), [], [], [], [], False)
        if widths is not None and size == 1:
            widths.leave(size, min(policy.passes, self.left(policy)))
        made.positions, made.changed = widths.plan(size, 0, alone=size == 1) if widths else (size, False)
        self._at_begin = (widths.padding, widths.changes) if widths else (0, 0)
        return made

    def counts(self, current: Round, policy: Policy) -> bool:
        """Whether a round that is over was one of rest from which the policy learns nothing: it is told of it later."""
        padded = current.positions > len(current.sequences)
        if not current.is_rest or padded or current.changed or is_heard(policy.rounds + self._rested + 1):
            return False
        self._rested += 1
        return True

    def begin(self, rounds: int = 1) -> None:
        """So many rounds of rest begin, after the one in which the rest was decided."""
        for request in self._alone:
            for _ in range(min(rounds, request.rests_alone)):
                request.rest_alone()

    def over(
        self, current: Round, policy: Policy, rounds: int, seconds: float, widths: PassWidths | None = None
    ) -> None:
        """So many rounds of rest went together, in so many seconds; the first of them was begun.

        How wide their passes were is not what was planned for the first one, where it was not known how many there are.

        Args:
            current: the first one.
            policy: is told.
            rounds, seconds: as said.
            widths: of these passes; None where they are not padded, and as wide as was planned.
        """
        self.begin(rounds - 1)
        padding, changed, rows = 0, current.changed, len(current.sequences)
        if widths is not None:
            padding, changed = widths.padding - self._at_begin[0], widths.changes > self._at_begin[1]
        # Of several passes hardly anything of the first one is told, in which a width is new.
        within = rounds == 1
        policy.lessons.rested_together(rounds, rows, seconds, padding=padding, changed=changed, within=within)
        self._rested += rounds

    def left(self, policy: Policy) -> int:
        """Rounds before the one until which the rows rest."""
        return self._until - policy.rounds - self._rested

    def tell(self, policy: Policy) -> None:
        """Tell the policy of the rounds that were counted."""
        if self._rested:
            policy.lessons.rested(self._rested, len(self._rows))
            self._rested = 0

    def holds(self, sequences: AbstractSequence[Sequence], policy: Policy) -> bool:
        """Whether these are the rows, and still rest."""
        return self.left(policy) > 0 and [one() for one in self._rows] == [*sequences]


class Saved:
    """Stores what a policy has learnt of costs and rates, now and then.

    Args:
        key: where; None for nowhere.
    """

    def __init__(self, key: str | None = None) -> None:
        self.key, self._rounds = key, 0

    def after(self, policy: Policy, rounds: int = 1) -> None:
        """So many more rounds are over."""
        before = self._rounds.bit_length()
        self._rounds += rounds
        if self.key is not None and self._rounds >= _SAVE_ROUNDS and self._rounds.bit_length() > before:
            store.write(self.key, policy.as_json())


def kinds_of(drafters: AbstractSequence[Drafter], free: AbstractSequence[bool], trees: bool) -> list[Kind]:
    """Kinds of drafters, and that of the prediction behind them.

    Args:
        drafters: all of a cascade.
        free: of each, whether it drafts before the choice.
        trees: they may draft trees.
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
    drafter: Drafter, at: int, draft: Draft, sequences: AbstractSequence[Sequence]
) -> list[list[tuple[Offer, list[int], list[int]]]]:
    """What a free drafter has drafted in each row, if anything: the offer, its tokens and its parents.

    Args:
        drafter: whose draft it is.
        at: its index.
        draft: of all rows.
        sequences: of the rows.
    """
    tokens, parents, counts = draft.listed
    found: list[list[tuple[Offer, list[int], list[int]]]] = [[] for _ in sequences]
    for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        if count:
            reach = drafter.estimates[sequence] if drafter.estimates is not None else []
            match = min(drafter.matches[sequence], LONGEST) if drafter.matches is not None else 0
            chain = draft.is_chain or parents[row][:count] == list(range(count))
            offer = Offer(at, min(count, LARGEST), match, tuple(reach[:count]), chain)
            found[row].append((offer, tokens[row][:count], parents[row][:count]))
    return found
