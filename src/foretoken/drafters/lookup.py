"""Lookup, the default drafter: copies from the sequence itself, and the target's most probable successors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as AbstractSequence

from torch import Tensor

from foretoken.draft import Draft
from foretoken.drafters.base import Batch
from foretoken.drafters.continuations import SUCCESSORS, AcceptanceRates, Continuations, ends_as_before, match_class
from foretoken.drafters.other_requests import OtherRequests
from foretoken.drafters.per_sequence import PerSequence
from foretoken.drafters.plain_rounds import Follower, Sought
from foretoken.drafters.row_rounds import RowCopies, RowRounds, leaves_as_is
from foretoken.drafters.sharing import Participants, SharingDrafter
from foretoken.sampling.params import check_integer
from foretoken.sampling.vocabulary import topk
from foretoken.sequence import Sequence
from foretoken.verify.base import Verdict

_SHORT = 256
"""Tokens of the longest prompt, source included, that is not read until it has a match. A search in so many takes some
10 µs in every round that asks. Longer prompts are read in their prefill's round: others have no time for that."""

_SEARCHED = 1024
"""Tokens of the longest sequence in which followed tokens are searched for; in longer ones each is read."""

_REPEATED = 3
"""Tokens of the shortest match for which a sequence that is followed is read: pairs repeat all the time."""


class Lookup(SharingDrafter):
    """Drafts what most probably follows, from two sources that cost next to nothing.

    Copies of what followed the longest suffix that occurred before in prompt or output (suffix decoding, arXiv
    2411.04975, over a suffix automaton, arXiv 2411.10666), which go on into the draft itself where the output repeats
    (as LZ77 does, Ziv and Lempel 1977); and the target's most probable tokens the last time that it scored the same
    token (token recycling, arXiv 2408.08696). How often candidates like these were accepted is measured, by the length
    of the match, the rank and whether both sources agree: the node that is most likely to be accepted is drafted next,
    and `estimates` say how likely. Where trees are taken the draft is a tree, else a chain, and always a chain if
    `trees` is set to False. The tokens are chosen, not drawn. An encoder-decoder model's input counts as the beginning
    of the sequence.

    Measured rates are shared by all requests that sample alike (greedily or not). A request whose seed must give one
    output (`Batch.reproducible`), and all but the first of requests with one seed whose output depends on its uniforms,
    use rates of their own.

    Takes some 200 to 300 bytes a token of each running sequence.

    Args:
        global_tokens: also copy from other requests, finished and running ones: from this many of their tokens, of
            100 to 200 bytes each. The oldest are dropped first, half of them at a time. 0 keeps requests apart; else a
            request's speed reveals what others wrote. Only requests that share measured rates take part.
    """

    name = "lookup"
    trees = True
    own_threads = True

    def __init__(self, global_tokens: int = 0) -> None:
        self.global_tokens = check_integer("global_tokens", global_tokens, 0, cure="use 0 to keep requests apart")
        self.keeps = self.global_tokens > 0
        self._others = OtherRequests(self.global_tokens) if self.global_tokens else None
        self.estimates: PerSequence[list[float]] = PerSequence(list)
        self.foreseen: PerSequence[list[bool]] = PerSequence(list)
        self._engine = {greedy: AcceptanceRates() for greedy in (False, True)}
        self._participants = Participants()
        self._sequences: PerSequence[_State] = PerSequence(_State)

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """The most probable chain or tree; empty where nothing like the end of the sequence occurred before."""
        worth = _Worth(self._engine)
        drafts = [self._draft(batch, row, limit, worth) for row, limit in enumerate(limits)]
        return Draft.from_lists([tokens for tokens, _ in drafts], batch.device, [links for _, links in drafts])

    def _draft(self, batch: Batch, row: int, limit: int, worth: _Worth) -> tuple[list[int], list[int]]:
        """The tokens of a row's draft, and their parents."""
        sequence, least = batch.sequences[row], batch.least[row] if batch.least else 0.0
        state = self._sequences[sequence]
        read = state.known is not None or self._others is not None
        read = read or bool(batch.reproducible and batch.reproducible[row])
        state.asked = limit > 0 and (read or worth.reading(sequence, least))
        if not state.asked:  # it is read when it is asked for again
            self.foreseen[sequence] = []
            return [], []
        known = self._continuations(batch, row)
        if self._branches(batch, row):
            tokens, links, reached = known.tree(known.here(), limit, least)
        else:
            tokens, reached = known.chain(known.here(), limit, least)
            links = list(range(len(tokens)))
        # A draft ends before a token that the target has no logit for; nodes after it may be its children.
        usable = next((n for n, token in enumerate(tokens) if token >= batch.vocab_size), len(tokens))
        self.estimates[sequence] = reached[:usable]
        return tokens[:usable], links[:usable]

    def _branches(self, batch: Batch, row: int) -> bool:
        return self.trees and batch.takes_chosen_trees(row)

    def in_row(self, batch: Batch, limit: int) -> RowRounds | None:
        """Chains; None where drafts branch."""
        if not leaves_as_is(self, Lookup) or self._branches(batch, 0):
            return None

        def draft(most: int) -> list[int]:
            return self._draft(batch, 0, most, _Worth(self._engine))[0]

        def learn(drafted: list[int], emitted: list[int], logits: Tensor) -> None:
            if self._sequences[batch.sequences[0]].asked:
                path = list(range(1, len(emitted)))
                self._learn(batch, 0, drafted, path, emitted[-1], _likeliest(logits, [0])[0])

        return RowCopies(limit, draft, learn)

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        """Judge candidates by the emitted tokens, then keep the most probable tokens after every node.

        In this order, since candidates from these very logits would always be right. Rows that were not asked for are
        skipped.
        """
        asked = [row for row, sequence in enumerate(batch.sequences) if self._sequences[sequence].asked]
        if not asked:
            return
        likeliest = dict(zip(asked, _likeliest(logits, asked), strict=True))
        tokens, _, counts = draft.listed
        for row in asked:
            drafted = tokens[row][: counts[row]]
            self._learn(batch, row, drafted, verdict.accepted[row], verdict.following[row], likeliest[row])

    def _learn(
        self, batch: Batch, row: int, drafted: list[int], path: list[int], following: int, likeliest: list[list[int]]
    ) -> None:
        """`observe` for a row: its draft, the accepted nodes, the token after them, and likely ones after each node."""
        sequence, known = batch.sequences[row], self._continuations(batch, row)
        nodes = [sequence.tokens[-1], *drafted]
        self.foreseen[sequence] = known.extend([*(nodes[node] for node in path), following])
        # If a token was scored several times, the scores at its place in the output are kept.
        for node in (*range(len(nodes)), 0, *path):
            known.scored(nodes[node], likeliest[node])

    def follow(self, batch: Batch, sought: Sought) -> Follower:
        """See `Drafter.follow`."""
        sequence, shared = batch.sequences[0], self._participants.takes_part(batch, 0)
        state, rates = self._sequences[sequence], self._engine[sequence.params.greedy]
        # Not the batch: a round that fails leaves its follower behind, and the target's KV cache would live as long.
        follower = _Follower([*sequence.context], lambda: self._read(sequence, shared), state, rates, sought)
        follower.searches = self._others is None or not shared
        return follower

    def forget(self) -> None:
        """See `SharingDrafter`. The participants stay, since the measured rates stay, too."""
        if self._others is not None:
            self._others.clear()

    def judge(self, sequences: AbstractSequence[Sequence]) -> None:
        """Judge candidates by the tokens that were emitted since the last proposal.

        Sequences that were not asked for are skipped.
        """
        for sequence in sequences:
            state = self._sequences[sequence]
            if state.known is not None and state.asked:
                seen = len(state.known) - len(sequence.source or ())
                self.foreseen[sequence] = state.known.extend(sequence.tokens[seen:])

    def _continuations(self, batch: Batch, row: int) -> Continuations:
        """The row's state, up to date with its sequence."""
        return self._read(batch.sequences[row], self._participants.takes_part(batch, row))

    def _read(self, sequence: Sequence, shared: bool) -> Continuations:
        """A sequence's state, up to date with it; `shared` as `Participants.takes_part` says."""
        state = self._sequences[sequence]
        if state.known is None or len(state.known) > len(sequence.context):
            rates = AcceptanceRates(self._engine[sequence.params.greedy]) if shared else AcceptanceRates()
            state.known = Continuations(rates, self._others if shared else None)
            state.known.read(sequence.context)
        else:
            seen = len(state.known) - len(sequence.source or ())
            state.known.read(sequence.tokens[seen:])
        return state.known


class _State:
    """State of one sequence.

    Attributes:
        known: its tokens; None before it is read.
        asked: whether the last proposal asked for a draft; True before the first one.
    """

    def __init__(self) -> None:
        self.known: Continuations | None = None
        self.asked = True


class _Follower(Follower):
    """Follows a row, see `Drafter.follow`.

    What is done between two passes finds its data evicted from the processor's caches. So it is done step by step: a
    search for the last tokens (6 µs); reading of all new ones; and the draft, where its first token's rate allows what
    it needs and the match's class has changed.

    Args:
        tokens: of the row so far.
        read: has the row's continuations read its sequence, and returns them.
        state: of the sequence.
        rates: measured ones of requests like this.
        sought: drafts that are worth it.

    Attributes:
        searches: whether a short sequence is searched before it is read: a copy may be from nowhere else.
    """

    searches = True

    def __init__(
        self,
        tokens: list[int],
        read: Callable[[], Continuations],
        state: _State,
        rates: AcceptanceRates,
        sought: Sought,
    ) -> None:
        self._tokens, self._before, self._read, self._state = tokens, len(tokens), read, state
        # A token that the drafter has observed is read already.
        self._begin = max(self._before, len(state.known) if state.known is not None else 0)
        self._sought = sought
        self._shortest, self._behind = rates.shortest_with(sought.needs, sought.limit)
        self._repeats, self._class = False, 0
        self._foreseen: list[bool] = []

    def pays_behind(self, tokens: list[int]) -> bool:
        """See `Follower`."""
        self._take(tokens)
        before, self._class = self._class, 0
        if not self._ends_as_before(_REPEATED):
            return False
        self._repeats = True
        if not self._ends_as_before(self._shortest):
            return False
        known, sought = self._known(), self._sought
        here = known.here()
        self._class = match_class(here.match)
        if self._class == before or here.match < self._shortest:
            return False
        first = max([known.rates.rate(key) for _, key in known.candidates(here)], default=0.0)
        if first * self._behind[self._class] < sought.needs:
            return False
        return sought.pays(known.chain(here, sought.limit, sought.least)[1])

    def foreseen(self, tokens: list[int]) -> list[bool]:
        """See `Follower`."""
        self._take(tokens)
        if self._repeats:
            self._known()
        unread = len(self._tokens) - self._begin - len(self._foreseen)
        return [False] * unread + self._foreseen

    def _take(self, tokens: list[int]) -> None:
        self._tokens += tokens[len(self._tokens) - self._before :]

    def _ends_as_before(self, count: int) -> bool:
        """Whether the last `count` tokens occurred before."""
        if not self.searches or len(self._tokens) > _SEARCHED:
            return self._known().here().match >= count
        return ends_as_before(self._tokens, count)

    def _known(self) -> Continuations:
        """The continuations of all tokens; those that were not read are judged by."""
        known = self._state.known
        if known is None or len(known) < self._begin:
            known = self._read()
            known.read(self._tokens[len(known) : self._begin])
        self._foreseen += known.extend(self._tokens[len(known) :])
        return known


class _Worth:
    """Which sequences are worth reading: for a short one that takes fifty times as long as a search.

    Args:
        rates: measured ones, by whether requests are greedy.
    """

    def __init__(self, rates: Mapping[bool, AcceptanceRates]) -> None:
        self._rates = rates
        self._shortest: dict[tuple[bool, float], int] = {}

    def reading(self, sequence: Sequence, least: float) -> bool:
        """Whether a continuation in it may be right with a probability of `least`; always True for long prompts."""
        if least <= 0.0 or sequence.prompt_length + len(sequence.source or ()) > _SHORT:
            return True
        kind = sequence.params.greedy, least
        if kind not in self._shortest:
            self._shortest[kind] = self._rates[sequence.params.greedy].shortest(least)
        return ends_as_before(sequence.context, self._shortest[kind])


def _likeliest(logits: Tensor, rows: AbstractSequence[int]) -> list[list[list[int]]]:
    """The most probable tokens after each node of these rows."""
    if len(rows) < len(logits):
        logits = logits[rows]
    return topk(logits, min(SUCCESSORS, logits.shape[-1]))[1].tolist()
