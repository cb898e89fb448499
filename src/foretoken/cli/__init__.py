"""The command line: ``foretoken``."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point."""
    try:
        from foretoken.cli.app import app  # here, so that Ctrl-C is clean from the first moment on

        app()
    except KeyboardInterrupt:
        sys.exit(130)
