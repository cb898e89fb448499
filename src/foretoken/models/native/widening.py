"""Whether passes over 5 to 64 tokens have their 16-bit weights widened before, where float32 is computed.

OpenVINO can keep 16-bit weights as they are and widen them in every pass. That halves the bytes that a pass reads, and
reading them is what a pass over one token waits for. One over several waits for its arithmetic, and widening adds to
that: next to nothing on one processor with AVX2, and up to a third of the pass on another. So it is tried, once for a
model. Scores of a few passes must be the same to the last bit, too: which graphs there are depends on what a process
has done before, and an output must not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from threading import Lock
from time import perf_counter
from weakref import WeakMethod

import torch
from torch import Tensor

from foretoken.models.native.compilation import CompiledGraph, CompiledGraphs
from foretoken.models.native.graph_keys import GraphKey

FEW = 4
"""Tokens up to which passes read 16 bits in any case. Milliseconds of 10M weights, widened in the pass and before, over
1, 4, 6, 9, 17 and 32 tokens: 2.1, 3.8, 6.1, 7.8, 9.2, 13.3 and 2.5, 3.2, 4.0, 5.1, 7.5, 10.2 on an AMD EPYC with AVX2;
on another 1.8, 2.3 and 2.8, 3.2 over 1 and 4, 3.6 and 3.8 over 8."""

MOST = 64
"""Tokens up to which passes may use other weights: over more than 80, scores of the shipped target are 1e-6 apart, for
the runtime sums in another order."""

_TRIED = (5, 9, 17, 33, MOST)
"""Tokens of passes whose scores are compared."""

_TIMED = (6, 17)
"""Tokens of passes whose times are compared: a middling draft and the longest chain that the policy considers."""

_TURNS, _BLOCK = 3, 3  # turns of each graph, and passes in a row of each turn
_LEAST_GAIN = 0.05
"""Share of a pass that has to be gained: weights that were widened take four bytes each once, and in each graph."""


class Widening:
    """Decides for one model.

    Args:
        graphs: of the model.
        run: a method that runs a graph over so many tokens of no request and gives their logits.
        forget: lets go of the widened weights.

    Attributes:
        graph: for passes over more than `FEW` and up to `MOST` tokens; None where weights are widened in the pass.
        decided: whether it was tried.
    """

    def __init__(
        self, graphs: CompiledGraphs, run: Callable[[CompiledGraph, int], Tensor], forget: Callable[[], None]
    ) -> None:
        self._graphs, self._run, self._forget = graphs, WeakMethod(run), forget  # `run` is of who holds this
        self._lock = Lock()
        self.graph: CompiledGraph | None = None
        self.decided = False

    def decide(self) -> None:
        """Try it, unless it was tried."""
        run = self._run()
        if run is not None:
            with self._lock:
                if not self.decided:
                    self._try(run)

    def _try(self, run: Callable[[CompiledGraph, int], Tensor]) -> None:
        key = GraphKey(widened=True)
        try:
            usual, widened = self._graphs(GraphKey()), self._graphs(key)
            if all(torch.equal(run(usual, size), run(widened, size)) for size in _TRIED):
                times = [seconds_of(run, (usual, widened), size) for size in _TIMED]
                before, now = (sum(of_graph) for of_graph in zip(*times, strict=True))
                if now <= (1.0 - _LEAST_GAIN) * before:
                    self.graph = widened
        except (RuntimeError, MemoryError):  # decoding goes on as it did
            pass
        if self.graph is None:
            self._graphs.drop([key])
            self._forget()
        self.decided = True


def seconds_of(
    run: Callable[[CompiledGraph, int], Tensor], graphs: Sequence[CompiledGraph], size: int, turns: int = _TURNS
) -> list[float]:
    """Median seconds of passes over so many tokens by each graph; they take turns.

    The first pass of each turn is left out: it finds the other graph's weights in the processor's caches.
    """
    seconds: list[list[float]] = [[] for _ in graphs]
    for _ in range(turns):
        for graph, found in zip(graphs, seconds, strict=True):
            run(graph, size)
            for _ in range(_BLOCK - 1):
                start = perf_counter()
                run(graph, size)
                found.append(perf_counter() - start)
    return [median(found) for found in seconds]
