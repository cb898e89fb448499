"""Errors of allocation, which become `OutOfMemory` with what to do about it."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from traceback import clear_frames

import torch

from foretoken.engine.row import Row
from foretoken.errors import OutOfMemory


class MemoryGuard:
    """A context manager that turns errors of allocation into `OutOfMemory`, which says what to do.

    Args:
        name: of the model or drafter that computes there.
        rows: the requests that are being decoded.
    """

    __slots__ = ("_name", "_rows")

    def __init__(self, name: str, rows: AbstractSequence[Row]) -> None:
        self._name, self._rows = name, rows

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, OutOfMemory) or not is_out_of_memory(error):
            return
        clear_frames(error.__traceback__)  # of a pass that failed, see `Scheduler.step`
        raise OutOfMemory(
            f"out of memory in {self._name} with {len(self._rows)} rows of up to "
            f"{max((len(row.sequence.tokens) for row in self._rows), default=0):,} tokens: lower max_batch_size, "
            "num_speculative_tokens, the prompt's length or max_new_tokens"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: an `OutOfMemory`, or an error that `MemoryGuard` makes one of."""
    by_message = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return by_message or isinstance(error, OutOfMemory | torch.OutOfMemoryError | MemoryError)
