"""The command line: ``foretoken``."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

__all__ = ["main"]


class _NumpyFirst:
    """Has numpy imported before torch, whose native part imports it, and drops what is raised meanwhile: a Ctrl-C."""

    def find_spec(self, name: str, *_: Any) -> None:
        """Called for every module that is imported; finds none."""
        if name == "torch":
            import numpy  # noqa: F401


def main() -> None:
    """Entry point."""
    sys.meta_path.insert(0, _NumpyFirst())
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
