"""Language models: the contract, and `load` for any transformers model.

Names are imported when they are first used: `foretoken.models.locating` needs neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken.models.base import Cache, LanguageModel, Scores
    from foretoken.models.loading import load
    from foretoken.models.pairing import check_pair

__all__ = ["Cache", "LanguageModel", "Scores", "check_pair", "load"]

_HOMES = {"Cache": "base", "LanguageModel": "base", "Scores": "base", "check_pair": "pairing", "load": "loading"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
