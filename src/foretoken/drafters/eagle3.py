"""An EAGLE-3 head that drafts from the target's hidden states."""

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
    """What the target has told about one sequence.

    Attributes:
        read: tokens whose features came, the first ones of the text.
        features: of the last ones of them, fused, ``[n, H]`` each: those that the head has not read.
    """

    read: int = 0
    features: list[Tensor] = field(default_factory=list)

    @property
    def held(self) -> int:
        """Tokens that the head has read the features of."""
        return self.read - sum(map(len, self.features))


@dataclass
class _BatchCache:
    """The head's cache for sequences that are decoded together, and whose rows are whose."""

    cache: HeadCache
    rows: list[int]


class Eagle3(Drafter):
    """Drafts with a head on the target's features (EAGLE-3, Li et al. 2025, arXiv 2503.01840).

    The features of a text come as the target reads it; they are fused at once, and read by the head when it is next
    asked for a draft. From the last of them on it drafts by itself, each token from its own output for the one before.
    A token is drawn from the head's law under the request's own sampling parameters, with probability 0 for tokens that
    a reduced draft vocabulary lacks, and that very law is what the draft carries as q.

    A sequence is drafted for in one batch at a time: what the head has read of it stays with the batch that it was
    last part of, so that a row which leaves a batch and comes back is no longer drafted for.

    Args:
        head: a head, or the folder of one, in a layout that `foretoken.heads.load_eagle3` reads.
        target: the model to draft for.
        tree: see `DraftModel`.
        backend: "openvino", "torch", or "auto" for the fastest that can be used.
        quantize: how the head's weights are rounded, on OpenVINO: "int8", "w8a8", None, or "auto" for "w8a8" where it
            is faster. What is drawn from is the rounded head's law, so no rounding changes the text's.

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
        """How many numbers the head is made of."""
        return sum(weight.numel() for weight in self._head.parameters())

    def observe_hidden(
        self,
        sequences: AbstractSequence[Sequence],
        starts: AbstractSequence[int],
        counts: AbstractSequence[int],
        hidden: AbstractSequence[Tensor],
    ) -> None:
        """Fuse the features, and keep them until there is something to draft."""
        if not any(counts):
            return
        weight = self._head.fc.weight
        with torch.inference_mode():
            fused = self._head.fuse(torch.cat(list(hidden), dim=-1).to(weight))
        for row, (sequence, start, count) in enumerate(zip(sequences, starts, counts, strict=True)):
            text = self._features[sequence]
            if count and start == text.read:
                part = fused[row, :count]
                text.features.append(part.clone() if len(counts) > 1 else part)
                text.read += count

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """A draft of up to ``limits[b]`` tokens in row b; none where the target has not read the text's beginning."""
        memory = self._recall(batch)
        held = memory.cache.lengths
        texts = [self._features[sequence] for sequence in batch.sequences]
        limits = [
            limit if 0 < text.read == len(sequence.tokens) - 1 and text.held == slots else 0
            for limit, sequence, text, slots in zip(limits, batch.sequences, texts, held, strict=True)
        ]
        if not any(limits):
            return Draft.empty(len(limits), batch.device)
        if self.trees:
            return self._trees(memory.cache, batch, limits, texts)
        whole = self._runner.drafts_chains

        def one_call(limits: AbstractSequence[int], draws: Draws | None) -> Chains:
            tokens, states = self._new(memory.cache, batch, limits, texts)
            return self._spread_chains(self._runner.chain(memory.cache, tokens, states, max(limits), draws))

        def steps(limits: AbstractSequence[int]) -> tuple[Draft, bool]:
            return self._steps(memory.cache, batch, limits, texts)

        with torch.inference_mode():
            draft, sound = draft_chains(batch, limits, one_call if whole else None, steps)
        if not sound:
            self._warn_of_bad_scores()
        return draft

    def _trees(
        self, cache: HeadCache, batch: Batch, limits: AbstractSequence[int], texts: AbstractSequence[_Features]
    ) -> Draft:
        def score(frontier: Frontier) -> Tensor:
            return self._spread(self._runner.score(cache, frontier.tokens, frontier.parents, frontier.counts))

        with torch.inference_mode():
            logits = self._spread(self._runner.read(cache, *self._new(cache, batch, limits, texts)))
            grown = grow(self.tree, batch, limits, logits, score)
            cache.forget()
        if not grown.sound:
            self._warn_of_bad_scores()
        return grown.draft

    def _new(
        self, cache: HeadCache, batch: Batch, limits: AbstractSequence[int], texts: AbstractSequence[_Features]
    ) -> tuple[list[list[int]], list[Tensor]]:
        """What the head has to read of rows that are drafted for: tokens and features, which are forgotten here."""
        tokens: list[list[int]] = []
        states: list[Tensor] = []
        nothing = self._head.fc.weight.new_zeros((0, self._head.config.hidden_size))
        for limit, sequence, text, slots in zip(limits, batch.sequences, texts, cache.lengths, strict=True):
            new = list(text.features) if limit else []
            tokens.append(sequence.tokens[slots + 1 : text.read + 1] if limit else [])
            states.append(torch.cat(new) if len(new) > 1 else new[0] if new else nothing)
            if limit:
                text.features.clear()
        return tokens, states

    def _steps(
        self, cache: HeadCache, batch: Batch, limits: AbstractSequence[int], texts: AbstractSequence[_Features]
    ) -> tuple[Draft, bool]:
        """Chains that are drawn token by token."""
        logits = self._spread(self._runner.read(cache, *self._new(cache, batch, limits, texts)))
        most = torch.tensor(limits)

        def score(token: Tensor, step: int) -> Tensor:
            counts = (most > step + 1).to(torch.int64)
            scores = self._runner.score(cache, token, torch.full_like(token, step - 1), counts)
            return self._spread(scores[:, 0])[:, : batch.vocab_size]

        drawn = draw_chains(batch, limits, logits[:, : batch.vocab_size], score)
        cache.forget()
        return drawn

    def _spread(self, logits: Tensor) -> Tensor:
        """Scores ``[…, Vd]`` of draft tokens as scores ``[…, V]`` of the target's."""
        if self._tokens is None:
            return logits
        spread = logits.new_full((*logits.shape[:-1], self._head.config.vocab_size), -torch.inf)
        return spread.index_copy_(-1, self._tokens.to(logits.device), logits)

    def _spread_chains(self, chains: Chains) -> Chains:
        """Chains of draft tokens as chains of the target's."""
        if self._tokens is None:
            return chains
        laws = chains.laws
        if laws is not None:
            spread = laws.new_zeros((*laws.shape[:-1], self._head.config.vocab_size))
            laws = spread.index_copy_(-1, self._tokens.to(laws.device), laws)
        return Chains([[self._numbers[number] for number in chain] for chain in chains.tokens], laws)

    def _warn_of_bad_scores(self) -> None:
        warnings.warn(
            "the EAGLE-3 head gave scores with NaN or infinity; such drafts are cut short: load the target with "
            "dtype='float32', or check the head's weights",
            RuntimeWarning,
            stacklevel=3,
        )

    def _recall(self, batch: Batch) -> _BatchCache:
        """What is remembered of the batch, its rows made the batch's: rows that left go, rows that joined are empty."""
        known = [found for sequence in batch.sequences if (found := self._caches.get(sequence)) is not None]
        memory = known[0] if known else self._caches[batch.sequences[0]]
        ids = [sequence.id for sequence in batch.sequences]
        if ids != memory.rows:
            places = {row: place for place, row in enumerate(memory.rows)}
            memory.cache.select([places.get(row, -1) for row in ids])
            memory.rows = ids
            for sequence in batch.sequences:
                self._caches[sequence] = memory
        return memory


def _check(head: Eagle3Head, name: str, target: LanguageModel) -> None:
    """See to it that the target has the layers and the embeddings that a head asks for.

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
