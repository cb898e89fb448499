"""The command line: ``foretoken``."""

from __future__ import annotations

import io
import os
import sys

__all__ = ["main"]


def main() -> None:
    """Entry point."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:  # closed: the next file that is opened would get what is written to it
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            os.set_inheritable(number, True)  # processes that are started would have it closed, too
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character shows another one
            stream.reconfigure(errors="replace")
    try:
        from foretoken.cli.app import app  # here, so that Ctrl-C is clean from the first moment on

        app()
    except KeyboardInterrupt:
        sys.exit(130)
