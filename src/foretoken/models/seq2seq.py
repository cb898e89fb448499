"""Encoder-decoder transformers models (T5 and BART families): each row has a source, which is encoded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from foretoken.errors import PromptError
from foretoken.models import traits
from foretoken.models.base import Cache, Keep, Scores
from foretoken.models.cache import SlotCache
from foretoken.models.masks import MaskBuilder, Pattern, patterns_of
from foretoken.models.recompute import RecomputeModel, TokenCache
from foretoken.models.slots import Append, slots_bytes


class Sources:
    """The encoder's outputs of a batch of rows, and those outputs padded to one tensor.

    Args:
        encoder: reads the sources. Rows without one attend to its blank.
    """

    def __init__(self, batch_size: int, encoder: Encoder) -> None:
        self._encoder, self._blank = encoder, encoder.blank()
        self._rows = [self._blank] * batch_size
        self._padded: tuple[Tensor, Tensor] | None = None

    def encode(self, row: int, source: Sequence[int]) -> None:
        """Run the encoder for a row."""
        self._rows[row] = self._encoder(source)
        self._padded = None

    def select(self, rows: Sequence[int]) -> None:
        """Rearrange rows as `Cache.select` does."""
        self._rows = [self._rows[row] if row >= 0 else self._blank for row in rows]
        self._padded = None

    def arguments(self, rows: Sequence[int] | None = None) -> dict[str, Any]:
        """Keyword arguments of the model for the sources of some rows, or of all of them."""
        if rows is not None:
            states, used = pad_sources([self._rows[row] for row in rows])
        else:
            states, used = self.padded()
        return {"encoder_outputs": self._encoder.output_type(last_hidden_state=states), "attention_mask": used}

    def padded(self) -> tuple[Tensor, Tensor]:
        """Encoder outputs ``[B, S, H]`` and the mask ``[B, S]`` int64, 1 where there is a token."""
        if self._padded is None:
            self._padded = pad_sources(self._rows)
        return self._padded


def pad_sources(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Encoder outputs ``[S_b, H]`` as one ``[B, S, H]``, and the mask ``[B, S]``, 1 where there is a token."""
    if not rows:
        return torch.zeros((0, 0, 0)), torch.zeros((0, 0), dtype=torch.int64)
    used = [row.new_ones(row.shape[0], dtype=torch.int64) for row in rows]
    return pad_sequence(rows, batch_first=True), pad_sequence(used, batch_first=True)


class Encoder:
    """Runs a model's encoder on one source after another; rows with equal sources share the encoder's output.

    Args:
        module: the whole model.
        name: its name in messages.
        limit: most tokens of a source.
    """

    def __init__(self, module: Any, name: str, limit: int, device: torch.device) -> None:
        self._encoder = module.get_encoder()
        self._name, self._limit, self._device = name, limit, device
        self._blank: Tensor | None = None
        # Weak: outputs without a running row are dropped, so that weights may change between requests.
        self._outputs = WeakValueDictionary[tuple[int, ...], Tensor]()
        self.output_type: type[Any] = BaseModelOutput

    def __call__(self, source: Sequence[int]) -> Tensor:
        """The encoder's output ``[S, H]``.

        Raises:
            PromptError: the source is empty or too long.
        """
        if not source:
            raise PromptError(f"the source is empty: {self._name} needs at least one token")
        if len(source) > self._limit:
            raise PromptError(
                f"the source has {len(source):,} tokens, the encoder of {self._name} takes {self._limit:,}: shorten it"
            )
        key = tuple(source)
        output = self._outputs.get(key)
        if output is None:
            output = self._outputs[key] = self._encode(key)
        return output

    def _encode(self, source: tuple[int, ...]) -> Tensor:
        ids = torch.tensor([source], device=self._device)
        with torch.inference_mode():
            output = self._encoder(input_ids=ids, attention_mask=torch.ones_like(ids))
        self.output_type = type(output)  # Decoders of some families look for fields that others lack.
        states: Tensor = output.last_hidden_state[0]
        return states

    def blank(self) -> Tensor:
        """``[1, H]``, the encoder output of rows without a source: cross attention needs at least one position."""
        if self._blank is None:
            self._blank = self._encode((0,))
        return self._blank


class Seq2SeqCache(Cache):
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
    def select(self, rows: Sequence[int], keep: Sequence[int | None] | None = None) -> None:
        """See `foretoken.models.Cache`."""
        rows = list(rows)
        same = rows == list(range(self.slots.lengths.shape[0]))
        self.slots.select(rows, keep)
        if same:
            return
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
        patterns = patterns_of(config)
        if patterns is None:
            raise NotImplementedError(f"layers that are not attention: {sorted(set(config.layer_types))}")
        self._patterns = patterns
        self._masks = MaskBuilder(self.dtype, self.device)
        self._output = traits.OutputLayer(module)
        self._encoder = Encoder(module, self.name, self.max_length, self.device)
        self._positions = traits.hooks_of(module, OwnPositions)
        self._takes_positions = "decoder_position_ids" in traits.accepts(module)

    def open(self, batch_size: int) -> Cache:
        """A new cache with `batch_size` empty rows."""
        return Seq2SeqCache(SlotCache(batch_size), Sources(batch_size, self._encoder))

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """See `LanguageModel.cache_bytes`."""
        # Cross attention's keys and values are as large as the decoder's own, and the encoder's outputs come on top.
        width = getattr(traits.text_config(self.module), "d_model", 0) * self.dtype.itemsize
        return slots_bytes(lengths, 2 * self._slot_bytes + 2 * width)

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
            arguments: dict[str, Any] = {
                **cache.sources.arguments(),
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
            try:
                output, logits = self._output.score(arguments, keep, counts, width)
            finally:
                self._positions.clear()
            hidden = traits.hidden_states(output) if hidden_layers else ()
            return Scores(logits, tuple(hidden[layer] for layer in hidden_layers))

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
        self._limit = traits.max_length(traits.text_config(module))
        self._token = 0 if module.config.pad_token_id != 0 else 1  # Some families give padding no position.
        self._table: Tensor | None = None
        self._asked = 0
        decoder = module.get_decoder()
        for part in decoder.modules():
            if getattr(part, "has_relative_attention_bias", False) and hasattr(part, "compute_bias"):
                part.compute_bias = self._relative_bias(part.compute_bias)
        embedding = getattr(decoder, "embed_positions", None)
        if isinstance(embedding, nn.Module):
            embedding.register_forward_pre_hook(self._ask_all, with_kwargs=True)
            embedding.register_forward_hook(self._pick_own, with_kwargs=True)

    def use(self, queries: Tensor, keys: Tensor) -> None:
        """Set positions: of the new nodes ``[B, N]``, and of each slot's token ``[B, K]``."""
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

    def _ask_all(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Have the module embed positions 0, 1, 2, … of one row, or one position if all are known already."""
        if self._queries is None or self._keys is None:
            return None
        wanted = min(self._keys.shape[1], self._limit)
        if self._table is None or self._table.shape[0] < wanted:
            self._table, self._asked = None, min(2 * wanted, self._limit)
        else:
            self._asked = 1
        steps = torch.arange(self._asked, device=self._queries.device)

        def replaced(value: Any) -> Any:
            if isinstance(value, torch.Size):
                return torch.Size((1, self._asked))
            if isinstance(value, Tensor):  # Token ids, of which only the shape and the padding matter.
                return torch.full_like(steps, self._token)[None] if value.dtype == torch.int64 else None
            return 0 if isinstance(value, int) else value

        new = {name: replaced(value) for name, value in kwargs.items()}
        if new.get("position_ids") is not None:
            new["position_ids"] = steps
        return tuple(map(replaced, args)), new

    def _pick_own(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
        if self._queries is None:
            return None
        if self._table is None:
            self._table = output.reshape(self._asked, -1)
        return self._table[self._queries]


class SourceTokenCache(TokenCache):
    """A `TokenCache` whose rows have sources."""

    def __init__(self, batch_size: int, sources: Sources) -> None:
        super().__init__(batch_size)
        self.sources = sources

    def select(self, rows: Sequence[int], keep: Sequence[int | None] | None = None) -> None:
        """See `foretoken.models.Cache`."""
        super().select(rows, keep)
        self.sources.select(rows)

    def encode(self, row: int, source: Sequence[int]) -> None:
        """See `foretoken.models.Cache`."""
        self.sources.encode(row, source)


class RecomputeSeq2SeqModel(RecomputeModel):
    """A `LanguageModel` over an encoder-decoder model whose decoder recomputes each row's sequence in every pass."""

    def __init__(self, module: Any, tokenizer: Any | None = None, name: str | None = None) -> None:
        super().__init__(module, tokenizer, name)
        self.decoder_start_token_id = traits.decoder_start_token_id(module)
        self._encoder = Encoder(module, self.name, self.max_length, self.device)

    def open(self, batch_size: int) -> Cache:
        """A new cache with `batch_size` empty rows."""
        return SourceTokenCache(batch_size, Sources(batch_size, self._encoder))

    def _arguments(self, input_ids: Tensor, rows: list[int], cache: TokenCache) -> dict[str, Any]:
        assert isinstance(cache, SourceTokenCache)
        return {
            **cache.sources.arguments(rows),
            "decoder_input_ids": input_ids,
            "decoder_attention_mask": torch.ones_like(input_ids),
            "use_cache": False,
        }
