"""What a GGUF file says about its model: metadata and tensors, read without llama.cpp.

The package `gguf` reads files too, and makes an array of every string: a vocabulary of 150,000 tokens takes it seconds.
Here strings in lists are passed over. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretoken.errors import ModelError
from foretoken.models.mapped import release

KINDS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
"""Types of tensors that can be read, as ggml numbers them: name, numbers of a block, its bytes."""

_STRING, _LIST = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ALIGNMENT = 32


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        kind: name of its type; a number for one that can't be read.
        shape: rows first, as in torch.
        data: ``[rows, bytes]`` uint8, mapped into memory; empty for a type that can't be read.
    """

    kind: str
    shape: tuple[int, ...]
    data: Any


@dataclass(frozen=True)
class Header:
    """What a model's files say.

    Attributes:
        metadata: numbers, strings and lists of numbers; None for lists of strings.
        tensors: by name.
        files: the files' memory, which the tensors lie in.
    """

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]
    files: tuple[mmap.mmap, ...]

    def release(self) -> None:
        """Give memory of the files back; what is read again is read from the disk again."""
        release(self.files)


def read_header(parts: Sequence[Path]) -> Header:
    """Read the beginnings of a model's files.

    Args:
        parts: all of them, in order; metadata are the first one's.

    Raises:
        ModelError: a file is cut off, or broken.
    """
    found = [_read(part) for part in parts]
    return Header(
        found[0].metadata,
        {name: tensor for one in found for name, tensor in one.tensors.items()},
        tuple(file for one in found for file in one.files),
    )


def _read(path: Path) -> Header:
    with path.open("rb") as opened:
        # Writes would go to a copy: torch takes no arrays that can't be written to.
        file = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    try:
        return _Reader(file).read()
    except (struct.error, ArithmeticError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} is cut off or broken: download it again ({error})") from error


class _Reader:
    """Reads a file's numbers one after another.

    Args:
        file: the whole file.
    """

    def __init__(self, file: mmap.mmap) -> None:
        self._file, self._data, self._at = file, np.frombuffer(file, np.uint8), 4

    def read(self) -> Header:
        """The file's header."""
        self._number("I")  # the version, which has been checked
        tensors, pairs = self._number("Q"), self._number("Q")
        metadata = {}
        for _ in range(pairs):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        described = [self._described() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        start = -(-self._at // alignment) * alignment
        found = {name: self._tensor(kind, shape, start + at) for name, kind, shape, at in described}
        return Header(metadata, found, (self._file,))

    def _described(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string()
        shape = tuple(self._number("Q") for _ in range(self._number("I")))[::-1]
        return name, self._number("I"), shape, self._number("Q")

    def _tensor(self, kind: int, shape: tuple[int, ...], start: int) -> StoredTensor:
        if kind not in KINDS:
            return StoredTensor(str(kind), shape, self._data[:0])
        name, block, size = KINDS[kind]
        if not shape or shape[-1] % block:
            raise ValueError(f"a tensor of type {name} has the shape {list(shape)}")
        rows, width = math.prod(shape[:-1]), shape[-1] // block * size
        end = start + rows * width
        if end > len(self._data):
            raise ValueError(f"it has {len(self._data):,} bytes, and a tensor ends at {end:,}")
        return StoredTensor(name, shape, self._data[start:end].reshape(rows, width))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _LIST:
            return self._number(_NUMBERS[kind])
        item, count = self._number("I"), self._number("Q")
        if item == _STRING:
            for _ in range(count):
                self._at += 8 + struct.unpack_from("<Q", self._file, self._at)[0]
            return None
        if item == _LIST:
            return [self._value(_LIST) for _ in range(count)]
        return self._numbers(_NUMBERS[item], count)

    def _string(self) -> str:
        size = self._number("Q")
        self._at += size
        return self._file[self._at - size : self._at].decode("utf-8", "replace")

    def _number(self, code: str) -> Any:
        return self._numbers(code, 1)[0]

    def _numbers(self, code: str, count: int) -> list[Any]:
        layout = f"<{count}{code}"
        self._at += struct.calcsize(layout)
        return list(struct.unpack_from(layout, self._file, self._at - struct.calcsize(layout)))
