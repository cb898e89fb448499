"""Checks of an engine's options, and the name under which the policy keeps what it measured for them."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any, Literal, Protocol
from zlib import crc32

from foretoken.drafters import Drafter, NoDrafter, is_name
from foretoken.drafters.tree_plan import KINDS, TreePlan, plan_of
from foretoken.errors import ParameterError, did_you_mean, shown
from foretoken.limits import MAX_SPECULATIVE_TOKENS
from foretoken.models import LanguageModel, load
from foretoken.policy.request import AUTO
from foretoken.policy.store import key_of
from foretoken.sampling.params import check_integer


def check_num_speculative_tokens(value: Any) -> int | Literal["auto"]:
    """A draft length, or ``"auto"``.

    Raises:
        ParameterError: it is neither, or out of range.
    """
    if isinstance(value, str):
        if value == AUTO:
            return AUTO
        raise ParameterError(f"num_speculative_tokens is {shown(value)}: give a whole number, or 'auto'")
    return check_integer(
        "num_speculative_tokens", value, 0, MAX_SPECULATIVE_TOKENS, cure="use 0 for no speculation, or 'auto'"
    )


class DrafterNames(Protocol):
    """What requests can choose drafters by: a `Drafter`, or a description of one that another process has."""

    @property
    def name(self) -> str:
        """See `Drafter`."""

    @property
    def tree(self) -> TreePlan | None:
        """See `Drafter`."""

    @property
    def drafters(self) -> Sequence[DrafterNames]:
        """See `Drafter`."""


def check_drafter_choice(name: Any, drafter: DrafterNames) -> frozenset[str] | None:
    """The names of those of an engine's drafters that a request lets draft; None for all.

    Args:
        name: ``"none"``, ``"auto"`` for the engine's own choice, or one of its drafters.
        drafter: the engine's.

    Raises:
        ParameterError: it is none of these.
    """
    if name in (AUTO, drafter.name):
        return None
    parts = [part.name for part in drafter.drafters]
    if name == NoDrafter.name:
        return frozenset()
    if name in parts:
        return frozenset([name])
    choices = dict.fromkeys([NoDrafter.name, AUTO, drafter.name, *parts])
    raise ParameterError(
        f"drafter is {shown(name)}: a request may choose among the engine's, {', '.join(map(repr, choices))}"
    )


def check_tree_choice(tree: Any, drafter: DrafterNames) -> bool:
    """Whether a request's drafts must be chains.

    Args:
        tree: ``"none"`` for chains, or the trees that the engine's drafter grows, ``"auto"`` among others.
        drafter: the engine's.

    Raises:
        ParameterError: it is neither.
    """
    if tree == "none":
        return True
    plans = [part.tree for part in (drafter, *drafter.drafters)]
    if tree == AUTO or (tree in KINDS and plan_of(tree) in plans):
        return False
    raise ParameterError(
        f"tree is {shown(tree)}: a request may have 'none', for chains, or 'auto', what the engine's drafter grows"
    )


def check_load_options(options: dict[str, Any], target: Any, drafter: Any, engine_options: list[str]) -> None:
    """Refuse unknown options if no model is loaded with them: a misspelt one would go unnoticed.

    Args:
        options: what `Engine` got beyond its own options.
        target: as `Engine` got it.
        drafter: as `Engine` got it.
        engine_options: names of the engine's own options.

    Raises:
        ParameterError: one is unknown; the message names the closest known one.
    """
    loaded = (target, *(drafter if isinstance(drafter, list | tuple) else (drafter,)))
    if any(isinstance(model, str | Path) and not is_name(str(model)) for model in loaded):
        return
    known = [name for name, option in signature(load).parameters.items() if option.kind is option.KEYWORD_ONLY]
    for name, value in options.items():
        if name not in known:
            names = [*engine_options, *known]
            raise ParameterError(
                f"unknown option {name}={shown(value)}{did_you_mean(name, names)}: choose from {', '.join(names)}"
            )


def measurement_key(target: LanguageModel, drafter: Drafter) -> str:
    """The name under which measurements of these models and this drafter are kept."""
    models = [target, *drafter.models]
    described = [
        f"{type(model).__name__} {model.name} {model.dtype} {model.device} {model.quantize} {model.backend_name}"
        for model in models
    ]
    plan = drafter.tree
    grown = f"trees {crc32(repr(plan).encode()):08x}" if plan is not None and plan.branches else ""
    heads = [
        f"{part.name} {part.num_parameters or ''} {part.quantize or ''}".strip()
        for part in (drafter, *drafter.drafters)
    ]
    return key_of(*described, ",".join(heads), *filter(None, [grown]))
