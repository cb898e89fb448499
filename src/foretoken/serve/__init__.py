"""The HTTP server: OpenAI's and Anthropic's APIs over an `AsyncEngine`. Needs the extra ``serve``.

Names are imported when they are first used: what passes requests on to replicas needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken.serve.app import create_app
    from foretoken.serve.settings import ServeSettings

__all__ = ["ServeSettings", "create_app"]

_HOMES = {"ServeSettings": "settings", "create_app": "app"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
