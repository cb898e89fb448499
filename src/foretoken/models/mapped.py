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
        room: bytes that it has room for; each tensor begins on a page of its own. It is not made where they would take
            more than half of the free space.
    """

    def __init__(self, folder: Path, room: int) -> None:
        self._end, self._room = 0, room
        self._file: IO[bytes] | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if CAN_RELEASE and shutil.disk_usage(folder).free > 2 * room:
                file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (as long as this lives)
                file.truncate(room)  # takes no space yet
                # One for all tensors: each mapping keeps a file open. Writes to it would go to a copy: torch takes no
                # memory that can't be written to.
                self._map = mmap.mmap(file.fileno(), room, access=mmap.ACCESS_COPY)
                self._file = file
        except (OSError, ValueError):
            pass

    def keep(self, tensor: Tensor) -> Tensor:
        """The same numbers in the file, not to be written to; the tensor itself where that can't be."""
        data = tensor.contiguous().view(-1).view(torch.uint8)
        begin, end = self._end, self._end + len(data)
        if self._file is None or len(data) < mmap.PAGESIZE or end > self._room:
            return tensor
        try:
            self._file.seek(begin)
            left = data.numpy().data
            while left:
                left = left[self._file.write(left) :]
        except OSError:  # the disk is full
            return tensor
        self._end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        mapped = torch.frombuffer(self._map, dtype=torch.uint8, count=len(data), offset=begin)
        return mapped.view(tensor.dtype).view(tensor.shape)

    def release(self) -> None:
        """Give the memory back."""
        if self._file is not None:
            release([self._map])


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
