"""SlotCache: keys and values of a batch whose rows all have their own length, and of their tentative nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import proxy

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin

from foretoken.models.base import Cache, cut_rows, kept_lengths
from foretoken.models.slots import Append, SlotBuffers


class SlotLayer(SlotBuffers, CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer of a `SlotCache`, as transformers wants a layer."""

    is_sliding = False

    def __init__(self, cache: SlotCache) -> None:
        CacheLayerMixin.__init__(self)
        SlotBuffers.__init__(self)
        # Weak: a reference cycle of cache and layers would keep the memory until the garbage collector runs.
        self.cache: Any = proxy(cache)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: `write` allocates."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the pass's new nodes (``[B, H, N, D]``); returns all keys and values that attention covers."""
        self.is_initialized = True
        return self.write(self.cache.plan, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of slots that attention covers, and the first of them."""
        return self.cache.plan.end, 0

    def get_seq_length(self) -> int:
        """Slots in use before the pass."""
        plan: Append = self.cache.plan
        return plan.end - plan.width

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name in older transformers


class SlotCache(TransformersCache, Cache):  # type: ignore[misc]
    """A `foretoken.models.Cache` that transformers' attention layers write to.

    Row b's committed tokens sit in slots ``0 … lengths[b] - 1`` of that row, its tentative node i in slot
    ``lengths[b] + i``. So a commit of the first nodes moves nothing, and a commit of a tree's branch moves only that
    branch. Layers with a sliding window keep everything as well: their mask is the window.
    """

    def __init__(self, batch_size: int) -> None:
        super().__init__(layers=[])
        self._lengths = [0] * batch_size
        self._forget()
        self.plan = Append(0, self._lengths, self._done, 0, 0, True, None, None)

    @property
    def lengths(self) -> Tensor:
        """See `Cache`."""
        return torch.tensor(self._lengths, dtype=torch.int64)

    def _forget(self) -> None:
        self._done = [0] * len(self._lengths)
        self._chain = True
        self._ancestors: npt.NDArray[np.bool_] | None = None

    def begin(self, parents: Tensor, counts: Tensor, width: int) -> Append:
        """Take `width` more tentative nodes a row and say where they go.

        Args:
            parents: ``[B, N]`` int64.
            counts: ``[B]`` int64.
            width: N.
        """
        lengths, done = self._lengths, self._done
        added: list[int] = counts.tolist()
        self._chain = self._chain and _continues(parents, added, done)
        if not self._chain:
            self._extend_tree(parents.tolist(), added, width)
        offsets = [length + count for length, count in zip(lengths, done, strict=True)]
        first = max(offsets, default=0)
        uniform = all(offset == first for offset in offsets)
        slots = None
        if not uniform:
            slots = torch.tensor(offsets)[:, None] + torch.arange(width)
        self.plan = Append(
            width=width,
            lengths=lengths,
            done=done,
            start=first if uniform else None,
            end=first + width,
            chain=self._chain,
            ancestors=self._ancestors,
            slots=slots,
        )
        self._done = [before + more for before, more in zip(done, added, strict=True)]
        return self.plan

    def _extend_tree(self, parents: list[list[int]], added: list[int], width: int) -> None:
        batch_size, size = len(added), max(self._done) + width
        old = self._ancestors
        if old is None or old.shape[1] < size:
            new = np.zeros((batch_size, size, size), dtype=np.bool_)
            known = max(self._done) if old is None else old.shape[1]
            new[:, :known, :known] = np.tri(known, dtype=np.bool_) if old is None else old
            self._ancestors = old = new
        else:
            self._ancestors = old = old.copy()  # The plan of the pass before may still be read.
        for row, before in enumerate(self._done):
            above, row_parents = old[row], parents[row]
            for i in range(width):
                node = before + i
                parent = row_parents[i] if i < added[row] else -1  # Padding attends to the prefix and itself.
                above[node] = above[parent] if parent >= 0 else False
                above[node, node] = True

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by each attention layer with its new keys and values, ``[B, H, N, D]``."""
        while len(self.layers) <= layer_idx:
            self.layers.append(SlotLayer(self))
        return self.layers[layer_idx].update(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots in use before the pass."""
        return self.plan.end - self.plan.width

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """The number of slots that attention covers, and the first of them."""
        return self.plan.end, 0

    @torch.inference_mode()
    def commit(self, path: Tensor, counts: Tensor) -> None:
        """See `foretoken.models.Cache`."""
        kept: list[int] = counts.tolist()
        rows: list[int] = []
        sources: list[int] = []
        targets: list[int] = []
        if any(kept) and not (self._chain and path.shape[1] == max(self._done) and kept == self._done):
            for row, nodes in enumerate(path.tolist()):
                length = self._lengths[row]
                for i in range(kept[row]):
                    if nodes[i] != i:
                        rows.append(row)
                        sources.append(length + nodes[i])
                        targets.append(length + i)
        if rows:
            for layer in self.layers:
                layer.move(rows, sources, targets)
        self._lengths = [length + more for length, more in zip(self._lengths, kept, strict=True)]
        self._forget()

    @torch.inference_mode()
    def select(self, rows: Sequence[int], keep: Sequence[int | None] | None = None) -> None:
        """See `foretoken.models.Cache`."""
        rows = list(rows)
        lengths = kept_lengths(self._lengths, rows, keep)
        if rows == list(range(len(self._lengths))) and lengths == self._lengths:
            return
        used, cut = self.plan.end, cut_rows(rows, keep)
        for layer in self.layers:
            layer.select(rows, used, lengths, cut)
        self._lengths = lengths
        self._forget()


def _continues(parents: Tensor, added: list[int], done: list[int]) -> bool:
    """Whether each row's new nodes follow, one after another, the nodes it already has."""
    width = parents.shape[1]
    if parents.numel() > 4096:
        steps = torch.arange(width, device=parents.device)
        before = torch.tensor(done, device=parents.device)[:, None]
        used = steps < torch.tensor(added, device=parents.device)[:, None]
        return bool(((parents == before + steps - 1) | ~used).all())
    return all(
        row[:count] == list(range(before - 1, before - 1 + count))
        for row, count, before in zip(parents.tolist(), added, done, strict=True)
    )
