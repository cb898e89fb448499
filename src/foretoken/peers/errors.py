"""Errors of other engines."""

from __future__ import annotations

from foretoken.errors import ForetokenError


class PeerError(ForetokenError):
    """An engine can't be installed or started, fails, or does not answer in time."""


class Unsupported(PeerError):
    """An engine does not support a request; it stays usable for others."""
