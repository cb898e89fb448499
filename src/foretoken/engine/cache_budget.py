"""A limit for the memory of KV caches, and which requests fit within it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from threading import Condition
from typing import Protocol
from weakref import WeakSet

from foretoken.errors import ParameterError, RequestTooLarge, show_bytes, shown
from foretoken.limits import TENTATIVE
from foretoken.models.base import LanguageModel

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

_LARGEST = 1 << 60

_POLL_SECONDS = 0.1
"""Seconds between two looks of a holder that waits: dropped streams and cancelled requests notify nobody."""


def parse_bytes(value: int | str, name: str = "cache_memory") -> int:
    """Bytes of a number such as 1073741824, ``"512MiB"`` or ``"4G"`` (powers of 1024).

    Args:
        value: the number, or the string.
        name: of the parameter, in messages.

    Raises:
        ParameterError: it is no size, not above 0, or more than any machine has.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST:
        return value
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?)(?:i?B)?\s*", value, re.I)
        if isinstance(value, str)
        else None
    )
    number = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
    size = round(number) if number <= _LARGEST else 0
    if size <= 0:
        raise ParameterError(
            f"{name} is {shown(value)}: give a number of bytes above 0 and at most {show_bytes(_LARGEST)}, or a size "
            "such as '4GiB'"
        )
    return size


class Holder(Protocol):
    """Whoever decodes rows with a KV cache of its own."""

    @property
    def max_lengths(self) -> list[int]:
        """Of each of its rows, most tokens that the KV cache may hold before the request ends."""

    @property
    def runs(self) -> bool:
        """Whether a call in progress decodes its rows to their ends."""


class Budget:
    """Decides which requests fit into memory together, by the lengths that they may reach.

    Holders may be in several threads. Each acquires `changes` to look at what others hold and to hold more, and
    notifies it when it holds less.

    Args:
        limit: bytes that the KV caches of all models may take.
        models: that keep KV caches.

    Attributes:
        changes: guards what is held, and who waits.
        waiting: holders of nothing that wait, in the order in which they came.
        holders: all whose rows share the memory; weak references, so that those that are gone do not count.
    """

    def __init__(self, limit: int, models: Sequence[LanguageModel]) -> None:
        self.limit = limit
        self.models = models
        self.changes = Condition()
        self.waiting: list[Holder] = []
        self.holders: WeakSet[Holder] = WeakSet()

    def needs(self, lengths: Sequence[int]) -> int:
        """Most bytes that the KV caches take when rows reach these lengths."""
        return sum(model.cache_bytes([length + TENTATIVE for length in lengths]) for model in self.models)

    def fits(self, lengths: Sequence[int], holder: Holder | None = None) -> bool:
        """Whether a holder may decode rows of these lengths together, beside what the others hold."""
        return self.needs(lengths) + self.held(holder) <= self.limit

    def held(self, apart_from: Holder | None = None) -> int:
        """Most bytes that the KV caches of all holders' rows may take, one holder left out."""
        with self.changes:
            lengths = [other.max_lengths for other in self.holders if other is not apart_from]
        return sum(self.needs(rows) for rows in lengths if rows)

    def wait(self, holder: Holder) -> bool:
        """Wait a short while for another holder to hold less; False at once if none will do so by itself.

        The caller has acquired `changes`, and is among those `waiting`.
        """
        if self.waiting[0] is holder and not any(
            other.runs and other.max_lengths for other in self.holders if other is not holder
        ):
            return False
        self.changes.wait(_POLL_SECONDS)
        return True

    def check(self, length: int) -> None:
        """Refuse a request that would not fit even if it had all of the memory to itself.

        Raises:
            RequestTooLarge: it would not fit.
        """
        needs = self.needs([length])
        if needs > self.limit:
            least = self.needs([1])
            cure = "lower max_new_tokens, shorten the prompt, or raise cache_memory"
            if least > self.limit:
                cure = f"raise cache_memory to at least {show_bytes(least)}, which the shortest request needs"
            raise RequestTooLarge(
                f"a request of up to {length:,} tokens needs {show_bytes(needs)} of KV cache, and cache_memory is "
                f"{show_bytes(self.limit)}: {cure}"
            )
