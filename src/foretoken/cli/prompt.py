"""Prompts, from wherever they come."""

from __future__ import annotations

import sys
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from foretoken.cli.screen import Screen
from foretoken.errors import PromptError


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt's text, wherever it comes from.

    Raises:
        PromptError: there is none, there are two, or it is no UTF-8 text.
    """
    if (prompt is None) == (file is None):
        raise PromptError(
            "no prompt: give PROMPT, - for standard input, or --prompt-file FILE"
            if prompt is None
            else "two prompts: give either PROMPT or --prompt-file, not both"
        )
    if file is not None:
        text = read_text(file, "prompt file")
    elif prompt == "-":
        text = decode_text(standard_input().buffer.read(), "standard input")
    else:
        assert prompt is not None
        try:
            data = prompt.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:  # half a pair of UTF-16, where arguments are in that
            raise PromptError(f"PROMPT is no text: half a surrogate pair at character {error.start:,}") from error
        text = decode_text(data, "PROMPT")
    if not text:
        raise PromptError("prompt is empty: give at least one character")
    return text


def read_text(file: Path, what: str) -> str:
    """The UTF-8 text in a file.

    Raises:
        PromptError: it can't be read, is no regular file, or no UTF-8 text; the message calls it `what`.
    """
    try:
        if file.exists() and not (file.is_file() or file.is_fifo() or file.is_char_device()):
            reason = "it is a folder" if file.is_dir() else "it is no file"
            raise PromptError(f"{what} {str(file)!r} can't be read: {reason}")
        return decode_text(file.read_bytes(), str(file))
    except (OSError, ValueError) as error:
        if isinstance(error, PromptError):
            raise
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise PromptError(f"{what} {str(file)!r} can't be read: {reason}") from error


def as_message(text: str) -> list[dict[str, str]]:
    """A prompt as a chat message, stripped of surrounding white space: files end in a line break.

    Raises:
        PromptError: nothing is left.
    """
    if not text.strip():
        raise PromptError("prompt is empty but for white space: give at least one character")
    return [{"role": "user", "content": text.strip()}]


def decode_text(data: bytes, name: str) -> str:
    """Bytes as text without a byte order mark, which is no part of it.

    Raises:
        PromptError: they are not UTF-8; the message has the position of the first byte that is not.
    """
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "LATIN1"
        raise PromptError(
            f"{name} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start:,}; convert it, for example "
            f"with iconv -f {encoding} -t UTF-8"
        ) from error


def standard_input() -> TextIO:
    """Standard input.

    Raises:
        PromptError: the process was started without one.
    """
    if sys.stdin is None:
        raise PromptError("standard input is closed: give PROMPT or --prompt-file FILE, or open it, with < FILE")
    return sys.stdin


def read_lines(screen: Screen) -> Iterator[str]:
    """Lines of standard input, with a prompt where somebody types them."""
    if not sys.stdin.isatty():
        for raw in sys.stdin.buffer:
            try:
                yield decode_text(raw, "a line of standard input")
            except PromptError as error:
                screen.error(error)
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for `input`)
    while True:
        try:
            # Python writes the prompt to standard output: where the output alone belongs, if that is no terminal.
            if not sys.stdout.isatty():
                screen.notes.print("> ", end="")
            yield input("> " if sys.stdout.isatty() else "")
        except EOFError:
            screen.notes.print()
            return
