"""Engines that belong to an `AsyncEngine`: a second one would disturb the requests of the first."""

from __future__ import annotations

from threading import Lock
from weakref import WeakSet

from foretoken.engine.engine import Engine
from foretoken.errors import ParameterError

_TAKEN: WeakSet[Engine] = WeakSet()
_lock = Lock()


def take(engine: object) -> None:
    """Claim an engine for one `AsyncEngine`.

    Raises:
        ParameterError: it is no `Engine`, or claimed already.
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
    """End the claim."""
    _TAKEN.discard(engine)
