"""What can go wrong with a benchmark through no fault of the library."""

from __future__ import annotations

from foretoken.errors import ForetokenError


class BenchError(ForetokenError):
    """A benchmark can't go on: results that don't fit together, or that can't be written."""
