"""Lossless speculative decoding for any transformers model.

Names are imported when they are first used, so that ``import foretoken`` itself is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken import drafters, verify
    from foretoken.async_engine import AsyncEngine
    from foretoken.beam import beam_search
    from foretoken.completion import Completion, DecodeStats, StreamEvent
    from foretoken.engine import Engine
    from foretoken.models import load
    from foretoken.sampling import SamplingParams
    from foretoken.shipped import tiny_pair, tiny_pair_path
    from foretoken.transformers_generate import custom_generate

    __version__: str

__all__ = [
    "AsyncEngine",
    "Completion",
    "DecodeStats",
    "Engine",
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
    "AsyncEngine": "async_engine",
    "Completion": "completion",
    "DecodeStats": "completion",
    "Engine": "engine",
    "SamplingParams": "sampling",
    "StreamEvent": "completion",
    "beam_search": "beam",
    "custom_generate": "transformers_generate",
    "load": "models",
    "tiny_pair": "shipped",
    "tiny_pair_path": "shipped",
}
_MODULES = ("drafters", "verify")


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
