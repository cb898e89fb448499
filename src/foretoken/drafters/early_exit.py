"""Early exit: the target's own first layers and output layer draft, over the target's own keys and values."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.drafters.base import Batch
from foretoken.drafters.draft_model import DraftCache, DraftModel
from foretoken.drafters.tree_plan import Tree
from foretoken.errors import ModelError, ParameterError
from foretoken.models.base import Cache, Keep, LanguageModel, Scores
from foretoken.models.chain import Chains, Draws, placed
from foretoken.models.loading import load
from foretoken.sampling.params import check_integer


class EarlyExit(DraftModel):
    """Drafts with the first layers of the target (Draft & Verify, arXiv 2309.08168; LayerSkip, arXiv 2404.16710).

    The target's KV cache serves the drafter as it is: there is no second prefill, and no second cache. Keys and values
    of draft tokens go to the target's cache, too, and are overwritten by its pass over the draft. Tokens are drawn and
    chosen as in `DraftModel`.

    The acceptance rate depends on the target: layers that were trained for early exit (LayerSkip's models) draft well,
    those of most other models badly.

    Args:
        target: the loaded target, the very object that the engine gets. It runs on the native runner, or on the
            transformers one where its layers can be told apart; encoder-decoder models can't be left early.
        layers: how many of its layers draft; None for about a third.
        tree: see `DraftModel`.

    Raises:
        ParameterError: the target can't be left early, or has no more than so many layers.
    """

    name = "early-exit"
    reads_cache = True

    def __init__(self, target: Any, layers: int | None = None, tree: Tree = "none") -> None:
        model: LanguageModel = load(target)
        if not model.supports_early_exit:
            raise ParameterError(
                f"drafter {self.name!r}: {model.name} ({type(model).__name__}) can't be left early: models of the "
                "native runner can, and decoder-only models on the transformers runner that keep keys and values"
            )
        if model.num_layers < 2:
            raise ParameterError(f"drafter {self.name!r}: {model.name} has one layer, and nothing to leave out")
        chosen = max(1, round(model.num_layers / 3)) if layers is None else layers
        check_integer("layers", chosen, 1, model.num_layers - 1, cure="leave out one of the target's layers at least")
        try:
            early = model.exit_after(chosen)
        except ModelError as error:
            raise ParameterError(f"drafter {self.name!r}: {error}") from error
        self.target: LanguageModel = model
        self.layers = chosen
        super().__init__(_EarlyLayers(early, chosen, model), tree)

    def check_target(self, target: LanguageModel) -> None:
        """Check that the layers are the target's.

        Raises:
            ParameterError: they are another model's.
        """
        if target is not self.target:
            raise ParameterError(
                f"drafter {self.name!r} has layers of {self.target.name}, and the target is another model, "
                f"{target.name}: load the target once, and give the same object to both"
            )

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """A draft of up to ``limits[b]`` tokens in row b."""
        assert batch.cache is not None
        try:
            return super().propose(batch, limits)
        finally:
            rows = len(batch.cache.lengths)
            batch.cache.commit(torch.zeros((rows, 0), dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))

    def _recall(self, batch: Batch) -> DraftCache:
        assert batch.cache is not None
        return DraftCache(_TargetCacheView(batch.cache, batch.slots), [sequence.id for sequence in batch.sequences])


class _TargetCacheView(Cache):
    """A view of rows of the target's cache, whose commits are tentative nodes of that cache.

    Args:
        cache: the target's, without tentative nodes.
        rows: the rows of the view.

    Attributes:
        committed: ``[B]`` int64, leading tentative nodes of each row, a chain, that count as committed in the view.
    """

    def __init__(self, cache: Cache, rows: AbstractSequence[int]) -> None:
        self.cache = cache
        self.rows = list(rows)
        self.committed = torch.zeros(len(self.rows), dtype=torch.int64)

    @property
    def lengths(self) -> Tensor:
        """See `Cache`."""
        return self.cache.lengths[self.rows] + self.committed

    def commit(self, path: Tensor, counts: Tensor) -> None:
        """Let the first tentative nodes, a chain, count as committed."""
        self.committed = self.committed + counts.cpu()

    def select(self, rows: AbstractSequence[int], keep: AbstractSequence[int | None] | None = None) -> None:
        """Refused: the target alone rearranges its rows."""
        raise TypeError("rows of the target's cache are the target's to select")


class _EarlyLayers(LanguageModel):
    """The first layers as a model of its own, whose caches are views of the target's.

    Args:
        early: the layers.
        layers: how many they are.
        target: whose they are.
    """

    def __init__(self, early: LanguageModel, layers: int, target: LanguageModel) -> None:
        self._early = early
        # A pass reads so many of the layers, and all of the output layer.
        output = target.vocab_size * target.hidden_size * (1 if target.quantize else target.dtype.itemsize)
        inner = max(target.weight_bytes - output, 0)
        self.num_layers, self.layer_seconds = layers, target.layer_seconds
        self.weight_bytes = min(output, target.weight_bytes) + inner * layers // target.num_layers
        self.position_share = target.position_share
        self.name, self.tokenizer, self.eos_token_ids = early.name, early.tokenizer, early.eos_token_ids
        self.vocab_size, self.max_length = early.vocab_size, early.max_length
        self.device, self.dtype = early.device, early.dtype
        self.supports_trees, self.shares_prefixes = early.supports_trees, early.shares_prefixes
        self.chain_sizes = early.chain_sizes
        self.own_threads, self.quantize, self.backend_name = early.own_threads, early.quantize, early.backend_name

    @property
    def drafts_chains(self) -> bool:
        """See `LanguageModel.drafts_chains`."""
        return self._early.drafts_chains

    @property
    def turn(self) -> RLock:
        """See `LanguageModel.turn`."""
        return self._early.turn

    def warm_up_chains(self, drawn: bool, *, alone: bool = False) -> None:
        """See `LanguageModel.warm_up_chains`."""
        self._early.warm_up_chains(drawn, alone=alone)

    def open(self, batch_size: int) -> Cache:
        """Refused: the only cache is the target's."""
        raise TypeError("the target's layers work in the target's cache")

    def cache_bytes(self, lengths: AbstractSequence[int]) -> int:
        """Nothing beyond what the target's cache takes."""
        return 0

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        counts: Tensor,
        cache: Cache,
        keep: Keep = "all",
        hidden_layers: AbstractSequence[int] = (),
    ) -> Scores:
        """See `LanguageModel.forward`."""
        assert isinstance(cache, _TargetCacheView)
        committed = cache.committed.to(parents.device)[:, None]
        parents = torch.where(parents < 0, committed - 1, parents + committed)
        rows = len(cache.cache.lengths)
        if len(cache.rows) == rows:
            return self._early.forward(tokens, parents, counts, cache.cache, keep, hidden_layers)
        tokens, parents, counts = (placed(values, cache.rows, rows) for values in (tokens, parents, counts))
        scores = self._early.forward(tokens, parents, counts, cache.cache, keep, hidden_layers)
        logits = None if scores.logits is None else scores.logits[cache.rows]
        return Scores(logits, tuple(layer[cache.rows] for layer in scores.hidden))

    def chain(
        self, rows: AbstractSequence[AbstractSequence[int]], steps: int, cache: Cache, draws: Draws | None = None
    ) -> Chains:
        """See `LanguageModel.chain`; no node is left behind."""
        assert isinstance(cache, _TargetCacheView)
        total = len(cache.cache.lengths)
        spread: list[AbstractSequence[int]] = [()] * total
        for row, tokens in zip(cache.rows, rows, strict=True):
            spread[row] = tokens
        draws = None if draws is None else draws.among(cache.rows, total)
        return self._early.chain(spread, steps, cache.cache, draws).of(cache.rows)
