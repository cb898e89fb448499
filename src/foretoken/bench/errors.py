"""Errors of benchmarks that callers can cause and mend."""

from __future__ import annotations

from foretoken.errors import ForetokenError


class BenchError(ForetokenError):
    """A benchmark can't go on: results that don't fit together, or that can't be written."""
