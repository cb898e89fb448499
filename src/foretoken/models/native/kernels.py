"""Which kernels torch computes attention with on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch

_switching = RLock()


@contextmanager
def attention_kernels(device: torch.device, *, ready: bool) -> Iterator[None]:
    """Have attention computed by kernels that are there already, or by those that torch prefers.

    On some GPUs torch prefers cuDNN's. For every shape that a process has not had yet it makes a kernel, which took 50
    to 110 ms a pass on an H100. Once it is made, a pass of one row takes three quarters to four fifths of the time, one
    of eight rows eight to nine tenths.

    A switch of the whole process says whether cuDNN's are used. So one thread at a time is in such a block: it sets the
    switch, and sets it back.

    Args:
        device: that computes; nothing is switched but for GPUs.
        ready: leave out cuDNN's, the only ones that have to be made; else torch chooses.
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
