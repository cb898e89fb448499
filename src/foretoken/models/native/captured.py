"""Captured work: what a GPU is told in one call instead of some hundreds, as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foretoken.errors import ModelError


class Captured:
    """A function over tensors that stay where they are, run as one CUDA graph; on a CPU it is called.

    Args:
        function: computes tensors, which a later run overwrites; the same operations whenever it is called, and none
            that waits for the device.
        device: where.
        pool: of memory for what is computed, from `memory_pool`.
        kept: what the function reads, and may read elsewhere when it is called again.

    Raises:
        ModelError: it can't be captured.
    """

    def __init__(self, function: Callable[[], list[Tensor]], device: torch.device, pool: Any, kept: Any = None) -> None:
        self._function: Callable[[], list[Tensor]] | None = function
        self._kept, self._graph = kept, None
        if device.type != "cuda":
            return
        current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            function()  # libraries prepare themselves at a first call, which a capture forbids
            # Not `torch.cuda.graph`, which collects garbage and empties the allocator's cache. What other threads do
            # meanwhile is their own.
            try:
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    self._outputs = function()
                finally:
                    graph.capture_end()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
                raise ModelError(
                    f"a pass can't be captured as a CUDA graph on {device} ({reason}): load the model with eager=True "
                    "(--eager), which runs operation by operation"
                ) from error
        current.wait_stream(stream)
        self._graph = graph
        self._function = None  # it holds the room, which holds this

    def run(self) -> list[Tensor]:
        """What the function computes of what its tensors hold now; read it before the next run."""
        if self._function is not None:
            return self._function()
        assert self._graph is not None
        self._graph.replay()
        return self._outputs


def memory_pool(device: torch.device) -> Any:
    """Memory that captured functions share which never run at the same time."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None
