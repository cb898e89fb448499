"""How wide the next pass of the target is, where a change of width between two passes costs something.

A wide pass has room for long drafts, and the rounds after it are padded to its width, or pay for a narrower one. Which
width is best depends on drafts to come. That is a metrical task system (Borodin, Linial and Saks 1992, "An optimal
on-line algorithm for metrical task system"): each round says what every width would be worth in it, and a change costs
the same between any two. Their work function algorithm needs no assumption on what comes, and has no constant to tune.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import inf

STEPS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
"""Draft tokens that the considered widths have room for."""


@lru_cache(256)
def widths_from(least: int, most: int, last: int) -> list[int]:
    """Widths that are considered; callers must not change the list.

    Args:
        least: positions of a pass without drafts.
        most: positions that drafts fill at most.
        last: of the last pass.
    """
    if last <= least + STEPS[-1] * least:  # else it was a prompt's
        most = max(most, last)
    found = [least + step for step in (0, *STEPS) if least + step < most]
    size = least + STEPS[-1]
    while (size := size + size // 4) < most:
        found.append(size)
    return sorted({*found, max(least, most), *((last,) if least < last < most else ())})


class Widths:
    """The choice of widths over the rounds of an engine; all values are in tokens."""

    def __init__(self) -> None:
        # The work function: of each width, the most that rounds up to now are worth with this width as the last one,
        # less that of the best width.
        self._worth: dict[int, float] = {}

    def next(self, values: Mapping[int, float], last: int, charge: float) -> int:
        """The width of the next pass.

        Args:
            values: what the round is worth, by width.
            last: width of the pass before.
            charge: what a change costs.
        """
        before, least = self._worth, max(self._worth.values(), default=0.0) - charge
        worth, best, most = dict[int, float](), 0, -inf
        for width, value in values.items():
            worth[width] = here = max(before.get(width, least), least) + value
            net = here if width == last else here - charge
            if net > most or (net == most and width < best):
                best, most = width, net
        highest = max(worth.values())
        self._worth = {width: value - highest for width, value in worth.items()}
        return best
