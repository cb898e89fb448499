"""N-gram storage: counts of n-grams in the sequence and in the target's own predictions."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence

from torch import Tensor

from foretoken.draft import Draft
from foretoken.drafters.base import Batch
from foretoken.drafters.per_sequence import PerSequence
from foretoken.drafters.prompt_lookup import LONGEST_NGRAM
from foretoken.drafters.sharing import Participants, SharingDrafter
from foretoken.sampling.params import check_integer
from foretoken.sampling.vocabulary import topk
from foretoken.verify.base import Verdict


class NgramStorage(SharingDrafter):
    """Drafts the most frequent continuation of the longest context that was seen.

    Counts all n-grams of orders 2 … `max_order` of prompt and output, and, as *filler*, of each scored position's
    path followed by the target's most probable tokens there, which often come up later. A
    context of ``max_order - 1`` tokens is looked up first, then ever shorter ones. The tokens are chosen, not drawn.

    Args:
        max_order: longest n-gram, N, context and continuation together.
        top_k_filler: how many of the target's predictions at each scored position are counted; 0 for none.
        stop_if_unknown: end the draft where no context is known; else go on with the most frequent token of all.
        one_level: only n-grams of order N: no fallback to shorter contexts.
        keep: count over all requests instead of each on its own. Then a request's drafts, and with a rejection verifier
            its samples, depend on the requests before it (their distribution does not). Requests with one seed have the
            same uniforms: of these only the first takes part, see `foretoken.drafters.sharing`.
    """

    name = "ngram-storage"
    own_threads = True

    def __init__(
        self,
        max_order: int = 4,
        *,
        top_k_filler: int = 3,
        stop_if_unknown: bool = True,
        one_level: bool = False,
        keep: bool = False,
    ) -> None:
        check_integer("max_order", max_order, 2, LONGEST_NGRAM, cure="an n-gram has a context and a continuation")
        check_integer("top_k_filler", top_k_filler, 0, cure="use 0 for no filler")
        self.max_order = max_order
        self.top_k_filler = top_k_filler
        self.stop_if_unknown = stop_if_unknown
        self.one_level = one_level
        self.keep = self.keeps = keep
        self._contexts = (max_order - 1,) if one_level else tuple(range(max_order - 1, 0, -1))
        if one_level:
            self.name = "ngram-storage-one-level"
        self._shared = _NgramCounts(self._contexts)
        self._participants = Participants()
        contexts = self._contexts
        self._own = PerSequence(lambda: _NgramCounts(contexts))
        self._counted: PerSequence[int] = PerSequence(int)  # tokens of each sequence that are counted

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """A chain of most probable continuations."""
        rows = []
        for row, (sequence, limit) in enumerate(zip(batch.sequences, limits, strict=True)):
            counts = self._counts(batch, row)
            context = sequence.context
            for end in range(self._counted[sequence], len(context)):
                counts.add(context[max(0, end - self.max_order + 1) : end], context[end])
            self._counted[sequence] = len(context)
            rows.append([token for token in self._chain(counts, context, limit) if token < batch.vocab_size])
        return Draft.from_lists(rows, batch.device)

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        """Count the target's most probable tokens after every node of the draft."""
        if self.top_k_filler == 0:
            return
        predictions = topk(logits, min(self.top_k_filler, logits.shape[-1]))[1].tolist()
        tokens, parents, sizes = draft.listed
        for row, sequence in enumerate(batch.sequences):
            counts = self._counts(batch, row)
            reach = self.max_order - 1
            contexts = [sequence.context[-reach:]]
            for node in range(sizes[row]):
                contexts.append((contexts[parents[row][node]] + [tokens[row][node]])[-reach:])
            for context, likely in zip(contexts, predictions[row], strict=False):
                for token in likely:
                    counts.add(context, token)

    def forget(self) -> None:
        """See `SharingDrafter`."""
        self._shared = _NgramCounts(self._contexts)
        self._participants = Participants()

    def _counts(self, batch: Batch, row: int) -> _NgramCounts:
        if self.keep and self._participants.takes_part(batch, row):
            return self._shared
        return self._own[batch.sequences[row]]

    def _chain(self, counts: _NgramCounts, context: list[int], limit: int) -> list[int]:
        window = context[-(self.max_order - 1) :]
        chain: list[int] = []
        while len(chain) < limit:
            token = counts.best(window)
            if token is None and not self.stop_if_unknown:
                token = counts.commonest
            if token is None:
                break
            chain.append(token)
            window = [*window, token][-(self.max_order - 1) :]
        return chain


class _NgramCounts:
    """How often each token followed each context."""

    def __init__(self, context_sizes: Iterable[int]) -> None:
        self._sizes = tuple(context_sizes)  # longest first
        self._followers: dict[tuple[int, ...], dict[int, int]] = {}
        self._likeliest: dict[tuple[int, ...], int] = {}
        self._totals: dict[int, int] = {}
        self.commonest: int | None = None

    def add(self, context: list[int], token: int) -> None:
        """Count `token` after every known size of context. Of equal counts the latest leads."""
        for size in self._sizes:
            if size <= len(context):
                key = tuple(context[len(context) - size :])
                followers = self._followers.setdefault(key, {})
                followers[token] = followers.get(token, 0) + 1
                leader = self._likeliest.get(key)
                if leader is None or followers[token] >= followers[leader]:
                    self._likeliest[key] = token
        self._totals[token] = self._totals.get(token, 0) + 1
        if self.commonest is None or self._totals[token] >= self._totals[self.commonest]:
            self.commonest = token

    def best(self, context: list[int]) -> int | None:
        """The most probable token after the longest suffix of `context` that was seen."""
        for size in self._sizes:
            if size <= len(context):
                token = self._likeliest.get(tuple(context[len(context) - size :]))
                if token is not None:
                    return token
        return None
