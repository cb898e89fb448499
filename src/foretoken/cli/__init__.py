"""The command line: ``foretoken``."""

from foretoken.cli.app import main

__all__ = ["main"]
