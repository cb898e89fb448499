"""API keys."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from hashlib import sha256

from starlette.datastructures import Headers


class ApiKeys:
    """Keys that requests show as ``Authorization: Bearer KEY`` or ``x-api-key: KEY``.

    Digests are compared, each with every key, so that the time tells nothing of a key: neither its length nor how much
    of it was right.

    Args:
        keys: the valid ones; none lets everybody in.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def admit(self, headers: Headers) -> bool:
        """Whether a request may pass."""
        if not self._digests:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")
        digest = _digest(given.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, always
        return any(matches)


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()
