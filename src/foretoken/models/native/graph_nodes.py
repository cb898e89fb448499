"""Nodes of OpenVINO graphs: inputs, small constants, and constants that lie in the memory of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops
from torch import Tensor

from foretoken.models.native.checkpoint import AnyMatrix, Parts
from foretoken.models.native.linear import Quantize, quantised
from foretoken.models.native.packed import Packed


class Constants:
    """Small constants of one graph. Equal ones are one node: with a third fewer nodes it compiles in three quarters of
    the time."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[str, tuple[int, ...], bytes], Any] = {}

    def i32(self, values: int | Sequence[int]) -> Any:
        """Of integers."""
        return self.array(np.array(values, dtype=np.int32))

    def f32(self, value: float) -> Any:
        """Of a number."""
        return self.array(np.array(value, dtype=np.float32))

    def empty(self, dtype: Any, dimensions: int) -> Any:
        """Without elements."""
        return self.array(np.zeros((0,) * dimensions, dtype=dtype))

    def array(self, values: np.ndarray) -> Any:
        """Of an array's type and shape."""
        key = values.dtype.str, values.shape, values.tobytes()
        if key not in self._nodes:
            self._nodes[key] = ops.constant(values)
        return self._nodes[key]

    def forget(self) -> None:
        """Drop the nodes, once the graph is complete."""
        self._nodes.clear()


class WeightNodes:
    """Weights as float32 nodes; the runtime multiplies in the type that lies below them.

    Args:
        quantize: None to leave matrices that are not packed as they are; else they get eight bits.
        constants: of the graph.
        round_off: gives eight bits and a scale of each row.
    """

    def __init__(
        self,
        quantize: Quantize | None,
        constants: Constants,
        round_off: Callable[[Tensor], tuple[Tensor, Tensor]] = quantised,
    ) -> None:
        self._quantize, self._constants, self._round_off = quantize, constants, round_off
        self._memory: list[Any] = []  # constants don't keep the memory that they lie in
        self._nodes: dict[tuple[int, str], Any] = {}

    def linear(self, x: Any, matrix: AnyMatrix) -> Any:
        """``[T, out]`` of ``[T, in]``."""
        if isinstance(matrix, Parts):
            return ops.concat([self.linear(x, part) for part in matrix.matrices], 1)
        product = self.product(x, matrix.weight)
        return product if matrix.bias is None else ops.add(product, self.vector(matrix.bias))

    def product(self, x: Any, weight: Tensor | Packed) -> Any:
        """``[T, out]`` of ``[T, in]``, without a bias."""
        if isinstance(weight, Tensor):
            return ops.matmul(x, self.matrix(weight), False, True)
        product = ops.matmul(x, self._packed(weight), False, True)
        if weight.offsets is None:
            return product
        grouped = ops.reshape(x, self._constants.i32([-1, weight.scales.shape[1], weight.group]), False)
        sums = ops.reduce_sum(grouped, self._constants.i32([2]))
        return ops.add(product, ops.matmul(sums, self.vector(weight.offsets), False, True))

    def rows(self, weight: Tensor | Packed, index: Any) -> Any:
        """``[T, in]``: rows of a matrix of which the T numbers are given."""
        if isinstance(weight, Tensor):
            return ops.gather(self.vector(weight), index, self._constants.i32(0))
        (_, width), groups = weight.shape, weight.scales.shape[1]
        found = ops.convert(ops.gather(self._constant(weight.integers), index, self._constants.i32(0)), "f32")
        if weight.bits == 4:
            high = ops.floor(ops.divide(found, self._constants.f32(16.0)))
            both = [ops.subtract(found, ops.multiply(high, self._constants.f32(16.0))), high]
            pairs = ops.concat([ops.unsqueeze(half, self._constants.i32(2)) for half in both], 2)
            found = ops.subtract(
                ops.floor_mod(ops.add(pairs, self._constants.f32(8.0)), self._constants.f32(16.0)),
                self._constants.f32(8.0),
            )
        found = ops.reshape(found, self._constants.i32([-1, groups, width // groups]), False)
        for operation, factors in ((ops.multiply, weight.scales), (ops.add, weight.offsets)):
            if factors is not None:
                its = ops.gather(self._constant(factors), index, self._constants.i32(0))
                found = operation(found, ops.unsqueeze(its, self._constants.i32(2)))
        return ops.reshape(found, self._constants.i32([-1, width]), False)

    def matrix(self, weight: Tensor) -> Any:
        """``[out, in]``, quantised to eight bits if `quantize` is set."""
        return self.vector(weight) if self._quantize is None else self._once(weight, "matrix", self._quantised)

    def vector(self, values: Tensor) -> Any:
        """The values as they are."""
        return self._once(values, "vector", self._widened)

    def forget(self) -> None:
        """Drop the nodes, once the graph is complete: tensors that were only a step on the way are freed."""
        self._nodes.clear()

    def _packed(self, weight: Packed) -> Any:
        """``[out, in]``, in the form that the runtime multiplies without widening the whole; offsets apart."""
        return self._once(weight.integers, "packed", lambda _: self._scaled(weight))

    def _scaled(self, weight: Packed) -> Any:
        if not _is_multiplied(weight):
            return self._constant(weight.widened())
        rows, width = weight.shape
        groups, size = weight.scales.shape[1], weight.group
        tensor, memory = shared(weight.integers.contiguous())
        kind = ov.Type.i8 if weight.bits == 8 else ov.Type.i4
        tensor = ov.Tensor(memory, ov.Shape([rows, groups, size]), kind)
        self._memory.append((tensor, memory))
        integers_ = ops.convert(ops.constant(tensor, shared_memory=True), "f32")
        product = ops.multiply(integers_, self._constant(weight.scales.view(rows, groups, 1)))
        return ops.reshape(product, self._constants.i32([rows, width]), False)

    def _once(self, values: Tensor, kind: str, make: Callable[[Tensor], Any]) -> Any:
        """The node that `make` gives for these values, made at the first call."""
        key = values.data_ptr(), kind
        if key not in self._nodes:
            self._nodes[key] = make(values)
        return self._nodes[key]

    def _quantised(self, weight: Tensor) -> Any:
        rounded, scale = self._round_off(weight)
        if weight.shape[1] % 2:
            # In bfloat16 the runtime's products of eight-bit weights are wrong for odd widths: with 67 features scores
            # were off by 0.15 of their deviation, and by 0.03 with 64.
            return self._widened((rounded * scale[:, None]).to(weight.dtype))
        widened = ops.convert(self._constant(rounded), "f32")
        return ops.multiply(widened, self._constant(scale[:, None].contiguous()))

    def _widened(self, values: Tensor) -> Any:
        constant = self._constant(values)
        if values.dtype is torch.float32:
            return constant
        widened = ops.convert(constant, "f32")
        # Without this mark the runtime widens the weights when it compiles, and keeps twice their bytes from then on.
        widened.get_rt_info()["decompression_0"] = ""
        return widened

    def _constant(self, values: Tensor) -> Any:
        """A constant in the memory of the tensor."""
        tensor = shared(values.contiguous())
        self._memory.append(tensor)
        return ops.constant(tensor[0], shared_memory=True)


def _is_multiplied(weight: Packed) -> bool:
    """Whether the runtime's products of such groups are right.

    Those of four bits are wrong in odd groups, of which two share a byte. In float32 they are wrong over up to four
    tokens in groups of more than 32 features, but for multiples of 32.
    """
    return weight.bits == 8 or (weight.group % 2 == 0 and (weight.group <= 32 or weight.group % 32 == 0))


def shared(values: Tensor) -> tuple[ov.Tensor, Any]:
    """OpenVINO's view of a contiguous tensor's memory, and the object that has to stay alive with it."""
    if values.dtype is not torch.bfloat16:
        array = values.numpy()
        return ov.Tensor(array, shared_memory=True), array
    array = values.view(torch.int16).numpy()  # NumPy has no bfloat16
    return ov.Tensor(array, ov.Shape(list(values.shape)), ov.Type.bf16), array


def parameter(name: str, kind: Any, shape: list[int]) -> Any:
    """An input of the graph; -1 stands for a size that varies."""
    parameter = ops.parameter(shape, kind, name)
    parameter.output(0).get_tensor().set_names({name})
    return parameter


def output(node: Any) -> Any:
    """A node's only output."""
    return node if isinstance(node, ov.Output) else node.output(0)
