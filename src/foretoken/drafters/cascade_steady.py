"""Steady rounds of a cascade: one drafter drafts for a single row, and rounds are decided like the one before."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from typing import TypeVar
from weakref import ref

from torch import Tensor

from foretoken.draft import Draft, Listed
from foretoken.drafters.base import Batch, Drafter, proposal
from foretoken.drafters.cascade_rounds import barred_in, offers_of
from foretoken.drafters.chains import first_nodes
from foretoken.drafters.judging import follow
from foretoken.drafters.row_rounds import Drafted, RowRounds
from foretoken.models.chain import Chains
from foretoken.models.widths import PassWidths
from foretoken.policy.copies import Copies
from foretoken.policy.policy import Policy
from foretoken.policy.request import LONGEST, Offer, Row
from foretoken.policy.steady import Prices, Told
from foretoken.sequence import Sequence
from foretoken.verify.base import Verdict

Made = TypeVar("Made", Draft, Chains)
"""How a drafter drafts: in a round by itself, or in rounds that go together."""


class SteadyRounds:
    """A few rounds of one row, which the policy learns from together when they are over.

    Args:
        policy: of the cascade.
        drafter: that drafts.
        at: its index.
        sequence: of the row.
        lengths: as `State.lengths`; kept up to date.
        row: as it was decided.
        prices: that the rounds go by.
        clock: returns seconds.

    Attributes:
        open: whether one of the rounds is in progress.
    """

    def __init__(
        self,
        policy: Policy,
        drafter: Drafter,
        at: int,
        sequence: Sequence,
        lengths: list[int],
        row: Row,
        prices: Prices,
        clock: Callable[[], float],
    ) -> None:
        self._policy, self._drafter, self._row, self._prices, self._clock = policy, drafter, row, prices, clock
        self._at, self._sequence, self._lengths, self._least = at, ref(sequence), lengths, (prices.least,)
        self._told: list[Told] = []
        self._left, self.open = prices.rounds, False
        self._offered: list[tuple[Offer, list[int], list[int]]] = []
        self._tokens, self._gain, self._positions, self._changed, self._emitted = 0, 0.0, 1, False, 0
        self._drafted = 0  # tokens of the model
        self._copied = self._deciding = self._call = self._price = 0.0

    @classmethod
    def after(
        cls,
        policy: Policy,
        drafters: AbstractSequence[Drafter],
        batch: Batch,
        lengths: list[int],
        row: Row,
        clock: Callable[[], float],
    ) -> SteadyRounds | None:
        """The rounds after one that was decided; None if each of them is to be decided.

        Args:
            policy, lengths, clock: as for the class.
            drafters: of the cascade; if several, all of them may miss rounds.
            batch: of the round that was decided, one row.
            row: that row.
        """
        sequence, at = batch.sequences[0], max(row.chosen.drafter, 0)
        if any(batch.exact) or batch.drafters or sequence.prediction:
            return None
        drafter = drafters[at]
        follows = drafter.trees or drafter.hidden_layers or drafter.reads_cache or not drafter.models
        if (policy.free[at] and len(drafters) > 1) or (not policy.free[at] and follows):
            return None
        prices = policy.prices(row, batch.least[0] if batch.least else 0.0)
        return None if prices is None else cls(policy, drafter, at, sequence, lengths, row, prices, clock)

    def holds(self, batch: Batch, most: int) -> bool:
        """Whether a round with these sequences, and at most `most` draft tokens, is one of these rounds."""
        if not self._left or most <= 0 or len(batch.sequences) != 1 or batch.sequences[0] is not self._sequence():
            return False
        if self._row.request.rests_until:  # the row has begun to rest
            return False
        if self._prices.tokens:
            request = self._row.request
            due = request.copied and not request.copying.rounds_left(request.rounds + len(self._told))
            return not (due or barred_in(batch, 0, (self._drafter,)))
        if len(self._told) < 2 or any(one.tokens for one in self._told[-2:]):
            return True
        self.tell()  # a passage without copies has begun: plain rounds of several passes may pay more
        if not self._row.request.copying.earns:
            self._left = 0
        return self._left > 0

    def propose(self, batch: Batch, most: int, widths: PassWidths | None) -> Draft:
        """The draft that pays most at these prices."""
        batch = self._priced(batch)

        def ask(limit: int) -> tuple[Draft, Listed]:
            draft = proposal(self._drafter, batch, [limit])
            return draft, draft.listed

        draft = self._begin(batch.sequences[0], most, widths, ask)
        return draft if self._prices.tokens else first_nodes(draft, [self._tokens], self._tokens)

    def _priced(self, batch: Batch) -> Batch:
        """The round with what copies have to be worth."""
        return batch if self._prices.tokens else batch.with_least(self._least)

    def _begin(
        self, sequence: Sequence, most: int, widths: PassWidths | None, ask: Callable[[int], tuple[Made, Listed]]
    ) -> Made:
        """Begin a round: have a model draft, or choose how many tokens of a copy are verified.

        Args:
            sequence: of the row.
            most: draft tokens that the round may have.
            widths: of the target's passes.
            ask: makes a draft of up to so many tokens, also as lists.
        """
        tokens, request, width = self._prices.tokens, self._row.request, 0
        if tokens:
            length = len(sequence.tokens)
            request.asked, request.emitted = False, length - sequence.prompt_length
            self._lengths[self._at] = length
        start = self._clock()
        made, listed = ask(min(most, tokens or LONGEST))
        if tokens:
            self._call, self._deciding = self._clock() - start, 0.0
            self._tokens, self._drafted = min(most, tokens), listed.counts[0]
        else:
            (self._offered,) = offers_of(self._drafter, 0, listed, (sequence,))
            drafted = self._clock()
            width = self._choose(most, widths)
        self._positions, self._changed = 1 + (self._drafted if tokens else self._tokens), False
        if widths is not None:
            self._positions, self._changed = widths.plan(self._positions, width, alone=True)
        if not tokens:
            self._copied, self._deciding = drafted - start, self._clock() - drafted
        self._left, self.open, self._emitted = self._left - 1, True, 0
        return made

    def in_row(self, batch: Batch, most: int, widths: PassWidths | None, ended: Callable[[], None]) -> RowRounds | None:
        """The rounds as `RowRounds`, as far as they hold; None where they are to be asked for one by one.

        Args:
            batch: of the row.
            most: draft tokens that a round may have.
            widths: of the target's passes.
            ended: called at the end of each of them.
        """
        if not self.holds(batch, most):
            return None
        own = self._drafter.in_row(self._priced(batch), min(most, self._prices.tokens or LONGEST))
        return None if own is None else _InRow(self, own, batch, most, widths, ended)

    def _choose(self, most: int, widths: PassWidths | None) -> int:
        """How many tokens are verified; returns how wide the pass is to be, 0 where it does not matter."""
        self._tokens, self._gain = 0, 0.0
        if widths is None:
            for offer, _, _ in self._offered:
                self._tokens, self._gain = self._prices.best(Copies.of(self._row, offer), most)
            self._price = self._prices.price(self._tokens)
            return 0
        row = self._row
        row.most = row.room = most
        row.offers = [offer for offer, _, _ in self._offered]
        width = self._policy.choose([row], (widths.last, widths.least))
        self._tokens, self._gain, self._price = row.chosen.tokens, row.gain if row.chosen.tokens else 0.0, row.price
        return width

    def goes_on(self, batch: Batch) -> bool:
        """Whether this is the round in progress; if it is not, that one has failed."""
        self.open = self.open and len(batch.sequences) == 1 and batch.sequences[0] is self._sequence()
        return self.open

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        """Pass the verdict to the drafter, and compare the drafts with the emitted tokens."""
        start, tokens = self._clock(), draft.listed.tokens[0]
        self._drafter.observe(batch, draft, verdict, logits)
        self._judge(start, [*(tokens[node - 1] for node in verdict.accepted[0]), verdict.following[0]])

    def _judge(self, start: float, emitted: list[int]) -> None:
        """Compare the drafts with the emitted tokens, which the drafter has observed since `start`."""
        request, self._emitted = self._row.request, len(emitted)
        for offer, tokens, parents in self._offered:
            if not offer.reach:
                right, missed = follow(tokens, parents, emitted)
                self._policy.judge(request, offer.drafter, right + missed, right, offer.match)
        if not self._prices.tokens:
            self._copied += self._clock() - start
            return
        self._call += self._clock() - start
        if self._drafted:
            self._policy.judge(request, self._at, self._drafted, len(emitted) - 1)

    def end(self, seconds: float | None) -> None:
        """End the round; `seconds` as in `Drafter.observe_seconds`."""
        self.open = False
        if self._emitted:  # else it failed
            rest = None if seconds is None else max(seconds - self._copied - self._call, 0.0)
            offered = sum(offer.size for offer, _, _ in self._offered)
            self._told.append(
                Told(
                    self._tokens,
                    offered,
                    self._emitted,
                    self._gain,
                    self._positions,
                    self._changed,
                    rest,
                    self._copied,
                    self._deciding,
                    self._call,
                    self._price,
                )
            )

    def tell(self) -> None:
        """Let the policy learn from the rounds that are over."""
        told, self._told = self._told, []
        if told:
            self._policy.lessons.learn_together(self._row.request, told, self._at)

    def propose_in_row(self, own: RowRounds, sequence: Sequence, most: int, widths: PassWidths | None) -> Chains:
        """`propose`, from rounds of the drafter's own."""

        def ask(limit: int) -> tuple[Chains, Listed]:
            chains = own.propose(limit)
            count = len(chains.tokens[0])
            return chains, Listed(chains.tokens, [list(range(count))], [count])

        chains = self._begin(sequence, most, widths, ask)
        return chains if self._prices.tokens else Chains([chains.tokens[0][: self._tokens]])

    def observe_in_row(self, own: RowRounds, found: Drafted, logits: Tensor) -> None:
        """`observe` after `propose_in_row`."""
        start = self._clock()
        own.observe(found, logits)
        self._judge(start, found.tokens)


class _InRow(RowRounds):
    """Steady rounds that go together.

    Args:
        steady: the rounds.
        own: the drafter's.
        batch: of the row.
        limit: most tokens of a draft.
        widths: of the target's passes.
        ended: called at the end of each round.
    """

    def __init__(
        self,
        steady: SteadyRounds,
        own: RowRounds,
        batch: Batch,
        limit: int,
        widths: PassWidths | None,
        ended: Callable[[], None],
    ) -> None:
        self._steady, self._own, self._batch, self._limit = steady, own, batch, limit
        self._widths, self._ended = widths, ended

    def goes_on(self, most: int) -> bool:
        """See `RowRounds`."""
        return self._steady.holds(self._batch, most) and self._own.goes_on(most)

    def propose(self, most: int) -> Chains:
        """See `RowRounds`."""
        return self._steady.propose_in_row(self._own, self._batch.sequences[0], min(most, self._limit), self._widths)

    def observe(self, found: Drafted, logits: Tensor) -> None:
        """See `RowRounds`."""
        self._steady.observe_in_row(self._own, found, logits)

    def observe_seconds(self, seconds: float) -> None:
        """See `RowRounds`."""
        self._steady.end(seconds)
        self._ended()
