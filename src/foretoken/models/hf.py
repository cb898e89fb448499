"""HFModel: any decoder-only transformers model whose layers are attention, scored through a `SlotCache`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from foretoken.errors import ModelError
from foretoken.models import attention, traits
from foretoken.models.base import Cache, Keep, Scores
from foretoken.models.cache import SlotCache
from foretoken.models.masks import LOCAL, MaskBuilder, Pattern, patterns_of
from foretoken.models.slots import Append, slots_bytes


class HFModel(traits.Wrapped):
    """A `LanguageModel` over a transformers causal language model.

    Args:
        module: the model, on its device, in evaluation mode.
        tokenizer: its tokenizer, if it has one.
        name: what messages call it.
        patterns: which positions its layers see; None reads the config.
    """

    supports_early_exit = True

    def __init__(
        self,
        module: Any,
        tokenizer: Any | None = None,
        name: str | None = None,
        patterns: dict[str, Pattern] | Pattern | None = None,
    ) -> None:
        config = traits.text_config(module)
        found = patterns if patterns is not None else patterns_of(config)
        if found is None:
            raise NotImplementedError(f"layers that are not attention: {sorted(set(config.layer_types))}")
        if not {"position_ids", "past_key_values", "attention_mask"} <= traits.accepts(module):
            raise NotImplementedError("its forward takes no position ids")
        super().__init__(module, tokenizer, name)
        self.shares_prefixes = not traits.turns_by_length(config)
        self._patterns = found
        self._masks = MaskBuilder(self.dtype, self.device)
        self._local = _local_layers(module) if isinstance(found, dict) and LOCAL in found else None
        self._output = traits.OutputLayer(module)
        # Eager attention isn't causal of its own: it has no mask but the one that it is given.
        self._plain_causal = getattr(config, "_attn_implementation", None) in ("sdpa", attention.NAME)

    def open(self, batch_size: int) -> Cache:
        """A new cache with `batch_size` empty rows."""
        return SlotCache(batch_size)

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """See `LanguageModel.cache_bytes`."""
        return slots_bytes(lengths, self._slot_bytes)

    def exit_after(self, layers: int) -> HFModel:
        """See `LanguageModel.exit_after`."""
        name = f"{self.name} after {layers} of {self.num_layers} layers"
        early = type(self)(traits.first_layers(self.module, layers), self.tokenizer, name, self._patterns)
        early.num_layers = layers
        cache = early.open(1)
        one = torch.zeros((1, 1), dtype=torch.int64)
        try:
            early.forward(one, one - 1, one[0] + 1, cache)
        except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(
                f"{self.name} ({type(self.module).__name__}) can't be left early ({type(error).__name__}: {error}): "
                "use a drafter of another kind"
            ) from error
        run = early.layers_in(cache)
        if run != layers:
            raise ModelError(
                f"{self.name} ({type(self.module).__name__}) can't be left after {layers} layers: {run} "
                "were run; use a drafter of another kind"
            )
        return early

    def layers_in(self, cache: Cache) -> int:
        """The number of layers that have written to a cache."""
        assert isinstance(cache, SlotCache)
        return len(cache.layers)

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        counts: Tensor,
        cache: Cache,
        keep: Keep = "all",
        hidden_layers: Sequence[int] = (),
    ) -> Scores:
        """See `LanguageModel.forward`. Parents and counts on the CPU spare a synchronisation with the device."""
        assert isinstance(cache, SlotCache)
        return self._score(tokens, parents, counts, cache, keep, hidden_layers, self.max_length)

    def _score(
        self,
        tokens: Tensor,
        parents: Tensor,
        counts: Tensor,
        slots: SlotCache,
        keep: Keep,
        hidden_layers: Sequence[int],
        limit: int,
        last: int | None = None,
    ) -> Scores:
        """One pass over slots.

        Args:
            tokens: see `forward`, as all that is not named here.
            limit: positions are below it.
            last: position of each row's last column, which is padding; None for the position that follows.
        """
        width = tokens.shape[1]
        with torch.inference_mode():
            plan = slots.begin(parents, counts, width)
            positions = self._masks.positions(plan, limit)
            if last is not None:
                positions = positions.clone()
                positions[:, -1] = last
            arguments: dict[str, Any] = {
                "input_ids": tokens.to(self.device),
                "position_ids": positions,
                "past_key_values": slots,
                "use_cache": True,
            }
            if hidden_layers:
                arguments["output_hidden_states"] = True
            with self._hiding(plan) as mask:
                output, logits = self._output.score({**arguments, "attention_mask": mask}, keep, counts, width)
            hidden = traits.hidden_states(output) if hidden_layers else ()
            return Scores(logits, tuple(hidden[layer] for layer in hidden_layers))

    def _hiding(self, plan: Append) -> AbstractContextManager[Tensor | dict[str, Tensor | None] | None]:
        """What the model is called with, while this is entered, as its attention mask."""
        if isinstance(self._patterns, Pattern):
            return nullcontext(self._masks.mask(plan, self._patterns, self._plain_causal))
        masks = {
            layer_type: self._masks.mask(plan, pattern, self._plain_causal)
            for layer_type, pattern in self._patterns.items()
        }
        return nullcontext(masks) if self._local is None else self._local.hiding(masks, plan.end)


def _local_layers(module: Any) -> Any:
    from foretoken.models.local_layers import LocalLayers  # with modelling code that other models do without

    return traits.hooks_of(module, LocalLayers)
