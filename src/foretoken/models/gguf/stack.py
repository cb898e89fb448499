"""Calls of functions whose recursion needs more stack than a thread has by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from foretoken.errors import OutOfMemory

_CHANGING = threading.Lock()  # the size is the process's, for threads that begin
_PAGE = 4096

Result = TypeVar("Result")


def call_with_stack(size: int, function: Callable[[], Result]) -> Result:
    """What a function that raises nothing returns, called in a thread of its own.

    Args:
        size: bytes of that thread's stack; memory is taken for those that are used alone.
        function: what is called.

    Raises:
        OutOfMemory: the system has no address space for such a stack, or gives none of that size.
    """
    found: list[Result] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    with _CHANGING:
        before = threading.stack_size()
        try:
            threading.stack_size(-(-size // _PAGE) * _PAGE)  # Windows refuses 256 MiB and more with a ValueError
            thread.start()
        except (ValueError, RuntimeError, MemoryError) as error:
            raise OutOfMemory(f"no memory for a stack of {size:,} bytes: shorten the prompt") from error
        finally:
            threading.stack_size(before)
    thread.join()
    return found[0]
