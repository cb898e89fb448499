"""16-bit weights in float32, for passes over several tokens; see `widening`."""

from __future__ import annotations

from dataclasses import replace
from threading import Lock

from torch import Tensor

from foretoken.models.native.checkpoint import AnyMatrix, LayerWeights, Matrix, Parts, Weights
from foretoken.models.native.packed import Packed, PackedMatrix


class WidenedWeights:
    """Weights whose 16-bit matrices are float32, each read once for all graphs that are built of them.

    Args:
        weights: of the checkpoint.
    """

    def __init__(self, weights: Weights) -> None:
        self.spec, self.release, self.final_norm = weights.spec, weights.release, weights.final_norm
        self._weights, self._lock = weights, Lock()
        self._layers: dict[int, LayerWeights] = {}
        self._tables: dict[str, Tensor | Packed] = {}

    def layer(self, number: int) -> LayerWeights:
        """See `Weights`."""
        with self._lock:
            if number not in self._layers:
                layer = self._weights.layer(number)
                self._layers[number] = replace(
                    layer,
                    qkv=_widened(layer.qkv),
                    output=_widened(layer.output),
                    gate_up=_widened(layer.gate_up),
                    down=_widened(layer.down),
                )
            return self._layers[number]

    def table(self) -> Tensor | Packed:
        """See `Weights`."""
        with self._lock:
            if "table" not in self._tables:
                self._tables["table"] = _in_float32(self._weights.table())
            return self._tables["table"]

    def head(self) -> Tensor | Packed:
        """See `Weights`."""
        if self.spec.tied:
            return self.table()
        with self._lock:
            if "head" not in self._tables:
                self._tables["head"] = _in_float32(self._weights.head())
            return self._tables["head"]


def _widened(matrix: AnyMatrix) -> AnyMatrix:
    if isinstance(matrix, Parts):
        return Parts(tuple(_widened_part(part) for part in matrix.matrices))
    return _widened_part(matrix)


def _widened_part(matrix: Matrix | PackedMatrix) -> Matrix | PackedMatrix:
    return Matrix(matrix.weight.float(), matrix.bias) if isinstance(matrix, Matrix) else matrix


def _in_float32(weight: Tensor | Packed) -> Tensor | Packed:
    return weight.float() if isinstance(weight, Tensor) else weight
