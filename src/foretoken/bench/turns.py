"""Comparing by turns: contestants take turns on the same case, and ratios are formed within a turn.

What slows the machine for a while then slows all of them, and a ratio hardly moves. `bench`, its table of drafters and
`tune` all measure in this way.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

T = TypeVar("T")
Turn = TypeVar("Turn", bound=Hashable)


def order(contestants: Sequence[T], turn: int) -> list[T]:
    """The contestants in an order that depends on the turn: none always runs after the same one."""
    shuffled = list(contestants)
    random.Random(turn).shuffle(shuffled)
    return shuffled


@dataclass(frozen=True)
class Spread:
    """A median with the smallest and the largest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Of some values; None if there are none."""
        listed = sorted(values)
        return cls(median(listed), listed[0], listed[-1]) if listed else None

    @classmethod
    def of_ratios(cls, ours: Mapping[Turn, float], theirs: Mapping[Turn, float]) -> Spread | None:
        """Of the ratios ours ÷ theirs within each turn that both took; None if there is none.

        Args:
            ours: rates by turn.
            theirs: likewise.
        """
        return cls.of(rate / theirs[turn] for turn, rate in ours.items() if turn in theirs)


def seconds_left(done: int, planned: int, seconds: float) -> float | None:
    """About how long the rest takes, if it goes on like this; None before anything is done.

    Args:
        done: runs made.
        planned: runs in all.
        seconds: what those made took.
    """
    return seconds * (planned - done) / done if done else None
