"""Threads: torch's, beside a runtime that computes with threads of its own; and those of callers that share a model."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from foretoken.models.base import LanguageModel


@contextmanager
def one_thread(enabled: bool = True) -> Iterator[None]:
    """Have the calling thread's work in torch done by itself alone.

    The threads that helped with an operation of torch's wait for the next one, and keep their cores busy with that for
    some milliseconds. Another runtime's threads then have to share those cores: a pass of OpenVINO's of some
    milliseconds takes half as long again. Other threads' work in torch is not affected, nor is `torch.set_num_threads`,
    which is the process's.
    """
    omp = _omp() if enabled else None
    if omp is None:
        yield
        return
    before = omp.omp_get_max_threads()
    omp.omp_set_num_threads(1)
    try:
        yield
    finally:
        omp.omp_set_num_threads(before)


_TURNS: WeakKeyDictionary[object, RLock] = WeakKeyDictionary()
_making = Lock()


def turn_of(model: object) -> RLock:
    """The lock of a model: one thread at a time may run rounds with it."""
    with _making:
        return _TURNS.setdefault(model, RLock())


@contextmanager
def taking_turns(models: Iterable[LanguageModel]) -> Iterator[None]:
    """Wait until no other thread runs a round with any of these models, and keep them until the block ends."""
    # In one order everywhere: no two threads wait for each other.
    turns = {id(turn): turn for turn in (model.turn for model in models)}
    with ExitStack() as held:
        for _, turn in sorted(turns.items()):
            held.enter_context(turn)
        yield


@cache
def _omp() -> Any | None:
    """The OpenMP runtime that torch has loaded; None where it can't be got at."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    if not (hasattr(library, "omp_set_num_threads") and hasattr(library, "omp_get_max_threads")):
        return None
    return library
