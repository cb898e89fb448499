"""Torch's threads, beside a runtime that computes with threads of its own."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


@contextmanager
def one_thread(enabled: bool = True) -> Iterator[None]:
    """Have the calling thread's work in torch done by itself alone.

    The threads that helped with an operation of torch's wait for the next one, and keep their cores busy with that for
    some milliseconds. Another runtime's threads then have to share those cores: a pass of OpenVINO's of some
    milliseconds takes half as long again. Other threads' work in torch is not affected, nor is `torch.set_num_threads`,
    which is the process's.
    """
    omp = _omp() if enabled else None
    if omp is None:
        yield
        return
    before = omp.omp_get_max_threads()
    omp.omp_set_num_threads(1)
    try:
        yield
    finally:
        omp.omp_set_num_threads(before)


@cache
def _omp() -> Any | None:
    """The OpenMP runtime that torch has loaded; None where it can't be got at."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    if not (hasattr(library, "omp_set_num_threads") and hasattr(library, "omp_get_max_threads")):
        return None
    return library
