"""Checks of names, paths and options that run before torch and transformers are imported: errors come at once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from foretoken.cli.options import LoadOptions, ModelOptions
from foretoken.errors import ModelError, ParameterError, check_choice, did_you_mean, shown
from foretoken.limits import MAX_SPECULATIVE_TOKENS
from foretoken.models import gguf
from foretoken.models.locating import hub_resolves, locate

DRAFTERS = (
    "none",
    "auto",
    "draft-model",
    "lookup",
    "prompt-lookup",
    "ngram-storage",
    "ngram-storage-one-level",
    "suffix",
    "recycling",
    "lookahead",
    "early-exit",
    "retrieval",
    "eagle3",
    "medusa",
    "cascade",
)
"""As `foretoken.drafters.names` lists them; a test compares the two."""
VERIFIERS = (
    "token",
    "block",
    "tree",
    "traversal",
    "kseq",
    "coupled",
    "typical",
    "lenient",
    "ensemble",
    "token-unadjusted",
)
"""As `foretoken.verify.names` lists them."""

SHIPPED_DRAFTER = "draft-model"
AUTO: Literal["auto"] = "auto"
_TREES = ("none", "static", "dynamic")
_VOCABS = ("auto", "same", "intersection", "text")
RUNNERS = ("auto", "native", "hf", "gguf")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_WITH_FILE = ("retrieval", "eagle3", "medusa")  # drafters whose argument is a file or folder


def check_models(options: ModelOptions) -> None:
    """Check names, paths and numbers of the options.

    Checks that need a loaded model are left to loading: whether two models fit together, for example.

    Raises:
        ParameterError: a name is unknown, a number out of range, or two options exclude each other.
        ModelError: there is no such folder.
    """
    check_loading(options)
    if options.profile is None:  # which may name a GGUF file
        check_gguf_options(options, [options.drafter or ""])
    if options.profile is not None and not _is_file(str(options.profile)):
        raise ParameterError(
            f"profile {shown(str(options.profile))} can't be read (there is no such file): name a file that foretoken "
            "tune -o has written"
        )
    if options.verifier is not None:
        _check_verifier(options.verifier)
    if options.num_speculative_tokens is not None:
        draft_length(options.num_speculative_tokens)
    if options.tree is not None and options.tree not in _TREES and not _is_file(options.tree):
        raise ParameterError(
            f"tree is {shown(options.tree)}{did_you_mean(options.tree, _TREES)}: use {', '.join(_TREES)}, or a file"
        )
    check_choice("vocab", options.vocab, _VOCABS)
    if options.drafter is not None:
        check_drafter(options.drafter, options.target)


def check_loading(options: LoadOptions) -> None:
    """Check the target's name and its loading options; see `check_models`."""
    if options.target is not None:
        check_source(options.target)
    if options.runner is not None:
        check_choice("runner", options.runner, RUNNERS)


def check_gguf_options(options: LoadOptions, drafters: Iterable[str]) -> None:
    """Refuse the options of GGUF files where no model is one: they would have no effect.

    Raises:
        ParameterError: there is one.
    """
    given = [name for name in ("n_ctx", "n_gpu_layers") if getattr(options, name) is not None]
    parts = [part.strip() for drafter in drafters for part in (drafter, *drafter.split(","))]
    if given and not any(gguf.find(name) for name in (options.target, *parts) if name):
        raise ParameterError(
            f"--{given[0].replace('_', '-')} is for GGUF files, and neither target nor drafter is one: leave it out"
        )


def check_source(name: str) -> None:
    """Check that a model's name is a GGUF file, a folder with a model in it, or the hub id of one.

    Raises:
        ModelError: it is neither.
    """
    file = gguf.find(name)
    if file is not None:
        gguf.parts_of(file)
    elif locate(name) == name and not _exists(name):
        _check_hub(name)


def shipped_only(target: str | None) -> ParameterError:
    """The error where the shipped drafter is named for another target."""
    return ParameterError(
        f"drafter {SHIPPED_DRAFTER!r} is the shipped drafter, which fits the shipped target alone: for {target} name a "
        "draft model's folder or hub id, or one of 'foretoken drafters'"
    )


def draft_length(words: str) -> int | Literal["auto"]:
    """``-k``: the most tokens that are drafted a round, or ``"auto"``.

    Raises:
        ParameterError: it is neither.
    """
    text = words.strip()
    cure = f"give a whole number from 0 (no speculation) to {MAX_SPECULATIVE_TOKENS}, or auto"
    if text == AUTO:
        return AUTO
    try:
        number = int(text)
    except ValueError:
        raise ParameterError(f"num_speculative_tokens is {shown(words)}: {cure}") from None
    if not 0 <= number <= MAX_SPECULATIVE_TOKENS:
        raise ParameterError(f"num_speculative_tokens is {number}: {cure}")
    return number


def _check_verifier(name: str) -> None:
    base = name.partition(":")[0]
    if base != AUTO and base not in VERIFIERS:
        raise ParameterError(
            f"unknown verifier {shown(name)}{did_you_mean(base, VERIFIERS)}: choose one of {', '.join(VERIFIERS)}"
        )


def check_drafter(name: str, target: str | None) -> None:
    """Check that a drafter's name is a known one, a folder or a model's hub id, or several of these with commas.

    Raises:
        ParameterError: it is none of these, or the shipped drafter's for another target.
        ModelError: there is no such folder.
    """
    if _exists(name):
        return
    parts = [part.strip() for part in name.split(",")]
    if len(parts) > 1 and not all(parts):
        raise ParameterError(
            f"drafter {shown(name)} has nothing on one side of a comma: name a drafter, or leave it out"
        )
    for number, part in enumerate(parts, start=1):
        base, colon, argument = part.partition(":")
        if base in DRAFTERS:
            if base in _WITH_FILE and colon and "/" in argument and not _exists(argument):
                raise ParameterError(
                    f"drafter {shown(part)} can't be read (No such file or directory): there is no {argument!r}"
                )
            if base == SHIPPED_DRAFTER and target is not None:
                raise shipped_only(target)
            continue
        if _exists(part):
            continue
        is_path = part.startswith((".", "/", "~")) or (part and not _HUB_ID.fullmatch(part))
        meant = did_you_mean(base, DRAFTERS)
        last = number == len(parts)  # only the last of a cascade may be a model, which may have a hub id
        if is_path and not meant:
            raise ModelError(f"drafter {shown(part)}: there is no such folder: check the path. {_choices()}")
        if not part or meant or not last:
            within = f" in {shown(name)}" if len(parts) > 1 else ""
            raise ParameterError(f"unknown drafter {shown(part)}{within}{meant}. {_choices()}")
        try:
            _check_hub(part)
        except ModelError as error:
            raise ParameterError(f"unknown drafter {shown(part)} ({error}). {_choices()}") from error


def _choices() -> str:
    return f"Choose one of {', '.join(DRAFTERS)}, or give the folder or hub id of a model"


def _exists(name: str) -> bool:
    try:
        return bool(name) and Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return False


def _is_file(name: str) -> bool:
    try:
        return bool(name) and Path(name).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):
        return False


def _check_hub(name: str) -> None:
    """Check that a hub id is that of a model: in the cache, or on the hub if that can be reached.

    Raises:
        ModelError: there is no such model, or this can't be found out.
    """
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
            return
    except (HFValidationError, OSError) as error:
        raise ModelError(f"{shown(name)} is no folder and can be no hub id: check the path") from error
    missing = f"there is no folder {shown(name)}, and no model of that name has been downloaded"
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise ModelError(f"{missing} (HF_HUB_OFFLINE is set): check the name")
    if not hub_resolves():
        raise ModelError(f"{missing} (the hub can't be reached): check the name, or the network")
    there = True
    with suppress(Exception):  # other errors of the hub, of a gated model for example, are raised by loading
        there = huggingface_hub.repo_exists(name)
    if not there:
        raise ModelError(f"there is no folder {shown(name)}, and no such model on the hub: check the name")
