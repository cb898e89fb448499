"""Benchmarks: the speed of speculation beside plain decoding and beside other engines.

Names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken.bench.engines import EngineConfig, parse
    from foretoken.bench.plan import BenchPlan
    from foretoken.bench.records import Store
    from foretoken.bench.run import measure
    from foretoken.bench.shape import Shape, choose_shape, parse_size
    from foretoken.bench.summary import BenchResults
    from foretoken.bench.widening import widen

__all__ = [
    "BenchPlan",
    "BenchResults",
    "EngineConfig",
    "Shape",
    "Store",
    "choose_shape",
    "measure",
    "parse",
    "parse_size",
    "widen",
]

_HOMES = {
    "EngineConfig": "engines",
    "BenchPlan": "plan",
    "BenchResults": "summary",
    "Shape": "shape",
    "Store": "records",
    "choose_shape": "shape",
    "measure": "run",
    "parse": "engines",
    "parse_size": "shape",
    "widen": "widening",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
