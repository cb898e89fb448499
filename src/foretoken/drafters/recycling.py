"""Token recycling: the target's most probable tokens after a token are drafted when that token comes again."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as AbstractSequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise

from torch import Tensor

from foretoken.draft import Draft
from foretoken.drafters.base import Batch
from foretoken.drafters.per_sequence import PerSequence
from foretoken.drafters.sharing import Participants, SharingDrafter
from foretoken.sampling.params import check_integer
from foretoken.sampling.vocabulary import topk
from foretoken.verify.base import Verdict

# Where the first successor is rejected, acceptance rates of the later ones: about the same at all temperatures.
_LATER = (0.2, 0.1, 0.07, 0.045, 0.03, 0.02, 0.015)
_FIRST = 0.5  # acceptance rate of the first one before any was tried
_STEP = 1 / 32  # weight of a new observation


class TokenRecycling(SharingDrafter):
    """Drafts from a table of the target's most probable tokens after each token (Luo et al. 2024, arXiv 2408.08696).

    Every pass scores all nodes of a draft, and the most probable tokens after each of them, rejected ones too, become
    the successors of the node's token. A draft follows the table from the root on: where trees are taken in a tree
    of a fixed shape, wide at the top and deepest along first successors, else along first successors alone. The shape
    is one of nine, by the recent acceptance rate of first successors: where it is high, a tree hardly branches. The
    tokens are chosen, not drawn.

    Drafters don't see the logits of the prompt: until a token was part of a scored draft, its successors are those that
    it had in the prompt, the latest first.

    Takes some 200 bytes for each token that came up, and at most that for each of the vocabulary.

    Args:
        candidates: successors that are kept of each token, at most 8.
        shared: one table for all requests instead of one for each: better drafts from a request's beginning on. Then a
            request's drafts, and with a rejection verifier its samples, depend on the requests before it and beside it
            (their distribution does not). Requests with one seed have the same uniforms: of these only the first takes
            part, see `foretoken.drafters.sharing`.
    """

    name = "recycling"
    trees = True
    own_threads = True

    def __init__(self, candidates: int = 8, *, shared: bool = False) -> None:
        self.candidates = check_integer("candidates", candidates, 1, len(_LATER) + 1, cure="use 8")
        self.shared = self.keeps = shared
        self._common = _SuccessorTable()
        self._own = PerSequence(_SuccessorTable)
        self._entered: PerSequence[bool] = PerSequence(bool)  # whether a sequence's prompt is in its table
        self._participants = Participants()

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """A tree of successors, a chain of first ones where chains are wanted; nothing after an unknown token."""
        rows, parents = [], []
        for row, (sequence, limit) in enumerate(zip(batch.sequences, limits, strict=True)):
            table = self._table(batch, row)
            if not self._entered[sequence]:
                self._entered[sequence] = True
                table.enter(sequence.context, self.candidates, batch.vocab_size)
            # Twice as large, for nodes of the shape without known successors are left out.
            branches = self.candidates if batch.takes_chosen_trees(row) else 1
            shape = tree_shape(2 * limit, branches, round(10 * table.rate))
            tokens, links = table.grow(sequence.tokens[-1], shape, limit)
            rows.append(tokens)
            parents.append(links)
        return Draft.from_lists(rows, batch.device, parents)

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        """Enter the target's most probable tokens after every node."""
        likely = topk(logits, min(self.candidates, logits.shape[-1]))[1].tolist()
        drafted, _, sizes = draft.listed
        for row, sequence in enumerate(batch.sequences):
            table = self._table(batch, row)
            tokens = [sequence.tokens[-1], *drafted[row][: sizes[row]]]
            kept = [0, *verdict.accepted[row]]
            table.judge([*(tokens[node] for node in kept), verdict.following[row]])
            # Accepted nodes count most: they are entered last.
            for node in (*range(len(tokens)), *kept):
                table.predicted[tokens[node]] = array("i", likely[row][node])

    def forget(self) -> None:
        """See `SharingDrafter`. The recent acceptance rate stays."""
        rate, self._common = self._common.rate, _SuccessorTable()
        self._common.rate = rate

    def _table(self, batch: Batch, row: int) -> _SuccessorTable:
        if self.shared and self._participants.takes_part(batch, row):
            return self._common
        return self._own[batch.sequences[row]]


class _SuccessorTable:
    """The successors of each token, the most probable first.

    Attributes:
        predicted: by token, the target's most probable successors.
        found: by token, its successors in the prompt.
        rate: recent acceptance rate of first successors.
    """

    def __init__(self) -> None:
        self.predicted: dict[int, array[int]] = {}
        self.found: dict[int, list[int]] = {}
        self.rate = _FIRST

    def successors(self, token: int) -> AbstractSequence[int]:
        """The known successors of a token."""
        return self.predicted.get(token) or self.found.get(token) or ()

    def judge(self, emitted: list[int]) -> None:
        """Update `rate` with the root, the accepted tokens and the one after them."""
        for token, following in pairwise(emitted):
            known = self.successors(token)
            if known:
                self.rate += _STEP * ((known[0] == following) - self.rate)

    def enter(self, tokens: list[int], candidates: int, vocab_size: int) -> None:
        """Enter a prompt."""
        for token, following in pairwise(tokens):
            if following < vocab_size:
                known = self.found.setdefault(token, [])
                if following in known:
                    known.remove(following)
                known.insert(0, following)
                del known[candidates:]

    def grow(self, root: int, shape: tuple[tuple[int, int], ...], limit: int) -> tuple[list[int], list[int]]:
        """A tree of that shape, of at most `limit` nodes, as far as successors are known: tokens, and their parents."""
        tokens, parents = [root], [-1]
        numbers = [0]  # of each node of the shape; -1 where there is none
        for above, rank in shape:
            if len(tokens) > limit:
                break
            parent = numbers[above]
            token = -1
            if parent >= 0:
                known = self.successors(tokens[parent])
                token = known[rank] if rank < len(known) else -1
            if token < 0:
                numbers.append(-1)
                continue
            numbers.append(len(tokens))
            tokens.append(token)
            parents.append(parent)
        return tokens[1:], parents[1:]


@lru_cache(maxsize=1024)
def tree_shape(size: int, candidates: int, tenths: int) -> tuple[tuple[int, int], ...]:
    """The tree of the `size` paths of ranks that are most likely to be accepted.

    Args:
        size: nodes.
        candidates: ranks.
        tenths: acceptance rate of rank 0, in tenths.

    Returns:
        For each node, parents first, its parent's number (0 = root) and its rank among the parent's successors.
    """
    first = min(max(tenths / 10, 0.1), 0.9)
    rates = (first, *((1 - first) * later for later in _LATER))
    shape: list[tuple[int, int]] = []
    heap = [(-first, 0, 0, 1.0)]  # minus the probability, parent, rank, the parent's probability
    while len(shape) < size:
        chance, parent, rank, above = heappop(heap)
        shape.append((parent, rank))
        heappush(heap, (chance * first, len(shape), 0, -chance))
        if rank + 1 < candidates:
            heappush(heap, (-above * rates[rank + 1], parent, rank + 1, above))
    return tuple(shape)
