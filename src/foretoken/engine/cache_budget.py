"""A limit for the memory of caches, and what keeps requests within it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakSet

from foretoken.errors import OutOfMemory, ParameterError, show_bytes
from foretoken.limits import MAX_SPECULATIVE_TOKENS
from foretoken.models.base import LanguageModel

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

TENTATIVE = 1 + MAX_SPECULATIVE_TOKENS
"""Tokens that a row is taken to hold beyond its text: the root and what is drafted after it."""


def parse_bytes(value: int | str, name: str = "cache_memory") -> int:
    """Bytes of a number such as 1073741824, ``"512MiB"`` or ``"4G"`` (powers of 1024).

    Args:
        value: the number, or the text.
        name: of the parameter, in messages.

    Raises:
        ParameterError: it is no size, or not above 0.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?)(?:i?B)?\s*", value, re.I)
        if isinstance(value, str)
        else None
    )
    size = round(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size <= 0:
        raise ParameterError(f"{name} is {value!r}: give a number of bytes above 0, or a size such as '4GiB'")
    return size


class Holder(Protocol):
    """Whoever decodes rows in caches of its own."""

    @property
    def reaches(self) -> list[int]:
        """Tokens that each of the rows may come to hold."""


class Budget:
    """Decides which requests fit into memory together, by the lengths that their texts may reach.

    Args:
        limit: bytes that the caches of all models may take.
        models: that keep caches.

    Attributes:
        holders: all whose rows share the memory; those that are gone leave by themselves.
    """

    def __init__(self, limit: int, models: Sequence[LanguageModel]) -> None:
        self.limit = limit
        self.models = models
        self.holders: WeakSet[Holder] = WeakSet()

    def needs(self, lengths: Sequence[int]) -> int:
        """Most bytes that the caches take when rows reach these lengths."""
        return sum(model.cache_bytes([length + TENTATIVE for length in lengths]) for model in self.models)

    def fits(self, lengths: Sequence[int], holder: Holder | None = None) -> bool:
        """Whether a holder may decode these rows together, beside what the others hold."""
        return self.needs(lengths) + self.held(holder) <= self.limit

    def held(self, apart_from: Holder | None = None) -> int:
        """Most bytes that all holders' rows come to take, one holder's left out."""
        lengths = [other.reaches for other in self.holders if other is not apart_from]
        return sum(self.needs(rows) for rows in lengths if rows)

    def check(self, length: int) -> None:
        """Refuse a request that would not fit with the memory to itself.

        Raises:
            OutOfMemory: it would not.
        """
        needs = self.needs([length])
        if needs > self.limit:
            raise OutOfMemory(
                f"a text of up to {length:,} tokens needs {show_bytes(needs)} of caches, and cache_memory is "
                f"{show_bytes(self.limit)}: lower max_new_tokens, shorten the prompt, or raise cache_memory"
            )
