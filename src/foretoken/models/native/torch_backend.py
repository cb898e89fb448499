"""The torch backend: the decoder of `decoder.py` over keys and values ``[B, G, S, D]``, on the CPU or a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from foretoken.models.chain import Chains, Draws
from foretoken.models.masks import MaskBuilder, Pattern
from foretoken.models.native.cache import Feed, NativeCache
from foretoken.models.native.checkpoint import Weights
from foretoken.models.native.decoder import Between, Decoder
from foretoken.models.native.decoder_backend import DecoderBackend
from foretoken.models.native.kernels import attention_kernels
from foretoken.models.native.linear import Quantize
from foretoken.models.native.rope import Rotary
from foretoken.models.slots import Append, SlotBuffers, slots_bytes


class DenseStore:
    """Keys and values of a batch: one buffer a layer, whose rows grow together, in pages.

    Args:
        layers: of the model.
    """

    def __init__(self, layers: int) -> None:
        self.plan = Append(0, [], [], 0, 0, True, None, None)
        self.layers = [SlotBuffers() for _ in range(layers)]
        self._used = 0

    def begin(self, plan: Append) -> None:
        """Announce where the next pass writes."""
        self.plan = plan
        self._used = max(self._used, plan.end)

    def remember(self, number: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values ``[B, G, N, D]``; returns all that attention covers."""
        return self.layers[number].write(self.plan, keys, values)

    def move(self, rows: list[int], sources: list[int], targets: list[int]) -> None:
        """See `KeyValueStore`."""
        for layer in self.layers:
            layer.move(rows, sources, targets)

    def select(self, rows: Sequence[int], kept: Sequence[int], cut: Sequence[int] = ()) -> None:
        """See `KeyValueStore`."""
        for layer in self.layers:
            layer.select(rows, self._used, kept, cut)
        self._used = max(kept, default=0)


class TorchBackend(DecoderBackend):
    """Scores feeds with torch.

    Args:
        weights: of the checkpoint.
        device: where the model runs.
        dtype: of weights, keys and values.
        quantize: see `Decoder`.
        compiled: does what lies between two layers' attentions; None has torch do it operation by operation.
    """

    chains = False
    chain_sizes: tuple[int, ...] = ()

    def __init__(
        self,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype,
        quantize: Quantize | None = None,
        compiled: Between | None = None,
    ) -> None:
        super().__init__(Decoder(weights, device, quantize, compiled), quantize)
        self._device, self._dtype = device, dtype
        self._rotary = Rotary(self.spec.config, self.spec.rotary_dim)
        self._rotations: list[Tensor | None] = [None, None]
        self._masks = MaskBuilder(dtype, device)

    def open(self, batch_size: int) -> NativeCache:
        """A cache of empty rows."""
        return NativeCache(DenseStore(self.spec.layers), batch_size)

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """See `LanguageModel.cache_bytes`."""
        return slots_bytes(lengths, self.spec.slot_size * self._dtype.itemsize)

    def score(
        self, cache: NativeCache, feeds: Sequence[Feed], picks: Sequence[tuple[int, int]], hidden_layers: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Run feeds, no two of one row.

        Args:
            cache: from `open`.
            feeds: what is run.
            picks: number of a feed and of a token in it, for every token whose logits are wanted.
            hidden_layers: layers whose hidden states are wanted.

        Returns:
            Logits ``[len(picks), V]``, and of each wanted layer the hidden states ``[len(picks), hidden]``.
        """
        store = cache.store
        assert isinstance(store, DenseStore)
        rows, width = len(cache.rows), max(len(feed.tokens) for feed in feeds)
        tokens, depths = np.zeros((2, rows, width), dtype=np.int64)
        # Rows without a feed write past their last token, where nothing is read.
        starts = [row.kept + row.scored for row in cache.rows]
        regimes = [0] * rows
        chain = all(feed.parents is None for feed in feeds)
        ancestors = None if chain else np.broadcast_to(np.tri(width, dtype=np.bool_), (rows, width, width)).copy()
        depths[:] = np.arange(width)
        for feed in feeds:
            size, row = len(feed.tokens), feed.row
            tokens[row, :size] = feed.tokens
            starts[row], regimes[row] = feed.start, feed.regime
            if feed.parents is not None:
                assert ancestors is not None
                depths[row, :size] = feed.depths()
                ancestors[row, :size, :size] = feed.ancestors()
        first = max(starts)
        uniform = min(starts) == first
        plan = Append(
            width=width,
            lengths=starts,
            done=[0] * rows,
            start=first if uniform else None,
            end=first + width,
            chain=chain,
            ancestors=ancestors,
            slots=None if uniform else torch.tensor(starts)[:, None] + torch.arange(width),
        )
        with torch.inference_mode(), attention_kernels(self._device, ready=True):
            store.begin(plan)
            positions = torch.from_numpy(np.asarray(starts)[:, None] + depths)
            states, hidden = self._decoder(
                torch.from_numpy(tokens).to(self._device),
                self._rotation(positions, regimes),
                {window: self._masks.mask(plan, Pattern(window=window), True) for window in set(self.spec.windows)},
                store.remember,
                hidden_layers,
                self._layers,
            )
            indices = torch.tensor([feeds[feed].row * width + node for feed, node in picks], dtype=torch.int64)
            indices = indices.to(self._device)
            logits = self._decoder.head(_pick(states, indices))
            return logits, [_pick(layer, indices) for layer in hidden]

    def warm_up(self, hidden_layers: Sequence[int]) -> None:
        """Nothing to do: layers are compiled when the model is loaded."""

    def warm_up_chains(self, drawn: bool) -> list[int]:
        """Nothing to do."""
        return []

    def chain(self, cache: NativeCache, rows: Sequence[Sequence[int]], steps: int, draws: Draws | None) -> Chains:
        """Not here."""
        raise NotImplementedError("the torch backend takes one step a call")

    def _rotation(self, positions: Tensor, regimes: list[int]) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[B * N, 1, R]`` of positions ``[B, N]``."""
        length = int(positions.max()) + 1
        used = sorted(set(regimes))
        found = self._table(used[0], length)[:, positions.to(self._device)]
        if len(used) > 1:
            other = self._table(used[1], length)[:, positions.to(self._device)]
            second = torch.tensor(regimes, device=self._device)[:, None, None] == used[1]
            found = torch.where(second, other, found)
        cosines, sines = found.reshape(2, -1, 1, found.shape[-1])
        return cosines, sines

    def _table(self, regime: int, length: int) -> Tensor:
        table = self._rotations[regime]
        if table is None or table.shape[1] < length:
            table = self._rotary.table(regime, length).to(self._device, self._dtype)
            self._rotations[regime] = table
        return table


def _pick(states: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` of ``[B, N, hidden]``; the states themselves where these are all of them, in order."""
    flat = states.reshape(-1, states.shape[-1])
    return flat if len(indices) == len(flat) and len(flat) == 1 else flat[indices]
