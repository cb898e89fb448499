"""Drafters: cheap proposals of what the target will say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from foretoken.drafters.base import Batch, Drafter, NoDrafter
from foretoken.drafters.cascade import Cascade
from foretoken.drafters.draft_model import DraftModel
from foretoken.drafters.ngram_storage import NgramStorage
from foretoken.drafters.prompt_lookup import PromptLookup
from foretoken.errors import ParameterError

__all__ = [
    "Batch",
    "Cascade",
    "DraftModel",
    "Drafter",
    "Known",
    "NgramStorage",
    "NoDrafter",
    "PromptLookup",
    "get",
    "known",
    "names",
]


@dataclass(frozen=True)
class Known:
    """A drafter that has a name."""

    make: Callable[..., Drafter]
    summary: str
    """One line for people."""
    citation: str = ""
    trees: bool = False
    """Whether its drafts branch."""
    needs_model: bool = False


def _one_level(**options: Any) -> NgramStorage:
    return NgramStorage(one_level=True, **options)


_DRAFTERS = {
    "none": Known(NoDrafter, "proposes nothing: plain decoding"),
    "draft-model": Known(
        DraftModel,
        "a smaller model with the target's vocabulary, one token a step",
        "Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318",
        needs_model=True,
    ),
    "prompt-lookup": Known(
        PromptLookup,
        "copies what followed the last occurrence of the longest suffix of the text",
        "Saxena 2023, prompt lookup decoding",
    ),
    "ngram-storage": Known(
        NgramStorage,
        "counts n-grams of the text and of the target's likeliest predictions; the longest known context drafts",
    ),
    "ngram-storage-one-level": Known(_one_level, "the same with contexts of one length alone: no fallback"),
    "cascade": Known(
        Cascade,
        "several drafters, named with commas: the first that promises as much as the next proposes",
        needs_model=True,
    ),
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
        return _DRAFTERS[name].make(**options)
    except TypeError as error:
        raise ParameterError(f"drafter {name!r}: {error}") from error


def names() -> tuple[str, ...]:
    """Names of all drafters."""
    return tuple(_DRAFTERS)


def known() -> Mapping[str, Known]:
    """All drafters by name, and what there is to know about them."""
    return MappingProxyType(_DRAFTERS)
