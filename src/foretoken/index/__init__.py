"""A searchable corpus of tokens: built once, memory-mapped, searched in microseconds."""

from __future__ import annotations

from foretoken.index.builder import IndexReport, build
from foretoken.index.file import Index, fingerprint

__all__ = ["Index", "IndexReport", "build", "fingerprint"]
