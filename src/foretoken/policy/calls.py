"""Seconds of one drafter's calls, by draft tokens; some drafters' calls draft certain numbers of tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.policy.lines import Drift, Line

_SHARED = 0.35
"""Share of the smallest call that a draft of several calls takes only once: with 2.9 MB of weights on a processor with
AMX one token took 1.2 ms, five took 2.2, and a sixth, in a call of its own, 0.76 more."""


@dataclass
class DrafterCosts:
    """Costs of one drafter.

    Attributes:
        call: seconds of a call by draft tokens (by nodes, for trees).
        row: share of a call that each further row adds.
        lag: seconds for each token that the drafter has not seen.
        sizes: numbers of tokens that one call can draft, in rising order; other drafts are made of several calls, and
            surplus tokens dropped (`call_parts`). Empty where a call drafts any number.
    """

    call: Line
    row: float = 0.1
    lag: float = 0.0
    sizes: tuple[int, ...] = ()

    def seconds(self, tokens: int) -> float:
        """Seconds of a draft of so many tokens in one row, drift left out."""
        each = [self.call(part) for part in call_parts(tokens, self.sizes)]
        if len(each) < 2:
            return sum(each)
        # By recent measurements the smallest call may take longer than several larger ones.
        return max(sum(each) - _SHARED * self.call(self.sizes[0]) * (len(each) - 1), *each)

    def up_to(self, longest: int) -> list[float]:
        """Seconds of drafts of 0, 1, … tokens."""
        if not self.sizes:
            return [0.0, *self.call.up_to(longest)]
        return [self.seconds(tokens) for tokens in range(longest + 1)]

    def record(self, tokens: int, seconds: float, drift: Drift) -> None:
        """Learn from a draft in one row; where it was several calls, each counts with its usual share of the time."""
        parts = call_parts(tokens, self.sizes)
        if len(parts) == 1:
            return self.call.record(parts[0], seconds, drift)
        share = seconds / self.seconds(tokens)
        for size, usual in [(size, self.call(size)) for size in dict.fromkeys(parts)]:
            self.call.record(size, share * usual, drift)


def call_parts(tokens: int, sizes: Sequence[int]) -> list[int]:
    """The calls that a draft of so many tokens is made up of: as many of the largest size as are filled, and one more.

    Args:
        tokens: of the draft.
        sizes: of calls, in rising order; none for one call of any size.
    """
    if not sizes:
        return [tokens]
    whole, left = divmod(tokens, sizes[-1])
    return [sizes[-1]] * whole + [next(size for size in sizes if size >= left)] * (left > 0)
