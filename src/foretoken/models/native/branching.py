"""Several graphs as branches of one, of which each call runs one.

The runtime packs weights once for each model that it compiles. Graphs of several sizes would hold as many copies, and
each would find the others' in the processor's caches: with 17 MB of weights and 32 MB of cache, six passes over nine
tokens, and then passes over one, took 1.8, 1.4, 1.2, 1.1, 1.0, 1.0 and 1.6, 1.2, 0.9, 0.8, 0.75, 0.7 ms; as branches
1.6, 1.4, 1.3, 1.3, 1.3, 1.3 and 1.0, 0.8, 0.75, 0.7 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from foretoken.models.native.graph_nodes import output
from foretoken.models.native.openvino_graph import DecoderGraph


@dataclass(frozen=True)
class Branched:
    """Graphs as one model.

    Attributes:
        model: what is to be compiled. Graphs share inputs of one name: each is as large as the largest graph needs it,
            and the others read its first entries.
        arrays: what inputs of fixed sizes are to be bound to, by place: zeros.
        choices: places of booleans, one for each graph but the last. The first that is true says which graph runs, and
            the last one does if none is.
        places: of each graph, where its `inputs` are among those of the model.
        views: of each graph, the part that it reads of the array of each input; None for inputs of any size.
    """

    model: ov.Model
    arrays: dict[int, np.ndarray]
    choices: list[int]
    places: list[list[int]]
    views: list[list[np.ndarray | None]]


def branched(graphs: Sequence[DecoderGraph]) -> Branched:
    """Make several graphs one; their `model` is part of it then.

    The runtime copies the inputs of a branch when it runs. So keys and values may not be inputs, but are part of the
    graphs. Each input takes some 2 µs in each call, whether the branch that runs reads it or not: so graphs share them.

    Args:
        graphs: two or more, with equal numbers of outputs.
    """
    sizes = [[_size(node) for node in graph.model.get_parameters()] for graph in graphs]
    largest: dict[str, int | None] = {}
    for graph, its in zip(graphs, sizes, strict=True):
        for name, size in zip(graph.inputs, its, strict=True):
            before = largest.setdefault(name, size)
            largest[name] = None if size is None or before is None else max(size, before)
    for graph in graphs:
        _take_first(graph, largest)
    model, inputs = _choice(graphs)
    place = {name: number for number, name in enumerate(inputs)}
    arrays = {place[name]: _zeros(inputs[name]) for name, size in largest.items() if size is not None}
    places = [[place[name] for name in graph.inputs] for graph in graphs]
    views = [
        [_first(arrays[at], size) if at in arrays else None for at, size in zip(*both, strict=True)]
        for both in zip(places, sizes, strict=True)
    ]
    return Branched(model, arrays, [place[str(left)] for left in range(len(graphs), 1, -1)], places, views)


def _take_first(graph: DecoderGraph, largest: dict[str, int | None]) -> None:
    """Have a graph take inputs as large as those of the largest graph, and read their first entries."""
    given = []
    for name, node in zip(graph.inputs, graph.model.get_parameters(), strict=True):
        size, most = _size(node), largest[name]
        if most is not None and size != most:
            shape = node.get_partial_shape()
            shape[0] = ov.Dimension(most)
            whole = ops.parameter(shape, node.get_element_type())
            bounds = (np.array([bound], dtype=np.int32) for bound in (0, size, 1, 0))
            first = ops.slice(whole, *map(ops.constant, bounds))
            for user in node.output(0).get_target_inputs():
                user.replace_source_output(output(first))
            node = whole
        given.append(node)
    graph.model = ov.Model([result.input_value(0) for result in graph.model.get_results()], given, "branch")


def _choice(graphs: Sequence[DecoderGraph]) -> tuple[ov.Model, dict[str, Any]]:
    """A model of which a boolean chooses the first graph or one of the others; and its inputs by name.

    The name of a boolean is the number of graphs that it chooses among.
    """
    first, *others = graphs
    inputs = dict(zip(first.inputs, first.model.get_parameters(), strict=True))
    if not others:
        return first.model, inputs
    rest, rest_inputs = _choice(others)
    chosen = ops.parameter([], ov.Type.boolean)
    choice = ops.if_op(output(chosen))
    choice.set_then_body(first.model)
    choice.set_else_body(rest)
    given = {str(len(graphs)): chosen}
    for name, node in (inputs | rest_inputs).items():
        given[name] = ops.parameter(node.get_partial_shape(), node.get_element_type())
        choice.set_input(output(given[name]), inputs.get(name), rest_inputs.get(name))
    both = zip(first.model.get_results(), rest.get_results(), strict=True)
    results = [ops.result(choice.set_output(its, theirs)) for its, theirs in both]
    return ov.Model(results, list(given.values()), "branches"), given


def _size(node: Any) -> int | None:
    """The first dimension of an input of a fixed shape, 1 for a number; None where a dimension varies."""
    shape = node.get_partial_shape()
    return None if shape.is_dynamic else shape[0].get_length() if len(shape) else 1


def _first(array: np.ndarray, size: int | None) -> np.ndarray:
    """So many first entries; a number as it is."""
    return array[:size] if array.ndim else array


def _zeros(node: Any) -> np.ndarray:
    kind = np.float32 if node.get_element_type() == ov.Type.f32 else np.int32
    return np.zeros([each.get_length() for each in node.get_partial_shape()], dtype=kind)
