"""What can go wrong with a benchmark through no fault of the library."""

from __future__ import annotations

from foretoken.errors import ForetokenError


class BenchError(ForetokenError):
    """A benchmark can't go on: an engine that can't be started or breaks, results that don't fit together."""


class Unsupported(BenchError):
    """An engine can't do what a case asks for; the message says why. Other cases go on."""
