"""Makes the drafter that a user asks for: by name, folder, model, head, or several of these."""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from inspect import isclass
from pathlib import Path
from typing import Any

from foretoken.drafters import (
    Cascade,
    Drafter,
    DraftModel,
    Eagle3,
    Lookup,
    NoDrafter,
    Vocab,
    check_vocab,
    draft_with,
    is_name,
)
from foretoken.drafters import get as get_drafter
from foretoken.drafters import known as known_drafters
from foretoken.drafters import names as drafter_names
from foretoken.drafters.translated import TranslatedModel
from foretoken.drafters.tree_plan import TreePlan
from foretoken.errors import ModelError, ParameterError, shown
from foretoken.heads import kind_of
from foretoken.models import LanguageModel, load
from foretoken.models.pairing import check_pair
from foretoken.models.tiny_pair import head_path, is_shipped, load_part
from foretoken.policy.request import AUTO


def make_drafter(
    drafter: Any,
    target: LanguageModel,
    *,
    tree: TreePlan | None = None,
    vocab: Vocab = "auto",
    **load_options: Any,
) -> Drafter:
    """The drafter that `Engine` was asked for; see there.

    Raises:
        ParameterError: neither a known name nor a model, or it can't grow the trees that are asked for.
        ModelError: the model can't be loaded, or doesn't fit the target.
    """
    check_vocab(vocab)
    if drafter is None:
        _refuse_trees(tree, "no drafter")
        return NoDrafter()
    if isinstance(drafter, str):
        parts = _split(drafter)
        if len(parts) > 1:
            drafter = parts
        elif (named := _by_name(drafter, target, tree, vocab, load_options)) is not None:
            return named
    if isinstance(drafter, list | tuple):
        _refuse_trees(tree, "a cascade")
        made: list[Drafter] = []
        for part in drafter:
            if isinstance(part, str) and part == AUTO:
                made += _automatic(target, load_options)
            else:
                made.append(make_drafter(part, target, vocab=vocab, **load_options))
        return Cascade(made)
    kind = kind_of(drafter) if isinstance(drafter, str | Path) else None
    if kind is not None:
        return _named(kind, target, tree, load_options, head=drafter)
    if isclass(drafter):
        raise ParameterError(f"drafter is the class {drafter.__name__}: give an instance, {drafter.__name__}(…)")
    if isinstance(drafter, Drafter):
        if tree is not None and tree != (drafter.tree or TreePlan()):
            raise ParameterError("tree= is for drafters that are made here: give it to the drafter itself instead")
        return _checked(drafter, target)
    if hasattr(drafter, "propose"):
        raise ParameterError(
            f"drafter is a {type(drafter).__name__}, which is no Drafter: make it a subclass of "
            "foretoken.drafters.Drafter"
        )
    try:
        # A drafter's rounding changes nothing but its acceptance rate.
        model = load(drafter, **{"quantize": "auto", **load_options})
    except ModelError as error:
        if isinstance(drafter, str) and "/" not in drafter and not os.path.exists(drafter):
            raise ParameterError(f"unknown drafter {shown(drafter)} ({error}). {_choices()}") from error
        raise
    return _of_model(model, target, tree, vocab)


def names_model(drafter: Any) -> bool:
    """Whether a drafter, as `make_drafter` takes it, is a language model or has one among its parts."""
    if isinstance(drafter, list | tuple):
        return any(map(names_model, drafter))
    if isinstance(drafter, str) and not os.path.exists(drafter) and "," in drafter:
        return any(names_model(part.strip()) for part in drafter.split(","))
    if isinstance(drafter, Drafter):
        return bool(drafter.models)
    if drafter is None:
        return False
    if isinstance(drafter, str) and (drafter in (AUTO, "") or is_name(drafter)):
        return drafter == DraftModel.name
    return not (isinstance(drafter, str | Path) and kind_of(drafter) is not None)


def _automatic(target: LanguageModel, load_options: Mapping[str, Any]) -> list[Drafter]:
    """The drafters of ``drafter="auto"``, the cheapest first: lookup, and a head in the target's folder."""
    folder = Path(target.name)
    heads = sorted(found for found in folder.iterdir() if kind_of(found)) if folder.is_dir() else []
    lookup = Lookup()
    lookup.trees = not target.prefers_chains
    return [lookup, *(_named(str(kind_of(head)), target, None, load_options, head=head) for head in heads[:1])]


def _choices() -> str:
    return f"Choose one of {', '.join(drafter_names())}, or give the folder or hub id of a model"


def _split(drafter: str) -> list[str]:
    """Names separated by commas; a path that exists, commas or not, is one.

    Raises:
        ParameterError: a name is empty, or one before the last, which may be a model to load, is unknown.
    """
    parts = [part.strip() for part in drafter.split(",")]
    if len(parts) == 1 or os.path.exists(drafter):
        return [drafter]
    if not all(parts):
        raise ParameterError(
            f"drafter {shown(drafter)} has nothing on one side of a comma: name a drafter, or leave it out"
        )
    unknown = [part for part in parts[:-1] if not is_name(part) and not os.path.exists(part)]
    if unknown:
        raise ParameterError(f"unknown drafter {shown(unknown[0])} in {shown(drafter)}. {_choices()}")
    return parts


def _by_name(
    name: str, target: LanguageModel, tree: TreePlan | None, vocab: Vocab, load_options: Mapping[str, Any]
) -> Drafter | None:
    """The drafter of that name; None where it is none of the known names, so that it may be a model.

    Raises:
        ParameterError: the name needs a model or other drafters, is misspelt, or can't grow the trees asked for.
    """
    if name == DraftModel.name:
        if is_shipped(target):
            return _of_model(load_part("drafter", **{"quantize": "auto", **load_options}), target, tree, vocab)
        raise ParameterError(f"drafter {shown(name)} needs a model: give the model's path or hub id, or the model")
    if name == Cascade.name:
        raise ParameterError(f"drafter {shown(name)} is made of others: name them, 'prompt-lookup,path/of/a/model'")
    if name == AUTO:
        _refuse_trees(tree, f"drafter {AUTO!r}")
        made = _automatic(target, load_options)
        return made[0] if len(made) == 1 else Cascade(made)
    if is_name(name):
        return _named(name, target, tree, load_options)
    # A misspelt name should not go to the hub, which may take long to answer.
    meant = get_close_matches(name.partition(":")[0], drafter_names(), n=1, cutoff=0.8)
    if meant and not os.path.exists(name):
        raise ParameterError(f"unknown drafter {shown(name)}: did you mean {meant[0]!r}? {_choices()}")
    return None


def _named(
    name: str, target: LanguageModel, tree: TreePlan | None, load_options: Mapping[str, Any], **options: Any
) -> Drafter:
    known = known_drafters()[name.partition(":")[0]]
    if tree is not None and known.takes_tree:
        options["tree"] = tree
    else:
        _refuse_trees(tree, f"drafter {shown(name)}")
    if known.takes_quantize and "quantize" in load_options:
        options["quantize"] = load_options["quantize"]
    if name == Eagle3.name and not options.get("head") and is_shipped(target):
        options["head"] = head_path()
    return _checked(get_drafter(name, target, **options), target)


def _of_model(model: LanguageModel, target: LanguageModel, tree: TreePlan | None, vocab: Vocab) -> Drafter:
    made = draft_with(model, target, vocab, tree or TreePlan())
    if not isinstance(made, DraftModel) or made.tree != (tree or TreePlan()):
        _refuse_trees(tree, "a drafter of another vocabulary")
    return made


def _checked(drafter: Drafter, target: LanguageModel) -> Drafter:
    """The drafter, checked to fit the target."""
    for model in drafter.models:
        # A translated model takes its target's tokens.
        check_pair(target, model.target if isinstance(model, TranslatedModel) else model)
    drafter.check_target(target)
    return drafter


def _refuse_trees(tree: TreePlan | None, what: str) -> None:
    if tree is not None and tree.branches:
        takers = [name for name, one in known_drafters().items() if one.takes_tree]
        raise ParameterError(
            f"a tree is given, but {what} can't be told what trees to grow: leave it out, or use {', '.join(takers)}"
        )
