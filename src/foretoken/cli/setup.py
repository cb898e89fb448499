"""From options to an engine."""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from foretoken.cli.options import ModelOptions
from foretoken.cli.screen import Screen
from foretoken.errors import ParameterError

if TYPE_CHECKING:
    from foretoken.engine import Engine
    from foretoken.models import LanguageModel

SHIPPED_DRAFTER = "draft-model"
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


def load_engine(options: ModelOptions, screen: Screen) -> Engine:
    """The engine that the options describe.

    Raises:
        ForetokenError: a model can't be loaded, or a name or number is wrong.
    """
    from foretoken import verify
    from foretoken.control import AUTO
    from foretoken.drafters.growth import plan_of

    if options.verifier != AUTO:
        verify.get(options.verifier)  # a wrong name should not cost the time that models take to load
    if options.tree is not None:
        plan_of(options.tree)
    with screen.notes.status("loading …") if screen.notes.is_terminal else nullcontext():
        target = _load_target(options)
        engine = make_engine(options, target, make_drafter(options, target))
    if options.quantize is not None:
        screen.note(
            f"{target.name} has been rounded to {options.quantize}: the text follows the law of the rounded target, "
            "with or without speculation, and not that of the checkpoint"
        )
    return engine


def make_engine(options: ModelOptions, target: LanguageModel, drafter: Any) -> Engine:
    """An engine of loaded parts."""
    from foretoken.engine import Engine

    k = options.num_speculative_tokens.strip()
    return Engine(target, drafter, options.verifier, int(k) if k.lstrip("-").isdecimal() else k)  # type: ignore[arg-type]


def make_drafter(options: ModelOptions, target: LanguageModel) -> Any:
    """The drafter that the options name, loaded."""
    from foretoken import drafters, engine
    from foretoken.drafters import DraftModel
    from foretoken.drafters.growth import plan_of
    from foretoken.models import check_pair
    from foretoken.shipped import load_part

    shipped = options.target is None
    default = SHIPPED_DRAFTER if shipped else MODEL_FREE_DRAFTER
    name = default if options.drafter is None else options.drafter  # an empty one is a mistake, and is named
    if options.quantize_drafter is not None and name in drafters.names() and name != SHIPPED_DRAFTER:
        raise ParameterError(f"drafter {name!r} has no model to round to {options.quantize_drafter}: leave it out")
    parts = [part.strip() for part in name.split(",")]
    tree = None if options.tree is None else plan_of(options.tree)
    if SHIPPED_DRAFTER not in parts:
        return engine.make_drafter(name, target, tree=tree, **_drafter_options(options))
    if not shipped:
        raise ParameterError(
            f"drafter {SHIPPED_DRAFTER!r} is the shipped drafter, which fits the shipped target alone: for "
            f"{options.target} name a drafter model's folder or hub id, or one of 'foretoken drafters'"
        )
    model = load_part("drafter", **_drafter_options(options))
    check_pair(target, model)
    if len(parts) == 1:
        return DraftModel(model, tree or "none")
    return engine.make_drafter([model if part == SHIPPED_DRAFTER else part for part in parts], target, tree=tree)


def _load_target(options: ModelOptions) -> LanguageModel:
    from foretoken.models import load
    from foretoken.shipped import load_part

    if options.target is None:
        return load_part("target", **_load_options(options, options.quantize))
    return load(options.target, **_load_options(options, options.quantize))


def _drafter_options(options: ModelOptions) -> dict[str, Any]:
    quantize = options.quantize_drafter or "auto"
    return {**_load_options(options), "quantize": None if quantize == "none" else quantize}


def _load_options(options: ModelOptions, quantize: str | None = None) -> dict[str, Any]:
    given = {"dtype": options.dtype, "device": options.device, "runner": options.runner, "quantize": quantize}
    return {name: value for name, value in given.items() if value is not None}
