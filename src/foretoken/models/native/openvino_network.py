"""What an OpenVINO backend runs: how its graphs are built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from foretoken.models.native.cache import Feed
from foretoken.models.native.checkpoint import Weights
from foretoken.models.native.compilation import GraphKey, threads_of
from foretoken.models.native.linear import Quantize
from foretoken.models.native.openvino_graph import DecoderGraph, fix_width, joins_mlp
from foretoken.models.native.widened import WidenedWeights
from foretoken.models.processor import has_wide_vectors

_WIDENED = 5
"""Tokens of a pass from which on 16-bit weights are better widened when the graph is compiled, where the model is
computed in float32 without instructions of 512 bits. Milliseconds of 10M weights, widened in the pass and before, over
1, 4, 6, 9, 17 and 32 tokens: 2.1, 3.8, 6.1, 7.8, 9.2, 13.3 and 2.5, 3.2, 4.0, 5.1, 7.5, 10.2 on an AMD EPYC with AVX2.
With AVX-512 it was 1.8, 2.3 and 2.8, 3.2 over 1 and 4, 3.6 and 3.8 over 8, 5.1 and 4.9 over 16."""


class Network(Protocol):
    """What an `OpenVinoBackend` runs: how its graphs are built, and what they take besides a decoder's inputs."""

    def graph(self, key: GraphKey) -> DecoderGraph:
        """Build a graph."""

    def arrays(self, feeds: Sequence[Feed]) -> dict[str, Any]:
        """Values of `DecoderGraph.extra_inputs`; a feed of row -1 is padding."""


class DecoderNetwork:
    """The decoder of a checkpoint.

    Args:
        weights: of the checkpoint.
        dtype: what is computed in.
        cache_dtype: of keys and values.
        quantize: see `OpenVinoBackend`.
        small: there are so few weights that speed counts for more than memory.
    """

    def __init__(
        self, weights: Weights, dtype: torch.dtype, cache_dtype: torch.dtype, quantize: Quantize | None, *, small: bool
    ) -> None:
        self._weights, self._cache_dtype, self._quantize = weights, cache_dtype, quantize
        self._threads = torch.get_num_threads()
        self._joins_mlp = small and joins_mlp(cache_dtype, quantize)
        widens = small and dtype is torch.float32 and quantize is None and not has_wide_vectors()
        self._widened = WidenedWeights(weights) if widens else weights

    def graph(self, key: GraphKey) -> DecoderGraph:
        """See `Network`."""
        # OpenVINO 2026.4 divides by half of the threads there: by zero with one, which may be all that is left by now.
        joins = self._joins_mlp and threads_of(self._threads) > 1
        # Chains, and the first layers by themselves, write a token at a time.
        several = key.steps is None and key.layers is None and (key.width is None or key.width >= _WIDENED)
        settings = self._widened if several else self._weights, self._cache_dtype, self._quantize
        graph = DecoderGraph(*settings, key.hidden_layers, key.steps, key.layers, key.draws, joins_mlp=joins)
        if key.width is not None:
            fix_width(graph, key.width)
        return graph

    def arrays(self, feeds: Sequence[Feed]) -> dict[str, Any]:
        """See `Network`."""
        return {}
