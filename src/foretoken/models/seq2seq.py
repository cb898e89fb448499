"""Encoder-decoder transformers models (T5 and BART families): each row has a source, which is encoded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from foretoken.errors import PromptError
from foretoken.models import traits
from foretoken.models.base import Cache, Keep, Scores
from foretoken.models.cache import Append, SlotCache
from foretoken.models.masks import MaskBuilder, Pattern, patterns_of
from foretoken.models.recompute import RecomputeModel, TokenCache

Encode = Callable[[Sequence[int]], Tensor]


class Sources:
    """The encoder's outputs of a batch of rows, and those outputs padded to one tensor.

    Args:
        encode: gives the encoder's output ``[S, H]`` for a source.
        blank: ``[1, H]``, what rows without a source attend to.
    """

    def __init__(self, batch_size: int, encode: Encode, blank: Tensor) -> None:
        self._encode, self._blank = encode, blank
        self._rows = [blank] * batch_size
        self._padded: tuple[Tensor, Tensor] | None = None

    def encode(self, row: int, source: Sequence[int]) -> None:
        """Run the encoder for a row."""
        self._rows[row] = self._encode(source)
        self._padded = None

    def select(self, rows: Sequence[int]) -> None:
        """Rearrange rows as `Cache.select` does."""
        self._rows = [self._rows[row] if row >= 0 else self._blank for row in rows]
        self._padded = None

    def padded(self) -> tuple[Tensor, Tensor]:
        """Encoder outputs ``[B, S, H]`` and the mask ``[B, S]`` int64 of their used places."""
        if self._padded is None:
            self._padded = pad_sources(self._rows)
        return self._padded

    def rows(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """`padded` for some of the rows, named in any order."""
        return pad_sources([self._rows[row] for row in rows])


def pad_sources(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Encoder outputs ``[S_b, H]`` as one ``[B, S, H]``, and the mask ``[B, S]`` of used places."""
    used = [row.new_ones(row.shape[0], dtype=torch.int64) for row in rows]
    return pad_sequence(rows, batch_first=True), pad_sequence(used, batch_first=True)


class Encoder:
    """Runs a model's encoder on one source after another.

    Args:
        module: the whole model.
        name: what messages call it.
        limit: most tokens of a source.
    """

    def __init__(self, module: Any, name: str, limit: int, device: torch.device) -> None:
        self._encoder = module.get_encoder()
        self._name, self._limit, self._device = name, limit, device

    def __call__(self, source: Sequence[int]) -> Tensor:
        """The encoder's output ``[S, H]``.

        Raises:
            PromptError: the source is empty or too long.
        """
        if not source:
            raise PromptError(f"the source is empty: {self._name} needs at least one token to read")
        if len(source) > self._limit:
            raise PromptError(
                f"the source has {len(source):,} tokens, the encoder of {self._name} takes {self._limit:,}: shorten it"
            )
        ids = torch.tensor([list(source)], device=self._device)
        with torch.inference_mode():
            output: Tensor = self._encoder(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        return output[0]

    def blank(self, dtype: torch.dtype, width: int) -> Tensor:
        """``[1, H]`` zeros."""
        return torch.zeros((1, width), dtype=dtype, device=self._device)


class Seq2SeqCache:
    """A `SlotCache` for the decoder's own keys and values; those of the source beside it."""

    def __init__(self, slots: SlotCache, sources: Sources) -> None:
        self.slots, self.sources = slots, sources
        self.past = EncoderDecoderCache(slots, DynamicCache())

    @property
    def lengths(self) -> Tensor:
        """``[B]`` int64 on the CPU: committed tokens of each row."""
        return self.slots.lengths

    def commit(self, path: Tensor, counts: Tensor) -> None:
        """See `foretoken.models.Cache`."""
        self.slots.commit(path, counts)

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        """See `foretoken.models.Cache`."""
        rows = list(rows)
        if rows == list(range(self.slots.lengths.shape[0])):
            return
        self.slots.select(rows)
        before = self.sources.padded()[0].shape[1]
        self.sources.select(rows)
        if min(rows, default=-1) < 0 or self.sources.padded()[0].shape[1] != before:
            self._forget_source()
            return
        for layer in self.past.cross_attention_cache.layers:
            if layer.keys is not None:
                chosen = torch.tensor(rows, device=layer.keys.device)
                layer.keys, layer.values = layer.keys[chosen], layer.values[chosen]

    def encode(self, row: int, source: Sequence[int]) -> None:
        """See `foretoken.models.Cache`."""
        self.sources.encode(row, source)
        self._forget_source()

    def _forget_source(self) -> None:
        """Let the next pass compute the source's keys and values anew."""
        self.past.cross_attention_cache = DynamicCache()
        self.past.is_updated = {}


class Seq2SeqModel(traits.Wrapped):
    """A `LanguageModel` over an encoder-decoder model. The decoder's tokens begin with `decoder_start_token_id`.

    Such decoders number positions by one offset for the whole batch. Where rows or branches need their own, the
    relative biases (T5) or position embeddings (BART) that the model computes are replaced on the way.
    """

    def __init__(self, module: Any, tokenizer: Any | None = None, name: str | None = None) -> None:
        super().__init__(module, tokenizer, name)
        config = traits.text_config(module)
        self.decoder_start_token_id = traits.decoder_start_token_id(module)
        found = patterns_of(config)
        if found is None:
            raise NotImplementedError(f"layers that are not attention: {sorted(set(config.layer_types))}")
        self._patterns = found
        self._masks = MaskBuilder(self.dtype, self.device)
        self._rows = traits.OutputRows(module)
        self._encoder = Encoder(module, self.name, self.max_length, self.device)
        self._positions = OwnPositions.of(module)
        self._takes_positions = "decoder_position_ids" in traits.accepts(module)

    def open(self, batch_size: int) -> Cache:
        """A new cache with `batch_size` empty rows."""
        blank = self._encoder.blank(self.dtype, traits.text_config(self.module, decoder=False).hidden_size)
        return Seq2SeqCache(SlotCache(batch_size), Sources(batch_size, self._encoder, blank))

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        counts: Tensor,
        cache: Cache,
        keep: Keep = "all",
        hidden_layers: Sequence[int] = (),
    ) -> Scores:
        """See `LanguageModel.forward`."""
        assert isinstance(cache, Seq2SeqCache)
        width = tokens.shape[1]
        with torch.inference_mode():
            plan = cache.slots.begin(parents, counts, width)
            states, used = cache.sources.padded()
            arguments: dict[str, Any] = {
                "encoder_outputs": BaseModelOutput(last_hidden_state=states),
                "attention_mask": used,
                "decoder_input_ids": tokens.to(self.device),
                "decoder_attention_mask": self._attention_mask(plan),
                "past_key_values": cache.past,
                "use_cache": True,
            }
            if hidden_layers:
                arguments["output_hidden_states"] = True
            if self._takes_positions:
                arguments["decoder_position_ids"] = self._masks.positions(plan, self.max_length)
            elif not (plan.chain and plan.start is not None and plan.end <= self.max_length):
                queries = self._masks.positions(plan, self.max_length)
                self._positions.use(queries, self._masks.key_positions(plan))
            hook = None
            if keep == "none":
                hook = self._rows.none()
            elif keep == "last" and width > 1:
                hook = self._rows.only((counts - 1).clamp(min=0)[:, None])
            try:
                output = self.module(**arguments)
            finally:
                self._positions.clear()
                if hook is not None:
                    hook.remove()
            kept = traits.hidden_states(output)
            return Scores(None if keep == "none" else output.logits, tuple(kept[layer] for layer in hidden_layers))

    def _attention_mask(self, plan: Append) -> Tensor | dict[str, Tensor | None] | None:
        if isinstance(self._patterns, Pattern):
            return self._masks.mask(plan, self._patterns, plain=False)
        return {layer: self._masks.mask(plan, pattern, plain=False) for layer, pattern in self._patterns.items()}


class OwnPositions:
    """Gives a decoder positions of its own for each row and branch, while they are set.

    Args:
        module: the whole model; its decoder's position modules get hooks, which do nothing while nothing is set.
    """

    def __init__(self, module: Any) -> None:
        self._queries: Tensor | None = None
        self._keys: Tensor | None = None
        decoder = module.get_decoder()
        for part in decoder.modules():
            if getattr(part, "has_relative_attention_bias", False) and hasattr(part, "compute_bias"):
                part.compute_bias = self._relative_bias(part.compute_bias)
        embedding = getattr(decoder, "embed_positions", None)
        if isinstance(embedding, nn.Module):
            embedding.register_forward_pre_hook(self._flatten, with_kwargs=True)
            embedding.register_forward_hook(self._unflatten, with_kwargs=True)

    @classmethod
    def of(cls, module: Any) -> OwnPositions:
        """The one that a model has; it must not be hooked twice."""
        if not hasattr(module, "_foretoken_positions"):
            module._foretoken_positions = cls(module)
        positions: OwnPositions = module._foretoken_positions
        return positions

    def use(self, queries: Tensor, keys: Tensor) -> None:
        """Set positions: of the new nodes ``[B, N]``, and of what each slot holds ``[B, K]``."""
        self._queries, self._keys = queries, keys

    def clear(self) -> None:
        """Leave the model alone."""
        self._queries = self._keys = None

    def _relative_bias(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def compute_bias(query_length: int, key_length: int, *args: Any, **kwargs: Any) -> Tensor:
            if self._queries is None or self._keys is None:
                return original(query_length, key_length, *args, **kwargs)
            # The bias depends on the distance alone; one query after all keys gives it for every distance.
            kwargs["past_seen_tokens"] = key_length - 1
            by_distance = original(1, key_length, *args, **kwargs)[0, :, 0].flip(-1)  # [heads, K]
            distance = (self._queries[:, :, None] - self._keys[:, None]).clamp_(0, key_length - 1)
            return by_distance.t()[distance].permute(0, 3, 1, 2)

        return compute_bias

    def _flatten(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._queries is None:
            return None
        if "position_ids" not in kwargs:
            raise NotImplementedError("position embeddings that take no position ids")
        return args, {**kwargs, "position_ids": self._queries.flatten()}

    def _unflatten(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
        return None if self._queries is None else output.reshape(*self._queries.shape, -1)


class SourceTokenCache(TokenCache):
    """A `TokenCache` whose rows have sources."""

    def __init__(self, batch_size: int, sources: Sources) -> None:
        super().__init__(batch_size)
        self.sources = sources

    def select(self, rows: Sequence[int]) -> None:
        """See `foretoken.models.Cache`."""
        super().select(rows)
        self.sources.select(rows)

    def encode(self, row: int, source: Sequence[int]) -> None:
        """See `foretoken.models.Cache`."""
        self.sources.encode(row, source)


class RecomputeSeq2SeqModel(RecomputeModel):
    """A `LanguageModel` over an encoder-decoder model whose decoder reads each row's whole text in every pass."""

    def __init__(self, module: Any, tokenizer: Any | None = None, name: str | None = None) -> None:
        super().__init__(module, tokenizer, name)
        self.decoder_start_token_id = traits.decoder_start_token_id(module)
        self._encoder = Encoder(module, self.name, self.max_length, self.device)

    def open(self, batch_size: int) -> Cache:
        """A new cache with `batch_size` empty rows."""
        blank = self._encoder.blank(self.dtype, traits.text_config(self.module, decoder=False).hidden_size)
        return SourceTokenCache(batch_size, Sources(batch_size, self._encoder, blank))

    def _arguments(self, input_ids: Tensor, rows: list[int], cache: TokenCache) -> dict[str, Any]:
        assert isinstance(cache, SourceTokenCache)
        states, used = cache.sources.rows(rows)
        return {
            "encoder_outputs": BaseModelOutput(last_hidden_state=states),
            "attention_mask": used,
            "decoder_input_ids": input_ids,
            "decoder_attention_mask": torch.ones_like(input_ids),
            "use_cache": False,
        }
