"""Engines that an `AsyncEngine` makes the calls of: two of them would disturb each other's requests."""

from __future__ import annotations

from threading import Lock
from weakref import WeakSet

from foretoken.engine.engine import Engine
from foretoken.errors import ParameterError

_TAKEN: WeakSet[Engine] = WeakSet()
_lock = Lock()


def take(engine: object) -> None:
    """Take an engine.

    Raises:
        ParameterError: it is none, or taken.
    """
    if not isinstance(engine, Engine):
        raise ParameterError(
            f"AsyncEngine takes an Engine, not {type(engine).__name__}: AsyncEngine(Engine(target, drafter))"
        )
    with _lock:
        if engine in _TAKEN:
            raise ParameterError("the engine has an AsyncEngine already: close that one, or make another Engine")
        _TAKEN.add(engine)


def give_back(engine: Engine) -> None:
    """Let others take it."""
    _TAKEN.discard(engine)
