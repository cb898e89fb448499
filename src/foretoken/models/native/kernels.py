"""Which kernels torch computes attention with on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch

_switching = RLock()


@contextmanager
def attention_kernels(device: torch.device, *, ready: bool) -> Iterator[None]:
    """Have attention computed by kernels that are `ready`, or by those that torch prefers.

    On some GPUs torch prefers cuDNN's. For every shape that a process has not had yet it makes a kernel, which took 60
    to 120 ms a pass on an H100, where others are there already. Once it is made, a pass of one row takes three quarters
    of the time, one of eight nine tenths.

    A switch of the whole process says whether cuDNN's are used. So one thread at a time is in such a block: it sets the
    switch, and sets it back.

    Args:
        device: that computes; nothing is switched but for GPUs.
        ready: leave out cuDNN's.
    """
    if device.type != "cuda":
        yield
        return
    with _switching:
        used = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(used and not ready)
        try:
            yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(used)
