"""Errors that end an audit before it has a verdict."""

from __future__ import annotations

from foretoken.errors import ForetokenError


class AuditError(ForetokenError):
    """The audit can't be carried out: a subject that does not answer, or answers something that is not a sample."""
