"""The decoder of `decoder.py` as a graph of OpenVINO's operations, over paged keys and values.

Tokens of all rows are one after another, without padding: T tokens of S rows. Attention is OpenVINO's paged one, which
writes new keys and values into blocks that belong to this package, and reads of each row what is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops
from openvino.op import _PagedAttentionExtension
from torch import Tensor

from foretoken.models.native.checkpoint import Layer, Matrix, Weights
from foretoken.models.native.linear import Quantize, quantised

BLOCK = 32
"""Slots of a block of keys or values: what OpenVINO's kernels for CPUs take."""

INPUTS = {
    "tokens": (ov.Type.i32, [-1]),  # [T]
    "cosines": (ov.Type.f32, [-1, 1, 1, -1]),  # [T, 1, 1, R]
    "sines": (ov.Type.f32, [-1, 1, 1, -1]),  # [T, 1, 1, R]
    "past_lens": (ov.Type.i32, [-1]),  # [S]: slots of each row that are in use
    "subsequence_begins": (ov.Type.i32, [-1]),  # [S + 1]: where each row's tokens begin
    "block_indices": (ov.Type.i32, [-1]),  # the rows' blocks, one row's after another's
    "block_indices_begins": (ov.Type.i32, [-1]),  # [S + 1]: where each row's blocks begin
    "max_context_len": (ov.Type.i32, []),  # most slots of a row, the new ones included
    "tree": (ov.Type.u8, [-1]),  # each row's square of which new token sees which, one after another; empty for chains
    "tree_begins": (ov.Type.i32, [-1]),  # [S + 1]: where each row's square begins; empty for chains
    "picks": (ov.Type.i32, [-1]),  # [P]: tokens whose results are wanted
}
"""Inputs of a graph besides the keys and values of each layer: types and shapes."""

CHAIN_INPUTS = {
    "next_cosines": (ov.Type.f32, [-1, 1, 1, -1]),  # [(steps - 1) · S, 1, 1, R]
    "next_sines": (ov.Type.f32, [-1, 1, 1, -1]),  # [(steps - 1) · S, 1, 1, R]
    "next_lens": (ov.Type.i32, [-1]),  # [S]: slots of each row that are in use once its tokens are read
    "next_begins": (ov.Type.i32, [-1]),  # [S + 1]: 0, 1, 2, …
}
"""Further inputs of a graph of several steps."""

DRAW_INPUTS = {
    "inverse_temperatures": (ov.Type.f32, [-1, 1]),  # [S, 1]
    "coins": (ov.Type.f32, [-1, 1]),  # [steps · S, 1]: whole numbers from 0 to `UNITS` - 1, one step's after another's
}
"""Further inputs of a graph that draws its tokens."""

UNITS = 2**24
"""What the laws of a graph that draws are whole multiples of: float32 holds all whole numbers up to it."""

_TYPES = {torch.float32: ov.Type.f32, torch.bfloat16: ov.Type.bf16}


class Graph:
    """A model ready to be compiled.

    Args:
        weights: of the checkpoint.
        dtype: of weights, keys and values.
        quantize: "int8" for linear layers of eight bits.
        hidden_layers: layers whose hidden states are outputs besides the logits.
        steps: None for one pass. A number for a pass that is followed by so many less one of one token a row, each
            token the likeliest after the one before: `picks` are then the rows' last tokens, `CHAIN_INPUTS` are about
            the further passes, one pass after another, and the first output is ``[steps, S]`` int32, the vocabulary's
            size where the scores were no numbers.
        layers: how many there are, the first ones, before the last norm and the output layer; None for all.
        draws: whether the steps' tokens are drawn, by `DRAW_INPUTS`. Then each step has an output more, ``[S, V]``
            float32: the cumulative law that its tokens were drawn from, in whole multiples of ``1 / UNITS``.

    Attributes:
        model: OpenVINO's.
        inputs: names of what it takes before the keys and values, in this order.
        caches: how many keys and values it takes: two for each layer.
    """

    def __init__(
        self,
        weights: Weights,
        dtype: torch.dtype,
        quantize: Quantize | None,
        hidden_layers: Sequence[int] = (),
        steps: int | None = None,
        layers: int | None = None,
        draws: bool = False,
    ) -> None:
        self._draws, self._found, self._laws = draws, list[Any](), list[Any]()
        self._spec, self._dtype, self._quantize = weights.spec, dtype, quantize
        self._memory: list[Any] = []  # constants don't keep what they lie in
        self._constants: dict[tuple[int, str], Any] = {}
        self._inputs = {name: _parameter(name, *about) for name, about in self._inputs_of(steps).items()}
        self._caches = [
            _parameter(f"{kind}.{number}", _TYPES[dtype], [-1, self._spec.groups, BLOCK, self._spec.head_dim])
            for number in range(layers or self._spec.layers)
            for kind in ("keys", "values")
        ]
        self.caches = len(self._caches)
        self._layers = [weights.layer(number) for number in range(layers or self._spec.layers)]
        self._table, self._last_norm = weights.embedding(), weights.final_norm()
        self._head = self._table if self._spec.tied else weights.head()
        self._now = dict(self._inputs)
        self.inputs = tuple(self._inputs)
        outputs = self._pass(hidden_layers) if steps is None else self._chain(steps)
        self.model = ov.Model(outputs, [*self._inputs.values(), *self._caches], "decoder")
        # What the graph does not lie in need not stay: matrices that were quantised, above all.
        self._layers.clear()
        self._constants.clear()
        del self._table, self._last_norm, self._head

    def _inputs_of(self, steps: int | None) -> dict[str, tuple[Any, list[int]]]:
        """Types and shapes of what a graph of so many steps takes."""
        several = CHAIN_INPUTS if steps is not None and steps > 1 else {}
        return {**INPUTS, **several, **(DRAW_INPUTS if self._draws else {})}

    def _pass(self, hidden_layers: Sequence[int]) -> list[Any]:
        states = self._states()
        return [self._logits(self._pick(states[-1])), *(self._pick(states[number]) for number in hidden_layers)]

    def _chain(self, steps: int) -> list[Any]:
        """Passes one after another, which see each other's keys and values because each waits for a token."""
        turns = self._turns(steps)
        token = self._token(self._pick(self._states()[-1]))
        for turn in turns:
            self._now |= {"tokens": ops.minimum(token, integers(self._spec.vocab_size - 1)), **turn}
            token = self._token(self._states()[-1])
        return self._chained()

    def _chained(self) -> list[Any]:
        """What `_token` found: ``[steps, S]`` of tokens ``[S]``, one a step, and the laws."""
        return [ops.concat([ops.unsqueeze(token, integers(0)) for token in self._found], 0), *self._laws]

    def _token(self, x: Any) -> Any:
        """``[S]`` int32: the tokens that follow hidden states ``[S, hidden]``.

        The vocabulary's size stands for scores that are no numbers.
        """
        logits = self._logits(x)
        token = self._draw(logits) if self._draws else self._best(x, logits)
        self._found.append(token)
        return token

    def _turns(self, steps: int) -> list[dict[str, Any]]:
        """Of each pass after the first: what stands in place of the inputs besides the tokens."""
        given = self._inputs
        if self._draws:
            self._coins = ops.split(given["coins"], integers(0), steps).outputs()
        if steps == 1:
            return []
        turns = [ops.split(given[name], integers(0), steps - 1).outputs() for name in ("next_cosines", "next_sines")]
        return [
            {
                "cosines": cosines,
                "sines": sines,
                "subsequence_begins": given["next_begins"],
                "past_lens": ops.add(given["next_lens"], integers(step)),
                "max_context_len": ops.add(given["max_context_len"], integers(step + 1)),
            }
            for step, (cosines, sines) in enumerate(zip(*turns, strict=True))
        ]

    def _draw(self, logits: Any) -> Any:
        """Draw from the softmax of scores over temperature, by inverting its cumulative distribution.

        Sums of float32 are rounded, and differences of them are not the laws that they were made of. So the cumulative
        distribution is rounded to whole units, as are the coins, and its differences are the law: then what was drawn
        from is known exactly.
        """
        size = self._spec.vocab_size
        over = ops.subtract(logits, ops.reduce_max(logits, integers([1]), True))
        sums = ops.cum_sum(ops.exp(ops.multiply(over, self._now["inverse_temperatures"])), integers(1))
        total = ops.gather(sums, integers([size - 1]), integers(1))
        law = ops.floor(ops.multiply(sums, ops.divide(_floats(float(UNITS)), total)))  # never falls: a product does not
        # It ends with all units, which rounding may have missed by one or two.
        end = ops.constant(np.array([[0.0] * (size - 1) + [float(UNITS)]], dtype=np.float32))
        law = ops.minimum(ops.maximum(law, end), _floats(float(UNITS)))
        # The runtime's exponential may make numbers of what is none.
        differences = ops.reduce_sum(over, integers([1]), True)
        sound = ops.equal(differences, differences)
        law = ops.select(sound, law, end)
        below = ops.convert(ops.less_equal(law, self._coins[len(self._found)]), "f32")
        place = ops.reduce_sum(below, integers([1]), False)
        self._laws.append(law)
        return ops.convert(ops.select(ops.squeeze(sound, integers([1])), place, _floats(float(size))), "i32")

    def _best(self, x: Any, logits: Any) -> Any:
        """The likeliest tokens, the lowest of equal ones.

        OpenVINO's own operations for this (TopK) go over the scores with one thread, and not in vectors.
        """
        size = self._spec.vocab_size
        is_best = ops.equal(logits, ops.reduce_max(logits, integers([1]), True))
        countdown = ops.constant(np.arange(size, 0, -1, dtype=np.float32)[None])  # exact up to 2 ** 24
        place = ops.reduce_max(ops.select(is_best, countdown, _floats(0.0)), integers([1]), False)
        total = ops.reduce_sum(x, integers([1]), False)
        place = ops.select(ops.equal(total, total), place, _floats(0.0))
        return ops.convert(ops.subtract(_floats(float(size)), place), "i32")

    def _logits(self, x: Any) -> Any:
        as_it_is = self._spec.tied and self._quantize is None
        head = self._vector(self._table) if as_it_is else self._weight(self._head)
        return ops.matmul(x, head, False, True)

    def _states(self) -> list[Any]:
        """Hidden states of the tokens of now: embeddings, then after each layer, the last ones normalised."""
        x = ops.gather(self._vector(self._table), self._now["tokens"], integers(0))
        states = [x]
        for number, layer in enumerate(self._layers):
            x = ops.add(x, self._attention(self._norm(x, layer.attention_norm), layer, number))
            x = self._mlp(x, layer)
            states.append(x)
        states[-1] = self._norm(x, self._last_norm)
        return states

    def _mlp(self, x: Any, layer: Layer) -> Any:
        """``x`` and what the layer's second half adds to it."""
        normalised = self._norm(x, layer.mlp_norm)
        # Two products: a split of one, and the activation apart from it, would cost more than reading `x` twice.
        gates, values = (self._linear(normalised, half) for half in _halves(layer.gate_up))
        return ops.add(x, self._linear(ops.multiply(ops.swish(gates), values), layer.down))

    def _pick(self, x: Any) -> Any:
        return ops.gather(x, self._now["picks"], integers(0))

    def _attention(self, x: Any, layer: Layer, number: int) -> Any:
        spec, size = self._spec, self._spec.head_dim
        widths = [spec.heads * size, spec.groups * size, spec.groups * size]
        query, key, value = ops.variadic_split(self._linear(x, layer.qkv), integers(1), integers(widths)).outputs()
        query = self._rotate(query, spec.heads, layer.query_norm)
        key = self._rotate(key, spec.groups, layer.key_norm)
        caches = self._caches[2 * number : 2 * number + 2]
        inputs = self._now
        nothing, no_numbers = _empty(np.int32, 1), _empty(np.float32, 1)
        attention = _PagedAttentionExtension(
            [
                _output(node)
                for node in (
                    query,
                    key,
                    value,
                    *caches,
                    *(inputs[name] for name in ("past_lens", "subsequence_begins")),
                    *(inputs[name] for name in ("block_indices", "block_indices_begins")),
                    _floats(size**-0.5),
                    integers(spec.windows[number] or 0),
                    no_numbers,  # ALiBi slopes
                    inputs["max_context_len"],
                    nothing,  # score aggregation window
                    *(nothing, nothing, no_numbers),  # rotation of cached keys
                    *(no_numbers, integers(0), integers(0)),  # sparse attention
                    _empty(np.float32, 4),  # sinks
                    *(integers(0), nothing, nothing, nothing),  # eviction from the cache
                    nothing,  # token types
                    inputs["tree"],
                    inputs["tree_begins"],
                )
            ]
        )
        about = attention.get_rt_info()
        about["num_k_heads"] = about["num_v_heads"] = spec.groups
        about["k_head_size"] = about["v_head_size"] = size
        return self._linear(attention.output(0), layer.output)

    def _rotate(self, x: Any, heads: int, norm: Tensor | None) -> Any:
        """``[T, heads · D]``, normalised head by head, the first R features of each head turned."""
        size, rotated = self._spec.head_dim, self._spec.rotary_dim
        x = ops.reshape(x, integers([-1, heads, 1, size]), False)
        if norm is not None:
            x = self._norm(x, norm)
        turned, rest = x, None
        if rotated < size:
            turned, rest = ops.variadic_split(x, integers(3), integers([rotated, size - rotated])).outputs()
        # In just this form the runtime knows what it is, and does it in one operation.
        first, second = ops.variadic_split(turned, integers(3), integers([rotated // 2, rotated // 2])).outputs()
        minus = ops.constant(np.full((1, 1, 1, 1), -1.0, dtype=np.float32))
        swapped = ops.concat([ops.multiply(second, minus), first], -1)
        turned = ops.add(ops.multiply(turned, self._now["cosines"]), ops.multiply(swapped, self._now["sines"]))
        x = turned if rest is None else ops.concat([turned, rest], -1)
        return ops.reshape(x, integers([-1, heads * size]), False)

    def _norm(self, x: Any, scale: Tensor) -> Any:
        square = ops.reduce_mean(ops.power(x, _floats(2.0)), integers([-1]), True)
        root = ops.sqrt(ops.add(square, _floats(self._spec.norm_epsilon)))
        return ops.multiply(ops.multiply(x, ops.divide(_floats(1.0), root)), self._vector(scale))

    def _linear(self, x: Any, matrix: Matrix) -> Any:
        product = ops.matmul(x, self._weight(matrix.weight), False, True)
        return product if matrix.bias is None else ops.add(product, self._vector(matrix.bias))

    def _weight(self, weight: Tensor) -> Any:
        """``[out, in]`` as a float32 node; the runtime multiplies in the type that lies below it."""
        if self._quantize is None:
            return self._vector(weight)
        return self._once(weight, "weight", self._quantised)

    def _vector(self, values: Tensor) -> Any:
        """The values as a float32 node."""
        return self._once(values, "vector", self._widened)

    def _once(self, values: Tensor, kind: str, make: Callable[[Tensor], Any]) -> Any:
        """What `make` gives for values that outlive the graph; the same again where they have been seen."""
        key = values.data_ptr(), kind
        if key not in self._constants:
            self._constants[key] = make(values)
        return self._constants[key]

    def _quantised(self, weight: Tensor) -> Any:
        integers, scale = quantised(weight)
        widened = ops.convert(self._constant(integers), "f32")
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


def _halves(matrix: Matrix) -> list[Matrix]:
    """The first half of a layer's output features, and the second."""
    biases = [None, None] if matrix.bias is None else matrix.bias.chunk(2)
    return [Matrix(weight, bias) for weight, bias in zip(matrix.weight.chunk(2), biases, strict=True)]


def shared(values: Tensor) -> tuple[ov.Tensor, Any]:
    """OpenVINO's view of a contiguous tensor's memory, and what has to stay alive with it."""
    if values.dtype is not torch.bfloat16:
        array = values.numpy()
        return ov.Tensor(array, shared_memory=True), array
    array = values.view(torch.int16).numpy()  # NumPy has no bfloat16
    return ov.Tensor(array, ov.Shape(list(values.shape)), ov.Type.bf16), array


def _parameter(name: str, kind: Any, shape: list[int]) -> Any:
    parameter = ops.parameter(shape, kind, name)
    parameter.output(0).get_tensor().set_names({name})
    return parameter


def integers(values: int | list[int]) -> Any:
    """A constant of int32."""
    return ops.constant(np.array(values, dtype=np.int32))


def _floats(value: float) -> Any:
    return ops.constant(np.array(value, dtype=np.float32))


def _empty(dtype: Any, dimensions: int) -> Any:
    return ops.constant(np.zeros((0,) * dimensions, dtype=dtype))


def _output(node: Any) -> Any:
    return node if isinstance(node, ov.Output) else node.output(0)
