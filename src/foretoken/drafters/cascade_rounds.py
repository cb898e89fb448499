"""What a cascade keeps of each sequence, and of the round that is going on."""

from __future__ import annotations

from dataclasses import dataclass, field

from foretoken.policy.request import Offer, Request, Row
from foretoken.sequence import Sequence


@dataclass
class State:
    """Of one sequence.

    Attributes:
        request: the policy's.
        lengths: of each drafter, the tokens that the sequence had when it was last asked; the source's are negative.
        asked: of each drafter, whether it was asked in the round before.
        resting: its row of the rounds in which it rests.
    """

    request: Request
    lengths: list[int]
    asked: list[bool]
    resting: Row


@dataclass
class Round:
    """The round that is going on; a round of resting rows alone has no `rows`."""

    sequences: list[Sequence]
    rows: list[Row]
    awake: list[int]  # rows that do not rest
    offered: list[list[tuple[Offer, list[int], list[int]]]]  # of each row: tokens and parents of each offer
    turns: list[list[bool]]  # of each drafter: the rows whose draft is its own; empty where all rows rest
    asked: bool  # free drafters were, for some row
    calls: list[tuple[int, int, int, int, float]] = field(default_factory=list)
    positions: int = 0
    changed: bool = False  # the pass is not as wide as the one before
    copied: float = 0.0  # seconds that free drafters took
    deciding: float = 0.0  # seconds that the choice took
    emitted: list[int] = field(default_factory=list)
