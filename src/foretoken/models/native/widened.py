"""Weights that several graphs share; among them 16-bit ones in float32, see `widening`."""

from __future__ import annotations

from dataclasses import replace
from threading import Lock

import torch
from torch import Tensor

from foretoken.models.native.checkpoint import AnyMatrix, LayerWeights, Matrix, Parts, Weights
from foretoken.models.native.linear import quantised
from foretoken.models.native.packed import Packed, PackedMatrix


class KeptWeights:
    """Weights that are read once for all graphs that are built of them, so that these share their memory.

    Args:
        weights: of the checkpoint.
    """

    def __init__(self, weights: Weights) -> None:
        self.spec, self.release, self.final_norm = weights.spec, weights.release, weights.final_norm
        self._weights, self._lock = weights, Lock()
        self._layers: dict[int, LayerWeights] = {}
        self._tables: dict[str, Tensor | Packed] = {}
        self._rounded: dict[tuple[int, torch.Size], tuple[Tensor, tuple[Tensor, Tensor]]] = {}

    def layer(self, number: int) -> LayerWeights:
        """See `Weights`."""
        with self._lock:
            if number not in self._layers:
                self._layers[number] = self._made(self._weights.layer(number))
            return self._layers[number]

    def table(self) -> Tensor | Packed:
        """See `Weights`."""
        with self._lock:
            if "table" not in self._tables:
                self._tables["table"] = self._made_table(self._weights.table())
            return self._tables["table"]

    def head(self) -> Tensor | Packed:
        """See `Weights`."""
        if self.spec.tied:
            return self.table()
        with self._lock:
            if "head" not in self._tables:
                self._tables["head"] = self._made_table(self._weights.head())
            return self._tables["head"]

    def quantised(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See `foretoken.models.native.linear.quantised`; of a matrix of these weights, or of some of its rows."""
        key = weight.data_ptr(), weight.shape
        with self._lock:
            if key not in self._rounded:
                self._rounded[key] = weight, quantised(weight)
            return self._rounded[key][1]

    def _made(self, layer: LayerWeights) -> LayerWeights:
        return layer

    def _made_table(self, table: Tensor | Packed) -> Tensor | Packed:
        return table


class WidenedWeights(KeptWeights):
    """Weights whose 16-bit matrices are float32."""

    def _made(self, layer: LayerWeights) -> LayerWeights:
        return replace(
            layer,
            qkv=_widened(layer.qkv),
            output=_widened(layer.output),
            gate_up=_widened(layer.gate_up),
            down=_widened(layer.down),
        )

    def _made_table(self, table: Tensor | Packed) -> Tensor | Packed:
        return table.float() if isinstance(table, Tensor) else table


def _widened(matrix: AnyMatrix) -> AnyMatrix:
    if isinstance(matrix, Parts):
        return Parts(tuple(_widened_part(part) for part in matrix.matrices))
    return _widened_part(matrix)


def _widened_part(matrix: Matrix | PackedMatrix) -> Matrix | PackedMatrix:
    return Matrix(matrix.weight.float(), matrix.bias) if isinstance(matrix, Matrix) else matrix
