"""Errors that callers can cause and mend, and helpers of checks. Messages name the value, the limit and the cure."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ForetokenError(Exception):
    """Base of all errors that the caller can correct; the command line prints it and exits with status 2."""


class ParameterError(ForetokenError, ValueError):
    """A parameter is out of its range, or names something unknown."""


class GrammarError(ParameterError):
    """A grammar can't be used: it is wrong, beyond its limits, or leaves no token."""


class PromptError(ForetokenError, ValueError):
    """A prompt can't be used: empty, too long, or with tokens outside the vocabulary."""


class PromptTooLong(PromptError):
    """A prompt does not fit into the model's context."""


class ModelError(ForetokenError):
    """A model can't be loaded, or two models don't fit together."""


class NumericalError(ForetokenError, ArithmeticError):
    """A model returned scores that no token can be chosen from: NaN, or all of them -inf."""


class OutOfMemory(ForetokenError, MemoryError):
    """Memory ran out; the message says for which model and what to lower."""


class RequestTooLarge(OutOfMemory):
    """A request may need more KV cache than `cache_memory` is in all: it never fits."""


class EngineClosed(ForetokenError):
    """The engine was closed: it takes no more requests, and what still ran has ended."""


class QueueTimeout(ForetokenError):
    """A request waited for a row for longer than it may."""


class SlowConsumer(ForetokenError):
    """The consumer of a request's events is too many of them behind."""


def did_you_mean(word: str, known: Iterable[str], note: str = " (did you mean {!r}?)") -> str:
    """A question with the known word that is closest to a wrong one; nothing where none is close."""
    close = get_close_matches(word.lower(), list(known), n=1, cutoff=0.7)
    return note.format(close[0]) if close else ""


def show_bytes(size: float) -> str:
    """A number of bytes in the largest unit that leaves at least 1, for messages."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def shown(value: object, most: int = 200) -> str:
    """A value's `repr` for a message: cut to `most` characters; its type where `repr` raises."""
    try:
        text = repr(value)
    except Exception as error:
        return f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def refuse_unknown(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse unknown keyword arguments.

    Raises:
        ParameterError: there are some; the message names the closest known one.
    """
    known = sorted(known)
    for name in given:
        raise ParameterError(f"{where} takes no {name}{did_you_mean(name, known)}: choose from {', '.join(known)}")


def check_choice(name: str, value: object, known: Iterable[str], error: type[ForetokenError] = ParameterError) -> None:
    """Check that a parameter is one of some words.

    Raises:
        ParameterError: it is none of them (another class with `error`); the message names the closest one.
    """
    known = list(known)
    if not isinstance(value, str):
        raise error(f"{name} is {shown(value)}: use one of {', '.join(map(repr, known))}")
    if value not in known:
        hint = did_you_mean(value, known)
        raise error(f"{name} is {shown(value)}{hint}: use one of {', '.join(map(repr, known))}")


def install_extra(name: str) -> str:
    """How optional dependencies are installed, as messages say it.

    Never by the package's bare name: until a release is published, an index may have another project under it.
    """
    return f"run pip install '.[{name}]' in your clone of Foretoken"


def check_flag(name: str, value: object, error: type[ForetokenError] = ParameterError) -> bool:
    """A parameter that is True or False.

    Raises:
        ParameterError: it is neither (another class with `error`).
    """
    if not isinstance(value, bool):
        raise error(f"{name} is {shown(value)}: use True or False")
    return value
