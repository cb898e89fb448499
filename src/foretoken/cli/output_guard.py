"""What happens where the output of a command can't be written."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from foretoken.cli.commands import BAD_INPUT
from foretoken.cli.screen import Screen

CLOSED_PIPE = 141  # exit status of a process that SIGPIPE ended


class OutputGuard(TyperGroup):
    """Ends any command whose output can't be written with a message, or silently where the reader is gone."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Read the command's arguments; asked for help, print it."""
        with _output():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _output():
            return super().invoke(ctx)


@contextmanager
def _output() -> Iterator[None]:
    try:
        try:
            yield
        except typer.Exit:
            _flush()
            raise
        _flush()
    except BrokenPipeError:
        # The reader of the pipe, such as head, has closed it: not an error.
        _drop_output()
        raise typer.Exit(CLOSED_PIPE) from None
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):  # rich's consoles, which help is printed by, end so
            raise
        _drop_output()
        raise typer.Exit(CLOSED_PIPE) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        Screen().error(f"the output can't be written: {error.strerror}")
        _drop_output()
        raise typer.Exit(BAD_INPUT) from None


def _flush() -> None:
    """Write what is left, so that errors of writing are met while they are handled."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _drop_output() -> None:
    """What is left in the buffers would fail once more at the end of the process."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
