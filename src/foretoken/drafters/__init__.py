"""Drafters: cheap proposals of what the target will say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from types import MappingProxyType
from typing import Any

from foretoken.drafters.base import Batch, Drafter, NoDrafter
from foretoken.drafters.cascade import Cascade
from foretoken.drafters.draft_model import DraftModel
from foretoken.drafters.eagle3 import Eagle3
from foretoken.drafters.growth import TreePlan
from foretoken.drafters.medusa import Medusa
from foretoken.drafters.ngram_storage import NgramStorage
from foretoken.drafters.prompt_lookup import PromptLookup
from foretoken.drafters.shapes import AcceptanceTable, TreeShape
from foretoken.errors import ParameterError
from foretoken.models.base import LanguageModel

__all__ = [
    "AcceptanceTable",
    "Batch",
    "Cascade",
    "DraftModel",
    "Drafter",
    "Eagle3",
    "Known",
    "Medusa",
    "NgramStorage",
    "NoDrafter",
    "PromptLookup",
    "TreePlan",
    "TreeShape",
    "get",
    "is_name",
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
    takes_tree: bool = False
    """Whether `make` takes what trees to grow, as ``tree=``."""
    needs_model: bool = False
    needs_target: bool = False
    """Whether `make` takes the target, as ``target=``."""
    argument: str = ""
    """The option that stands behind a colon: ``name:argument``. A number is given as one."""

    @property
    def required(self) -> tuple[str, ...]:
        """Options that `make` can't do without."""
        parameters = signature(self.make).parameters.values()
        return tuple(one.name for one in parameters if one.default is one.empty and one.kind is not one.VAR_KEYWORD)


def _one_level(**options: Any) -> NgramStorage:
    return NgramStorage(one_level=True, **options)


_DRAFTERS = {
    "none": Known(NoDrafter, "proposes nothing: plain decoding"),
    "draft-model": Known(
        DraftModel,
        "a smaller model with the target's vocabulary, one token a step; as a tree, one depth a step",
        "Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318; trees: Chen et al. 2024, "
        "arXiv 2402.12374; Li et al. 2024, arXiv 2406.16858",
        takes_tree=True,
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
    "eagle3": Known(
        Eagle3,
        "a head of one layer on the target's hidden states, trained for that target: eagle3:FOLDER",
        "Li et al. 2025, EAGLE-3, arXiv 2503.01840",
        takes_tree=True,
        needs_target=True,
        argument="head",
    ),
    "medusa": Known(
        Medusa,
        "heads on the target's last hidden state, one for each of the next tokens: medusa:FOLDER",
        "Cai et al. 2024, arXiv 2401.10774",
        takes_tree=True,
        needs_target=True,
        argument="head",
    ),
    "cascade": Known(
        Cascade,
        "several drafters, named with commas: the first that promises as much as the next proposes",
        needs_model=True,
    ),
}


def get(name: str, target: LanguageModel | None = None, **options: Any) -> Drafter:
    """A new drafter of that name.

    Args:
        name: one of `names`; of some, with an argument after a colon.
        target: the model to draft for; drafters that are made of it need it.
        options: what the drafter's class takes; ``draft-model`` needs ``model=``, a loaded language model.

    Raises:
        ParameterError: no drafter has that name, or it does not take an option.
    """
    base, colon, argument = name.partition(":")
    if base not in _DRAFTERS:
        raise ParameterError(f"unknown drafter {name!r}: choose one of {', '.join(_DRAFTERS)}, or give a model's path")
    found = _DRAFTERS[base]
    if colon:
        if not found.argument or not argument:
            form = f"write {base}:{found.argument.upper()}" if found.argument else "leave out what follows the name"
            raise ParameterError(f"drafter {name!r} has {'no' if found.argument else 'an'} argument: {form}")
        options[found.argument] = int(argument) if argument.isdecimal() else argument
    if found.argument in found.required and found.argument not in options:
        raise ParameterError(f"drafter {base!r} needs to be told more: write {base}:{found.argument.upper()}")
    if found.needs_target:
        if target is None:
            raise ParameterError(f"drafter {base!r} is made of the target: give it, get({name!r}, target=model)")
        options["target"] = target
    try:
        return found.make(**options)
    except TypeError as error:
        raise ParameterError(f"drafter {name!r}: {error}") from error


def is_name(text: str) -> bool:
    """Whether a text names a drafter, with an argument or without."""
    return text.partition(":")[0] in _DRAFTERS


def names() -> tuple[str, ...]:
    """Names of all drafters."""
    return tuple(_DRAFTERS)


def known() -> Mapping[str, Known]:
    """All drafters by name, and what there is to know about them."""
    return MappingProxyType(_DRAFTERS)
