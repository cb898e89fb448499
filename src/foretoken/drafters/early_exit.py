"""Early exit: the target's own first layers and output layer draft, over the target's own keys and values."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
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

    What the target has read of the text serves the drafter as it is: nothing is read twice, and no cache is added. The
    layers' keys and values of drafted tokens go to the target's cache too, until its pass over the draft writes them
    anew, with those of all layers. Tokens are drawn and chosen as `DraftModel` does it.

    How often the drafts are right depends on the target: layers that were trained to be left early (LayerSkip's
    models) draft well, those of most other models badly.

    Args:
        target: the loaded target, the very object that the engine gets. It runs on the native runner, or on the
            transformers one where its layers can be told apart; encoder-decoder models can't be left early.
        layers: how many of its layers draft; None for about a third.
        tree: see `DraftModel`.

    Raises:
        ParameterError: the target can't be left early, or has no more than so many layers.
    """

    name = "early-exit"

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
        super().__init__(_EarlyLayers(early), tree)

    def check_target(self, target: LanguageModel) -> None:
        """See to it that the layers are the target's.

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
        return DraftCache(_TargetCacheView(batch.cache, batch.places), [sequence.id for sequence in batch.sequences])


class _TargetCacheView(Cache):
    """Rows of the target's cache as a cache of the drafter's, in which nothing is committed for good.

    Args:
        cache: the target's, without tentative nodes.
        places: its rows that are the drafter's.

    Attributes:
        read: ``[B]`` int64, tentative nodes of each row that count as committed here: the first ones, a chain.
    """

    def __init__(self, cache: Cache, places: AbstractSequence[int]) -> None:
        self.cache = cache
        self.places = list(places)
        self.read = torch.zeros(len(self.places), dtype=torch.int64)

    @property
    def lengths(self) -> Tensor:
        """See `Cache`."""
        return self.cache.lengths[self.places] + self.read

    def commit(self, path: Tensor, counts: Tensor) -> None:
        """Let the first tentative nodes, a chain, count as text."""
        self.read = self.read + counts.cpu()

    def select(self, rows: AbstractSequence[int], keep: AbstractSequence[int | None] | None = None) -> None:
        """The rows are the target's."""
        raise TypeError("rows of the target's cache are the target's to select")


class _EarlyLayers(LanguageModel):
    """The first layers as a model of their own, whose caches are views of the target's.

    Args:
        early: the layers.
    """

    def __init__(self, early: LanguageModel) -> None:
        self._early = early
        self.name, self.tokenizer, self.eos_token_ids = early.name, early.tokenizer, early.eos_token_ids
        self.vocab_size, self.max_length = early.vocab_size, early.max_length
        self.device, self.dtype = early.device, early.dtype
        self.supports_trees, self.shares_prefixes = early.supports_trees, early.shares_prefixes
        self.own_threads, self.quantize, self.backend_name = early.own_threads, early.quantize, early.backend_name

    @property
    def drafts_chains(self) -> bool:
        """See `LanguageModel.drafts_chains`."""
        return self._early.drafts_chains

    def warm_up(self) -> None:
        """See `LanguageModel.warm_up`."""
        self._early.warm_up()

    def open(self, batch_size: int) -> Cache:
        """There is no cache but the target's."""
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
        read = cache.read.to(parents.device)[:, None]
        parents = torch.where(parents < 0, read - 1, parents + read)
        rows = len(cache.cache.lengths)
        if len(cache.places) == rows:
            return self._early.forward(tokens, parents, counts, cache.cache, keep, hidden_layers)
        tokens, parents, counts = (placed(values, cache.places, rows) for values in (tokens, parents, counts))
        scores = self._early.forward(tokens, parents, counts, cache.cache, keep, hidden_layers)
        logits = None if scores.logits is None else scores.logits[cache.places]
        return Scores(logits, tuple(layer[cache.places] for layer in scores.hidden))

    def chain(
        self, rows: AbstractSequence[AbstractSequence[int]], steps: int, cache: Cache, draws: Draws | None = None
    ) -> Chains:
        """See `LanguageModel.chain`; no node is left behind."""
        assert isinstance(cache, _TargetCacheView)
        total = len(cache.cache.lengths)
        spread: list[AbstractSequence[int]] = [()] * total
        for place, tokens in zip(cache.places, rows, strict=True):
            spread[place] = tokens
        draws = None if draws is None else draws.among(cache.places, total)
        return self._early.chain(spread, steps, cache.cache, draws).of(cache.places)
