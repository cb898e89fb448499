"""Slot buffers: keys and values ``[B, H, S, D]`` of a batch whose rows all have their own length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretoken.limits import current_limits

PAGE = 256
"""Slots are allocated in multiples of this many."""


@dataclass(slots=True)
class Append:
    """The slots that one forward pass writes to, and the ancestors of its nodes.

    Attributes:
        width: nodes that the pass appends to each row, N (padding included).
        lengths: committed tokens of each row.
        done: tentative nodes that each row had before the pass.
        start: slot of the pass's first node where all rows agree on it, else None.
        end: number of slots that attention covers, K.
        chain: every tentative node, of this pass and of those before, follows the one before it.
        ancestors: ``[B, T, T]`` bool, ``[b, i, j]``: tentative node j is i or above it. None for chains.
        slots: ``[B, N]`` int64, the slot of each new node; None if `start` gives it.
    """

    width: int
    lengths: list[int]
    done: list[int]
    start: int | None
    end: int
    chain: bool
    ancestors: npt.NDArray[np.bool_] | None
    slots: Tensor | None

    def depths(self) -> npt.NDArray[np.int64]:
        """``[B, T]``: the number of tentative nodes above each tentative node (trees only)."""
        assert self.ancestors is not None
        return self.ancestors.sum(-1) - 1


class SlotBuffers:
    """Keys and values of one layer, ``[B, H, S, D]`` each; None before the first pass."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def write(self, plan: Append, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write a pass's new nodes (``[B, H, N, D]``); the first ``plan.end`` slots of keys and values."""
        end, start = plan.end, plan.start
        if self.keys is None or self.values is None or self.keys.shape[2] < end:
            self.keys = _reserve(self.keys, keys, end)
            self.values = _reserve(self.values, values, end)
        if start is not None:
            self.keys.narrow(2, start, plan.width).copy_(keys)
            self.values.narrow(2, start, plan.width).copy_(values)
        else:
            assert plan.slots is not None
            slots = plan.slots.to(keys.device)
            rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
            self.keys[rows, :, slots] = keys.transpose(1, 2)
            self.values[rows, :, slots] = values.transpose(1, 2)
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)

    def move(self, rows: list[int], sources: list[int], targets: list[int]) -> None:
        """Copy slots `sources` of `rows` to slots `targets`, all at once."""
        for buffer in (self.keys, self.values):
            if buffer is not None:
                buffer[rows, :, targets] = buffer[rows, :, sources]

    def select(self, rows: Sequence[int], used: int, kept: Sequence[int], cut: Sequence[int] = ()) -> None:
        """Make row i a copy of row ``rows[i]`` up to slot `used`; clear it where that is -1.

        New buffers get room for the longest of `kept`, so that a long row that left takes no memory from then on. Rows
        that are `cut` are cleared beyond their `kept` slots: these may hold NaN of the other sequence.
        """
        if self.keys is None or self.values is None:
            return
        longest = max(kept, default=0)
        self.keys, self.values = (_select(buffer, rows, used, longest) for buffer in (self.keys, self.values))
        for buffer in (self.keys, self.values):
            for row in cut:
                buffer[row, :, kept[row] : used] = 0


def slots_bytes(lengths: Sequence[int], slot_bytes: int) -> int:
    """Most memory, in bytes, of buffers whose rows grow to these lengths.

    All rows are as long as the longest, and buffers grow by half. Where several rows share a prefill pass, the padding
    of the shorter ones takes slots too.
    """
    longest = max(lengths, default=0) + (current_limits().prefill_tokens if len(lengths) > 1 else 0)
    return len(lengths) * -(-(longest + longest // 2) // PAGE) * PAGE * slot_bytes


def _reserve(old: Tensor | None, states: Tensor, slots: int) -> Tensor:
    """A buffer like `old` with room for `slots`. Zeros, since masked slots must be finite too."""
    have = 0 if old is None else old.shape[2]
    slots = -(-max(slots, have + have // 2) // PAGE) * PAGE
    new = states.new_zeros((states.shape[0], states.shape[1], slots, states.shape[3]))
    if old is not None:
        new[:, :, :have] = old
    return new


def _select(buffer: Tensor, rows: Sequence[int], used: int, kept: int) -> Tensor:
    if len(rows) > buffer.shape[0]:
        slots = min(buffer.shape[2], -(-max(kept + kept // 2, 1) // PAGE) * PAGE)
        new = buffer.new_zeros((len(rows), buffer.shape[1], slots, buffer.shape[3]))
        used = min(used, slots)
        new[: buffer.shape[0], :, :used] = buffer[:, :, :used]
        buffer_rows = buffer.shape[0]
    else:
        new, buffer_rows = buffer, len(rows)
    moved = [(i, row) for i, row in enumerate(rows) if row not in (i, -1)]
    if moved:
        targets, sources = [i for i, _ in moved], [row for _, row in moved]
        new[targets, :, :used] = buffer[sources, :, :used]
    for i in range(buffer_rows):
        if rows[i] == -1:
            # A row that left may have had NaN, which no mask hides.
            new[i, :, :used] = 0
    return new[: len(rows)]
