"""The decoder of `decoder.py` as a graph of OpenVINO's operations, over a paged KV cache.

Tokens of all rows are one after another, without padding: T tokens of S sequences, of which a row may have several.
Attention is OpenVINO's paged one, which writes new keys and values into blocks that belong to this package, and reads
the blocks of each sequence that are in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops
from openvino.op import _PagedAttentionExtension
from torch import Tensor

from foretoken.models.native.checkpoint import AnyMatrix, LayerWeights, Matrix, Parts, Weights
from foretoken.models.native.graph_nodes import Constants, WeightNodes, output, parameter, shared
from foretoken.models.native.graph_tokens import best_tokens, draw_tokens
from foretoken.models.native.linear import Quantize, quantised
from foretoken.models.native.packed import Packed, PackedMatrix
from foretoken.models.native.paging import BLOCK
from foretoken.models.native.widened import KeptWeights
from foretoken.models.processor import multiplies_tiles

INPUTS = {
    "tokens": (ov.Type.i32, [-1]),  # [T]
    "cosines": (ov.Type.f32, [-1, 1, 1, -1]),  # [T, 1, 1, R]
    "sines": (ov.Type.f32, [-1, 1, 1, -1]),  # [T, 1, 1, R]
    "past_lens": (ov.Type.i32, [-1]),  # [S]: slots that each sequence has before its tokens, see `sequences`
    "subsequence_begins": (ov.Type.i32, [-1]),  # [S + 1]: where each one's tokens begin
    "block_indices": (ov.Type.i32, [-1]),  # the sequences' blocks, one's after another's
    "block_indices_begins": (ov.Type.i32, [-1]),  # [S + 1]: where each one's blocks begin
    "max_context_len": (ov.Type.i32, []),  # slots of a row to make room for, the new ones included
    "tree": (ov.Type.u8, [-1]),  # each sequence's square mask among its tokens, one after another; empty for chains
    "tree_begins": (ov.Type.i32, [-1]),  # [S + 1]: where each one's square begins; empty for chains
    "picks": (ov.Type.i32, [-1]),  # [P]: tokens whose logits are wanted
}
"""Inputs of a graph besides the keys and values of each layer: types and shapes."""

CHAIN_INPUTS = {
    "next_cosines": (ov.Type.f32, [-1, 1, 1, -1]),  # [(steps - 1) · S, 1, 1, R]
    "next_sines": (ov.Type.f32, [-1, 1, 1, -1]),  # [(steps - 1) · S, 1, 1, R]
    "next_lens": (ov.Type.i32, [-1]),  # [S]: slots of each row that are in use after its first pass
    "next_begins": (ov.Type.i32, [-1]),  # [S + 1]: 0, 1, 2, …
}
"""Further inputs of a graph of several steps."""

DRAW_INPUTS = {
    "inverse_temperatures": (ov.Type.f32, [-1, 1]),  # [S, 1]
    "uniforms": (ov.Type.f32, [-1, 1]),  # [steps · S, 1]: whole numbers from 0 to `UNITS` - 1, step by step
}
"""Further inputs of a graph that draws its tokens."""


MOST_PICKS = 17
"""Tokens of a pass of a fixed width whose logits are given: as many as drafts have, and not all of a prompt's."""

_CACHE_TYPES = {torch.float32: ov.Type.f32, torch.bfloat16: ov.Type.bf16, torch.float16: ov.Type.dynamic}
"""Of keys and values. Those of inputs in float16 would be widened first; so the runtime is left to choose, as told."""


class DecoderGraph:
    """A graph ready to be compiled: one pass, or a chain of passes that choose their tokens themselves.

    Networks that are fed more than tokens subclass it: they say what they take besides (`extra_inputs`), what a pass
    is (`run`), how logits follow from it (`scored`), what the next pass of a chain is fed (`next_inputs`) and what the
    caller gets back for the passes to come (`carried`). They build on `norm`, `attention`, `mlp` and `weights`.
    `__init__` builds the graph, so a subclass sets what its methods need before it calls that of this class.

    Args:
        weights: of the checkpoint.
        dtype: of keys and values.
        quantize: see `WeightNodes`.
        hidden_layers: layers whose hidden states are outputs besides the logits.
        steps: None for one pass. A number for a chain: a pass, followed by so many less one of one token a row, each
            token the best or a drawn one after the one before. `picks` are then the rows' last tokens, `CHAIN_INPUTS`
            are about the further passes, one pass after another, and the first output is ``[steps, S]`` int32, the
            vocabulary's size where a logit was NaN.
        layers: how many there are, the first ones, before the last norm and the output layer; None for all.
        draws: whether the steps' tokens are drawn, by `DRAW_INPUTS`. Then the second output is ``[S, steps, V]``
            float32: the cumulative distributions that they were drawn from, in multiples of ``1 / UNITS``.
        joins_mlp: give `mlp` the form that `joins_mlp` is about.
        input_group: features that share a scale where inputs are rounded; 0 where they are not.
        memory: keys and values that are constants of the graph, two tensors for each layer; None where they are inputs.

    Attributes:
        model: OpenVINO's.
        output_layer: a model of its own of the output layer, for a single pass of a model whose output layer has
            smaller groups of weights than `input_group`: the runtime rounds the inputs of a model in groups of one
            size, and does not round them where the weights have smaller ones. The first output of `model` is then what
            the output layer takes. None where it is the logits, and for chains, whose output layers take inputs that
            are not rounded.
        output_group: features that share a scale in the output layer's weights; 0 where they are not packed.
        inputs: names of what it takes before the keys and values, in this order.
        caches: how many keys and values it takes as inputs: two for each layer, or none.
        now: the nodes that stand for each input in the pass that is being built, by name.
        width: tokens of a pass that it takes, see `fix_width`; None for any number.
        picks: how many of them it gives logits of; 0 for any number.
    """

    width: int | None = None
    picks = 0

    def __init__(
        self,
        weights: Weights | KeptWeights,
        dtype: torch.dtype,
        quantize: Quantize | None,
        hidden_layers: Sequence[int] = (),
        steps: int | None = None,
        layers: int | None = None,
        draws: bool = False,
        *,
        joins_mlp: bool = False,
        input_group: int = 0,
        memory: Sequence[Tensor] | None = None,
    ) -> None:
        self.spec, self.release = weights.spec, weights.release
        self.constants = Constants()
        round_off = weights.quantised if isinstance(weights, KeptWeights) else quantised
        self.weights = WeightNodes(quantize, self.constants, round_off)
        self._draws, self._steps, self._joins_mlp = draws, steps, joins_mlp
        count = layers or self.spec.layers
        described = self._inputs_of(steps)
        self._inputs = {name: parameter(name, *about) for name, about in described.items()}
        if memory is None:
            shape = [-1, self.spec.groups, BLOCK, self.spec.head_dim]
            names = [f"{kind}.{number}" for number in range(count) for kind in ("keys", "values")]
            self._caches = [parameter(name, _CACHE_TYPES[dtype], shape) for name in names]
        else:
            self._caches = [ops.constant(shared(tensor)[0], shared_memory=True) for tensor in memory]
        given = self._caches if memory is None else []
        self.caches = len(given)
        self.layers = [weights.layer(number) for number in range(count)]
        self.table, self.last_norm = weights.table(), weights.final_norm()
        self._head = self.table if self.spec.tied else weights.head()
        self.now = dict(self._inputs)
        self.inputs = tuple(self._inputs)
        self.output_layer, self.output_group = None, self._head.group if isinstance(self._head, Packed) else 0
        if steps is None and 0 < self.output_group < input_group:
            state = parameter("state", ov.Type.f32, [-1, self.spec.hidden_size])
            self.output_layer = ov.Model([self._logits(state)], [state], "output layer")
        outputs = self._one_pass(hidden_layers) if steps is None else self._chain(steps)
        self.model = ov.Model(outputs, [*self._inputs.values(), *given], "decoder")
        # Tensors that the graph's constants don't lie in may go: matrices that were quantised, above all.
        self.layers.clear()
        self.weights.forget()
        self.constants.forget()
        del self.table, self.last_norm, self._head, self._caches

    def extra_inputs(self) -> dict[str, tuple[Any, list[int]]]:
        """Types and shapes of inputs that only this network has; none."""
        return {}

    def scored(self, state: Any) -> Any:
        """What the output layer takes, of the last states that `run` gave; the states themselves."""
        return state

    def next_inputs(self, token: Any, state: Any) -> dict[str, Any]:
        """What a chain's next pass is fed: tokens ``[S]``, and other inputs by name.

        Args:
            token: ``[S]``, the tokens that were chosen, the vocabulary's size where a logit was NaN.
            state: the last states ``[S, hidden]`` that they were chosen by.
        """
        return {"tokens": ops.minimum(token, self.constants.i32(self.spec.vocab_size - 1))}

    def carried(self, state: Any) -> list[Any]:
        """Outputs of the graph after all others, of the last states of the picked tokens; none."""
        return []

    def pick(self, x: Any) -> Any:
        """``[P, …]``: the rows of ``[T, …]`` whose results are wanted."""
        return ops.gather(x, self.now["picks"], self.constants.i32(0))

    def run(self) -> list[Any]:
        """One pass over `now`: hidden states ``[T, hidden]``, embeddings first, then after each layer, the last normed.

        For other networks than decoders to override; `scored` says what becomes of the last of them.
        """
        x = self.weights.rows(self.table, self.now["tokens"])
        states = [x]
        for number, layer in enumerate(self.layers):
            x = ops.add(x, self.attention(self.norm(x, layer.attention_norm), layer, number))
            x = self.mlp(x, layer)
            states.append(x)
        states[-1] = self.norm(x, self.last_norm)
        return states

    def mlp(self, x: Any, layer: LayerWeights) -> Any:
        """A layer's second half: ``[T, hidden]``, `x` included."""
        normalised = self.norm(x, layer.mlp_norm)
        if self._joins_mlp:  # the form that the runtime recognises: three axes, and a product with the sigmoid
            normalised = ops.unsqueeze(normalised, self.constants.i32(0))
        # Two products: a split of one, and the activation apart from it, would cost more than reading `x` twice.
        gates, values = (self.weights.linear(normalised, half) for half in _halves(layer.gate_up))
        activated = ops.multiply(gates, ops.sigmoid(gates)) if self._joins_mlp else ops.swish(gates)
        added = self.weights.linear(ops.multiply(activated, values), layer.down)
        return ops.add(x, ops.squeeze(added, self.constants.i32(0)) if self._joins_mlp else added)

    def attention(self, x: Any, layer: LayerWeights, number: int) -> Any:
        """Paged attention of layer `number` over normed states ``[T, …]``, `x` not included: ``[T, hidden]``."""
        spec, size = self.spec, self.spec.head_dim
        widths = [spec.heads * size, spec.groups * size, spec.groups * size]
        if isinstance(layer.qkv, Parts):
            query, key, value = (self.weights.linear(x, part) for part in layer.qkv.matrices)
        else:
            whole = self.weights.linear(x, layer.qkv)
            query, key, value = ops.variadic_split(whole, self.constants.i32(1), self.constants.i32(widths)).outputs()
        query = self._rotate(query, spec.heads, layer.query_norm)
        key = self._rotate(key, spec.groups, layer.key_norm)
        caches = self._caches[2 * number : 2 * number + 2]
        inputs = self.now
        nothing, no_floats = self.constants.empty(np.int32, 1), self.constants.empty(np.float32, 1)
        attention = _PagedAttentionExtension(
            [
                output(node)
                for node in (
                    query,
                    key,
                    value,
                    *caches,
                    *(inputs[name] for name in ("past_lens", "subsequence_begins")),
                    *(inputs[name] for name in ("block_indices", "block_indices_begins")),
                    self.constants.f32(size**-0.5),
                    self.constants.i32(spec.windows[number] or 0),
                    no_floats,  # ALiBi slopes
                    inputs["max_context_len"],
                    nothing,  # score aggregation window
                    *(nothing, nothing, no_floats),  # rotation of cached keys
                    *(no_floats, self.constants.i32(0), self.constants.i32(0)),  # sparse attention
                    self.constants.empty(np.float32, 4),  # sinks
                    *(self.constants.i32(0), nothing, nothing, nothing),  # eviction from the cache
                    nothing,  # token types
                    inputs["tree"],
                    inputs["tree_begins"],
                )
            ]
        )
        about = attention.get_rt_info()
        about["num_k_heads"] = about["num_v_heads"] = spec.groups
        about["k_head_size"] = about["v_head_size"] = size
        return self.weights.linear(attention.output(0), layer.output)

    def _rotate(self, x: Any, heads: int, norm: Tensor | None) -> Any:
        """``[T, heads · D]``, normalised head by head, the first R features of each head turned."""
        size, rotated = self.spec.head_dim, self.spec.rotary_dim
        x = ops.reshape(x, self.constants.i32([-1, heads, 1, size]), False)
        if norm is not None:
            x = self.norm(x, norm)
        turned, rest = x, None
        if rotated < size:
            turned, rest = ops.variadic_split(
                x, self.constants.i32(3), self.constants.i32([rotated, size - rotated])
            ).outputs()
        # The runtime recognises exactly this form and fuses it into one operation.
        first, second = ops.variadic_split(
            turned, self.constants.i32(3), self.constants.i32([rotated // 2, rotated // 2])
        ).outputs()
        minus = self.constants.array(np.full((1, 1, 1, 1), -1.0, dtype=np.float32))
        swapped = ops.concat([ops.multiply(second, minus), first], -1)
        turned = ops.add(ops.multiply(turned, self.now["cosines"]), ops.multiply(swapped, self.now["sines"]))
        x = turned if rest is None else ops.concat([turned, rest], -1)
        return ops.reshape(x, self.constants.i32([-1, heads * size]), False)

    def norm(self, x: Any, scale: Tensor) -> Any:
        """Root-mean-square norm over the last axis."""
        square = ops.reduce_mean(ops.power(x, self.constants.f32(2.0)), self.constants.i32([-1]), True)
        root = ops.sqrt(ops.add(square, self.constants.f32(self.spec.norm_epsilon)))
        return ops.multiply(ops.divide(x, root), self.weights.vector(scale))

    def _inputs_of(self, steps: int | None) -> dict[str, tuple[Any, list[int]]]:
        """Types and shapes of all inputs of a graph of so many steps."""
        several = CHAIN_INPUTS if steps is not None and steps > 1 else {}
        return {**INPUTS, **several, **(DRAW_INPUTS if self._draws else {}), **self.extra_inputs()}

    def _one_pass(self, hidden_layers: Sequence[int]) -> list[Any]:
        states = self.run()
        last = self.pick(states[-1])
        hidden = [self.pick(states[number]) for number in hidden_layers]
        scored = self.scored(last)
        return [self._logits(scored) if self.output_layer is None else scored, *hidden, *self.carried(last)]

    def _chain(self, steps: int) -> list[Any]:
        """Passes one after another; each needs the token of the one before, so it attends to its keys and values."""
        turns = self._turns(steps)
        state = self.pick(self.run()[-1])
        chosen = [self._choose(state, 0)]
        for step, turn in enumerate(turns, start=1):
            self.now |= {**self.next_inputs(chosen[-1][0], state), **turn}
            state = self.run()[-1]
            chosen.append(self._choose(state, step))
        tokens = ops.concat([ops.unsqueeze(token, self.constants.i32(0)) for token, _ in chosen], 0)
        drawn = [ops.unsqueeze(cumulative, self.constants.i32(1)) for _, cumulative in chosen if cumulative is not None]
        return [tokens, *([ops.concat(drawn, 1)] if drawn else []), *self.carried(state)]

    def _choose(self, state: Any, step: int) -> tuple[Any, Any | None]:
        """Tokens ``[S]`` int32 after states ``[S, hidden]``, and the cumulative distribution where they are drawn."""
        x = self.scored(state)
        logits = self._logits(x)
        if not self._draws:
            return best_tokens(x, logits, self.spec.vocab_size, self.constants), None
        temperatures = self.now["inverse_temperatures"]
        return draw_tokens(logits, temperatures, self._uniforms[step], self.spec.vocab_size, self.constants)

    def _turns(self, steps: int) -> list[dict[str, Any]]:
        """Of each pass after the first: the inputs that change from step to step, the tokens aside."""
        given = self._inputs
        if self._draws:
            self._uniforms = ops.split(given["uniforms"], self.constants.i32(0), steps).outputs()
        if steps == 1:
            return []
        turns = [
            ops.split(given[name], self.constants.i32(0), steps - 1).outputs()
            for name in ("next_cosines", "next_sines")
        ]
        return [
            {
                "cosines": cosines,
                "sines": sines,
                "subsequence_begins": given["next_begins"],
                "past_lens": ops.add(given["next_lens"], self.constants.i32(step)),
                "max_context_len": ops.add(given["max_context_len"], self.constants.i32(step + 1)),
            }
            for step, (cosines, sines) in enumerate(zip(*turns, strict=True))
        ]

    def _logits(self, x: Any) -> Any:
        return self.weights.product(x, self._head)


def _halves(matrix: AnyMatrix) -> Sequence[Matrix | PackedMatrix]:
    """The first half of a layer's output features, and the second."""
    if isinstance(matrix, Parts):
        return matrix.matrices
    if isinstance(matrix, PackedMatrix):
        return matrix.halves()
    biases = [None, None] if matrix.bias is None else matrix.bias.chunk(2)
    return [Matrix(weight, bias) for weight, bias in zip(matrix.weight.chunk(2), biases, strict=True)]


def joins_mlp(dtype: torch.dtype, quantize: Quantize | None) -> bool:
    """Whether the runtime has one operation for all of `DecoderGraph.mlp`: one in bfloat16 that multiplies by AMX.

    It rounds otherwise than several do, so that all graphs of a model have it or none: with a seed, no output may
    depend on which of them runs. Milliseconds of a pass over 1, 16, 64 and 128 tokens without it, and with it: of a 10M
    model 1.5, 1.9, 3.7, 4.2 and 1.4, 1.9, 3.7, 4.2; of a 500M model 43, 45, 71, 103 and 39, 43, 93, 160.

    Args:
        dtype: of keys and values.
        quantize: see `WeightNodes`.
    """
    return dtype is torch.bfloat16 and quantize is None and multiplies_tiles()


def fix_width(graph: DecoderGraph, width: int) -> None:
    """Fix the sizes of inputs to those of a pass over so many tokens of one row, or of a chain that begins with it.

    Only what attention alone reads may then be of any size: sequences, their blocks, and the mask of a tree. Not for
    networks with further inputs.
    """
    graph.width, turn = width, [1, 1, graph.spec.rotary_dim]
    steps = graph._steps or 1
    graph.picks = min(width, MOST_PICKS) if graph._steps is None else 1
    sizes = {
        "tokens": [width],
        "cosines": [width, *turn],
        "sines": [width, *turn],
        "picks": [graph.picks],
        "next_cosines": [steps - 1, *turn],
        "next_sines": [steps - 1, *turn],
        "next_lens": [1],
        "next_begins": [2],
        "inverse_temperatures": [1, 1],
        "uniforms": [steps, 1],
    }
    graph.model.reshape({output(node): sizes[name] for name, node in graph._inputs.items() if name in sizes})
