"""The drafters that have names: what each does, what its name takes after a colon, and how to make one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from types import MappingProxyType
from typing import Any

from foretoken.drafters.base import Drafter, NoDrafter
from foretoken.drafters.cascade import Cascade
from foretoken.drafters.draft_model import DraftModel
from foretoken.drafters.eagle3 import Eagle3
from foretoken.drafters.early_exit import EarlyExit
from foretoken.drafters.lookahead import Lookahead
from foretoken.drafters.lookup import Lookup
from foretoken.drafters.medusa import Medusa
from foretoken.drafters.ngram_storage import NgramStorage
from foretoken.drafters.prompt_lookup import PromptLookup
from foretoken.drafters.recycling import TokenRecycling
from foretoken.drafters.retrieval import Retrieval
from foretoken.drafters.suffix import Suffix
from foretoken.errors import ParameterError, shown
from foretoken.models.base import LanguageModel
from foretoken.policy.request import AUTO


@dataclass(frozen=True)
class Known:
    """A drafter with a name."""

    make: Callable[..., Drafter]
    summary: str
    """One line for people."""
    citation: str = ""
    trees: bool = False
    """Whether its drafts branch."""
    takes_tree: bool = False
    """Whether `make` takes the kind of trees to grow, as ``tree=``."""
    takes_quantize: bool = False
    """Whether it has weights that can be quantised, and `make` takes ``quantize=``."""
    needs_model: bool = False
    needs_target: bool = False
    """Whether `make` takes the target, as ``target=``."""
    argument: str = ""
    """The option given after a colon: ``name:argument``."""
    number: bool = False
    """Whether that option is a whole number."""

    @property
    def required(self) -> tuple[str, ...]:
        """Options of `make` without a default."""
        parameters = signature(self.make).parameters.values()
        return tuple(one.name for one in parameters if one.default is one.empty and one.kind is not one.VAR_KEYWORD)


def _one_level(**options: Any) -> NgramStorage:
    return NgramStorage(one_level=True, **options)


_DRAFTERS = {
    "none": Known(NoDrafter, "proposes nothing: plain decoding"),
    AUTO: Known(
        Lookup,
        "lookup, a head that lies in the target's folder, and what is named behind a comma: auto,MODEL",
        trees=True,
    ),
    "draft-model": Known(
        DraftModel,
        "a smaller model, one token a step, or one depth of a tree; one of another vocabulary drafts shared tokens, or "
        "text (--vocab)",
        "Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318; trees: Chen et al. 2024, "
        "arXiv 2402.12374; Li et al. 2024, arXiv 2406.16858; other vocabularies: Timor et al. 2025, arXiv 2502.05202",
        takes_tree=True,
        needs_model=True,
    ),
    "lookup": Known(
        Lookup,
        "what probably follows: copies of prompt and output, overlapping ones too, and the target's own runners-up; "
        "lookup:N copies from the last N tokens of other requests, too",
        "Oliaro et al. 2024, arXiv 2411.04975; Hu et al. 2024, arXiv 2411.10666; Luo et al. 2024, arXiv 2408.08696",
        trees=True,
        argument="global_tokens",
        number=True,
    ),
    "prompt-lookup": Known(
        PromptLookup,
        "copies what followed the last occurrence of the sequence's longest suffix",
        "Saxena 2023, prompt lookup decoding",
    ),
    "ngram-storage": Known(
        NgramStorage,
        "counts n-grams of the sequence and of the target's best predictions; the longest known context drafts",
    ),
    "ngram-storage-one-level": Known(_one_level, "the same with contexts of one length alone: no fallback"),
    "suffix": Known(
        Suffix,
        "what most often followed the longest suffix that occurred before; suffix:N looks in other requests, too",
        "Oliaro et al. 2024, arXiv 2411.04975; Hu et al. 2024, arXiv 2411.10666",
        trees=True,
        argument="global_tokens",
        number=True,
    ),
    "recycling": Known(
        TokenRecycling,
        "the target's most probable tokens after each token, kept in a table from every pass",
        "Luo et al. 2024, arXiv 2408.08696",
        trees=True,
    ),
    "lookahead": Known(
        Lookahead,
        "n-grams from parallel Jacobi iteration of the target, in the pass that verifies",
        "Fu et al. 2024, arXiv 2402.02057",
        trees=True,
    ),
    "early-exit": Known(
        EarlyExit,
        "the target's own first layers, over the target's keys and values: early-exit, or early-exit:LAYERS",
        "Draft & Verify, Zhang et al. 2023, arXiv 2309.08168; LayerSkip, Elhoushi et al. 2024, arXiv 2404.16710",
        needs_target=True,
        takes_tree=True,
        argument="layers",
        number=True,
    ),
    "retrieval": Known(
        Retrieval,
        "looks the sequence's longest suffix up in a corpus, and drafts what follows there: retrieval:INDEX, a file "
        "that 'foretoken index' wrote",
        "REST, He et al. 2023, arXiv 2311.08252",
        trees=True,
        argument="index",
    ),
    "eagle3": Known(
        Eagle3,
        "a head of one layer on the target's hidden states, trained for that target: eagle3:FOLDER; eagle3 alone is "
        "the shipped target's own",
        "Li et al. 2025, EAGLE-3, arXiv 2503.01840",
        needs_target=True,
        takes_tree=True,
        takes_quantize=True,
        argument="head",
    ),
    "medusa": Known(
        Medusa,
        "heads on the target's last hidden state, one for each of the next tokens: medusa:FOLDER",
        "Cai et al. 2024, arXiv 2401.10774",
        needs_target=True,
        takes_tree=True,
        argument="head",
    ),
    "cascade": Known(
        Cascade,
        "several drafters, separated by commas, the cheapest first: each row gets the draft that pays most",
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
        raise ParameterError(
            f"unknown drafter {shown(name)}: choose one of {', '.join(_DRAFTERS)}, or give a model's path"
        )
    found = _DRAFTERS[base]
    if colon:
        if not found.argument or not argument:
            form = f"write {base}:{found.argument.upper()}" if found.argument else "leave out what follows the name"
            if found.needs_model:
                form = "give the models' names alone, without this one"
            raise ParameterError(f"drafter {name!r} has {'no' if found.argument else 'an'} argument: {form}")
        options[found.argument] = _integer(name, found.argument, argument) if found.number else argument
    if found.argument in found.required and found.argument not in options:
        raise ParameterError(f"drafter {base!r} needs to be told more: write {base}:{found.argument.upper()}")
    if found.needs_target:
        if target is None:
            raise ParameterError(f"drafter {base!r} is made of the target: give it, get({name!r}, target=model)")
        options["target"] = target
    try:
        return found.make(**options)
    except TypeError as error:
        form = f" (write {base}:{found.argument.upper()})" if found.argument and not colon else ""
        raise ParameterError(f"drafter {name!r}: {error}{form}") from error


def _integer(name: str, option: str, argument: str) -> int:
    try:
        return int(argument)
    except ValueError:
        raise ParameterError(
            f"drafter {name!r}: {option} is {argument!r}, not a whole number: write {name.partition(':')[0]}:8, or the "
            "name alone"
        ) from None


def is_name(name: str) -> bool:
    """Whether a drafter has this name, with an argument or without."""
    return name.partition(":")[0] in _DRAFTERS


def names() -> tuple[str, ...]:
    """Names of all drafters."""
    return tuple(_DRAFTERS)


def known() -> Mapping[str, Known]:
    """All drafters, by name."""
    return MappingProxyType(_DRAFTERS)
