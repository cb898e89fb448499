"""The command line: ``foretoken``."""

from __future__ import annotations

import io
import sys

__all__ = ["main"]


def main() -> None:
    """Entry point."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character shows another one
            stream.reconfigure(errors="replace")
    try:
        from foretoken.cli.app import app  # here, so that Ctrl-C is clean from the first moment on

        app()
    except KeyboardInterrupt:
        sys.exit(130)
