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
"""Suffixes that are looked at when an index is opened."""


@dataclass(frozen=True)
class Header:
    """What an index says of itself.

    Attributes:
        tokenizer: what the tokenizer was loaded from.
        fingerprint: of the tokenizer's vocabulary; see `fingerprint`.
        vocab_size: one more than the largest token that the tokenizer has.
        tokens: numbers in the file, separators included.
        suffixes: tokens without separators.
        documents: that the corpus had.
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
        """Where the suffixes begin, in bytes."""
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
    """Bytes of a token of so large a vocabulary: all but the largest number are tokens."""
    return 2 if vocab_size < 1 << 16 else 4


def fingerprint(tokenizer: Any) -> str:
    """What two tokenizers have in common if the same numbers are the same tokens."""
    vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]


def refuse_pipe(path: Path) -> None:
    """See to it that a path is no pipe and no device, of which opening or reading may wait for ever.

    Raises:
        OSError: it is one.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


class Index:
    """A corpus to look up texts in. Opening it reads next to nothing: pages come as they are looked at.

    Tokens are numbers of `Header.width` bytes, the most significant first, so that texts compare as bytes do; the
    largest number ends a document. Suffixes are little-endian uint32.

    Args:
        path: the file that ``foretoken index`` wrote.

    Raises:
        ParameterError: there is no such file, it is no index, or it is damaged.
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
        # Reading a number of a memoryview takes half the time that it takes of an array.
        self._places = self._suffixes.astype("=u4", copy=False).data
        self.separator = (1 << 8 * header.width) - 1
        self._check_order()

    def find(self, text: Sequence[int], longest: int, shortest: int) -> tuple[int, range]:
        """Where the longest suffix of a text occurs that occurs at all.

        Args:
            text: tokens.
            longest: tokens of the longest suffix that is looked for, at most `Header.depth`.
            shortest: of the shortest one, at least 1.

        Returns:
            Its length, 0 where there is none, and the numbers of the suffixes of the corpus that begin with it.
        """
        pattern = self._pattern(text[-longest:])
        width, best, where = self.header.width, 0, 0
        low, high = shortest, len(pattern) // width
        while low <= high:  # a text that occurs has suffixes that do
            size = (low + high) // 2
            wanted = pattern[len(pattern) - size * width :]
            place = bisect_left(self._places, wanted, key=self._beginning(len(wanted)))
            if place < len(self._places) and self._beginning(len(wanted))(self._places[place]) == wanted:
                best, where, low = size, place, size + 1
            else:
                high = size - 1
        if not best:
            return 0, range(0)
        wanted = pattern[len(pattern) - best * width :]
        return best, range(where, bisect_right(self._places, wanted, lo=where, key=self._beginning(len(wanted))))

    def after(self, suffix: int, skip: int, count: int) -> list[int]:
        """Up to `count` tokens of the corpus, the first `skip` of a suffix left out; none of another document."""
        width = self.header.width
        start = HEADER + (self._places[suffix] + skip) * width
        tokens = self._numbers(self._data[start : min(start + count * width, HEADER + self.header.tokens * width)])
        return tokens[: tokens.index(self.separator)] if self.separator in tokens else tokens

    def _document(self, tokens: list[int]) -> list[int]:
        """The tokens up to the first separator, which is one of them."""
        return tokens[: tokens.index(self.separator) + 1] if self.separator in tokens else tokens

    def _beginning(self, size: int) -> Any:
        data, width = self._data, self.header.width

        def beginning(place: int) -> bytes:
            start = HEADER + place * width
            return data[start : start + size]

        return beginning

    def _numbers(self, data: bytes) -> list[int]:
        return np.frombuffer(data, f">u{self.header.width}").tolist()

    def _pattern(self, text: Sequence[int]) -> bytes:
        """The end of a text as it would stand in the file, from the last token on that no corpus can have."""
        foreign = [place for place, token in enumerate(text) if token >= self.separator]
        return np.array(text[foreign[-1] + 1 :] if foreign else text, dtype=f">u{self.header.width}").tobytes()

    def _check_order(self) -> None:
        """See to it that suffixes are where they should be: in the corpus, and in order; a look at some of them."""
        header = self.header
        numbers = np.linspace(0, header.suffixes - 1, _PROBES, dtype=np.int64)
        numbers = np.unique(np.concatenate([numbers, (numbers + 1).clip(max=header.suffixes - 1)]))
        places = self._suffixes[numbers].tolist()
        beginning = self._beginning(header.depth * header.width)
        texts = [self._document(self._numbers(beginning(place))) for place in places]
        inside = max(places) < header.tokens and len(set(places)) == len(places)
        inside = inside and all(text[0] < header.vocab_size for text in texts)
        if not inside or any(one > other for one, other in pairwise(texts)):
            raise ParameterError(
                f"index {str(self.path)!r} is damaged: its suffixes are not in order; copy it again, or make it anew "
                "with 'foretoken index'"
            )


def _header(data: bytes, path: Path) -> Header:
    """What the beginning of a file says."""
    try:
        said = json.loads(data)
        if said["format"] != FORMAT:
            raise ValueError
    except (ValueError, TypeError, KeyError):
        raise ParameterError(f"{str(path)!r} is no index: give the file that 'foretoken index' wrote") from None
    if said.get("version") != VERSION:
        raise ParameterError(
            f"index {str(path)!r} has format {said.get('version')!r}, this version reads {VERSION}: make it anew with "
            "'foretoken index'"
        )
    names = {field.name: field.type for field in fields(Header)}
    wrong = [name for name, kind in names.items() if type(said.get(name)).__name__ != kind]
    if wrong or said["width"] not in (2, 4) or min(said["suffixes"], said["depth"]) < 1:
        raise ParameterError(
            f"index {str(path)!r} is damaged: its header is broken; make it anew with 'foretoken index'"
        )
    return Header(**{name: said[name] for name in names})
