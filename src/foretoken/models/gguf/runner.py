"""GgufModel: a GGUF file, computed by llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.models.base import Cache, Keep, LanguageModel, Scores
from foretoken.models.gguf.cache import GgufCache
from foretoken.models.gguf.context import Context, ContextOptions
from foretoken.models.gguf.handle import Handle
from foretoken.models.gguf.passes import Pass

FIRST_CELLS = 1024
"""Tokens that a new context has room for; it grows by half where that is not enough."""
_SPARE_CONTEXTS = 2
"""Contexts without a cache that a model keeps for the next one."""


class ContextPool:
    """The contexts of a model.

    Args:
        handle: the loaded model.
        options: how contexts are made.
        rows: most rows of one context.
        rolls_back: the model's state can be cut back.
        vocab_size: logits of a token.
    """

    def __init__(self, handle: Handle, options: ContextOptions, rows: int, rolls_back: bool, vocab_size: int) -> None:
        self._handle, self._vocab_size = handle, vocab_size
        self.options, self.rows, self.sequences, self.rolls_back = options, rows, options.sequences, rolls_back
        self._spare: list[Context] = []

    def take(self, cells: int) -> Context:
        """An empty context with room for so many tokens."""
        for index, context in enumerate(self._spare):
            if context.cells >= cells:
                return self._spare.pop(index)
        while self._spare:
            self._spare.pop().close()
        return Context(self._handle, max(cells, FIRST_CELLS), self.options, self._vocab_size)

    def give_back(self, context: Context) -> None:
        """A context that is no longer used. A large one is freed."""
        if not context.alive:
            return
        if len(self._spare) < _SPARE_CONTEXTS and context.cells <= FIRST_CELLS:
            context.clear()
            self._spare.append(context)
        else:
            context.close()


class GgufModel(LanguageModel):
    """A `LanguageModel`; `foretoken.load` makes one of a GGUF file.

    Hidden states are not to be had: llama.cpp shows those of its last layer alone.

    Args:
        pool: of the model's contexts.
        name: what messages call it.
        vocab_size: logits of a token.
        max_length: most tokens of a row.
        cell_bytes: of keys and values of one token.
        tokenizer: of the file; None where it has none.
        eos_token_ids: tokens that end the output.
        num_layers: of the model.
        weight_bytes: that a pass reads.
        quantize: the file's type, such as ``"Q4_K - Medium"``.
    """

    supports_trees = True
    shares_prefixes = True
    own_threads = True
    prefills_with_decode = True

    def __init__(
        self,
        pool: ContextPool,
        *,
        name: str,
        vocab_size: int,
        max_length: int,
        cell_bytes: int,
        tokenizer: Any | None,
        eos_token_ids: tuple[int, ...],
        num_layers: int,
        weight_bytes: int,
        quantize: str | None,
    ) -> None:
        self.pool = pool
        self.name, self.vocab_size, self.max_length = name, vocab_size, max_length
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.tokenizer, self.eos_token_ids = tokenizer, eos_token_ids
        self.num_layers, self.weight_bytes, self.quantize = num_layers, weight_bytes, quantize
        self.backend_name = "llama.cpp"
        self._cell_bytes = cell_bytes

    def open(self, batch_size: int) -> Cache:
        """A new cache with `batch_size` empty rows."""
        return GgufCache(self.pool, batch_size)

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """See `LanguageModel.cache_bytes`. A context has room for half as much again as it had to grow to."""
        total = sum(lengths)
        return self._cell_bytes * max(FIRST_CELLS, total + total // 2) if lengths else 0

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
        assert isinstance(cache, GgufCache)
        added = counts.tolist()
        batch_size, width = tokens.shape
        columns = 1 if keep == "last" else width
        out = torch.empty if all(count == width for count in added) else torch.zeros
        logits = out((0 if keep == "none" else batch_size * columns, self.vocab_size))
        wanted: list[dict[int, int]] = []
        for index, (row, new, above, count) in enumerate(
            zip(cache.rows, tokens.tolist(), parents.tolist(), added, strict=True)
        ):
            first = len(row.nodes)
            row.nodes += new[:count]
            row.parents += above[:count]
            if keep == "all":
                wanted.append({first + i: index * width + i for i in range(count)})
            else:
                wanted.append({first + count - 1: index} if keep == "last" and count else {})
        for shard in cache.shards:
            rows = [row for row in cache.rows if row.shard is shard]
            if not any(len(row.nodes) > len(row.homes) for row in rows):
                continue
            run = Pass(shard, rows, self.pool.options, self.pool.rolls_back, logits)
            for row, targets in zip(cache.rows, wanted, strict=True):
                if row.shard is shard and len(row.nodes) > len(row.homes):
                    run.add(row, targets)
            run.flush()
        return Scores(None if keep == "none" else logits.view(batch_size, columns, self.vocab_size))
