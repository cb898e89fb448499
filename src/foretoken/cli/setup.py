"""From options to an engine."""

from __future__ import annotations

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from foretoken.cli.options import LoadOptions, ModelOptions
from foretoken.cli.screen import Screen
from foretoken.errors import ParameterError

if TYPE_CHECKING:
    from foretoken.drafters import Vocab
    from foretoken.engine.engine import Engine
    from foretoken.models import LanguageModel

SHIPPED_DRAFTER = "draft-model"
SHIPPED_HEAD = "eagle3"
MODEL_FREE_DRAFTER = "prompt-lookup"  # for a target that came without a drafter


def keep_quiet(screen: Screen) -> None:
    """Let other libraries' chatter not mix with the text, and show the library's own warnings as notes.

    Before torch and transformers are imported.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if category is UserWarning or category is RuntimeWarning:
            screen.note(f"note: {message}", style="yellow")

    warnings.showwarning = show


def settled(options: ModelOptions) -> ModelOptions:
    """The options with all that they leave open, by their profile where they name one.

    Raises:
        ProfileError: the profile can't be used for the target.
    """
    from foretoken.engine import profile
    from foretoken.policy.controller import AUTO

    found: dict[str, Any] = {"verifier": AUTO, "num_speculative_tokens": AUTO}
    if options.profile is not None:
        given = profile.read(options.profile)
        target = options.target or given.target
        given.check_target(target, str(options.profile))
        found = {
            "target": target,
            "drafter": given.drafter,
            "verifier": given.verifier,
            "num_speculative_tokens": str(given.num_speculative_tokens),
            **given.load,
        }
        if options.drafter is None:
            # A profile holds its table as a file of trees does.
            found["tree"] = str(options.profile) if given.tree == profile.MEASURED else given.tree
        rounding = given.load_drafter.get("quantize", AUTO)
        if options.drafter is None and rounding != AUTO:
            found["quantize_drafter"] = "none" if rounding is None else rounding
    return replace(options, profile=None, **{n: value for n, value in found.items() if getattr(options, n) is None})


def load_engine(options: ModelOptions, screen: Screen) -> Engine:
    """The engine that the options describe.

    Raises:
        ForetokenError: a model can't be loaded, or a name or number is wrong.
    """
    from foretoken import verify
    from foretoken.drafters.growth import plan_of
    from foretoken.policy.controller import AUTO

    options = settled(options)
    if options.verifier is not None and options.verifier != AUTO:
        verify.get(options.verifier)  # a wrong name should not cost the time that models take to load
    if options.tree is not None:
        plan_of(options.tree)
    with loading(screen):
        target = load_target(options)
        engine = make_engine(options, target, make_drafter(options, target, screen))
    if options.tree is not None and plan_of(options.tree).branches and not engine.verifier.trees:
        screen.note(f"verifier {engine.verifier.name} takes chains alone: --tree {options.tree} is not used")
    if options.quantize is not None:
        screen.note(
            f"{target.name} has been rounded to {options.quantize}: the text follows the law of the rounded target, "
            "with or without speculation, and not that of the checkpoint"
        )
    return engine


def loading(screen: Screen) -> AbstractContextManager[Any]:
    """Says that models are being loaded."""
    return screen.notes.status("loading …") if screen.notes.is_terminal else nullcontext()


def make_engine(options: ModelOptions, target: LanguageModel, drafter: Any) -> Engine:
    """An engine of loaded parts, by options that are `settled`."""
    from foretoken.engine.engine import Engine

    assert options.verifier is not None
    assert options.num_speculative_tokens is not None
    k = options.num_speculative_tokens.strip()
    return Engine(target, drafter, options.verifier, int(k) if k.lstrip("-").isdecimal() else k)  # type: ignore[arg-type]


def make_drafter(options: ModelOptions, target: LanguageModel, screen: Screen) -> Any:
    """The drafter that the options name, loaded; a note says what people would not expect of it."""
    drafter = _make_drafter(options, target)
    for part in getattr(drafter, "drafters", (drafter,)):
        if hasattr(part, "note"):
            screen.note(part.note)
    return drafter


def _make_drafter(options: ModelOptions, target: LanguageModel) -> Any:
    from foretoken import drafters
    from foretoken.drafters import factory as making
    from foretoken.drafters.growth import plan_of

    shipped = options.target is None
    default = SHIPPED_DRAFTER if shipped else MODEL_FREE_DRAFTER
    name = default if options.drafter is None else options.drafter  # an empty one is a mistake, and is named
    known = drafters.known().get(name.partition(":")[0])
    rounded = name == SHIPPED_DRAFTER or known is None or known.takes_quantize
    if options.quantize_drafter is not None and not rounded:
        raise ParameterError(f"drafter {name!r} has no model to round to {options.quantize_drafter}: leave it out")
    parts = [part.strip() for part in name.split(",")]
    tree = None if options.tree is None else plan_of(options.tree)
    if SHIPPED_DRAFTER in parts and not shipped:
        raise ParameterError(
            f"drafter {SHIPPED_DRAFTER!r} is the shipped drafter, which fits the shipped target alone: for "
            f"{options.target} name a drafter model's folder or hub id, or one of 'foretoken drafters'"
        )
    vocab = cast("Vocab", options.vocab)
    return making.make_drafter(name, target, tree=tree, vocab=vocab, **drafter_options(options))


def load_target(options: LoadOptions) -> LanguageModel:
    """The target that the options name, loaded."""
    from foretoken.models import load
    from foretoken.models.tiny_pair import load_part

    if options.target is None:
        return load_part("target", **load_options(options))
    return load(options.target, **load_options(options))


def drafter_options(options: LoadOptions) -> dict[str, Any]:
    """How the options have models loaded that draft."""
    quantize = options.quantize_drafter or "auto"
    return {**load_options(options), "quantize": None if quantize == "none" else quantize}


def load_options(options: LoadOptions) -> dict[str, Any]:
    """How the options have the target loaded."""
    names = ("dtype", "device", "runner", "quantize")
    found = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return {**found, "eager": True} if options.eager else found
