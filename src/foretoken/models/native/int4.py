"""Weights of four bits, made of a checkpoint's: ``quantize="int4"``.

Linear layers are rounded in groups of neighbouring input features, each with a scale of its own, as in llama.cpp's Q4_0
and in OpenVINO's ``INT4_SYM``. The output layer gets eight bits, and embeddings, of which a pass reads a few rows, stay
as they are.
"""

from __future__ import annotations

import math
import mmap
from functools import cache

import torch
from torch import Tensor

from foretoken.cache_folder import cache_folder
from foretoken.models.mapped import ScratchFile
from foretoken.models.native.checkpoint import AnyMatrix, LayerWeights, Matrix, TensorSource, Weights, expected_shapes
from foretoken.models.native.packed import Packed, PackedMatrix
from foretoken.models.native.spec import Spec

GROUP = 64
"""Features that share a scale, at most.

OpenVINO on a processor with AVX2, ms of 24 products of 1024 x 4096 over 1, 2 and 4 rows: 5.3, 6.3, 9.9 in groups of 32,
4.4, 6.5, 10.1 of 64, 4.4, 6.7, 10.7 of 128, and 5.7, 8.2, 13.0 of 64 with zero points (eight bits: 4.8, 5.6, 8.4;
float32: 15.2, 15.3, 16.2). The shipped target's next tokens then diverge from the checkpoint's by 0.029, 0.034 and
0.039 nats, and by 0.034 in groups of 64 with zero points; by 0.043 where the output layer, too, has four bits in groups
of 64, and by 0.034 where it is not rounded at all.
"""

LEAST_GROUP = 16
"""In smaller groups the scales take as much as a third of the bytes: such layers get eight bits, one scale a row."""

_LOWEST, _HIGHEST = -8, 7
_FACTORS = (0.85, 0.925, 1.0, 1.075)
"""Tried, of the scale with which a group's extreme is -8. The root of the shipped target's mean squared error is 0.0914
of its weights' with these, 0.0949 with the last but one alone, and 0.0907 with 24 from 0.6 on."""
_CHUNK = 1 << 18
"""Weights that are rounded at a time: what it takes besides then fits into the processor's caches."""


def group_of(width: int) -> int | None:
    """Features that share a scale, of so many: the largest divisor up to `GROUP`; None where it would be too small."""
    if width % 2:  # two lie in a byte
        return None
    group = max(size for size in range(1, GROUP + 1) if width % size == 0)
    return group if group >= LEAST_GROUP else None


def rounded(weight: Tensor, group: int) -> Packed:
    """A matrix in four bits, without offsets.

    Of each group's candidate scales the one with the least squared error is taken, each being the best one for the
    integers that it rounds to. A group's error is at most that of rounding with an extreme of -8.

    Args:
        weight: ``[out, in]``.
        group: features that share a scale; divides ``in``, which is even.
    """
    rows, width = weight.shape
    groups = weight.reshape(-1, group)
    integers, scales = torch.empty(groups.shape, dtype=torch.int8), torch.empty(len(groups))
    step = max(1, _CHUNK // group)
    for begin in range(0, len(groups), step):
        part = slice(begin, begin + step)
        integers[part], scales[part] = _fitted(groups[part].float())
    low, high = integers.view(rows, -1, 2).unbind(-1)
    return Packed((low & 15 | high << 4).view(torch.uint8), 4, scales.view(rows, width // group), None)


def _fitted(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers ``[n, g]`` and scales ``[n]``, float32 both, of float32 groups ``[n, g]``.

    With integers q the best scale is ``<q, x> / <q, q>``, and the squared error ``<x, x> - <q, x>² / <q, q>``.
    """
    lowest, highest = x.aminmax(dim=1)
    widest = torch.where(highest > -lowest, highest, lowest) / _LOWEST
    widest = torch.where(widest.abs() < torch.finfo(torch.float32).tiny, 1.0, widest)
    found: tuple[Tensor, Tensor, Tensor] | None = None
    for factor in _FACTORS:
        q = (x * (1 / (widest * factor))[:, None]).round_().clamp_(_LOWEST, _HIGHEST)
        product, square = torch.linalg.vecdot(q, x), torch.linalg.vecdot(q, q).clamp_(min=1.0)
        tried = product * product / square, q, product / square
        if found is None:
            found = tried
        else:
            better = tried[0] > found[0]
            found = (
                torch.where(better, tried[0], found[0]),
                torch.where(better[:, None], q, found[1]),
                torch.where(better, tried[2], found[2]),
            )
    assert found is not None
    return found[1], found[2]


class Int4Weights(Weights):
    """The weights of a checkpoint, linear layers in four bits where their inputs make groups.

    Backends give eight bits to what is left: the output layer, and layers of odd widths.

    Args:
        spec: the model's shape.
        source: a mapping of transformers' names to tensors.
        name: what messages call the model.
        dtype: what weights are converted to before they are rounded, and those that are not.

    Raises:
        ModelError: see `Weights`.
    """

    input_group = GROUP
    """As for weights: a 500M model took 12.0, 12.6, 14.9 and 22.0 ms over 1, 4, 8 and 16 tokens, and 12.0, 13.0, 16.3
    and 25.2 with inputs in groups of 32."""

    def __init__(self, spec: Spec, source: TensorSource, name: str, dtype: torch.dtype) -> None:
        super().__init__(spec, source, name, dtype)
        self.forget()

    def forget(self) -> None:
        """See `Weights`."""
        # Integers and scales begin on pages of their own.
        self._scratch = ScratchFile(cache_folder("weights"), self.bytes() + 2 * mmap.PAGESIZE * 4 * self.spec.layers)
        # Several graphs of one model share the memory of its weights.
        self._layer = cache(super().layer)

    def bytes(self, layers: int | None = None) -> int:
        """See `Weights`; the embeddings count as the output layer does, a byte each."""
        part = 1.0 if layers is None else super().bytes(layers) / super().bytes()
        return int(part * sum(self._size(*about) for about in expected_shapes(self.spec).items()))

    def widened_bytes(self) -> int:
        """As `bytes`, of the same weights in the dtype that the model is computed in."""
        return super().bytes()

    def layer(self, number: int) -> LayerWeights:
        """See `Weights`."""
        found = self._layer(number)
        self.release()
        return found

    def release(self) -> None:
        """See `Weights`."""
        self._scratch.release()

    def _size(self, name: str, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor."""
        numbers = math.prod(shape)
        if len(shape) == 1:
            return numbers * self._dtype.itemsize
        group = group_of(shape[1]) if name.startswith("model.layers.") else None
        return numbers if group is None else numbers // 2 + 4 * numbers // group

    def _joined(self, parts: list[str], bias: bool) -> AnyMatrix:
        """See `Weights`."""
        matrix = super()._joined(parts, bias)
        assert isinstance(matrix, Matrix)
        group = group_of(matrix.weight.shape[1])
        if group is None:
            return matrix
        found = rounded(matrix.weight, group)
        kept = Packed(self._scratch.keep(found.integers), found.bits, self._scratch.keep(found.scales), None)
        return PackedMatrix(kept, matrix.bias)
