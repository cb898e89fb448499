"""Linear layers of the torch backend: weights as they are, prepacked for oneDNN, or in eight bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import linear

from foretoken.errors import ModelError, check_choice
from foretoken.models.native.checkpoint import Matrix
from foretoken.models.processor import multiplies_bfloat16

Quantize = Literal["int8", "int4", "w8a8", "w4a8"]
"""Eight bits for the weights, or four (see `int4.py`); with "a8" eight for what they are multiplied with, too, group by
group as it comes."""

FOUR_BITS = ("int4", "w4a8")
"""Those whose weights are `Int4Weights`."""

ROUNDED_INPUTS = ("w8a8", "w4a8")
"""Those whose layers' inputs are rounded; OpenVINO alone has them."""

Linear = Callable[[Tensor], Tensor]
"""``[…, in]`` to ``[…, out]``, in the dtype of what is given."""

_FEW_ROWS = 4
"""Up to so many rows the eight-bit kernel beats weights that are widened first; see `benchmarks/native.py`."""

_VECTOR = 16
"""Features that the eight-bit kernel reads at a time in bfloat16."""


def check_quantize(value: str | None) -> None:
    """Check that a `quantize` option is known, and resolve "auto" to the fastest one.

    Raises:
        ModelError: it is not.
    """
    if value is not None:
        check_choice("quantize", value, (*get_args(Quantize), "auto"), ModelError)


def make(matrix: Matrix, quantize: Quantize | None = None) -> Linear:
    """The fastest form of a layer that its device has."""
    if quantize is not None:
        return Int8(matrix)
    if matrix.weight.device.type == "cpu" and matrix.weight.dtype is torch.bfloat16 and multiplies_bfloat16():
        return Prepacked(matrix)
    return Plain(matrix)


class Plain:
    """Weights as they were stored."""

    def __init__(self, matrix: Matrix) -> None:
        self._weight, self._bias = matrix.weight, matrix.bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return linear(x, self._weight, self._bias)


class Prepacked:
    """Weights in the order that oneDNN's kernels read them in: torch would reorder them in every call."""

    def __init__(self, matrix: Matrix) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(matrix.weight.contiguous(), 8)
        self._bias = matrix.bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return result


class Int8:
    """Weights of eight bits with one scale an output feature; what they are multiplied with keeps its precision."""

    def __init__(self, matrix: Matrix) -> None:
        self._weight, self._scale = quantised(matrix.weight)
        self._half = matrix.weight.dtype is torch.float16
        if not self._half:
            self._scale = self._scale.to(matrix.weight.dtype)
        # In bfloat16 torch's kernel reads what lies behind rows of other widths: its products are wrong, or it crashes.
        self._fits = matrix.weight.dtype is torch.float32 or matrix.weight.shape[1] % _VECTOR == 0
        self._bias = matrix.bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        rows = x.reshape(-1, x.shape[-1])
        if self._half:  # whose largest number is 65504: products with integers up to 127 would exceed it
            weight = rows.new_empty(self._weight.shape)
            product = linear(rows, torch.mul(self._weight, self._scale[:, None], out=weight))
        elif rows.shape[0] <= _FEW_ROWS and rows.device.type == "cpu" and self._fits:
            product = torch._weight_int8pack_mm(rows, self._weight, self._scale)
        else:
            product = linear(rows, self._weight.to(rows.dtype)) * self._scale
        if self._bias is not None:
            product = product + self._bias
        return product.view(*x.shape[:-1], self._weight.shape[0])


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Eight-bit integers, and what to multiply each output feature by.

    Args:
        weight: ``[out, in]``.

    Returns:
        ``[out, in]`` int8 in -127 … 127, and ``[out]`` float32: the largest weight of a row is 127 of its scales.
    """
    scale = weight.abs().amax(dim=1).float().clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (weight.float() / scale[:, None]).round_().to(torch.int8), scale
