"""Weights in files that are mapped into memory, and that memory given back."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

CAN_RELEASE = hasattr(mmap, "MADV_DONTNEED")
"""Whether the system takes memory of files back when it is told to."""

_SECONDS = 0.005
"""Between two calls of `meanwhile`. The runtime packs some 0.3 GB in a second on one core: that is 6 MB."""


class ScratchFile:
    """A temporary file of tensors, mapped into memory: the system may take that memory back, and reads the file again.

    It is for what is read once, as a rule, and has to be there: the runtime packs weights in an order of its own, and
    keeps what it packed them from. The file has no name, and goes with the process. Where it can't be made, or the disk
    is full, tensors stay in memory.

    Args:
        folder: where the file is made.
        size: bytes that it will have, about; it is not made where they would take more than half of the free space.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._maps: list[mmap.mmap] = []
        self._file: IO[bytes] | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if CAN_RELEASE and shutil.disk_usage(folder).free > 2 * size:
                self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (as long as this lives)
        except OSError:
            pass

    def keep(self, tensor: Tensor) -> Tensor:
        """The same numbers in the file, not to be written to; the tensor itself where that can't be."""
        data = tensor.contiguous().view(-1).view(torch.uint8)
        if self._file is None or len(data) < mmap.ALLOCATIONGRANULARITY:
            return tensor
        begin = self._file.seek(0, 2)
        try:
            left = data.numpy().data
            while left:
                left = left[self._file.write(left) :]
            # What is mapped begins on a page of its own.
            self._file.truncate(-(-self._file.tell() // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY)
        except OSError:  # the disk is full
            self._file.truncate(begin)
            return tensor
        # Writes would go to a copy: torch takes no memory that can't be written to.
        mapped = mmap.mmap(self._file.fileno(), len(data), access=mmap.ACCESS_COPY, offset=begin)
        self._maps.append(mapped)
        return torch.frombuffer(mapped, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)

    def release(self) -> None:
        """Give the memory back."""
        release(self._maps)


def release(files: Iterable[mmap.mmap]) -> None:
    """Give memory that files are mapped to back; what is read again is read from the disk again."""
    for file in files if CAN_RELEASE else ():
        file.madvise(mmap.MADV_DONTNEED)


def trim() -> None:
    """Give back what has been freed: the C library keeps much of it where smaller pieces in use lie behind it."""
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim"):  # of glibc alone
            library.malloc_trim(0)


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """Do something again and again while a block runs, and once after it."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(_SECONDS):
            work()

    thread = threading.Thread(target=run, name="foretoken-release", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        work()
