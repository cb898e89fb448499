"""16-bit weights in float32, for passes over more than a few tokens.

OpenVINO can keep 16-bit weights as they are and widen them in every pass. That halves the bytes that a pass reads, and
reading them is what a pass over one token waits for. One over several waits for its arithmetic, and widening adds to
that. Products are the same either way, to the last bit: every 16-bit number is a float32 number.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from torch import Tensor

from foretoken.models.native.checkpoint import AnyMatrix, LayerWeights, Matrix, Parts, Weights
from foretoken.models.native.packed import Packed, PackedMatrix


class WidenedWeights:
    """Weights whose 16-bit matrices are float32; several graphs of one model share their memory.

    Args:
        weights: of the checkpoint.
    """

    def __init__(self, weights: Weights) -> None:
        self.spec, self.release, self._weights = weights.spec, weights.release, weights
        self.layer, self.table, self.head = cache(self._layer), cache(self._table), cache(self._head)
        self.final_norm = weights.final_norm

    def _layer(self, number: int) -> LayerWeights:
        layer = self._weights.layer(number)
        return replace(
            layer,
            qkv=_widened(layer.qkv),
            output=_widened(layer.output),
            gate_up=_widened(layer.gate_up),
            down=_widened(layer.down),
        )

    def _table(self) -> Tensor | Packed:
        table = self._weights.table()
        return table.float() if isinstance(table, Tensor) else table

    def _head(self) -> Tensor | Packed:
        head = self._weights.head()
        return head.float() if isinstance(head, Tensor) else head


def _widened(matrix: AnyMatrix) -> AnyMatrix:
    if isinstance(matrix, Parts):
        return Parts(tuple(_widened_part(part) for part in matrix.matrices))
    return _widened_part(matrix)


def _widened_part(matrix: Matrix | PackedMatrix) -> Matrix | PackedMatrix:
    return Matrix(matrix.weight.float(), matrix.bias) if isinstance(matrix, Matrix) else matrix
