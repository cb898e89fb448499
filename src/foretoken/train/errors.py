"""Errors of training runs."""

from __future__ import annotations

from foretoken.errors import ForetokenError


class TrainingError(ForetokenError):
    """A run can't start or continue; the message names the cure. Progress so far stays on disk."""
