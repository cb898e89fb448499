"""From options to an engine."""

from __future__ import annotations

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from foretoken.cli.checks import AUTO, SHIPPED_DRAFTER, check_models, draft_length, shipped_only
from foretoken.cli.options import LoadOptions, ModelOptions
from foretoken.cli.prompt import read_text
from foretoken.cli.screen import Screen
from foretoken.errors import ModelError, ParameterError, PromptError

if TYPE_CHECKING:
    from foretoken.drafters import Drafter, Vocab
    from foretoken.engine.engine import Engine
    from foretoken.models import LanguageModel

SHIPPED_HEAD = "eagle3"


def keep_quiet(screen: Screen) -> None:
    """Keep other libraries' messages out of the output, and show the library's own warnings as notes.

    Before torch and transformers are imported.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        # Our own kinds of warning, and the plain ones, which we use too; other libraries have theirs for their chatter.
        if category in (UserWarning, RuntimeWarning) or category.__module__.partition(".")[0] == "foretoken":
            screen.note(f"note: {message}", style="yellow")

    warnings.showwarning = show


def settled(options: ModelOptions, sampled: bool | None = None) -> ModelOptions:
    """The options with all that they leave open, by their profile where they name one.

    Args:
        options: as they were given.
        sampled: whether requests will be sampled, or greedy; None where both may come.

    Raises:
        ProfileError: the profile can't be used for the target.
    """
    from foretoken.engine import profile

    found: dict[str, Any] = {"verifier": AUTO, "num_speculative_tokens": AUTO}
    if options.profile is not None:
        given = profile.read(options.profile).for_requests(sampled)
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


def load_engine(options: ModelOptions, screen: Screen, *, sampled: bool | None = None, **engine_options: Any) -> Engine:
    """The engine that the options describe, with further options of `Engine`; `sampled` as in `settled`.

    Raises:
        ForetokenError: a model can't be loaded, or a name or number is wrong.
    """
    check_models(options)
    template = None if options.chat_template is None else read_template(options.chat_template)
    with loading(screen):
        from foretoken.drafters.tree_plan import plan_of

        options = settled(options, sampled)
        if options.tree is not None:
            plan_of(options.tree)  # a wrong one is told before models take their time to load
        target = load_target(options)
        if template is not None:
            _set_template(target, template)
        engine = make_engine(options, target, make_drafter(options, target, screen), **engine_options)
    note_unused_tree(options, engine, screen)
    if options.quantize is not None:
        screen.note(
            f"{target.name} has been rounded to {options.quantize}: the output follows the distribution of the rounded "
            "target, with or without speculation, and not that of the checkpoint"
        )
    return engine


def note_unused_tree(options: ModelOptions, engine: Engine, screen: Screen) -> None:
    """Print a note where a tree is asked for that the verifier does not take."""
    from foretoken.drafters.tree_plan import plan_of

    if options.tree is not None and plan_of(options.tree).branches and not engine.verifier.trees:
        screen.note(f"verifier {engine.verifier.name} takes chains alone: tree {options.tree} is not used")


def read_template(file: Path) -> str:
    """A chat template from a file.

    Raises:
        PromptError: it can't be read, or is empty.
    """
    text = read_text(file, "chat template")
    if not text.strip():
        raise PromptError(f"chat template {str(file)!r} is empty: give a file with a Jinja template")
    return text


def _set_template(target: LanguageModel, template: str) -> None:
    check_has_tokenizer(target)
    tokenizer: Any = target.tokenizer
    tokenizer.chat_template = template


def check_has_tokenizer(target: LanguageModel) -> None:
    """Check that the target can be asked in text.

    Raises:
        ModelError: it has no tokenizer.
    """
    if target.tokenizer is None:
        raise ModelError(f"{target.name} has no tokenizer, which prompts need: put its files beside the model")


def asks_in_chat(target: LanguageModel, chat: bool | None) -> bool:
    """Whether text is asked as a chat message; with `chat` None that is where the target has a chat template.

    Raises:
        ModelError: it has no tokenizer, or no chat template for a `chat` that is True.
    """
    check_has_tokenizer(target)
    if chat:
        check_can_chat(target)
    return bool(getattr(target.tokenizer, "chat_template", None)) if chat is None else chat


def check_can_chat(target: LanguageModel) -> None:
    """Check that the target has a chat template.

    Raises:
        ModelError: it has none, or no tokenizer; the message names alternatives.
    """
    check_has_tokenizer(target)
    if not getattr(target.tokenizer, "chat_template", None):
        raise ModelError(
            f"{target.name} has no chat template, as base models have none, so that it can't chat: have it continue "
            "text with 'foretoken generate --raw', give a template with --chat-template FILE, or name an "
            "instruction-tuned model"
        )


def loading(screen: Screen) -> AbstractContextManager[Any]:
    """Print on a terminal, at once, that models are being loaded."""
    return screen.notes.status("loading …") if screen.notes.is_terminal else nullcontext()


def make_engine(options: ModelOptions, target: LanguageModel, drafter: Drafter, **engine_options: Any) -> Engine:
    """An engine of loaded parts, by options that are `settled`."""
    from foretoken.engine.engine import Engine

    assert options.verifier is not None
    assert options.num_speculative_tokens is not None
    k = draft_length(options.num_speculative_tokens)
    return Engine(target, drafter, options.verifier, k, **engine_options)


def make_drafter(options: ModelOptions, target: LanguageModel, screen: Screen) -> Drafter:
    """Load the drafter that the options name; print a note on what may be unexpected about it."""
    drafter = _make_drafter(options, target)
    for part in drafter.drafters or (drafter,):
        if part.note:
            screen.note(part.note)
    return drafter


def _make_drafter(options: ModelOptions, target: LanguageModel) -> Drafter:
    from foretoken import drafters
    from foretoken.drafters.factory import make_drafter as make
    from foretoken.drafters.tree_plan import plan_of

    shipped = options.target is None
    default: str = AUTO
    if shipped:  # a tree is for the model alone
        default = SHIPPED_DRAFTER if options.tree is not None else f"{AUTO},{SHIPPED_DRAFTER}"
    name = default if options.drafter is None else options.drafter  # an empty one is a mistake, and is named
    known = drafters.known().get(name.partition(":")[0])
    rounded = name == SHIPPED_DRAFTER or known is None or known.takes_quantize
    if options.quantize_drafter is not None and not rounded:
        raise ParameterError(f"drafter {name!r} has no model to round to {options.quantize_drafter}: leave it out")
    parts = [part.strip() for part in name.split(",")]
    tree = None if options.tree is None else plan_of(options.tree)
    if SHIPPED_DRAFTER in parts and not shipped:
        raise shipped_only(options.target)
    vocab = cast("Vocab", options.vocab)
    return make(name, target, tree=tree, vocab=vocab, **drafter_options(options))


def load_target(options: LoadOptions) -> LanguageModel:
    """The target that the options name, loaded."""
    from foretoken.drafters.factory import names_model
    from foretoken.models import load
    from foretoken.models.tiny_pair import load_part

    if options.target is None:
        return load_part("target", **load_options(options))
    drafted = isinstance(options, ModelOptions) and names_model(options.drafter)
    return load(options.target, drafted=drafted, **load_options(options))


def drafter_options(options: LoadOptions) -> dict[str, Any]:
    """How the options have models loaded that draft."""
    quantize = options.quantize_drafter or "auto"
    return {**load_options(options), "quantize": None if quantize == "none" else quantize}


def load_options(options: LoadOptions) -> dict[str, Any]:
    """How the options have the target loaded."""
    names = ("dtype", "device", "runner", "quantize", "n_ctx", "n_gpu_layers")
    found = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.target is None and "dtype" not in found and _rounds_alike(options):
        found["dtype"] = "bfloat16"
    return {**found, "eager": True} if options.eager else found


def _rounds_alike(options: LoadOptions) -> bool:
    """Whether the shipped target would round alike in bfloat16: speculation then changes no greedy output there.

    Passes that give hidden states as well, as heads need them, are rounded otherwise than others in bfloat16. Of
    processors that multiply tiles (AMX) it is not known whether few rows are rounded as many are.
    """
    import torch

    from foretoken.heads.loading import Kind, kind_of
    from foretoken.models.native.loader import openvino_refusal
    from foretoken.models.placement import resolve_device
    from foretoken.models.processor import multiplies_tiles

    drafters = (options.drafter or "").split(",") if isinstance(options, ModelOptions) else []
    if any(name.partition(":")[0] in get_args(Kind) or kind_of(name) for name in map(str.strip, drafters)):
        return False
    if options.eager or options.quantize is not None or options.runner not in (None, AUTO, "native"):
        return False
    if multiplies_tiles():
        return False
    return openvino_refusal(torch.bfloat16, resolve_device(options.device)) is None
