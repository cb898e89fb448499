"""Paged KV cache: blocks of keys and values that all batches of a model share."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from threading import RLock
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

BLOCK = 32
"""Slots of a block of keys or values: what OpenVINO's kernels for CPUs take."""

LEAST_CONTEXT = 1024
"""Slots of a row that attention is told to make room for at least, doubled as long as a row has more.

The runtime makes new kernels whenever this number of slots, in whole blocks, is one that it has not met: 10 ms where a
pass takes 3, in each graph. Rounding up to so many costs nothing: attention reads as many as there are.
"""

FIRST_BLOCKS = 17
"""Blocks that a model begins with: 512 slots, and where padding goes; when they run out, there are half as many more.

The runtime copies what it is given in a new shape, if only for a moment, so that few tokens should need no more.
"""

_PRIVATE: dict[str, int] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
"""What mapped memory is asked for with, that no other process sees."""


def context_room(slots: int) -> int:
    """Slots that attention makes room for where the longest row has so many."""
    return doubled(LEAST_CONTEXT, slots)


def doubled(least: int, needed: int) -> int:
    """The least of `least`, twice as many, four times as many, … that is not below `needed`."""
    size = least
    while size < needed:
        size *= 2
    return size


class BlockPool:
    """Blocks of keys and values, of `BLOCK` slots in every layer.

    Args:
        layers: of the model.
        groups: key and value heads, G.
        head_dim: D.
        dtype: of keys and values.
        most: slots up to which it grows without a copy: addresses are set aside for them, and no memory.

    Attributes:
        tensors: keys, then values, of each layer in turn: ``[blocks, G, BLOCK, D]``. Another thread may replace them.
        version: changes when the tensors are replaced.
        moves: how often they came to lie in other memory.
        lock: held while they are, and by whoever writes to them besides passes, which would write to replaced ones.
    """

    def __init__(self, layers: int, groups: int, head_dim: int, dtype: torch.dtype, most: int = 0) -> None:
        shape = (FIRST_BLOCKS, groups, BLOCK, head_dim)
        # One more: where padding goes.
        rooms = [_Room(shape, dtype, -(-most // BLOCK) + 1) for _ in range(2 * layers)]
        self._rooms, self.tensors = rooms, [room.tensor for room in rooms]
        self.version = self.moves = 0
        self._arrays: tuple[int, list[Any]] = (-1, [])
        self._free = list(range(FIRST_BLOCKS))
        self.lock = RLock()  # the garbage collector may give blocks back at any time, within `take` too

    @property
    def arrays(self) -> list[Any]:
        """The memory of `tensors` as NumPy's, to move entries in: it does so in a seventh of torch's time.

        Integers of the entries' size, for NumPy has no bfloat16.
        """
        version, arrays = self._arrays
        if version != self.version:
            kind = {2: torch.int16, 4: torch.int32}[self.tensors[0].element_size()]
            version, arrays = self._arrays = self.version, [tensor.view(kind).numpy() for tensor in self.tensors]
        return arrays

    def memory(self) -> list[Tensor]:
        """The tensors with all blocks that they may grow to without a move."""
        return [room.whole() for room in self._rooms]

    @property
    def sets_aside(self) -> bool:
        """Whether it may grow without a move."""
        return all(len(room.whole()) > len(room.tensor) for room in self._rooms)

    @property
    def num_free(self) -> int:
        """Blocks that no row has."""
        return len(self._free)

    def take(self) -> int:
        """Reserve a block."""
        with self.lock:
            if not self._free:
                self._grow()
            return self._free.pop()

    def give_back(self, blocks: Sequence[int]) -> None:
        """Return blocks to the pool."""
        with self.lock:
            self._free.extend(blocks)

    def _grow(self) -> None:
        size = self.tensors[0].shape[0]
        more, aside = size + size // 2, min(len(room.whole()) for room in self._rooms)
        if size < aside:  # it moves when all that is set aside is in use, and not before
            more = min(more, aside)
        for room in self._rooms:  # all of them, or none where memory is short
            room.grow(more)
        self.moves += any([room.put() for room in self._rooms])
        self.tensors, self._arrays = [room.tensor for room in self._rooms], (-1, [])  # views keep memory
        self._free.extend(range(size, more))
        self.version += 1


class _Room:
    """Zeros that take memory when they are first read or written to, page by page; torch writes them all at once.

    Args:
        shape: of the tensor at first.
        dtype: of it.
        most: of its first dimension, up to which it grows where it is.

    Attributes:
        tensor: of that shape.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, most: int) -> None:
        self._entry, self._dtype = shape[1:], dtype
        self._size = math.prod(self._entry) * dtype.itemsize
        self._memory = self._set_aside(shape[0], most)
        self.tensor = self._view(shape[0])
        self._next = self._memory, self.tensor

    def grow(self, size: int) -> None:
        """Make a tensor with a larger first dimension, and the same values, which `put` puts in place of this one."""
        if size * self._size <= len(self._memory):
            self._next = self._memory, self._view(size)
            return
        memory = self._set_aside(size, 2 * size)
        tensor = self._view(size, memory)
        tensor[: len(self.tensor)] = self.tensor
        self._next = memory, tensor

    def put(self) -> bool:
        """Take over what `grow` made; whether it lies elsewhere."""
        before = self._memory
        self._memory, self.tensor = self._next
        return self._memory is not before

    def whole(self) -> Tensor:
        """All memory that is set aside, as the tensor that it would be."""
        return self._view(len(self._memory) // self._size)

    def _set_aside(self, size: int, most: int) -> mmap.mmap:
        """Memory of so many entries, with addresses of as many as there may come to be, if there are so many."""
        try:
            return self._mapped(max(size, most if _PRIVATE else 0))
        except (OSError, ValueError, OverflowError):  # there are fewer addresses than that
            return self._mapped(size)

    def _mapped(self, size: int) -> mmap.mmap:
        return mmap.mmap(-1, size * self._size, **_PRIVATE)

    def _view(self, size: int, memory: mmap.mmap | None = None) -> Tensor:
        count = size * math.prod(self._entry)
        return torch.frombuffer(memory or self._memory, dtype=self._dtype, count=count).view(size, *self._entry)


def _release(pool: BlockPool, tables: list[list[int]]) -> None:
    for table in tables:
        pool.give_back(table)


class PagedStore:
    """The block tables of a batch's rows: rows come, go and move without copies of keys and values.

    Args:
        pool: where blocks come from.
        rows: how many there are.
    """

    def __init__(self, pool: BlockPool, rows: int) -> None:
        self._pool = pool
        self.tables: list[list[int]] = [[] for _ in range(rows)]
        finalize(self, _release, pool, self.tables)

    def reserve(self, row: int, slots: int) -> list[int]:
        """The row's block table, with blocks for at least so many slots."""
        table = self.tables[row]
        while len(table) * BLOCK < slots:
            table.append(self._pool.take())
        return table

    def move(self, rows: list[int], sources: list[int], targets: list[int]) -> None:
        """See `KeyValueStore`."""
        old, new = (
            [self.tables[row][slot // BLOCK] for row, slot in zip(rows, slots, strict=True)]
            for slots in (sources, targets)
        )
        old_slots, new_slots = ([slot % BLOCK for slot in slots] for slots in (sources, targets))
        read, read_at, write, write_at = (np.array(one, dtype=np.intp) for one in (old, old_slots, new, new_slots))
        with self._pool.lock:
            for array in self._pool.arrays:
                array[write, :, write_at] = array[read, :, read_at]

    def select(self, rows: Sequence[int], kept: Sequence[int], cut: Sequence[int] = ()) -> None:
        """See `KeyValueStore`."""
        old = list(self.tables)
        sizes = [-(-slots // BLOCK) for slots in kept]
        heirs: dict[int, int] = {}  # of each old row, the new one that takes its blocks over: the longest
        for index, row in enumerate(rows):
            if row >= 0 and (row not in heirs or sizes[index] > sizes[heirs[row]]):
                heirs[row] = index
        for row, table in enumerate(old):  # before new blocks are taken: fewer are in use at once
            size = sizes[heirs[row]] if row in heirs else 0
            spare = table[size:]
            del table[size:]
            self._pool.give_back(spare)
        self.tables[:] = [
            [] if row < 0 else old[row] if heirs[row] == index else self._copy(old[row][: sizes[index]])
            for index, row in enumerate(rows)
        ]

    def _copy(self, table: list[int]) -> list[int]:
        new = [self._pool.take() for _ in table]
        with self._pool.lock:
            for tensor in self._pool.tensors:
                tensor[new] = tensor[table]
        return new
