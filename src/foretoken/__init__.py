"""Lossless speculative decoding for any transformers model.

Names are imported when they are first used, so that ``import foretoken`` itself is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken import drafters, verify
    from foretoken.engine.async_engine import AsyncEngine
    from foretoken.engine.beam import beam_search
    from foretoken.engine.engine import Engine
    from foretoken.engine.outputs import Completion, DecodeStats, StreamEvent
    from foretoken.integrations.transformers import custom_generate
    from foretoken.limits import Limits
    from foretoken.models import load
    from foretoken.models.tiny_pair import tiny_pair, tiny_pair_path
    from foretoken.sampling import Grammar, GrammarLimits, SamplingParams

    __version__: str

__all__ = [
    "AsyncEngine",
    "Completion",
    "DecodeStats",
    "Engine",
    "Grammar",
    "GrammarLimits",
    "Limits",
    "SamplingParams",
    "StreamEvent",
    "__version__",
    "beam_search",
    "custom_generate",
    "drafters",
    "load",
    "tiny_pair",
    "tiny_pair_path",
    "verify",
]

_HOMES = {
    "AsyncEngine": "engine.async_engine",
    "Completion": "engine.outputs",
    "DecodeStats": "engine.outputs",
    "Engine": "engine.engine",
    "Grammar": "sampling",
    "GrammarLimits": "sampling",
    "Limits": "limits",
    "SamplingParams": "sampling",
    "StreamEvent": "engine.outputs",
    "beam_search": "engine.beam",
    "custom_generate": "integrations.transformers",
    "load": "models",
    "tiny_pair": "models.tiny_pair",
    "tiny_pair_path": "models.tiny_pair",
}
_MODULES = ("drafters", "errors", "verify")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("foretoken")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0+unknown"


def __getattr__(name: str) -> Any:
    if name == "__version__":  # late, too: looking it up takes longer than all else here
        globals()[name] = _version()
        return globals()[name]
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
