"""What can be measured: engines, the modes each has, and how they are written on the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretoken import drafters
from foretoken.errors import ParameterError
from foretoken.peers.errors import Unsupported
from foretoken.peers.kinds import CASCADE, DRAFT_MODEL, KINDS, PLAIN, EngineKind

AUTO = "auto"
K = int | str | None
"""Tokens drafted a round; ``auto``: the engine chooses; None: nothing is drafted."""


@dataclass(frozen=True)
class EngineConfig:
    """An engine in one of its modes.

    Attributes:
        kind: which one.
        mode: how it decodes.
        k: tokens drafted a round.
        options: further arguments, of the engine's own.
    """

    kind: EngineKind
    mode: str
    k: K = None
    options: tuple[tuple[str, Any], ...] = ()

    def __hash__(self) -> int:
        """Options may be lists and objects, which have no hash of their own."""
        return hash((self.kind, self.mode, self.k, repr(self.options)))

    @property
    def plain(self) -> bool:
        """It does not speculate."""
        return self.mode == PLAIN

    @property
    def family(self) -> str:
        """The engine and its options: what its plain mode and its speculative ones have in common."""
        return self.kind.name + "".join(f"+{name}={_written(value)}" for name, value in self.options)

    @property
    def label(self) -> str:
        """How tables and files call it."""
        options = "".join(f"+{name}={_written(value)}" for name, value in self.options)
        k = "" if self.k is None else f" k={self.k}"
        return f"{self.kind.name}:{self.mode}{options}{k}"

    @property
    def process(self) -> str:
        """Engines with the same one share a process."""
        return self.family if self.kind.shares else self.label

    def check(self, batch: int, device: str = "cpu") -> None:
        """Check that it can decode so many prompts at once on a device.

        Raises:
            Unsupported: it can't.
        """
        if self.kind.cpu_only and device != "cpu":
            raise Unsupported(
                f"{self.kind.name} runs on the processor alone, not on {device}: measure it with --device cpu, in a "
                "file of its own"
            )
        if batch > 1 and not self.kind.any_drafter and self.mode not in self.kind.batched:
            what = "several prompts" if not self.kind.batched else f"several prompts in mode {self.mode}"
            raise Unsupported(f"{self.kind.name} does not decode {what} at once")


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def split(text: str) -> list[str]:
    """The words of a list of engines: at its commas, those within a cascade left out."""
    words: list[str] = []
    for part in filter(None, map(str.strip, text.split(","))):
        before = words[-1].partition(":")[0] if words and ":" in words[-1] else None
        if before in KINDS and KINDS[before].any_drafter and drafters.is_name(part.partition("+")[0]):
            words[-1] += f",{part}"
        else:
            words.append(part)
    return list(dict.fromkeys(words))


def parse(text: str, ks: Sequence[K], drafter: bool = True) -> list[EngineConfig]:
    """The engines that a word of the command line stands for.

    Args:
        text: ``NAME``, the usual modes of an engine, or ``NAME:MODE``, either with ``+OPTION=VALUE`` behind it, where
            option ``k`` replaces `ks`.
        ks: how many tokens are drafted a round, one engine each.
        drafter: there is a draft model; without one the modes that need it are left out of the usual ones.

    Raises:
        ParameterError: an unknown engine or mode, or an option that is none.
    """
    head, *rest = text.split("+")
    name, mark, mode = head.partition(":")
    if name not in KINDS:
        raise ParameterError(f"unknown engine {name!r}: choose one of {', '.join(KINDS)}")
    kind = KINDS[name]
    if mark and mode not in kind.modes:
        _check_named(kind, mode)
    if _needs_model(mode) and not drafter:
        raise ParameterError(f"{text!r} needs a draft model: name its folder with --drafter")
    options = dict(_option(entry) for entry in rest)
    if "k" in options:
        ks = [check_k(options.pop("k"))]
    usual = tuple(mode for mode in kind.modes if drafter or not _needs_model(mode))
    made = []
    for one in (mode,) if mark else usual:
        engine = EngineConfig(kind, one, None, tuple(sorted(options.items())))
        allowed = [k for k in ks if k != AUTO or kind.auto]
        made += [engine] if one == PLAIN else [replace(engine, k=k) for k in allowed]
    if not made:
        raise ParameterError(f"{name} can't choose k by itself: give it a number, for example {text}+k=5")
    return made


def _needs_model(mode: str) -> bool:
    return mode == CASCADE or DRAFT_MODEL in mode.split(",")


def _check_named(kind: EngineKind, mode: str) -> None:
    """Whether a mode consists of drafters' names."""
    single = [name for name, known in drafters.known().items() if name == DRAFT_MODEL or not known.needs_model]
    if not kind.any_drafter or any(part.partition(":")[0] not in single for part in mode.split(",")):
        others = [name for name in single if name not in (*kind.modes, "none")] if kind.any_drafter else []
        raise ParameterError(f"unknown mode {mode!r} of {kind.name}: choose one of {', '.join([*kind.modes, *others])}")


def _option(entry: str) -> tuple[str, Any]:
    name, mark, value = entry.partition("=")
    if not (name and mark and value):
        raise ParameterError(f"engine option {entry!r}: write +NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def check_k(k: Any) -> K:
    """A number of tokens to draft, or ``auto``.

    Raises:
        ParameterError: it is neither.
    """
    if k == AUTO:
        return AUTO
    try:
        number = int(k)
    except (TypeError, ValueError):
        number = 0
    if not 1 <= number <= 256:
        raise ParameterError(f"k is {k!r}: give a number from 1 to 256, or auto")
    return number
