"""Steady rounds of a cascade: one drafter drafts for a single row, and rounds are decided like the one before."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from weakref import ref

from torch import Tensor

from foretoken.draft import Draft
from foretoken.drafters.base import Batch, Drafter, proposal
from foretoken.drafters.cascade_rounds import barred_in, offers_of
from foretoken.drafters.chains import first_nodes
from foretoken.drafters.judging import follow
from foretoken.drafters.row_rounds import RowRounds
from foretoken.models.chain import Chains
from foretoken.models.widths import PassWidths
from foretoken.policy.copies import Copies
from foretoken.policy.policy import Policy
from foretoken.policy.request import LONGEST, Offer, Row
from foretoken.policy.steady import Prices, Told
from foretoken.sequence import Sequence
from foretoken.verify.base import Verdict


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
        return self._row.request.copying.earns

    def propose(self, batch: Batch, most: int, widths: PassWidths | None) -> Draft:
        """The draft that pays most at these prices."""
        if self._prices.tokens:
            return self._ask(batch, min(most, self._prices.tokens), widths)
        start = self._clock()
        made = proposal(self._drafter, batch.with_least(self._least), [min(most, LONGEST)])
        (self._offered,) = offers_of(self._drafter, 0, made, batch.sequences)
        drafted = self._clock()
        width = self._choose(most, widths)
        draft = first_nodes(made, [self._tokens], self._tokens)
        self._positions, self._changed = 1 + self._tokens, False
        if widths is not None:
            self._positions, self._changed = widths.plan(self._positions, width, alone=True)
        self._copied, self._deciding = drafted - start, self._clock() - drafted
        self._left, self.open, self._emitted = self._left - 1, True, 0
        return draft

    def _ask(self, batch: Batch, tokens: int, widths: PassWidths | None) -> Draft:
        """The draft of a model."""
        self._begin(batch.sequences[0], tokens)
        start = self._clock()
        draft = proposal(self._drafter, batch, [tokens])
        self._called(self._clock() - start, draft.listed.counts[0], widths)
        return draft

    def _begin(self, sequence: Sequence, tokens: int) -> None:
        """Begin a round in which the model is asked for so many tokens."""
        request, length = self._row.request, len(sequence.tokens)
        request.asked, request.emitted = False, length - sequence.prompt_length
        self._lengths[self._at], self._tokens, self._deciding = length, tokens, 0.0

    def _called(self, seconds: float, drafted: int, widths: PassWidths | None) -> None:
        """The model's call took so long, and drafted so many tokens."""
        self._call, self._drafted, self._positions, self._changed = seconds, drafted, 1 + drafted, False
        if widths is not None:
            self._positions, self._changed = widths.plan(self._positions, 0, alone=True)
        self._left, self.open, self._emitted = self._left - 1, True, 0

    def in_row(self, batch: Batch, most: int, widths: PassWidths | None, ended: Callable[[], None]) -> RowRounds | None:
        """The rounds of a model as `RowRounds`, as far as they hold; None where they are to be asked for one by one.

        Args:
            batch: of the row.
            most: draft tokens that a round may have.
            widths: of the target's passes.
            ended: called at the end of each of them.
        """
        if not self._prices.tokens or not self.holds(batch, most):
            return None
        own = self._drafter.in_row(batch, self._prices.tokens)
        return None if own is None else _InRow(self, own, batch, widths, ended)

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
        """Compare the drafts with the emitted tokens, and pass the verdict to the drafter."""
        start, path = self._clock(), verdict.accepted[0]
        self._emitted = len(path) + 1
        for offer, tokens, parents in self._offered:
            if not offer.reach:
                right, missed = follow(tokens, parents, [*(tokens[node - 1] for node in path), verdict.following[0]])
                self._policy.judge(self._row.request, offer.drafter, right + missed, right, offer.match)
        self._drafter.observe(batch, draft, verdict, logits)
        if not self._prices.tokens:
            self._copied += self._clock() - start
            return
        self._judge(self._clock() - start, len(path))

    def _judge(self, seconds: float, accepted: int) -> None:
        """The model observed in so many seconds how many of its tokens were accepted."""
        self._call += seconds
        if self._drafted:
            self._policy.judge(self._row.request, self._at, self._drafted, accepted)

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
        """Begin a round with a chain of the model's own rounds."""
        self._begin(sequence, min(most, self._prices.tokens))
        start = self._clock()
        chains = own.propose(self._tokens)
        self._called(self._clock() - start, len(chains.tokens[0]), widths)
        return chains

    def observe_in_row(self, own: RowRounds, count: int) -> None:
        """So many tokens of it were accepted."""
        start, self._emitted = self._clock(), count + 1
        own.observe(count)
        self._judge(self._clock() - start, count)


class _InRow(RowRounds):
    """Steady rounds in which a model drafts.

    Args:
        steady: the rounds.
        own: the model's.
        batch: of the row.
        widths: of the target's passes.
        ended: called at the end of each round.
    """

    def __init__(
        self,
        steady: SteadyRounds,
        own: RowRounds,
        batch: Batch,
        widths: PassWidths | None,
        ended: Callable[[], None],
    ) -> None:
        self._steady, self._own, self._batch, self._widths, self._ended = steady, own, batch, widths, ended

    def goes_on(self, most: int) -> bool:
        """See `RowRounds`."""
        return self._steady.holds(self._batch, most) and self._own.goes_on(most)

    def propose(self, most: int) -> Chains:
        """See `RowRounds`."""
        return self._steady.propose_in_row(self._own, self._batch.sequences[0], most, self._widths)

    def observe(self, accepted: int) -> None:
        """See `RowRounds`."""
        self._steady.observe_in_row(self._own, accepted)

    def observe_seconds(self, seconds: float) -> None:
        """See `RowRounds`."""
        self._steady.end(seconds)
        self._ended()
