"""Compiling graphs for the CPU with OpenVINO, and running them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
import openvino as ov
import torch
from torch import Tensor

from foretoken.models.machine import cores
from foretoken.models.mapped import meanwhile, trim
from foretoken.models.native.graph_nodes import shared
from foretoken.models.native.openvino_graph import DecoderGraph
from foretoken.models.native.paging import BlockPool
from foretoken.models.widths import PassWidths

_PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True)
class GraphKey:
    """Which graph of a model.

    Attributes:
        hidden_layers: layers whose hidden states are outputs.
        steps: passes of a chain; None for a single pass.
        draws: the chain's tokens are drawn.
        layers: first layers that are run; None for all.
        width: tokens of a pass over one row, of a chain's first one; None for any number of tokens and rows.
        widened: 16-bit weights are float32 in it; else they are widened in every pass.
    """

    hidden_layers: tuple[int, ...] = ()
    steps: int | None = None
    draws: bool = False
    layers: int | None = None
    width: int | None = None
    widened: bool = False


@dataclass(frozen=True)
class CompileOptions:
    """How a model's graphs are compiled.

    Attributes:
        dtype: what they compute in: float32 or bfloat16.
        cache_dtype: of keys and values: `dtype`, or float16 for float32.
        input_group: features that share a scale where the inputs of linear layers are rounded to eight bits; 0 where
            they keep their precision.
        threads: of the runtime.
        patience, least, tells: of `PassWidths`; chains have no least width, and any padding of theirs tells.
    """

    dtype: torch.dtype
    cache_dtype: torch.dtype
    input_group: int
    threads: int
    patience: int
    least: int = 1
    tells: int = 1


class CompiledGraph:
    """A compiled graph, its inputs, and the memory of its outputs.

    Args:
        graph: its `model` is not kept.
        pool: the keys and values that it reads and writes.
        options: how it is compiled.

    Attributes:
        width: tokens that it takes; None for any number.
        widths: what passes over any number are padded to.
    """

    def __init__(self, graph: DecoderGraph, pool: BlockPool, options: CompileOptions) -> None:
        self.width, self.widths = graph.width, PassWidths(options.patience, options.least, tells=options.tells)
        settings = {
            "INFERENCE_PRECISION_HINT": _PRECISIONS[options.dtype],
            "KV_CACHE_PRECISION": _PRECISIONS[options.cache_dtype],
            **_scheduling(options.threads),
        }
        self._packed = False
        # The runtime keeps its own copy of the nodes; what has to stay is the memory that constants lie in.
        self._weights, self._caches, self._release = graph.weights, graph.caches, graph.release
        trim()  # what building the graph took besides
        with meanwhile(graph.release):
            self._request = _compile(graph.model, options.input_group, settings)
            layer = graph.output_layer
            self._output_layer = None if layer is None else _compile(layer, graph.output_group, settings)
        self._pool, self._version = pool, -1
        self._memory: list[Any] = []
        self._names = graph.inputs
        self._types = [np.uint8 if name == "tree" else np.int32 for name in self._names]  # of Python's numbers
        self._inputs: list[Any] = [None] * len(self._names)
        self._given: list[Any] = [None] * len(self._names)  # the numbers in there, where they came as Python's

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
        for number, name in enumerate(self._names):
            array, bound = arrays[name], self._inputs[number]
            if isinstance(array, np.ndarray):
                self._given[number] = None
            elif array == self._given[number]:
                continue
            else:
                self._given[number] = array
                array = np.array(array, dtype=self._types[number])
            if bound is not None and bound.shape == array.shape:
                np.copyto(bound, array)  # takes a tenth of the time of making a tensor
            else:
                bound = self._inputs[number] = np.array(array, order="C")
                request.set_input_tensor(number, ov.Tensor(bound, shared_memory=True))
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


def _compile(model: ov.Model, input_group: int, settings: dict[str, str]) -> Any:
    """What runs a model, with inputs of rounded layers rounded in groups of so many features."""
    group = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": str(input_group)}
    return _core().compile_model(model, "CPU", settings | group).create_infer_request()


class CompiledGraphs:
    """A model's graphs, each compiled once, when it is first used.

    Compiled graphs are not kept on disk. OpenVINO 2026.4.1 exports them (``CACHE_DIR``, `export_model`), but does not
    import them again: what its paged attention has to know of its heads (``k_head_size``) is not written.

    Args:
        build: makes the graph of a key.
        pool: the keys and values that they share.
        options: of the graphs that are not compiled yet.
    """

    def __init__(self, build: Callable[[GraphKey], DecoderGraph], pool: BlockPool, options: CompileOptions) -> None:
        self._build, self._pool, self.options = build, pool, options
        self._found: dict[GraphKey, CompiledGraph] = {}
        self._lock = Lock()

    def __call__(self, key: GraphKey) -> CompiledGraph:
        """The graph, compiled now if it has not been."""
        if key not in self._found:
            # A chain is not padded, but begins earlier in its sequence, whose keys and values it computes again.
            options = self.options if key.steps is None else replace(self.options, least=1, tells=sys.maxsize)
            graph = CompiledGraph(self._build(key), self._pool, options)
            with self._lock:
                self._found.setdefault(key, graph)
        return self._found[key]

    def drop(self, key: GraphKey) -> None:
        """Let go of a graph."""
        with self._lock:
            self._found.pop(key, None)

    def prepare(self, keys: Iterable[GraphKey]) -> list[GraphKey]:
        """Compile graphs now, in parallel, so that no request waits for them; which ones had not been compiled."""
        missing = [key for key in keys if key not in self._found]
        if missing:
            with ThreadPoolExecutor(min(len(missing), cores())) as threads:
                list(threads.map(self, missing))
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
