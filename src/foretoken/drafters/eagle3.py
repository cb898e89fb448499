"""EAGLE-3: a head of one layer that drafts from the target's hidden states; the network is in `foretoken.heads`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Literal

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.drafters.base import Batch, Drafter
from foretoken.drafters.chains import draft_chains, draw_chains
from foretoken.drafters.growth import Frontier, grow
from foretoken.drafters.per_sequence import PerSequence
from foretoken.drafters.tree_plan import Tree, TreePlan, plan_of
from foretoken.errors import ModelError
from foretoken.heads.eagle3 import Eagle3Head
from foretoken.heads.fitting import check_fit
from foretoken.heads.loading import load_eagle3
from foretoken.heads.runner import HeadCache
from foretoken.heads.running import make_runner
from foretoken.models.base import LanguageModel
from foretoken.models.chain import Chains, Draws
from foretoken.models.native.linear import Quantize
from foretoken.sequence import Sequence


@dataclass
class _Features:
    """The target's features of one sequence.

    Attributes:
        received: how many leading tokens' features have been passed.
        pending: fused features, ``[n, H]`` each, of those tokens that are not in the head's cache yet.
    """

    received: int = 0
    pending: list[Tensor] = field(default_factory=list)

    @property
    def cached(self) -> int:
        """Tokens whose features are in the head's cache."""
        return self.received - sum(map(len, self.pending))


@dataclass
class _BatchCache:
    """The head's cache for sequences that are decoded together, and the id of each row's sequence."""

    cache: HeadCache
    rows: list[int]


class Eagle3(Drafter):
    """Drafts with a head on the target's features (EAGLE-3, Li et al. 2025, arXiv 2503.01840).

    Features arrive with the target's passes; they are fused at once, and go through the head when it next drafts. After
    the last of them the head runs on its own output of the token before. Each token is drawn from the head's
    distribution under the request's own sampling parameters, with probability 0 for tokens that a reduced draft
    vocabulary lacks, and the draft carries that very distribution as q.

    A sequence is drafted for in one batch at a time: its row of the head's cache belongs to the batch that it was last
    part of, so that a sequence which leaves a batch and comes back is not drafted for any more.

    Args:
        head: a head, or the folder of one, in a layout that `foretoken.heads.load_eagle3` reads.
        target: the model to draft for.
        tree: see `DraftModel`.
        backend: "openvino", "torch", or "auto" for the fastest that can be used.
        quantize: how the head's weights are rounded, on OpenVINO: "int8", "w8a8", None, or "auto" for "w8a8" where it
            is faster. Drafts are drawn from the rounded head, so that rounding does not change the output's
            distribution.

    Raises:
        ModelError: the folder holds no whole head, the head was trained for another target, or it can't be rounded so.
        ParameterError: `tree` is no known one.
    """

    name = "eagle3"

    def __init__(
        self,
        head: Eagle3Head | str | PathLike[str],
        target: LanguageModel,
        tree: Tree = "none",
        backend: Literal["auto", "openvino", "torch"] = "auto",
        quantize: Quantize | Literal["auto"] | None = "auto",
    ) -> None:
        self.tree: TreePlan = plan_of(tree)
        name = "the EAGLE-3 head" if isinstance(head, Eagle3Head) else str(head)
        self.head, self.target, self.backend = name, target, backend
        if not target.supports_hidden_states:
            raise ModelError(f"{target.name} does not show its hidden states: {name} can't draft for it")
        if not isinstance(head, Eagle3Head):
            head = load_eagle3(head, target.num_layers)
        check_fit(head.config, head.config.target_hidden_size, name, target, "eagle3")
        _check(head, name, target)
        config = head.config
        self.hidden_layers = config.target_layers
        self._head = head.to(target.device, target.dtype)
        table = head.embed_tokens.weight if config.own_embeddings else target.embeddings()
        self._runner = runner = make_runner(self._head, table, backend, quantize)
        self.own_threads, self.quantize = self._runner.own_threads, self._runner.quantize
        self._tokens = head.draft_tokens().to(target.device) if config.reduced else None
        self._numbers = head.draft_tokens().tolist()
        self._features = PerSequence(_Features)
        self._caches = PerSequence(lambda: _BatchCache(runner.open(), []))

    @property
    def num_parameters(self) -> int:
        """Weights of the head."""
        return sum(weight.numel() for weight in self._head.parameters())

    @property
    def call_sizes(self) -> tuple[int, ...]:  # type: ignore[override]  # an attribute there
        """Those of the head's chains; empty where it drafts trees."""
        return () if self.trees else self._runner.chain_sizes

    def warm_up(self, drawn: bool) -> None:
        """Compile what chains of the head need."""
        self._runner.warm_up_chains(drawn)

    def observe_hidden(
        self,
        sequences: AbstractSequence[Sequence],
        starts: AbstractSequence[int],
        counts: AbstractSequence[int],
        hidden: AbstractSequence[Tensor],
    ) -> None:
        """Fuse the features, and keep them until the next draft."""
        if not any(counts):
            return
        weight = self._head.fc.weight
        with torch.inference_mode():
            fused = self._head.fuse(torch.cat(list(hidden), dim=-1).to(weight))
        for row, (sequence, start, count) in enumerate(zip(sequences, starts, counts, strict=True)):
            features = self._features[sequence]
            if count and start == features.received:
                part = fused[row, :count]
                features.pending.append(part.clone() if len(counts) > 1 else part)
                features.received += count

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """A draft of up to ``limits[b]`` tokens in row b; none where features are missing."""
        state = self._recall(batch)
        held = state.cache.lengths
        known = [self._features[sequence] for sequence in batch.sequences]
        limits = [
            limit if 0 < features.received == len(sequence.tokens) - 1 and features.cached == slots else 0
            for limit, sequence, features, slots in zip(limits, batch.sequences, known, held, strict=True)
        ]
        if not any(limits):
            return Draft.empty(len(limits), batch.device)
        if self.trees:
            return self._trees(state.cache, batch, limits, known)
        whole = self._runner.drafts_chains

        def one_call(limits: AbstractSequence[int], draws: Draws | None) -> Chains:
            tokens, states = self._new(state.cache, batch, limits, known)
            return self._spread_chains(self._runner.chain(state.cache, tokens, states, max(limits), draws))

        def steps(limits: AbstractSequence[int]) -> tuple[Draft, bool]:
            return self._steps(state.cache, batch, limits, known)

        with torch.inference_mode():
            draft, sound = draft_chains(batch, limits, one_call if whole else None, steps)
        if not sound:
            self._warn_of_bad_scores()
        return draft

    def _trees(
        self, cache: HeadCache, batch: Batch, limits: AbstractSequence[int], known: AbstractSequence[_Features]
    ) -> Draft:
        def score(frontier: Frontier) -> Tensor:
            return self._spread(self._runner.score(cache, frontier.tokens, frontier.parents, frontier.counts))

        with torch.inference_mode():
            logits = self._spread(self._runner.read(cache, *self._new(cache, batch, limits, known)))
            grown = grow(self.tree, batch, limits, logits, score)
            cache.forget()
        if not grown.sound:
            self._warn_of_bad_scores()
        return grown.draft

    def _new(
        self, cache: HeadCache, batch: Batch, limits: AbstractSequence[int], known: AbstractSequence[_Features]
    ) -> tuple[list[list[int]], list[Tensor]]:
        """Take the pending features of the rows that are drafted for; returns their tokens and these features."""
        tokens: list[list[int]] = []
        states: list[Tensor] = []
        nothing = self._head.fc.weight.new_zeros((0, self._head.config.hidden_size))
        for limit, sequence, features, slots in zip(limits, batch.sequences, known, cache.lengths, strict=True):
            new = list(features.pending) if limit else []
            tokens.append(sequence.tokens[slots + 1 : features.received + 1] if limit else [])
            states.append(torch.cat(new) if len(new) > 1 else new[0] if new else nothing)
            if limit:
                features.pending.clear()
        return tokens, states

    def _steps(
        self, cache: HeadCache, batch: Batch, limits: AbstractSequence[int], known: AbstractSequence[_Features]
    ) -> tuple[Draft, bool]:
        """Chains that are drawn token by token."""
        logits = self._spread(self._runner.read(cache, *self._new(cache, batch, limits, known)))
        most = torch.tensor(limits)

        def score(token: Tensor, step: int) -> Tensor:
            counts = (most > step + 1).to(torch.int64)
            scores = self._runner.score(cache, token, torch.full_like(token, step - 1), counts)
            return self._spread(scores[:, 0])[:, : batch.vocab_size]

        drawn = draw_chains(batch, limits, logits[:, : batch.vocab_size], score)
        cache.forget()
        return drawn

    def _spread(self, logits: Tensor) -> Tensor:
        """Logits ``[…, Vd]`` of the draft vocabulary as logits ``[…, V]`` of the target's."""
        if self._tokens is None:
            return logits
        spread = logits.new_full((*logits.shape[:-1], self._head.config.vocab_size), -torch.inf)
        return spread.index_copy_(-1, self._tokens.to(logits.device), logits)

    def _spread_chains(self, chains: Chains) -> Chains:
        """Chains in the draft vocabulary as chains in the target's."""
        if self._tokens is None:
            return chains
        probs = chains.probs
        if probs is not None:
            spread = probs.new_zeros((*probs.shape[:-1], self._head.config.vocab_size))
            probs = spread.index_copy_(-1, self._tokens.to(probs.device), probs)
        return Chains([[self._numbers[number] for number in chain] for chain in chains.tokens], probs)

    def _warn_of_bad_scores(self) -> None:
        warnings.warn(
            "the EAGLE-3 head gave logits with NaN or infinity; such drafts are cut short: load the target with "
            "dtype='float32', or check the head's weights",
            RuntimeWarning,
            stacklevel=3,
        )

    def _recall(self, batch: Batch) -> _BatchCache:
        """The batch's cache, its rows those of the batch: rows that left are dropped, new ones are empty."""
        known = [found for sequence in batch.sequences if (found := self._caches.get(sequence)) is not None]
        state = known[0] if known else self._caches[batch.sequences[0]]
        ids = [sequence.id for sequence in batch.sequences]
        if ids != state.rows:
            rows = {identity: row for row, identity in enumerate(state.rows)}
            state.cache.select([rows.get(identity, -1) for identity in ids])
            state.rows = ids
            for sequence in batch.sequences:
                self._caches[sequence] = state
        return state


def _check(head: Eagle3Head, name: str, target: LanguageModel) -> None:
    """Check that the target has the layers and the embeddings that a head needs.

    Raises:
        ModelError: it has not.
    """
    config = head.config
    cure = "give a head that was trained on this very model, or train one: foretoken train eagle3"
    # The last layer's output comes normalised, which is not what heads are trained on.
    wrong = [layer for layer in config.target_layers if not 0 <= layer < target.num_layers]
    if wrong:
        raise ModelError(
            f"{name} wants the output of layer {wrong[0]} of its target, and of this one, which has "
            f"{target.num_layers} layers, it could get those of 0 to {target.num_layers - 1}: {cure}"
        )
    if not config.own_embeddings and config.hidden_size != target.hidden_size:
        raise ModelError(
            f"{name} is {config.hidden_size:,} wide and has no embeddings of its own, and the target's are "
            f"{target.hidden_size:,} wide: {cure}"
        )
