"""Admission of requests: as many as the engine has rows, and a queue of bounded length."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from foretoken.serve.errors import ApiError, shutting_down

_LONGEST_RETRY = 60
"""Seconds that a client is told to wait at most."""


class Admission:
    """Counts the choices under way.

    Args:
        rows: most that are decoded at once.
        max_queue: most that wait besides.
    """

    def __init__(self, rows: int, max_queue: int) -> None:
        self.in_flight = 0
        self.draining = False
        """No request is let in any more."""
        self._capacity = rows + max_queue
        self._mean_seconds = 1.0

    @contextmanager
    def admit(self, count: int) -> Iterator[float]:
        """Let a request in for as long as the block runs.

        Args:
            count: its choices.

        Yields:
            When it was let in, on the clock of `time.monotonic`.

        Raises:
            ApiError: the queue is full (429), will never take so many (400), or the server is about to end (503).
        """
        if self.draining:
            raise shutting_down()
        if count > self._capacity:
            raise ApiError(
                400, f"{count:,} completions are more than the queue takes, {self._capacity:,}: ask for fewer", "n"
            )
        if self.in_flight + count > self._capacity:
            seconds = min(max(math.ceil(self._mean_seconds), 1), _LONGEST_RETRY)
            raise ApiError(
                429,
                f"the queue is full ({self.in_flight:,} under way): ask again in {seconds} s",
                code="queue_full",
                headers={"retry-after": str(seconds)},
            )
        self.in_flight += count
        began = monotonic()
        try:
            yield began
        finally:
            self.in_flight -= count
            self._mean_seconds += 0.1 * (monotonic() - began - self._mean_seconds)
