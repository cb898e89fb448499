"""Building an index: read, tokenize, sort, write."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from foretoken.errors import OutOfMemory, ParameterError, show_bytes
from foretoken.index.corpus import CorpusFile, CorpusPiece, find, pieces
from foretoken.index.file import FORMAT, HEADER, Header, fingerprint, refuse_pipe, token_width
from foretoken.index.sort import sorted_suffixes
from foretoken.sampling.params import check_integer

DEPTH = 16
"""Default number of tokens that suffixes are sorted by, which limits the length of matches (16 in REST)."""

_TOGETHER = 64
"""Pieces that are tokenized at a time."""

Progress = Callable[[str, int, int], None]
"""Called with the part of the work (``"reading"`` or ``"sorting"``), how much of it is done, and its total."""


@dataclass(frozen=True)
class IndexReport:
    """The contents of a new index.

    Attributes:
        header: of the index.
        files: number of files that it has.
        skipped: number of files in folders that are not text.
    """

    header: Header
    files: int
    skipped: int


@dataclass
class _Tally:
    """Counts so far: tokens with separators, documents, and files that are not text."""

    tokens: int = 0
    documents: int = 0
    skipped: int = 0


def build(
    files: Sequence[str | Path],
    tokenizer: Any,
    path: str | Path,
    *,
    fields: Sequence[str] = ("text",),
    depth: int = DEPTH,
    progress: Progress | None = None,
) -> IndexReport:
    """Index a corpus for the `retrieval` drafter.

    The file is written under a temporary name and renamed when complete, replacing an older index. A token takes 6
    bytes of it (8 with vocabularies of 65,536 tokens and more), and about 40 bytes of memory while suffixes are sorted.

    Args:
        files: text files in UTF-8, ``.jsonl`` files, and folders of both.
        tokenizer: the target's, a transformers one.
        path: the file to write.
        fields: of a ``.jsonl`` file's objects, those that hold strings (or lists of strings).
        depth: longest match, in tokens, that can be found.
        progress: called with the progress.

    Raises:
        ParameterError: a file can't be read or is not text, all are empty, or `path` can't be written.
        OutOfMemory: there are too many tokens for this machine.
    """
    check_integer("depth", depth, 1, 256, cure="16 is enough for nearly all corpora")
    path = Path(path).expanduser()
    sources = find(files)
    vocabulary = tokenizer.get_vocab()
    vocab_size = max(vocabulary.values()) + 1
    width = token_width(vocab_size)
    if path.exists():
        _check_replaceable(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    tally = _Tally()
    tell = progress or (lambda part, done, total: None)
    try:
        with partial.open("w+b") as file:
            file.write(b" " * HEADER)
            total = sum(source.size for source in sources)
            done = 0
            parts = _all_pieces(sources, fields, tally)
            while batch := list(islice(parts, _TOGETHER)):
                _write_tokens(file, batch, tokenizer, width, tally)
                done += sum(piece.size for piece in batch)
                tell("reading", min(done, total), total)
            if tally.tokens == tally.documents:
                raise ParameterError(
                    f"there is no text in {', '.join(map(repr, map(str, files)))}: name files with text to index"
                )
            if tally.tokens >= 1 << 32:
                raise ParameterError(f"{tally.tokens:,} tokens are too many for one index: leave files out")
            header = Header(
                tokenizer=str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__),
                fingerprint=fingerprint(tokenizer),
                vocab_size=vocab_size,
                tokens=tally.tokens,
                suffixes=tally.tokens - tally.documents,
                documents=tally.documents,
                width=width,
                depth=depth,
            )
            _write_suffixes(file, header, tell)
            header.write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise ParameterError(
            f"index {str(path)!r} can't be written ({error.strerror}): give a path that can be written to, with free "
            "space of about twice the size of the files"
        ) from error
    except MemoryError as error:
        raise OutOfMemory(
            f"memory ran out while {tally.tokens:,} tokens were indexed, which takes about "
            f"{show_bytes(40 * tally.tokens)}: index fewer files"
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return IndexReport(header, len(sources) - tally.skipped, tally.skipped)


def _check_replaceable(path: Path) -> None:
    """Refuse to replace a file that is not an index."""
    try:
        refuse_pipe(path)
        with path.open("rb") as file:
            is_index = f'"format": "{FORMAT}"'.encode() in file.read(HEADER)
    except OSError as error:
        raise ParameterError(f"index {str(path)!r} can't be written ({error.strerror}): give a file's name") from error
    if not is_index:
        raise ParameterError(f"{str(path)!r} is there and no index: delete it, or give another name")


def _all_pieces(sources: Sequence[CorpusFile], fields: Sequence[str], tally: _Tally) -> Iterator[CorpusPiece]:
    for source in sources:
        last = True
        try:
            for piece in pieces(source, fields):
                last = piece.last
                yield piece
        except UnicodeDecodeError:
            tally.skipped += 1
            if not last:  # end the document after the pieces that were read
                yield CorpusPiece("", True, 0)


def _write_tokens(file: BinaryIO, batch: list[CorpusPiece], tokenizer: Any, width: int, tally: _Tally) -> None:
    """Append the tokens of pieces, with a separator after each document."""
    separator = (1 << 8 * width) - 1
    for tokens, piece in zip(_tokenized(tokenizer, [piece.text for piece in batch]), batch, strict=True):
        numbers = [*tokens, separator] if piece.last else tokens
        file.write(np.array(numbers, dtype=f">u{width}").tobytes())
        tally.tokens += len(numbers)
        tally.documents += piece.last


def _tokenized(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
        return ids
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    # On all cores, and without the attention masks and offsets that transformers makes.
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]


def _write_suffixes(file: BinaryIO, header: Header, tell: Progress) -> None:
    file.seek(HEADER)
    tokens = np.fromfile(file, f">u{header.width}", header.tokens).astype(f"=u{header.width}")
    done = 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        tell("sorting", done, header.suffixes)

    tell("sorting", 0, header.suffixes)
    suffixes = sorted_suffixes(tokens, header.depth, advance)
    file.seek(header.suffixes_at)
    file.write(suffixes.astype("<u4", copy=False).data)
