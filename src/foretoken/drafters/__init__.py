"""Drafters: cheap proposals of what the target will say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foretoken.drafters.base import Batch, Drafter, NoDrafter
from foretoken.drafters.draft_model import DraftModel
from foretoken.drafters.ngram_storage import NgramStorage
from foretoken.drafters.prompt_lookup import PromptLookup
from foretoken.errors import ParameterError

__all__ = ["Batch", "DraftModel", "Drafter", "NgramStorage", "NoDrafter", "PromptLookup", "get", "names"]


def _one_level(**options: Any) -> NgramStorage:
    return NgramStorage(one_level=True, **options)


_DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "none": NoDrafter,
    "draft-model": DraftModel,
    "prompt-lookup": PromptLookup,
    "ngram-storage": NgramStorage,
    "ngram-storage-one-level": _one_level,
}


def get(name: str, **options: Any) -> Drafter:
    """A new drafter of that name.

    Args:
        name: one of `names`.
        options: what the drafter's class takes; ``draft-model`` needs ``model=``, a loaded language model.

    Raises:
        ParameterError: no drafter has that name, or it does not take an option.
    """
    if name not in _DRAFTERS:
        raise ParameterError(f"unknown drafter {name!r}: choose one of {', '.join(_DRAFTERS)}, or give a model's path")
    try:
        return _DRAFTERS[name](**options)
    except TypeError as error:
        raise ParameterError(f"drafter {name!r}: {error}") from error


def names() -> tuple[str, ...]:
    """Names of all drafters."""
    return tuple(_DRAFTERS)
