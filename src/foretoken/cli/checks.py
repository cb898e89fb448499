"""What is wrong with names, paths and options, told before torch and transformers are imported: at once."""

from __future__ import annotations

import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

from foretoken.cli.options import LoadOptions, ModelOptions
from foretoken.errors import ModelError, ParameterError, did_you_mean
from foretoken.limits import MAX_SPECULATIVE_TOKENS

DRAFTERS = (
    "none",
    "draft-model",
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
_RUNNERS = ("auto", "native", "hf")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_WITH_FILE = ("retrieval", "eagle3", "medusa")  # drafters whose argument is a file or folder


def check_models(options: ModelOptions) -> None:
    """See to it that the names, paths and numbers of the options can be meant.

    What only a loaded model can tell is left to loading: whether two models fit together, for example.

    Raises:
        ParameterError: a name is unknown, a number out of range, or two options exclude each other.
        ModelError: there is no such folder.
    """
    check_loading(options)
    if options.profile is not None and not options.profile.is_file():
        raise ParameterError(
            f"profile {str(options.profile)!r} can't be read (there is no such file): name a file that foretoken tune "
            "-o has written"
        )
    if options.verifier is not None:
        _check_verifier(options.verifier)
    if options.num_speculative_tokens is not None:
        draft_length(options.num_speculative_tokens)
    if options.tree is not None and options.tree not in _TREES and not _exists(options.tree):
        raise ParameterError(
            f"tree is {options.tree!r}{did_you_mean(options.tree, _TREES)}: use {', '.join(_TREES)}, or a file"
        )
    _one_of("vocab", options.vocab, _VOCABS)
    if options.drafter is not None:
        _check_drafter(options.drafter, options.target)


def check_loading(options: LoadOptions) -> None:
    """See to it that the target can be there, and that it can be asked to be loaded so; see `check_models`."""
    if options.target is not None:
        check_source(options.target)
    if options.runner is not None:
        _one_of("runner", options.runner, _RUNNERS)


def check_source(name: str) -> None:
    """See to it that a model's name is a folder with a model in it, or has the form of a hub id.

    Raises:
        ModelError: it is neither.
    """
    if not name.strip():
        raise ModelError(f"the model's name is {name!r}: give a folder or a hub id (organisation/model)")
    shown = repr(name) if len(name) <= 100 else repr(f"{name[:100]}…")
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            if not (path / "config.json").is_file() and not any(path.glob("*.gguf")):
                raise ModelError(f"{name} has no config.json: give the folder that `save_pretrained` wrote")
            return
        if path.exists():
            if path.suffix == ".gguf":
                return
            raise ModelError(f"{name} is a file: give the folder that holds config.json and the weights")
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user's home, a null character
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelError(f"there is no folder {shown} ({reason}): check the path") from error
    if name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        raise ModelError(f"there is no folder {shown}: check the path, or give a hub id (organisation/model)")
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
        raise ParameterError(f"num_speculative_tokens is {words!r}: {cure}") from None
    if not 0 <= number <= MAX_SPECULATIVE_TOKENS:
        raise ParameterError(f"num_speculative_tokens is {number}: {cure}")
    return number


def _check_verifier(name: str) -> None:
    base = name.partition(":")[0]
    if base != AUTO and base not in VERIFIERS:
        raise ParameterError(
            f"unknown verifier {name!r}{did_you_mean(base, VERIFIERS)}: choose one of {', '.join(VERIFIERS)}"
        )


def _check_drafter(name: str, target: str | None) -> None:
    if _exists(name):
        return
    parts = [part.strip() for part in name.split(",")]
    if len(parts) > 1 and not all(parts):
        raise ParameterError(f"drafter {name!r} has nothing on one side of a comma: name a drafter, or leave it out")
    for number, part in enumerate(parts, start=1):
        base, colon, argument = part.partition(":")
        if base in DRAFTERS:
            if base in _WITH_FILE and colon and "/" in argument and not _exists(argument):
                raise ParameterError(
                    f"drafter {part!r} can't be read (No such file or directory): there is no {argument!r}"
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
            raise ModelError(f"drafter {part!r}: there is no such folder: check the path. {_choices()}")
        if not part or meant or not last:
            within = f" in {name!r}" if len(parts) > 1 else ""
            raise ParameterError(f"unknown drafter {part!r}{within}{meant}. {_choices()}")
        try:
            _check_hub(part)
        except ModelError as error:
            raise ParameterError(f"unknown drafter {part!r} ({error}). {_choices()}") from error


def _choices() -> str:
    return f"Choose one of {', '.join(DRAFTERS)}, or give the folder or hub id of a model"


def _exists(name: str) -> bool:
    try:
        return bool(name) and Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return False


def _one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ParameterError(
            f"{option} is {value!r}{did_you_mean(value, known)}: use one of {', '.join(map(repr, known))}"
        )


def _check_hub(name: str) -> None:
    """See to it that a hub id is that of a model: in the cache, or on the hub where that can be reached.

    Raises:
        ModelError: there is no such model, or no way to tell.
    """
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
            return
    except HFValidationError as error:
        raise ModelError(f"{name!r} is no folder and can be no hub id: check the path") from error
    missing = f"there is no folder {name!r}, and no model of that name has been downloaded"
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise ModelError(f"{missing} (HF_HUB_OFFLINE is set): check the name")
    if not _resolves(urlsplit(huggingface_hub.constants.ENDPOINT).hostname or ""):
        raise ModelError(f"{missing} (the hub can't be reached): check the name, or the network")
    there = True
    with suppress(Exception):  # whatever else the hub says, of a gated model for example, is told when it is loaded
        there = huggingface_hub.repo_exists(name)
    if not there:
        raise ModelError(f"there is no folder {name!r}, and no such model on the hub: check the name")


def _resolves(host: str) -> bool:
    if getproxies():  # a proxy does that
        return True
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True
