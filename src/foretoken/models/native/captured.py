"""Captured work: what a GPU is told in one call instead of some hundreds, as a CUDA graph."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from foretoken.errors import ModelError

Work = Callable[[], list[Tensor]]
"""Computes tensors: by the same operations on the same memory whenever it is called, none of which waits for the
device."""


_CAPTURE = Lock()
"""A process may capture one graph at a time."""


class Captures:
    """What captured work of a model shares: a stream, and memory for what is computed, since none runs beside another.

    Args:
        device: where; on a CPU nothing is captured, and work is called instead.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type != "cuda":
            return
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        # The pool is given up with the last graph in it, and can't be used again: one stays.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is empty
            self._first, _ = self._captured(lambda: [])

    def capture(self, work: Work, kept: Any = None) -> Captured:
        """Capture work, which is called twice for it.

        Args:
            work: what to capture.
            kept: what it reads, and may read elsewhere when it is called again.

        Raises:
            ModelError: it can't be captured.
            torch.OutOfMemoryError: there is no memory for it.
        """
        if self.device.type != "cuda":
            return Captured(None, [], kept)
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                work()  # libraries prepare themselves at a first call, which a capture forbids
            try:
                graph, outputs = self._captured(work)
            except torch.OutOfMemoryError:
                # The allocator gives nothing back to the device while it captures.
                gc.collect()
                torch.cuda.empty_cache()
                graph, outputs = self._captured(work)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ModelError(
                f"a pass can't be captured as a CUDA graph on {self.device} ({reason}): load the model with eager=True "
                "(--eager), which runs operation by operation"
            ) from error
        finally:
            current.wait_stream(self._stream)
        return Captured(graph, outputs, kept)

    def _captured(self, work: Work) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
        graph = torch.cuda.CUDAGraph()
        with _CAPTURE, torch.cuda.stream(self._stream):
            # cuBLAS keeps a workspace for each stream. One from before would not be the pool's, and one that stays
            # could be freed while the graph still writes to it.
            torch._C._cuda_clearCublasWorkspaces()
            # Not `torch.cuda.graph`, which collects garbage and empties the allocator's cache. What other threads do
            # meanwhile is their own.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = work()
            except BaseException:
                with suppress(RuntimeError):  # of the two errors the first one says what happened
                    graph.capture_end()
                raise
            graph.capture_end()
            torch._C._cuda_clearCublasWorkspaces()
        return graph, outputs


class Captured:
    """Work that was captured.

    Args:
        graph: None where nothing is.
        outputs: what its work computes, where it always is.
        kept: see `Captures.capture`.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph | None, outputs: list[Tensor], kept: Any) -> None:
        self._graph, self._outputs, self._kept = graph, outputs, kept

    def run(self, work: Work) -> list[Tensor]:
        """What the work computes of what its memory holds now; read it before anything of the model runs again.

        Args:
            work: the same as was captured, called where nothing is. Not kept: it holds what holds this.
        """
        if self._graph is None:
            return work()
        self._graph.replay()
        return self._outputs
