"""What an OpenVINO backend runs: how its graphs are built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from foretoken.models.native.cache import Feed
from foretoken.models.native.checkpoint import Weights
from foretoken.models.native.compilation import threads_of
from foretoken.models.native.graph_keys import GraphKey
from foretoken.models.native.linear import Quantize
from foretoken.models.native.openvino_graph import DecoderGraph, fix_width, joins_mlp
from foretoken.models.native.widened import KeptWeights, WidenedWeights


class Network(Protocol):
    """What an `OpenVinoBackend` runs: how its graphs are built, and what they take besides a decoder's inputs."""

    def graphs(self, keys: Sequence[GraphKey], memory: Sequence[Tensor] | None) -> list[DecoderGraph]:
        """Build graphs that share weights, with keys and values in this memory; with None they take them as inputs."""

    def arrays(self, feeds: Sequence[Feed]) -> dict[str, Any]:
        """Values of `DecoderGraph.extra_inputs`; a feed of row -1 is padding."""


class DecoderNetwork:
    """The decoder of a checkpoint.

    Args:
        weights: of the checkpoint.
        dtype: of keys and values.
        quantize: see `OpenVinoBackend`.
        input_group: see `DecoderGraph`.
        small: there are so few weights that speed counts for more than memory.
    """

    def __init__(
        self, weights: Weights, dtype: torch.dtype, quantize: Quantize | None, input_group: int, *, small: bool
    ) -> None:
        self._weights, self._dtype, self._quantize = weights, dtype, quantize
        # A second call for the output layer is much of a small model's pass.
        self._input_group = 0 if small else input_group
        self._threads = torch.get_num_threads()
        self._joins_mlp = small and joins_mlp(dtype, quantize)
        self._widened: WidenedWeights | None = None

    def graphs(self, keys: Sequence[GraphKey], memory: Sequence[Tensor] | None) -> list[DecoderGraph]:
        """See `Network`."""
        weights = self._weights if len(keys) == 1 else KeptWeights(self._weights)
        return [self._graph(key, weights, memory) for key in keys]

    def _graph(self, key: GraphKey, weights: Weights | KeptWeights, memory: Sequence[Tensor] | None) -> DecoderGraph:
        # OpenVINO 2026.4 divides by half of the threads there: by zero with one, which may be all that is left by now.
        joins = self._joins_mlp and threads_of(self._threads) > 1
        if key.widened:
            weights = self._widened = self._widened or WidenedWeights(self._weights)
        graph = DecoderGraph(
            weights,
            self._dtype,
            self._quantize,
            key.hidden_layers,
            key.steps,
            key.layers,
            key.draws,
            joins_mlp=joins,
            input_group=self._input_group,
            memory=memory,
        )
        if key.width is not None:
            fix_width(graph, key.width)
        return graph

    def forget_widened(self) -> None:
        """Let go of the weights that `GraphKey.widened` is about; graphs keep theirs."""
        self._widened = None

    def arrays(self, feeds: Sequence[Feed]) -> dict[str, Any]:
        """See `Network`."""
        return {}
