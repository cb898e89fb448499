"""Matrices of rounded weights in groups, beside `checkpoint.Matrix`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.models.gguf.blocks import Blocks, widened


@dataclass(frozen=True)
class Packed:
    """Weights ``integer · scale + offset``, ``I`` features in ``G`` groups with a scale and an offset each.

    Attributes:
        integers: ``[out, I]`` int8; of four bits ``[out, I / 2]`` uint8: two's complement, the first one of a pair in
            the low half.
        bits: of an integer: 8 or 4.
        scales: ``[out, G]`` float32.
        offsets: ``[out, G]`` float32, or None for zeros.
    """

    integers: Tensor
    bits: int
    scales: Tensor
    offsets: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """Features out, features in."""
        rows, width = self.integers.shape
        return rows, width * 8 // self.bits

    @property
    def group(self) -> int:
        """Features that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    def widened(self) -> Tensor:
        """The weights: ``[out, I]`` float32."""
        offsets = None if self.offsets is None else self.offsets.numpy()
        return torch.from_numpy(widened(Blocks(self.integers.numpy(), self.bits, self.scales.numpy(), offsets)))

    def rows(self, which: slice) -> Packed:
        """Some rows alone, in the same memory."""
        offsets = None if self.offsets is None else self.offsets[which]
        return Packed(self.integers[which], self.bits, self.scales[which], offsets)


@dataclass(frozen=True)
class PackedMatrix:
    """A linear layer of rounded weights.

    Attributes:
        weight: of ``[out, in]``.
        bias: ``[out]``, or None.
    """

    weight: Packed
    bias: Tensor | None = None

    def halves(self) -> list[PackedMatrix]:
        """The first half of its output features, and the second."""
        both = (slice(None, self.weight.shape[0] // 2), slice(self.weight.shape[0] // 2, None))
        return [PackedMatrix(self.weight.rows(half), None if self.bias is None else self.bias[half]) for half in both]


def join(parts: list[Packed]) -> Packed:
    """The rows of matrices that join, one after another's."""
    if len(parts) == 1:
        return parts[0]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return Packed(
        torch.cat([part.integers for part in parts]),
        parts[0].bits,
        torch.cat([part.scales for part in parts]),
        torch.cat(offsets) if offsets else None,
    )
