"""The policy's input and output: requests, their rows in a round, drafts made already, and the choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from foretoken.policy.acceptance import EngineRates, RequestRates
from foretoken.policy.account import Guard, Look, Pace
from foretoken.policy.costs import Costs

AUTO: Literal["auto"] = "auto"
"""The draft length with which the policy chooses."""

LONGEST = 16
"""Most tokens of a chain that are considered."""

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
NODES = (4, 8, 16, 32)
LARGEST = NODES[-1]


class Offer(NamedTuple):
    """A draft that a drafter that costs nothing has made already.

    Attributes:
        drafter: its index.
        size: its tokens, or nodes.
        match: tokens of the match that it continues, 0 for drafters without matches.
        reach: the drafter's own estimate for each token, or node, that it is accepted; empty if it makes none.
    """

    drafter: int
    size: int
    match: int = 0
    reach: tuple[float, ...] = ()


class Choice(NamedTuple):
    """What a row does in a round.

    Attributes:
        drafter: whose draft is verified, -1 for none.
        tokens: of the draft, or nodes.
    """

    drafter: int
    tokens: int


PLAIN = Choice(-1, 0)


class Request:
    """What the policy knows of one request; made by `Policy.open`."""

    def __init__(
        self, rates: list[RequestRates], engine: list[EngineRates], costs: Costs, guards: tuple[Guard, Guard]
    ) -> None:
        self.rates, self.engine, self.costs, self.guards = rates, engine, costs, guards
        self.looks = [Look() for _ in rates]
        self.pace = Pace()
        self.above = Pace()  # the engine's
        self.copies = Pace()  # tokens that free drafters alone would have got accepted, by time
        self.copies_above = Pace()  # the engine's
        self.copied = 0  # accepted tokens of the last round's longest-accepted free draft, verified or not
        self.rounds = 0
        self.looking = False  # the round drafts to see whether a drafter has become useful

    def expected_pace(self) -> float:
        """Tokens in a plain round's time: of the last rounds, or what free drafters alone would have given."""
        return max(self.pace.of(self.above), self.copies.of(self.copies_above))


@dataclass
class Row:
    """A row of the round that is being decided.

    Attributes:
        request: its state.
        room: most tokens that a draft may have in depth.
        lags: of each drafter, the tokens that it has not seen.
        offers: drafts that are made already.
        trees: the row takes trees.
        most: most draft tokens, or nodes, if the user set a limit.
        barred: drafters that may not be asked.
        chosen: filled by `Policy.choose`.
        alone: likewise, the best choice without a model; `gain` is what it gains, in tokens.
    """

    request: Request
    room: int
    lags: Sequence[int]
    offers: Sequence[Offer] = ()
    trees: bool = False
    most: int = LARGEST
    barred: frozenset[int] = frozenset()
    chosen: Choice = PLAIN
    alone: Choice = PLAIN
    gain: float = 0.0
