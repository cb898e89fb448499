"""Rooms: static KV cache buffers, of few shapes and at fixed addresses, which CUDA graphs of passes need."""

from __future__ import annotations

import gc
import sys
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import RLock
from weakref import finalize

import torch
from torch import Tensor

from foretoken.models.native.captured import Captured
from foretoken.models.native.paging import doubled

LEAST_SLOTS = 256
"""Slots of the smallest room; larger ones have twice as many, and so on."""

KEPT_BYTES = 2**28
"""Rooms that no batch uses are kept for the next one, with what was captured over them, up to so many bytes in all, or
as many as the largest room has had."""


@dataclass(frozen=True)
class RoomShape:
    """How large rooms of a model are.

    Attributes:
        layers: of the model.
        groups: key and value heads, G.
        head_dim: D.
        dtype: of keys and values.
        device: where they are.
        most: slots that the longest row needs; no room has many more.
    """

    layers: int
    groups: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    most: int = sys.maxsize

    def bytes(self, rows: int, slots: int) -> int:
        """Of a room of such a size."""
        return 2 * self.layers * self.groups * self.head_dim * self.dtype.itemsize * rows * slots

    def for_lengths(self, lengths: Sequence[int]) -> tuple[int, int]:
        """Rows and slots of a room for rows of these lengths."""
        return doubled(1, len(lengths)), self.slots(max(lengths, default=0))

    def slots(self, needed: int) -> int:
        """Of the smallest room that has so many."""
        size = doubled(LEAST_SLOTS, needed)
        return size if needed > self.largest else min(size, self.largest)

    @property
    def largest(self) -> int:
        """Slots of the largest room that a row needs."""
        return -(-self.most // LEAST_SLOTS) * LEAST_SLOTS


class Room:
    """Keys and values of up to so many rows.

    Args:
        shape: of the model's rooms.
        rows: B.
        slots: of each row, S.

    Attributes:
        states: ``[2 · layers, B, G, S, D]``: the keys, then the values of each layer in turn. Zeros where nothing has
            been written, since masked slots must be finite, too.
        used: no row has been written to from this slot on.
        captured: passes over these buffers, by what they are: what they are told, and what was captured.
    """

    def __init__(self, shape: RoomShape, rows: int, slots: int) -> None:
        size = (2 * shape.layers, rows, shape.groups, slots, shape.head_dim)
        self.states = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self.rows, self.slots, self.used = rows, slots, 0
        self.captured: dict[Hashable, tuple[list[Tensor], Captured]] = {}

    @property
    def bytes(self) -> int:
        """Of its memory."""
        return self.states.numel() * self.states.itemsize


class Rooms:
    """All rooms of a model: those that batches use, and some that wait for the next one.

    Args:
        shape: of them.
        kept_bytes: up to which rooms that are not used are kept, if none of them was larger.
    """

    def __init__(self, shape: RoomShape, kept_bytes: int = KEPT_BYTES) -> None:
        self.shape = shape
        self._kept_bytes = kept_bytes
        self._free: list[Room] = []  # the latest last
        self._lock = RLock()  # the garbage collector may give rooms back at any time, within `take` too

    def take(self, rows: int, slots: int) -> Room:
        """A room of zeros of that size."""
        found = self._found(rows, slots)
        if found is None:
            return self._made(rows, slots)
        found.states[:, :, :, : found.used] = 0
        found.used = 0
        return found

    def _found(self, rows: int, slots: int) -> Room | None:
        with self._lock:
            for room in reversed(self._free):
                if (room.rows, room.slots) == (rows, slots):
                    with suppress(ValueError):  # the collector came in between, and it is gone
                        self._free.remove(room)
                        return room
        return None

    def give_back(self, rooms: list[Room]) -> None:
        """Return all rooms in a list, which is emptied."""
        with self._lock:
            while rooms:
                self._kept_bytes = max(self._kept_bytes, rooms[-1].bytes)
                self._free.append(rooms.pop())
            while len(self._free) > 1 and sum(room.bytes for room in self._free) > self._kept_bytes:
                self._free.pop(0)

    def _made(self, rows: int, slots: int) -> Room:
        try:
            return Room(self.shape, rows, slots)
        except torch.OutOfMemoryError:
            with self._lock:
                self._free.clear()
            gc.collect()
            return Room(self.shape, rows, slots)


class RoomStore:
    """The keys and values of a batch: a `KeyValueStore` in a room, and in a larger one when that is full.

    All calls are made in torch's inference mode.

    Args:
        rooms: of the model.
        rows: of the batch.
    """

    def __init__(self, rooms: Rooms, rows: int) -> None:
        self._rooms, self._ends = rooms, [0] * rows
        self._held: list[Room] = []
        finalize(self, rooms.give_back, self._held)

    def reserve(self, ends: Sequence[int | None]) -> Room:
        """The batch's room, for a pass that writes to each row's last slots before these ends; None for no slot.

        Behind its end a row then has zeros. What earlier passes left there, for drafts that were not accepted, may be
        NaN, which no mask hides.
        """
        most, rows = max(end or 0 for end in ends), len(self._ends)
        if not self._held or self._held[0].slots < most:
            self._change(doubled(1, rows), self._rooms.shape.slots(most), list(range(rows)))
        room = self._held[0]
        room.used = max(room.used, most)
        for row, end in enumerate(ends):
            if end is not None:
                if end < self._ends[row]:
                    room.states[:, row, :, end : self._ends[row]] = 0
                self._ends[row] = end
        return room

    def move(self, rows: list[int], sources: list[int], targets: list[int]) -> None:
        """See `KeyValueStore`."""
        if self._held:
            states = self._held[0].states
            row, source, target = torch.tensor([rows, sources, targets]).to(states.device, non_blocking=True)
            states[:, row, :, target] = states[:, row, :, source]

    def select(self, rows: Sequence[int], kept: Sequence[int], cut: Sequence[int] = ()) -> None:
        """See `KeyValueStore`."""
        self._ends = [self._ends[row] if row >= 0 else 0 for row in rows]
        if not self._held:
            return
        # No larger than it has to be: so a request finds a room of one size, whatever was there before it.
        room, (wanted, slots) = self._held[0], self._rooms.shape.for_lengths(kept)
        if (wanted, slots) != (room.rows, room.slots):
            self._change(wanted, slots, rows)
            room = self._held[0]
        else:
            moved = [(target, source) for target, source in enumerate(rows) if source not in (target, -1)]
            if moved:
                targets, sources = torch.tensor(moved).T.to(room.states.device, non_blocking=True)
                room.states[:, targets, :, : room.used] = room.states[:, sources, :, : room.used]
            for target, source in enumerate(rows):
                if source == -1:
                    # A row that left may have had NaN, which no mask hides.
                    room.states[:, target, :, : room.used] = 0
        for row in cut:
            room.states[:, row, :, kept[row] : room.used] = 0
            self._ends[row] = kept[row]

    def _change(self, rows: int, slots: int, sources: Sequence[int]) -> None:
        """Go to another room; row i becomes what row ``sources[i]`` was, an empty one where that is -1."""
        new = self._rooms.take(rows, slots)
        if self._held:
            old = self._held[0]
            copied = [(target, source) for target, source in enumerate(sources) if source >= 0]
            new.used = min(old.used, slots) if copied else 0
            for target, source in copied:
                new.states[:, target, :, : new.used] = old.states[:, source, :, : new.used]
            self._ends = [min(end, new.used) for end in self._ends]
            self._rooms.give_back(self._held)
        self._held.append(new)
