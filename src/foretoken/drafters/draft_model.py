"""A small language model that drafts: a chain, one token a step, or a tree, one depth a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from foretoken.draft import Draft, chain_of_row, first_nodes_of_row, int_tensor
from foretoken.drafters.base import Batch, Drafter
from foretoken.drafters.chains import draft_chains, draft_uniforms, draw_chains, in_one_call
from foretoken.drafters.growth import Frontier, Grown, grow
from foretoken.drafters.per_sequence import PerSequence
from foretoken.drafters.row_rounds import Drafted, RowRounds, leaves_as_is
from foretoken.drafters.tree_plan import Tree, TreePlan, plan_of
from foretoken.limits import current_limits
from foretoken.models.base import Cache, LanguageModel
from foretoken.models.chain import Chains, Draws
from foretoken.models.feed import feed
from foretoken.models.loading import load
from foretoken.sampling.vocabulary import best_tokens
from foretoken.sequence import Sequence, shared_prefix_length
from foretoken.verify.base import Verdict


@dataclass
class DraftCache:
    """A draft model's KV cache for sequences that are decoded together.

    Attributes:
        cache: one row a sequence.
        rows: ids of the sequences that the rows belong to.
        tentative: draft tokens of each row in the cache that are not committed or dropped yet; empty for none.
        grown: the trees of the tentative tokens; None for chains.
        begun: committed tokens of each row that are another drafter's draft; empty for none.
    """

    cache: Cache
    rows: list[int]
    tentative: list[int] = field(default_factory=list)
    grown: Grown | None = None
    begun: list[int] = field(default_factory=list)

    def add(self, counts: AbstractSequence[int]) -> None:
        """Count so many more tentative tokens in each row."""
        before = self.tentative or [0] * len(counts)
        self.tentative = [had + count for had, count in zip(before, counts, strict=True)]

    def keep(self, verdict: Verdict | None) -> None:
        """Keep the accepted tokens, none for a verdict of None; drop the others."""
        size = len(self.rows)
        begun = self.begun or [0] * size
        if any(self.tentative) or any(begun):
            accepted = [0] * size if verdict is None else list(map(len, verdict.accepted))
        if any(self.tentative):
            if verdict is None:
                path, counts = torch.zeros((size, 0), dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
            elif self.grown is not None:
                path, counts = self.grown.kept(verdict)
            else:
                path = int_tensor([range(max(self.tentative))] * size)
                own = [max(count - first, 0) for count, first in zip(accepted, begun, strict=True)]
                counts = int_tensor(list(map(min, own, self.tentative)))
            self.cache.commit(path, counts)
        if any(begun) and any(count < first for count, first in zip(accepted, begun, strict=True)):
            lengths = self.cache.lengths.tolist()
            wrong = [max(first - count, 0) for count, first in zip(accepted, begun, strict=True)]
            keep: list[int | None] = [length - extra for length, extra in zip(lengths, wrong, strict=True)]
            self.cache.select(list(range(size)), keep)
        self.tentative, self.grown, self.begun = [], None, []

    def keep_first(self, count: int) -> None:
        """`keep` for the chain of a single row, of which the first `count` tokens were accepted."""
        (most,) = self.tentative or (0,)
        if most:
            self.cache.commit(*first_nodes_of_row(min(count, most), most))
        self.tentative = []


class DraftModel(Drafter):
    """Drafts with a smaller model of the same vocabulary (Leviathan et al. 2023, arXiv 2211.17192).

    Each token is drawn from the drafter's distribution under the request's own sampling parameters, and the draft
    carries that very distribution as q. With temperature 0, and under a coupled verifier, tokens are chosen instead.

    Args:
        model: in any form that `foretoken.load` takes; one that is loaded here is rounded where that helps.
        tree: "none" drafts chains. "static" drafts trees, drawn without replacement, of the shape that is best for a
            row's limit by typical acceptance rates; a `TreeShape`, an `AcceptanceTable`, or a file with one, does so
            with that shape or these rates. "dynamic" drafts trees of the most probable nodes, chosen. See
            `foretoken.drafters.tree_plan`.

    Raises:
        ParameterError: `tree` is none of these.
    """

    name = "draft-model"

    def __init__(self, model: Any, tree: Tree = "none") -> None:
        self.tree: TreePlan = plan_of(tree)
        model = load(model, quantize="auto")
        self.model: LanguageModel = model
        self.models = (self.model,)
        self.max_length = self.model.max_length
        self.own_threads = self.model.own_threads
        # By sequence: batches that alternate have caches of their own, and those of ended sequences are freed.
        self._caches = PerSequence(lambda: DraftCache(model.open(0), []))

    @property
    def extends(self) -> bool:  # type: ignore[override]  # an attribute there
        """Chains may begin behind another drafter's, whose rejected tokens are cut off a row again."""
        return not self.tree.branches and self.model.shares_prefixes

    @property
    def call_sizes(self) -> tuple[int, ...]:  # type: ignore[override]  # an attribute there
        """Those of the model's chains; empty where it drafts trees."""
        return () if self.tree.branches else self.model.chain_sizes

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """A draft of up to ``limits[b]`` tokens in row b."""
        begun = batch.begun or [()] * len(limits)
        # The last draft token is never fed, so a sequence of n tokens allows max_length - n + 1 draft tokens on a path.
        room = [
            max(0, self.model.max_length - len(sequence.tokens) - len(first) + 1) if self._fits_source(sequence) else 0
            for sequence, first in zip(batch.sequences, begun, strict=True)
        ]
        if self.tree.branches:
            return self._trees(batch, limits, room)
        limits = [min(limit, most) for limit, most in zip(limits, room, strict=True)]
        width = max(limits, default=0)
        device = batch.device
        if width == 0:
            return Draft.empty(len(limits), device)
        state = self._recall(batch)
        missing = self._missing(state, batch, limits)
        if batch.begun:
            state.begun = [len(first) if limit else 0 for first, limit in zip(begun, limits, strict=True)]
            sequences = [
                replace(sequence, tokens=[*sequence.tokens, *first]) if first else sequence
                for sequence, first in zip(batch.sequences, begun, strict=True)
            ]
            batch = replace(batch, sequences=sequences)  # what the drawn tokens follow; positions key the uniforms
        whole = self._drafts_whole(batch)

        def one_call(limits: AbstractSequence[int], draws: Draws | None) -> Chains:
            steps = max(limits)
            fed = [tokens if limit else [] for tokens, limit in zip(missing, limits, strict=True)]
            chains = self.model.chain(fed, steps, state.cache, draws)
            state.add([steps - 1 if limit else 0 for limit in limits])
            return chains

        def steps(limits: AbstractSequence[int]) -> tuple[Draft, bool]:
            fed = [tokens if limit else [] for tokens, limit in zip(missing, limits, strict=True)]
            return self._steps(state, batch, limits, fed)

        draft, sound = draft_chains(batch, limits, one_call if whole else None, steps)
        if not sound:
            self._warn_of_bad_scores()
        return draft

    def _drafts_whole(self, batch: Batch) -> bool:
        """Whether one call of the model may draft a chain."""
        return self.model.drafts_chains and self.model.vocab_size <= batch.vocab_size

    def reads(self, batch: Batch) -> bool:
        """See `Drafter`: rows whose drafts are the model's best tokens."""
        sequence, sampler = batch.sequences[0], batch.sampler
        chosen = sampler.all_greedy and not sampler.alters and not self.tree.branches
        fits = self._fits_source(sequence) and len(sequence.tokens) <= self.model.max_length
        # Passes that are captured by their sizes would be captured within a request.
        captured = self.model.drafts_chains and not self.model.prefills_with_decode
        return chosen and fits and not captured and leaves_as_is(self, DraftModel)

    def read(self, batch: Batch, most: int) -> list[bool]:
        """See `Drafter`: one pass over all that the model's cache lacks but the root."""
        state, (sequence,) = self._recall(batch), batch.sequences
        (known,), tokens = state.cache.lengths.tolist(), sequence.tokens
        count = min(most, len(tokens) - 1 - known, len(tokens) - sequence.prompt_length)
        if count < 1:
            return []
        unseen = _known(tokens[known:-1], self.model.vocab_size)
        state.add([count])  # dropped if the pass fails
        best = _best_after(self.model, state.cache, unseen[:-count], unseen[-count:], batch.vocab_size)
        state.tentative = []
        return [one == token for one, token in zip(best, tokens[-count:], strict=False)]

    def in_row(self, batch: Batch, limit: int) -> RowRounds | None:
        """Chains that one call of the model drafts; None where it takes steps, and for trees."""
        if not leaves_as_is(self, DraftModel) or self.tree.branches or batch.begun or not self._drafts_whole(batch):
            return None
        sequence = batch.sequences[0]
        if not in_one_call(batch)[0]:
            return None
        if not self._fits_source(sequence) or len(sequence.tokens) > self.model.max_length:
            return None
        return _RowChains(self.model, self._recall(batch), batch, limit, self._warn_of_bad_scores)

    def _steps(
        self, state: DraftCache, batch: Batch, limits: AbstractSequence[int], missing: list[list[int]]
    ) -> tuple[Draft, bool]:
        """Chains that are drawn token by token."""
        logits = feed(self.model, state.cache, missing, keep="last")
        assert logits is not None  # a row with a limit has at least its root to feed
        size = min(self.model.vocab_size, batch.vocab_size)
        counts = [int(limit > 0) for limit in limits]

        def score(token: Tensor, step: int) -> Tensor:
            parents = torch.full_like(token, step - 1)
            scores = self.model.forward(token, parents, torch.tensor(counts), state.cache).logits
            assert scores is not None
            state.add(counts)
            return scores[:, 0, :size]

        return draw_chains(batch, limits, logits[:, :size], score)

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        """Commit the accepted tokens that are in the cache; drop the others."""
        state = self._caches.get(batch.sequences[0])
        if state is not None:
            state.keep(verdict)

    def _trees(self, batch: Batch, limits: AbstractSequence[int], room: list[int]) -> Draft:
        limits = [limit if most else 0 for limit, most in zip(limits, room, strict=True)]
        if not any(limits):
            return Draft.empty(len(limits), batch.device)
        batch = replace(batch, depths=tuple(map(min, batch.depths or limits, room)))
        state = self._recall(batch)
        logits = feed(self.model, state.cache, self._missing(state, batch, limits), keep="last")
        assert logits is not None

        def score(frontier: Frontier) -> Tensor:
            state.add(frontier.counts.tolist())
            scores = self.model.forward(frontier.tokens, frontier.parents, frontier.counts, state.cache).logits
            assert scores is not None
            return scores

        state.grown = grow(self.tree, batch, limits, logits, score)
        if not state.grown.sound:
            self._warn_of_bad_scores()
        return state.grown.draft

    def _fits_source(self, sequence: Sequence) -> bool:
        """Whether the encoder input, if there is one, is short enough for the model."""
        return sequence.source is None or len(sequence.source) <= self.model.max_length

    def _warn_of_bad_scores(self) -> None:
        warnings.warn(
            f"the drafter {self.model.name} gave logits with NaN or infinity (or nothing but -inf); such drafts "
            "are cut short: load it with dtype='float32', or check its weights",
            RuntimeWarning,
            stacklevel=3,
        )

    def _recall(self, batch: Batch) -> DraftCache:
        """The batch's cache, its rows those of the batch: rows that left are dropped, new ones are empty."""
        known = [found for sequence in batch.sequences if (found := self._caches.get(sequence)) is not None]
        state = known[0] if known else self._caches[batch.sequences[0]]
        state.keep(None)
        ids = [sequence.id for sequence in batch.sequences]
        if ids == state.rows:
            return state
        rows = {identity: row for row, identity in enumerate(state.rows)}
        selection, keep = [rows.get(identity, -1) for identity in ids], list[int | None]([None] * len(ids))
        if self.model.shares_prefixes:
            lengths = state.cache.lengths.tolist()
            cached = [(rows[one.id], one, lengths[rows[one.id]]) for one in batch.sequences if one.id in rows]
            for row, sequence in enumerate(batch.sequences):
                # Not for a reproducible request: keys and values of another row may be rounded differently.
                if ids[row] not in rows and not (batch.reproducible and batch.reproducible[row]):
                    selection[row], keep[row] = _longest_prefix(sequence, cached)
        state.cache.select(selection, keep)
        state.rows = ids
        for row, (sequence, old) in enumerate(zip(batch.sequences, selection, strict=True)):
            self._caches[sequence] = state
            if old < 0 and sequence.source is not None and self._fits_source(sequence):
                state.cache.encode(row, sequence.source)
        return state

    def _missing(self, state: DraftCache, batch: Batch, limits: AbstractSequence[int]) -> list[list[int]]:
        """The tokens that each row's cache lacks, root and `Batch.begun` included; none for rows that draft nothing."""
        known, begun = state.cache.lengths.tolist(), batch.begun or [()] * len(limits)
        return [
            _known([*sequence.tokens[length:], *first], self.model.vocab_size) if limit > 0 else []
            for sequence, first, length, limit in zip(batch.sequences, begun, known, limits, strict=True)
        ]


class _RowChains(RowRounds):
    """Chains of a draft model for a single row.

    Args:
        model: that drafts.
        state: its KV cache for the row.
        batch: of the row.
        limit: most tokens of a chain.
        warn: called where a chain is cut short, since the model's scores were no numbers.
    """

    def __init__(
        self, model: LanguageModel, state: DraftCache, batch: Batch, limit: int, warn: Callable[[], None]
    ) -> None:
        self._model, self._state, self._limit, self._warn = model, state, limit, warn
        self._tokens = batch.sequences[0].tokens
        (self._cached,) = state.cache.lengths.tolist()
        self._seeds, self._reproducible = batch.seeds.tolist(), any(batch.reproducible)
        greedy = batch.sampler.all_greedy
        self._inverse_temperatures = None if greedy else batch.sampler.inverse_temperatures().cpu()

    def _most(self, most: int) -> int:
        return min(self._limit, most, self._model.max_length - len(self._tokens) + 1)

    def goes_on(self, most: int) -> bool:
        """See `RowRounds`."""
        return self._most(most) > 0

    def propose(self, most: int) -> Chains:
        """See `RowRounds`."""
        steps, length, draws = self._most(most), len(self._tokens), None
        if self._inverse_temperatures is not None:
            uniforms = draft_uniforms(self._seeds, [length], steps)
            draws = Draws(self._inverse_temperatures, uniforms, self._reproducible)
        missing = _known(self._tokens[self._cached :], self._model.vocab_size)
        chains = self._model.chain([missing], steps, self._state.cache, draws)
        self._cached = length
        self._state.add([steps - 1])
        if len(chains.tokens[0]) < steps:
            self._warn()
        return chains

    def observe(self, found: Drafted, logits: Tensor) -> None:
        """See `RowRounds`."""
        self._cached += min(found.accepted, *self._state.tentative)
        self._state.keep_first(found.accepted)


def _known(tokens: list[int], size: int) -> list[int]:
    """The tokens; ids that only the target's vocabulary has, padded to more than the drafter's `size`, become 0."""
    return [token if token < size else 0 for token in tokens]


def _best_after(model: LanguageModel, cache: Cache, before: list[int], tokens: list[int], size: int) -> list[int]:
    """Append tokens to a cache of one row; the best ones below `size` after each of `tokens`, none for bad scores."""
    if model.prefills_with_decode:
        cache.defer_prefill([before])
    else:
        feed(model, cache, [before])
    count = len(tokens)
    logits = model.forward(int_tensor([tokens]), *chain_of_row(count), cache).logits
    cache.commit(*first_nodes_of_row(count, count))
    assert logits is not None
    return best_tokens(logits[..., :size]) or []


def _longest_prefix(sequence: Sequence, cached: AbstractSequence[tuple[int, Sequence, int]]) -> tuple[int, int | None]:
    """The row of a cache with the longest prefix of a new sequence, such as a system prompt, and the prefix's length.

    Args:
        sequence: that has no row yet.
        cached: rows of the cache, their sequences and how many of these tokens are cached.

    Returns:
        -1 and None where no row shares a prefix that is long enough to be copied.
    """
    donor, longest, shortest = -1, 0, current_limits().shortest_shared_prefix
    if sequence.source is None and len(sequence.tokens) > shortest:
        for row, other, count in cached:
            length = min(shared_prefix_length(sequence.tokens, other.tokens, shortest), count)
            if length > longest:
                donor, longest = row, length
                if length == len(sequence.tokens) - 1:  # no other row shares more
                    break
    return donor, longest or None
