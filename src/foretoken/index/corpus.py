"""The documents of a corpus, from files and folders, in pieces that fit into memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.errors import ParameterError
from foretoken.index.file import refuse_pipe

PIECE = 1 << 16
"""Characters of a piece, about: it ends at the end of a line."""

_JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class CorpusPiece:
    """A part of a document.

    Attributes:
        text: one line or more.
        last: the document ends with it.
        size: bytes of the corpus' files that were read for it, about.
    """

    text: str
    last: bool
    size: int


@dataclass(frozen=True)
class CorpusFile:
    """A file to read.

    Attributes:
        path: its path.
        named: given by its name, not found in a folder: an error if it is not text.
        size: bytes.
    """

    path: Path
    named: bool
    size: int


def find(files: Sequence[str | Path]) -> list[CorpusFile]:
    """The named files, and all files in named folders, recursively, except names that begin with a dot.

    Raises:
        ParameterError: there is no such file or folder, or none in any of them.
    """
    sources: list[CorpusFile] = []
    for name in files:
        path = Path(name).expanduser()
        if not str(name):  # which pathlib takes for the current folder
            raise ParameterError("the name of a file to index is empty: name a file or a folder")
        try:
            refuse_pipe(path)
            if path.is_dir():
                inner = sorted(file for file in path.rglob("*") if file.is_file() and not _hidden(file, path))
                sources += [CorpusFile(file, False, file.stat().st_size) for file in inner]
            else:
                sources.append(CorpusFile(path, True, path.stat().st_size))
        except OSError as error:
            raise ParameterError(f"{str(name)!r} can't be read ({error.strerror}): name a file or a folder") from error
    if not sources:
        raise ParameterError(f"there are no files in {', '.join(map(repr, map(str, files)))}: name some to index")
    return sources


def pieces(source: CorpusFile, fields: Sequence[str]) -> Iterator[CorpusPiece]:
    """The documents of a file: the file itself, or for a ``.jsonl`` file each of the fields of each line.

    Raises:
        ParameterError: the file can't be read, is not UTF-8 text, or has lines that are not JSON objects with such a
            field.
        UnicodeDecodeError: a file that was found in a folder is not text.
    """
    path = source.path
    lines = path.suffix.lower() in _JSON_LINES
    try:
        with path.open(encoding="utf-8-sig", newline=None if lines else "") as file:
            yield from _records(file, path, fields) if lines else _parts(file)
    except UnicodeDecodeError as error:
        if not source.named:
            raise
        raise ParameterError(f"{str(path)!r} is no UTF-8 text ({error.reason}): convert it, or leave it out") from error
    except OSError as error:
        raise ParameterError(
            f"{str(path)!r} can't be read ({error.strerror}): check its permissions, or leave it out"
        ) from error


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _parts(file: Any) -> Iterator[CorpusPiece]:
    before = 0
    text = file.read(PIECE) + file.readline(PIECE)
    while text:
        following = file.read(PIECE)
        following += file.readline(PIECE) if following else ""
        now = file.buffer.tell()
        yield CorpusPiece(text, not following, now - before)
        text, before = following, now


def _records(file: Any, path: Path, fields: Sequence[str]) -> Iterator[CorpusPiece]:
    wanted = " or ".join(map(repr, fields))
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        at = f"line {number:,} of {str(path)!r}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ParameterError(f"{at} is no JSON ({error}): correct it, or leave it out") from error
        if not isinstance(record, dict):
            raise ParameterError(f"{at} is no JSON object but a {type(record).__name__}: write {{{wanted}: …}}")
        entries = [record[field] for field in fields if field in record]
        if not entries:
            known = ", ".join(record) or "none"
            raise ParameterError(f"{at} has no field {wanted}: name one with --field (it has {known})")
        documents = [text for entry in entries for text in (entry if isinstance(entry, list) else [entry])]
        if not all(isinstance(text, str) for text in documents):
            raise ParameterError(f"{at} has a field {wanted} that is no string: name another with --field")
        size = len(line)
        for text in documents:
            yield CorpusPiece(text, True, size)
            size = 0
