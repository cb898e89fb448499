"""Where things are written: outputs to standard output, everything else to standard error."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

from rich.console import Console

from foretoken.errors import ForetokenError


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # called where one is handled; the console's own way is to end the process with status 1


def make_console(file: IO[str], no_color: bool = False, width: int | None = None, record: bool = False) -> Console:
    """A console that writes escape codes to a terminal only, and none at all where colours are unwanted."""
    plain = no_color or bool(os.environ.get("NO_COLOR"))
    if width is None and os.environ.get("COLUMNS") == "0":  # "unknown"; taken at its word nothing would be shown
        width = 80
    return _Console(
        file=file,
        color_system=None if plain else "auto",
        highlight=False,
        markup=False,
        emoji=False,
        width=width,
        record=record,
    )


class Screen:
    """The two consoles of a command.

    Attributes:
        out: for the output, or the JSON.
        notes: for messages about it.
    """

    def __init__(self, no_color: bool = False) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, ValueError):  # a terminal of few characters must not end the output
                stream.reconfigure(errors="replace")  # type: ignore[union-attr]
        self.explained = False
        """The colours have been explained already."""
        self.out = make_console(sys.stdout, no_color)
        self.notes = make_console(sys.stderr, no_color)

    def note(self, text: str, style: str = "dim") -> None:
        """A line about what is going on."""
        self.notes.print(text, style=style, soft_wrap=not self.notes.is_terminal)

    def error(self, error: ForetokenError | str) -> None:
        """A line about what went wrong."""
        self.notes.print(f"error: {error}", style="bold red", soft_wrap=not self.notes.is_terminal)


def check_writable(file: Path) -> None:
    """Check that a file can be written, before the work whose result it gets.

    Raises:
        ForetokenError: it can't.
    """
    fresh = not file.exists()
    try:
        with file.open("ab"):
            pass
        if fresh:
            file.resolve().unlink()  # of a link to nothing, what it names, and not the link
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ForetokenError(
            f"can't write {str(file)!r} ({reason}): give a file in a folder that is there and yours to write to"
        ) from error


def has_colour(console: Console) -> bool:
    """Whether styles reach the reader; where not, marks must do."""
    return console.color_system is not None
