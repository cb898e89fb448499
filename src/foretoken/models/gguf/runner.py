"""GgufModel: a GGUF file, computed by llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.models.base import Cache, Keep, LanguageModel, Scores
from foretoken.models.chain import Chains, Draws
from foretoken.models.gguf.cache import FIRST_SEQUENCES, GgufCache, Shard
from foretoken.models.gguf.context import Context, ContextOptions
from foretoken.models.gguf.handle import Handle
from foretoken.models.gguf.passes import Pass, run_chain
from foretoken.models.gguf.picking import best, draw

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
        positions: places in a sequence that the model has entries of a table for; None where it needs no table.
        window: tokens that layers with a window see; 0 where there are none.
    """

    def __init__(
        self,
        handle: Handle,
        options: ContextOptions,
        rows: int,
        rolls_back: bool,
        vocab_size: int,
        positions: int | None = None,
        window: int = 0,
    ) -> None:
        self._handle, self._vocab_size, self.positions, self.window = handle, vocab_size, positions, window
        self.options, self.rows, self.sequences, self.rolls_back = options, rows, options.sequences, rolls_back
        self._spare: list[Context] = []

    def take(self, cells: int, sequences: int) -> Context:
        """An empty context with room for so many tokens of so many sequences."""
        for index, context in enumerate(self._spare):
            if context.cells >= cells and context.sequences >= sequences:
                return self._spare.pop(index)
        while self._spare:
            self._spare.pop().close()
        cells = self.options.within(max(cells, self.options.cells))
        return Context(self._handle, cells, sequences, self.options, self._vocab_size)

    def give_back(self, context: Context) -> None:
        """A context that is no longer used. A large one is freed."""
        if not context.alive:
            return
        if len(self._spare) < _SPARE_CONTEXTS and context.cells <= self.options.cells:
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
        state_bytes: of a sequence's state that can't be rolled back; 0 where there is none.
        tokenizer: of the file; None where it has none.
        eos_token_ids: tokens that end the output.
        num_layers: of the model.
        num_parameters: of the model.
        weight_bytes: that a pass reads.
        position_share: see `LanguageModel`.
        quantize: the file's type, such as ``"Q4_K - Medium"``.
    """

    supports_trees = True
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
        state_bytes: int,
        tokenizer: Any | None,
        eos_token_ids: tuple[int, ...],
        num_layers: int,
        num_parameters: int,
        weight_bytes: int,
        position_share: float | None,
        quantize: str | None,
    ) -> None:
        self.pool = pool
        self.name, self.vocab_size, self.max_length = name, vocab_size, max_length
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.tokenizer, self.eos_token_ids = tokenizer, eos_token_ids
        self.num_layers, self.weight_bytes, self.quantize = num_layers, weight_bytes, quantize
        self.position_share = position_share
        self.backend_name = "llama.cpp"
        # A copy of a state that can't be rolled back is of no use to a row that shares less than all of it.
        self.shares_prefixes = pool.rolls_back
        self.commits_late = pool.rolls_back
        self.cell_bytes, self.state_bytes, self.num_parameters = cell_bytes, state_bytes, num_parameters

    def open(self, batch_size: int) -> Cache:
        """A new cache with `batch_size` empty rows."""
        return GgufCache(self.pool, batch_size)

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """See `LanguageModel.cache_bytes`.

        A context has room for half as much again as it had to grow to, and while it grows, a copy of what it had. It
        has a state for each sequence, and drafts are computed on copies: each row takes two.
        """
        total, least = sum(lengths), self.pool.options.cells * -(-len(lengths) // self.pool.rows)
        grown = total + total // 2 + total if total > self.pool.options.cells else 0
        full, rest = divmod(len(lengths), self.pool.rows)
        most = self.pool.sequences
        states = full * most + (min(most, FIRST_SEQUENCES if 2 * rest <= FIRST_SEQUENCES else most) if rest else 0)
        return self.cell_bytes * max(least, grown) + self.state_bytes * states

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
        if batch_size == width == 1 and added == [1] and keep != "none":
            (token,), (parent,), found = tokens.tolist()[0], parents.tolist()[0], list[Tensor]()
            if run_chain(cache.rows[0], self.pool, token, parent, 1, lambda logits: found.append(logits.clone())):
                return Scores(found[0])
        columns = 1 if keep == "last" else width
        out = torch.empty if all(count == width for count in added) else torch.zeros
        logits = out((batch_size, 0 if keep == "none" else columns, self.vocab_size), dtype=torch.float32, device="cpu")
        starts: list[int] = []
        for row, new, above, count in zip(cache.rows, tokens.tolist(), parents.tolist(), added, strict=True):
            first = len(row.nodes)
            for token, parent in zip(new[:count], above, strict=False):
                row.append(token, parent)
            starts.append(first if keep == "all" else first + count - (keep == "last"))
        for shard in cache.shards:
            rows = [i for i, row in enumerate(cache.rows) if row.shard is shard and added[i]]
            if not rows:
                continue
            run = self._pass(cache, shard, logits)
            for index in rows:
                run.add(cache.rows[index], starts[index], index * columns)
            run.flush()
        return Scores(None if keep == "none" else logits)

    def decode_row(self, token: int, most: int, cache: Cache, choose: Callable[[Tensor], int | None]) -> None:
        """See `LanguageModel.decode_row`."""
        assert isinstance(cache, GgufCache)
        if not run_chain(cache.rows[0], self.pool, token, -1, most, choose):
            super().decode_row(token, most, cache, choose)

    def _pass(self, cache: GgufCache, shard: Shard, out: Tensor, later: int = 0) -> Pass:
        rows = [row for row in cache.rows if row.shard is shard]
        return Pass(shard, rows, self.pool, out, later)

    @property
    def drafts_chains(self) -> bool:
        """Whether `chain` works: a state that can't be rolled back would be copied for it."""
        return self.pool.rolls_back

    def chain(self, rows: Sequence[Sequence[int]], steps: int, cache: Cache, draws: Draws | None = None) -> Chains:
        """See `LanguageModel.chain`."""
        assert isinstance(cache, GgufCache)
        chains: list[list[int]] = [[] for _ in rows]
        logits = torch.zeros((len(rows), self.vocab_size), dtype=torch.float32, device="cpu")
        shape = len(rows), steps, self.vocab_size
        probs = None if draws is None else torch.zeros(shape, dtype=torch.float32, device="cpu")
        if probs is not None:
            probs[..., 0] = 1  # where nothing is drawn
        pick = _picker(logits, draws, probs)
        for row, tokens in zip(cache.rows, rows, strict=True):
            row.tokens += tokens
        for shard in cache.shards:
            active = [i for i, row in enumerate(cache.rows) if row.shard is shard and rows[i]]
            if not active:
                continue
            run = self._pass(cache, shard, logits, steps)
            for index in active:
                run.catch_up(cache.rows[index], index)
            for step in range(steps):
                run.flush()
                picked = [pick(row, step) for row in active]
                for index, token in zip(active, picked, strict=True):
                    chains[index].append(token)
                active = [i for i, token in zip(active, picked, strict=True) if token < self.vocab_size]
                for index in active if step + 1 < steps else ():
                    row = cache.rows[index]
                    row.append(chains[index][-1], step - 1)
                    run.add(row, step, index)
        return Chains(chains, probs).below(self.vocab_size)


def _picker(logits: Tensor, draws: Draws | None, probs: Tensor | None) -> Callable[[int, int], int]:
    """Gives the next token of a row in a step of its chain; the vocabulary's size where the logits are no numbers.

    Args:
        logits: ``[B, V]``, of the last pass.
        draws: how tokens are drawn; None for the best ones.
        probs: ``[B, steps, V]``, where the distributions go that they are drawn from.
    """
    scores = logits.numpy()
    if draws is None or probs is None:
        return lambda row, step: best(scores[row])
    told, inverse, uniforms = probs.numpy(), draws.inverse_temperatures.tolist(), draws.uniforms.tolist()
    return lambda row, step: draw(scores[row], inverse[row], uniforms[row][step], told[row, step])
