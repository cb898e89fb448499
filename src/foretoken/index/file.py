"""The index file: a corpus of tokens and its sorted suffixes, mapped into memory."""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from foretoken.errors import ParameterError

FORMAT, VERSION = "foretoken-index", 1

HEADER = 4096
"""Bytes before the tokens: a line of JSON, padded with spaces."""

_PROBES = 256
"""Suffixes that are checked when an index is opened."""


@dataclass(frozen=True)
class Header:
    """The metadata of an index.

    Attributes:
        tokenizer: path or hub id of the tokenizer.
        fingerprint: of the tokenizer's vocabulary; see `fingerprint`.
        vocab_size: one more than the tokenizer's largest token id.
        tokens: number of tokens in the file, separators included.
        suffixes: number of tokens without separators.
        documents: number of documents in the corpus.
        width: bytes of a token, 2 or 4.
        depth: tokens that suffixes are sorted by.
        format: `FORMAT`.
        version: `VERSION`.
    """

    tokenizer: str
    fingerprint: str
    vocab_size: int
    tokens: int
    suffixes: int
    documents: int
    width: int
    depth: int
    format: str = FORMAT
    version: int = VERSION

    @property
    def suffixes_at(self) -> int:
        """Offset of the suffixes, in bytes."""
        return HEADER + -(-self.tokens * self.width // 8) * 8

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.suffixes_at + 4 * self.suffixes

    def write(self, file: BinaryIO) -> None:
        """Write it to the beginning of a file."""
        file.seek(0)
        file.write(json.dumps(asdict(self)).encode().ljust(HEADER - 1) + b"\n")


def token_width(vocab_size: int) -> int:
    """Bytes of a token id, for a vocabulary size; the largest value of that width is the separator."""
    return 2 if vocab_size < 1 << 16 else 4


def fingerprint(tokenizer: Any) -> str:
    """A hash of a tokenizer's vocabulary: equal if the same ids are the same tokens."""
    vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]


def refuse_pipe(path: Path) -> None:
    """Refuse pipes and devices, whose opening or reading may block for ever.

    Raises:
        OSError: the path is one.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


class Index:
    """A corpus that is searched for token sequences. It is memory-mapped: opening it reads a few pages only.

    Tokens are big-endian numbers of `Header.width` bytes, so that sequences compare as bytes do; the largest number
    ends a document. Suffixes are little-endian uint32: the index of their first token.

    Args:
        path: the file that ``foretoken index`` wrote.

    Raises:
        ParameterError: there is no such file, it is not an index, or it is damaged.
    """

    def __repr__(self) -> str:
        return f"Index({str(self.path)!r})"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        try:
            refuse_pipe(self.path)
            with self.path.open("rb") as file:
                self.header = _header(file.read(HEADER), self.path)
                size = self.path.stat().st_size
                if size != self.header.size:
                    raise ParameterError(
                        f"index {str(self.path)!r} has {size:,} bytes and should have {self.header.size:,}: it was cut "
                        "short or changed; copy it again, or make it anew with 'foretoken index'"
                    )
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ParameterError(
                f"index {str(self.path)!r} can't be read ({error.strerror}): give the file that 'foretoken index' wrote"
            ) from error
        header = self.header
        self._suffixes = np.frombuffer(self._data, "<u4", header.suffixes, header.suffixes_at)
        # Indexing a memoryview takes half the time of indexing an array.
        self._starts = self._suffixes.astype("=u4", copy=False).data
        self.separator = (1 << 8 * header.width) - 1
        self._check_order()

    def find(self, tokens: Sequence[int], longest: int, shortest: int) -> tuple[int, range]:
        """All occurrences in the corpus of the longest suffix of `tokens` that occurs there.

        Args:
            tokens: a sequence.
            longest: tokens of the longest suffix that is tried, at most `Header.depth`.
            shortest: of the shortest one, at least 1.

        Returns:
            The length of that suffix, 0 if there is none, and the indices of the corpus' sorted suffixes that begin
            with it.
        """
        pattern = self._pattern(tokens[-longest:])
        width, best, where = self.header.width, 0, 0
        low, high = shortest, len(pattern) // width
        while low <= high:  # if a sequence occurs, its suffixes do
            size = (low + high) // 2
            wanted = pattern[len(pattern) - size * width :]
            index = bisect_left(self._starts, wanted, key=self._beginning(len(wanted)))
            if index < len(self._starts) and self._beginning(len(wanted))(self._starts[index]) == wanted:
                best, where, low = size, index, size + 1
            else:
                high = size - 1
        if not best:
            return 0, range(0)
        wanted = pattern[len(pattern) - best * width :]
        return best, range(where, bisect_right(self._starts, wanted, lo=where, key=self._beginning(len(wanted))))

    def after(self, suffix: int, skip: int, count: int) -> list[int]:
        """Up to `count` tokens of a suffix, from its token `skip` on, within its document."""
        width = self.header.width
        start = HEADER + (self._starts[suffix] + skip) * width
        tokens = self._numbers(self._data[start : min(start + count * width, HEADER + self.header.tokens * width)])
        return tokens[: tokens.index(self.separator)] if self.separator in tokens else tokens

    def _document(self, tokens: list[int]) -> list[int]:
        """The tokens up to the first separator, which is one of them."""
        return tokens[: tokens.index(self.separator) + 1] if self.separator in tokens else tokens

    def _beginning(self, size: int) -> Any:
        data, width = self._data, self.header.width

        def beginning(position: int) -> bytes:
            start = HEADER + position * width
            return data[start : start + size]

        return beginning

    def _numbers(self, data: bytes) -> list[int]:
        return np.frombuffer(data, f">u{self.header.width}").tolist()

    def _pattern(self, tokens: Sequence[int]) -> bytes:
        """A sequence as bytes of the file, cut to what follows the last token that the file can't represent."""
        foreign = [index for index, token in enumerate(tokens) if token >= self.separator]
        return np.array(tokens[foreign[-1] + 1 :] if foreign else tokens, dtype=f">u{self.header.width}").tobytes()

    def _check_order(self) -> None:
        """Check for a sample of the suffixes that they are in the corpus and in order."""
        header = self.header
        numbers = np.linspace(0, header.suffixes - 1, _PROBES, dtype=np.int64)
        numbers = np.unique(np.concatenate([numbers, (numbers + 1).clip(max=header.suffixes - 1)]))
        starts = self._suffixes[numbers].tolist()
        beginning = self._beginning(header.depth * header.width)
        suffixes = [self._document(self._numbers(beginning(start))) for start in starts]
        inside = max(starts) < header.tokens and len(set(starts)) == len(starts)
        inside = inside and all(suffix[0] < header.vocab_size for suffix in suffixes)
        if not inside or any(one > other for one, other in pairwise(suffixes)):
            raise ParameterError(
                f"index {str(self.path)!r} is damaged: its suffixes are not in order; copy it again, or make it anew "
                "with 'foretoken index'"
            )


def _header(data: bytes, path: Path) -> Header:
    """Parse and check the header at the beginning of a file."""
    try:
        values = json.loads(data)
        if values["format"] != FORMAT:
            raise ValueError
    except (ValueError, TypeError, KeyError):
        raise ParameterError(f"{str(path)!r} is no index: give the file that 'foretoken index' wrote") from None
    if values.get("version") != VERSION:
        raise ParameterError(
            f"index {str(path)!r} has format {values.get('version')!r}, this version reads {VERSION}: make it anew "
            "with 'foretoken index'"
        )
    names = {field.name: field.type for field in fields(Header)}
    wrong = [name for name, kind in names.items() if type(values.get(name)).__name__ != kind]
    if wrong or values["width"] not in (2, 4) or min(values["suffixes"], values["depth"]) < 1:
        raise ParameterError(
            f"index {str(path)!r} is damaged: its header is broken; make it anew with 'foretoken index'"
        )
    return Header(**{name: values[name] for name in names})
