"""Threads: torch's, beside a runtime that computes with threads of its own; and those of callers that share a model."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import cache
from pathlib import Path
from threading import Lock, RLock
from typing import Any, Protocol
from weakref import finalize


def one_thread(enabled: bool = True) -> AbstractContextManager[None]:
    """Have the calling thread's work in torch done by itself alone.

    The threads that helped with an operation of torch's wait for the next one, and keep their cores busy with that for
    some milliseconds. Another runtime's threads then have to share those cores: a pass of OpenVINO's of some
    milliseconds takes half as long again. Other threads' work in torch is not affected, nor is `torch.set_num_threads`,
    which is the process's.
    """
    omp = _omp() if enabled else None
    return nullcontext() if omp is None else _OneThread(omp)


class _OneThread:
    """What `one_thread` returns, to be entered once. A generator takes several times as long."""

    __slots__ = ("_before", "_omp")

    def __init__(self, omp: Any) -> None:
        self._omp = omp

    def __enter__(self) -> None:
        self._before = self._omp.omp_get_max_threads()
        self._omp.omp_set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        self._omp.omp_set_num_threads(self._before)


_SOFT = 1  # omp_pause_soft: what the threads know of variables of their own may stay


def release_threads() -> None:
    """Let the threads go that helped the calling one to compute; its next pass makes new ones.

    GNU's OpenMP, which torch and llama.cpp compute with, keeps such threads for every thread that ever computed. As
    soon as there are more of them than processors, all hardly spin any more before they sleep where they wait for each
    other: a pass over a small model, which has hundreds of such places, then takes up to three times as long. So a
    thread that loaded a model, or ran it alone, may not keep them while another one decodes.

    That goes for every copy of the runtime that is loaded. It takes 0.1 ms with two processors, and longer with many;
    next to nothing where there is nothing to let go. A forked process has none of its parent's threads, and would wait
    for them: nothing is done there, as long as it has no other thread of its own.
    """
    runtimes = _runtimes()
    if runtimes and len(os.listdir("/proc/self/task")) > 1:
        for runtime in runtimes:
            runtime.omp_pause_resource_all(_SOFT)


def library_loaded() -> None:
    """A shared library was loaded, which may have brought an OpenMP runtime of its own."""
    _runtimes.cache_clear()


_TURNS: dict[int, RLock] = {}  # by identity: what has a turn may be equal to others, and have no hash
_making = Lock()


class TakesTurns(Protocol):
    """A model, or a drafter that keeps something for all requests."""

    @property
    def turn(self) -> RLock:
        """Its lock, as `turn_of` has it."""


def turn_of(model: object) -> RLock:
    """The lock of a model, or of a drafter: one thread at a time may run rounds with it."""
    with _making:
        if id(model) not in _TURNS:
            finalize(model, _TURNS.pop, id(model))
            _TURNS[id(model)] = RLock()
        return _TURNS[id(model)]


def taking_turns(models: Iterable[TakesTurns]) -> AbstractContextManager[object]:
    """Wait until no other thread runs a round with any of these, and keep them until the block ends.

    What is returned may be entered again and again.
    """
    turns = {id(turn): turn for turn in [model.turn for model in models]}
    # In one order everywhere: no two threads wait for each other.
    return next(iter(turns.values())) if len(turns) == 1 else _Holding([turns[key] for key in sorted(turns)])


class _Holding:
    """Several locks as one."""

    __slots__ = ("_turns",)

    def __init__(self, turns: Sequence[RLock]) -> None:
        self._turns = turns

    def __enter__(self) -> None:
        with ExitStack() as held:  # an interruption gives back what was got
            for turn in self._turns:
                held.enter_context(turn)
            held.pop_all()

    def __exit__(self, *_: object) -> None:
        for turn in reversed(self._turns):
            turn.release()


@cache
def _omp() -> Any | None:
    """The OpenMP runtime that torch has loaded; None where it can't be got at."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    if not (hasattr(library, "omp_set_num_threads") and hasattr(library, "omp_get_max_threads")):
        return None
    return library


@cache
def _runtimes() -> list[Any]:
    """GNU's OpenMP runtimes that are loaded: packages may bring their own."""
    if not sys.platform.startswith("linux"):
        return []
    found = []
    with suppress(OSError):  # it can't be seen
        lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
        for file in sorted({line.split(maxsplit=5)[5] for line in lines if "/libgomp" in line}):
            if not Path(file).name.startswith("libgomp-plugin"):
                with suppress(OSError):  # the file is gone: it would be loaded a second time
                    found.append(ctypes.CDLL(file, mode=os.RTLD_NOW | os.RTLD_NOLOAD))
    return [runtime for runtime in found if hasattr(runtime, "omp_pause_resource_all")]  # from GCC 9 on


def _forget_parent() -> None:
    global _runtimes
    _runtimes = cache(list)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)
