"""Compiling graphs for the CPU with OpenVINO, and running them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from threading import Lock
from typing import Any
from weakref import WeakMethod

import numpy as np
import openvino as ov
import torch
from torch import Tensor

from foretoken.models.machine import cores
from foretoken.models.mapped import meanwhile, trim
from foretoken.models.native.branching import branched
from foretoken.models.native.graph_keys import CompileOptions, GraphKey, together
from foretoken.models.native.graph_nodes import shared
from foretoken.models.native.openvino_graph import DecoderGraph
from foretoken.models.native.paging import BlockPool
from foretoken.models.widths import PassWidths

_PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


class CompiledGraph:
    """A compiled graph, its inputs, and the memory of its outputs.

    Args:
        graph: its `model` is not kept.
        pool: the keys and values that it reads and writes.
        options: how it was compiled.
        request: runs it.
        output_layer: runs its output layer where that is a model of its own; else None.
        inputs: of the request, where others share it.

    Attributes:
        width, picks: as of the graph.
        widths: what passes over any number are padded to.
    """

    def __init__(
        self,
        graph: DecoderGraph,
        pool: BlockPool,
        options: CompileOptions,
        request: Any,
        output_layer: Any = None,
        inputs: _Inputs | None = None,
    ) -> None:
        self.width, self.picks = graph.width, graph.picks
        self.widths = PassWidths(options.patience, options.least, tells=options.tells)
        # The runtime keeps its own copy of the nodes; what has to stay is the memory that constants lie in.
        self._weights, self._caches, self._release = graph.weights, graph.caches, graph.release
        self._request, self._output_layer, self._packed = request, output_layer, False
        self._pool, self._version = pool, -1
        self._memory: list[Any] = []
        self._names = graph.inputs
        self._types = [np.uint8 if name == "tree" else np.int32 for name in self._names]  # of Python's numbers
        self._inputs = inputs or _Inputs(len(self._names))
        self._places: Sequence[int] = range(len(self._names))
        # The arrays of inputs that are never bound anew.
        self._fixed: Sequence[np.ndarray | None] = [None] * len(self._names)

    @property
    def moved(self) -> bool:
        """Whether the keys and values lie where the graph can't find them."""
        return False

    def run(self, arrays: dict[str, Any]) -> list[Tensor]:
        """Outputs ``[P, …]`` for inputs by name: arrays, or Python's numbers and lists.

        All are copied, but lists that a caller must not change any more: in most passes most are those of the last.
        """
        request = self._request
        if self._version != self._pool.version:
            with self._pool.lock:
                version, tensors = self._pool.version, self._pool.tensors
            self._memory = [shared(tensor) for tensor in tensors[: self._caches]]
            for number, (tensor, _) in enumerate(self._memory):
                request.set_input_tensor(len(self._names) + number, tensor)
            self._version = version
        all_bound, all_given = self._inputs.bound, self._inputs.given
        for name, kind, place, fixed in zip(self._names, self._types, self._places, self._fixed, strict=True):
            array = arrays[name]
            if isinstance(array, np.ndarray):
                all_given[place] = None
            elif array == all_given[place]:
                continue
            else:
                all_given[place] = array
                array = np.array(array, dtype=kind)
            bound = all_bound[place] if fixed is None else fixed
            if bound is not None and bound.shape == array.shape:
                np.copyto(bound, array)  # takes a tenth of the time of making a tensor
            else:
                bound = all_bound[place] = np.array(array, order="C")
                request.set_input_tensor(place, ov.Tensor(bound, shared_memory=True))
        if self._packed:
            found = self._infer()
        else:
            with meanwhile(self._release):  # the first run packs the weights
                found = self._infer()
            self._packed = True
            trim()  # what packing them took besides
        return [torch.from_numpy(output.copy()) for output in found]

    def _infer(self) -> Sequence[np.ndarray]:
        found = self._request.infer(share_outputs=True).to_tuple()  # else it copies them, too
        if self._output_layer is None:
            return found
        # Given as an array, it would be copied into a tensor of the runtime's: 0.4 ms.
        self._output_layer.set_input_tensor(self._request.get_output_tensor(0))
        return (*self._output_layer.infer(share_outputs=True).to_tuple(), *found[1:])


class _Inputs:
    """What each input of a request is bound to; branches share it, as they share the request.

    Args:
        count: of the inputs.

    Attributes:
        bound: the arrays that are written to and read from; None before the first, and for those that never change.
        given: the numbers in there, where they came as Python's.
    """

    def __init__(self, count: int) -> None:
        self.bound: list[Any] = [None] * count
        self.given: list[Any] = [None] * count


class Branches:
    """The compiled model that graphs are branches of, see `branching`.

    Args:
        graphs: whose keys and values are constants.
        memory: what these lie in; it stays as long as the graphs do, wherever the pool is by then.
        moves: of the pool when this was its memory.
        pool: of keys and values.
        options: how the model is compiled.

    Attributes:
        places, views: see `foretoken.models.native.branching.Branched`.
        request: runs the branch that was chosen.
        inputs: of the request.
    """

    def __init__(
        self,
        graphs: Sequence[DecoderGraph],
        memory: Sequence[Tensor],
        moves: int,
        pool: BlockPool,
        options: CompileOptions,
    ) -> None:
        self._memory, self._moves, self._pool = memory, moves, pool
        made = branched(graphs)
        self.places, self.views = made.places, made.views  # the model is not kept
        trim()  # what building the graphs took besides
        with meanwhile(graphs[0].release):
            self.request = _compile(made.model, options.input_group, _settings(options))
        self.inputs = _Inputs(len(made.model.inputs))
        self._choices = [np.zeros((), dtype=np.bool_) for _ in made.choices]
        for place, array in [*made.arrays.items(), *zip(made.choices, self._choices, strict=True)]:
            self.request.set_input_tensor(place, ov.Tensor(array, shared_memory=True))
        self._chosen = -1

    @property
    def moved(self) -> bool:
        """Whether the pool lies in other memory by now."""
        return self._pool.moves != self._moves

    def choose(self, number: int) -> None:
        """Have the next call run this graph."""
        if number != self._chosen:
            for other, choice in enumerate(self._choices):
                choice[...] = other == number
            self._chosen = number


class Branch(CompiledGraph):
    """One of several graphs that were compiled as one.

    Args:
        branches: all of them.
        number: of this one.
        graph: this one; its `model` is not kept.
        pool: of keys and values.
        options: how it was compiled.
    """

    def __init__(
        self, branches: Branches, number: int, graph: DecoderGraph, pool: BlockPool, options: CompileOptions
    ) -> None:
        super().__init__(graph, pool, options, branches.request, inputs=branches.inputs)
        self._branches, self._number = branches, number
        self._places, self._fixed = branches.places[number], branches.views[number]

    @property
    def moved(self) -> bool:
        """See `CompiledGraph.moved`."""
        return self._branches.moved

    def run(self, arrays: dict[str, Any]) -> list[Tensor]:
        """See `CompiledGraph.run`."""
        self._branches.choose(self._number)
        return super().run(arrays)


def _settings(options: CompileOptions) -> dict[str, str]:
    return {
        "INFERENCE_PRECISION_HINT": _PRECISIONS[options.dtype],
        "KV_CACHE_PRECISION": _PRECISIONS[options.cache_dtype],
        **_scheduling(options.threads),
    }


def _compile_graph(graph: DecoderGraph, options: CompileOptions) -> tuple[Any, Any]:
    """What runs a graph, and what runs its output layer where that is a model of its own; else None."""
    settings = _settings(options)
    trim()  # what building the graph took besides
    with meanwhile(graph.release):
        request = _compile(graph.model, options.input_group, settings)
        layer = graph.output_layer
        return request, None if layer is None else _compile(layer, graph.output_group, settings)


def _compile(model: ov.Model, input_group: int, settings: dict[str, str]) -> Any:
    """What runs a model, with inputs of rounded layers rounded in groups of so many features."""
    group = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": str(input_group)}
    return _core().compile_model(model, "CPU", settings | group).create_infer_request()


class CompiledGraphs:
    """A model's graphs, each compiled once, when it is first used.

    Compiled graphs are not kept on disk. OpenVINO 2026.4.1 exports them (``CACHE_DIR``, `export_model`), but does not
    import them again: what its paged attention has to know of its heads (``k_head_size``) is not written.

    Args:
        build: makes the graphs of keys, with these keys and values or with none of their own.
        pool: the keys and values that they share.
        options: of the graphs that are not compiled yet.
        lands: a method that runs a graph of a fixed width, and says whether keys and values came to lie in the pool.
            None where no graphs are branches of one.
    """

    def __init__(
        self,
        build: Callable[[Sequence[GraphKey], Sequence[Tensor] | None], list[DecoderGraph]],
        pool: BlockPool,
        options: CompileOptions,
        lands: Callable[[CompiledGraph, GraphKey], bool] | None = None,
    ) -> None:
        self._build, self._pool, self.options = build, pool, options
        self._lands = None if lands is None else WeakMethod(lands)  # of who holds these graphs
        self._found: dict[GraphKey, CompiledGraph] = {}
        self._refused: set[tuple[GraphKey, ...]] = set()  # graphs that could not be branches
        self._lock = Lock()

    def __call__(self, key: GraphKey) -> CompiledGraph:
        """The graph, compiled now if it has not been, or does not find the pool any more.

        With it all are compiled that it is a branch of one with.
        """
        graph = self._found.get(key)
        if graph is None or graph.moved:
            made = None
            if key.among and key.among not in self._refused:
                made = self._as_branches(together(key.among))
                if made is None:
                    self._refused.add(key.among)
            made = made or {key: self._by_itself(key)}
            with self._lock:  # another thread may have compiled the same, or drop it right after
                self._found = made | {each: found for each, found in self._found.items() if not found.moved}
                graph = self._found[key]
        return graph

    def _by_itself(self, key: GraphKey) -> CompiledGraph:
        graph, options = self._build([key], None)[0], self._options_of(key)
        return CompiledGraph(graph, self._pool, options, *_compile_graph(graph, options))

    def _as_branches(self, keys: Sequence[GraphKey]) -> dict[GraphKey, CompiledGraph] | None:
        """Graphs as branches of one; None where keys and values can't be part of a graph."""
        lands = None if self._lands is None else self._lands()
        # Other memory may not be set aside. The runtime may copy constants, of float16 if it widens them: so each graph
        # is run, and what becomes of the pool is looked at.
        if lands is None or self.options.cache_dtype is torch.float16 or not self._pool.sets_aside:
            return None
        with self._pool.lock:
            memory, moves = self._pool.memory(), self._pool.moves
        try:
            graphs = self._build(keys, memory)
            branches = Branches(graphs, memory, moves, self._pool, self.options)
            made: dict[GraphKey, CompiledGraph] = {
                key: Branch(branches, number, graph, self._pool, self._options_of(key))
                for number, (key, graph) in enumerate(zip(keys, graphs, strict=True))
            }
            return made if all([lands(graph, key) for key, graph in made.items()]) else None
        except RuntimeError:  # the runtime can't: decoding goes on with graphs by themselves
            return None

    def _options_of(self, key: GraphKey) -> CompileOptions:
        # A chain is not padded, but begins earlier in its sequence, whose keys and values it computes again.
        return self.options if key.steps is None else replace(self.options, least=1, tells=sys.maxsize)

    def drop(self, keys: Iterable[GraphKey]) -> None:
        """Let go of graphs."""
        with self._lock:
            for key in keys:
                self._found.pop(key, None)
                self._refused.discard(key.among)  # the pool may have room by then

    def drop_moved(self) -> None:
        """Let go of graphs that don't find the pool any more, and so of the memory where it was."""
        with self._lock:
            self._found = {key: graph for key, graph in self._found.items() if not graph.moved}

    def prepare(self, keys: Iterable[GraphKey]) -> list[GraphKey]:
        """Compile graphs now, in parallel, so that no request waits for them; those that had not been compiled."""
        found = self._found
        missing = [key for key in keys if key not in found or found[key].moved]
        first = {key.among or key: key for key in missing}
        if missing:
            with ThreadPoolExecutor(min(len(missing), cores())) as threads:
                list(threads.map(self, first.values()))  # one of several branches compiles all
                list(threads.map(self, missing))  # others where they can't be branches
        return missing


def _scheduling(threads: int) -> dict[str, str]:
    """Properties of a compiled graph that say which threads run it."""
    return {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": str(threads), "ENABLE_CPU_PINNING": "NO"}


def threads_of(threads: int) -> int:
    """How many threads a graph gets that is compiled now for so many: no more than there are processors for them."""
    x = ov.opset13.parameter([1], ov.Type.f32)
    compiled = _core().compile_model(ov.Model([ov.opset13.relu(x)], [x]), "CPU", _scheduling(threads))
    return int(compiled.get_property("INFERENCE_NUM_THREADS"))


@cache
def _core() -> ov.Core:
    """OpenVINO's runtime, one for as long as the process lives.

    Its CPU plugin gives the thread that loads it a stack for signal handlers, and frees that memory with the runtime.
    If several runtimes are freed in another order than they were made, the thread's stack is gone: its next signal,
    such as Ctrl-C, ends the process with a segmentation fault.
    """
    return ov.Core()
