"""Shapes of draft trees: the best one for a node budget, given acceptance rates by rank and depth.

A child's *rank* is its index among its siblings, 0 first. If the child of rank r at depth d is accepted with
probability ``a[d][r]`` once its parent is, a node is accepted with the product of these along its path, and a tree
emits ``1 + Σ products`` tokens a round on average. The best tree of n nodes follows by dynamic programming
(Sequoia, Chen et al. 2024, arXiv 2402.12374, section 4.1; here by depth too).
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from foretoken.errors import ParameterError, shown
from foretoken.limits import MAX_SPECULATIVE_TOKENS


@dataclass(frozen=True)
class TreeShape:
    """A tree without tokens.

    Attributes:
        parents: node number of the parent of node 1, 2, …; 0 is the root. Breadth first, so that they never fall and
            siblings are adjacent, by rank.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.parents) > MAX_SPECULATIVE_TOKENS:
            raise ParameterError(f"a tree of {len(self.parents)} nodes: at most {MAX_SPECULATIVE_TOKENS} are drafted")
        for index, parent in enumerate(self.parents):
            least = self.parents[index - 1] if index else 0
            if not least <= parent <= index:
                raise ParameterError(
                    f"tree shape: node {index + 1} has parent {parent}: parents are numbers from 0 (the root) up to "
                    f"the node before, breadth first, so from {least} to {index} here"
                )

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        """A chain of `length` nodes."""
        return cls(tuple(range(length)))

    @classmethod
    def comb(cls, depth: int, ranks: int) -> TreeShape:
        """A chain whose nodes, the last one aside, have `ranks` children each: for measuring."""
        return cls(tuple(parent for step in range(depth) for parent in [max(0, (step - 1) * ranks + 1)] * ranks))

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of node 1, 2, …; children of the root have depth 1."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths[1:])

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of node 1, 2, … among its siblings."""
        return tuple(index - self.parents.index(parent) for index, parent in enumerate(self.parents))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of node 0, 1, 2, …, by rank."""
        below: list[list[int]] = [[] for _ in range(len(self.parents) + 1)]
        for index, parent in enumerate(self.parents):
            below[parent].append(index + 1)
        return tuple(map(tuple, below))

    @property
    def depth(self) -> int:
        """Depth of the deepest node; 0 for an empty tree."""
        return max(self.depths, default=0)

    @property
    def is_chain(self) -> bool:
        """No node has more than one child."""
        return self.parents == tuple(range(len(self.parents)))

    def cut(self, budget: int, max_depth: int) -> TreeShape:
        """The `budget` nodes, none below `max_depth`, that are most likely to be accepted by the rates of `TYPICAL`."""
        kept = [node for node, depth in enumerate(self.depths, start=1) if depth <= max_depth]
        if len(kept) > budget:
            values = TYPICAL.values(self)
            kept = sorted(sorted(kept, key=lambda node: -values[node - 1])[:budget])
        if len(kept) == len(self.parents):
            return self
        numbers = {0: 0} | {node: number for number, node in enumerate(kept, start=1)}
        return TreeShape(tuple(numbers[self.parents[node - 1]] for node in kept))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that `load` reads."""
        _write(path, {"parents": self.parents})


@dataclass(frozen=True)
class AcceptanceTable:
    """Acceptance rates: how often the child of each rank is the accepted one, once its parent is.

    Attributes:
        rates: by depth (children of the root first), then by rank; a depth's sum is 1 at most. Those of the last depth
            also count for deeper ones.
    """

    rates: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not self.rates or not all(self.rates):
            raise ParameterError("acceptance table: no rates: give a list of rates by rank for each depth")
        for depth, ranks in enumerate(self.rates, start=1):
            if min(ranks) < 0 or not sum(ranks) <= 1 + 1e-6:
                raise ParameterError(
                    f"acceptance table: rates at depth {depth} are {list(ranks)}: probabilities that exclude each "
                    "other are at least 0, and their sum is at most 1"
                )

    def at(self, depth: int) -> tuple[float, ...]:
        """Rates by rank at a depth, the root's children being at 1."""
        return self.rates[min(depth, len(self.rates)) - 1]

    def values(self, shape: TreeShape) -> list[float]:
        """The chance that node 1, 2, … of a tree is accepted."""
        values = [1.0]
        for parent, depth, rank in zip(shape.parents, shape.depths, shape.ranks, strict=True):
            rates = self.at(depth)
            values.append(values[parent] * (rates[rank] if rank < len(rates) else 0.0))
        return values[1:]

    def expected(self, shape: TreeShape) -> float:
        """Mean acceptance length: tokens that a round with such a tree emits."""
        return 1.0 + sum(self.values(shape))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that `load` reads."""
        _write(path, {"acceptance": self.rates})


TYPICAL = AcceptanceTable(((0.65, 0.09, 0.055, 0.032, 0.017, 0.015, 0.013, 0.011),))
"""Rates that are assumed before any were measured: about those of the shipped pair at temperature 1, before its draft
model was trained further."""


@lru_cache(maxsize=512)
def best_shape(acceptance: AcceptanceTable, budget: int, max_depth: int) -> TreeShape:
    """The tree with the largest mean acceptance length.

    Args:
        acceptance: rates by depth and rank.
        budget: most nodes.
        max_depth: most tokens of a path.

    Returns:
        A shape of `budget` nodes, or fewer where a further one would never be accepted.
    """
    nodes = np.arange(budget + 1)
    # first[n, m]: of n nodes m go to the first child (itself and all below it), which leaves n - m to its siblings.
    left = nodes[:, None] - nodes
    possible = (left >= 0) & (nodes > 0)
    below = np.zeros(budget + 1)  # by number of nodes: best sum of probabilities under an accepted node, one depth down
    taken: list[list[np.ndarray[Any, Any]]] = []  # by depth, rank, nodes that are left: how many the child takes
    for depth in range(min(max_depth, budget), 0, -1):
        siblings, takes = np.zeros(budget + 1), list[np.ndarray[Any, Any]]()
        subtree = 1.0 + np.concatenate([[0.0], below[:-1]])  # of m nodes, if accepted
        for rate in reversed(acceptance.at(depth)):
            gains = np.where(possible, rate * subtree + siblings[left.clip(min=0)], 0.0)
            takes.append(gains.argmax(1))
            siblings = gains.max(1)
        below = siblings
        taken.append(takes[::-1])
    taken.reverse()
    parents: list[int] = []
    waiting = deque([(0, 0, budget)])  # nodes whose children are to be placed, their depth, and nodes for all below
    while waiting:
        node, depth, left_over = waiting.popleft()
        for sizes in taken[depth] if depth < len(taken) else ():
            size = int(sizes[left_over])
            if size == 0:
                break
            parents.append(node)
            waiting.append((len(parents), depth + 1, size - 1))
            left_over -= size
    return TreeShape(tuple(parents))


def load(path: str | os.PathLike[str]) -> TreeShape | AcceptanceTable:
    """A shape, or a table that shapes for any budget are made of, as their `save` writes them.

    Raises:
        ParameterError: there is no such file, or it holds something else.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not {"parents", "acceptance"} & set(content):
            raise ValueError("it has neither parents nor acceptance")
        if "parents" in content:
            return TreeShape(tuple(_whole(parent) for parent in content["parents"]))
        if content["acceptance"] is None:
            raise ValueError("it is a profile for a drafter whose trees were not measured")
        return AcceptanceTable(tuple(tuple(float(rate) for rate in ranks) for ranks in content["acceptance"]))
    except OSError as error:
        raise ParameterError(
            f"tree is {shown(path)}, which can't be read as a file ({error.strerror}): use none, static, dynamic "
            "or a file"
        ) from error
    except ParameterError as error:
        raise ParameterError(f"tree file {os.fspath(path)}: {error}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ParameterError(
            f"tree file {os.fspath(path)}: neither a tree shape nor an acceptance table ({error}): give a file that "
            "TreeShape.save, AcceptanceTable.save or foretoken tune has written"
        ) from error


def _whole(number: Any) -> int:
    if not isinstance(number, int):
        raise TypeError(f"{number!r} is no node number")
    return number


def _write(path: str | os.PathLike[str], content: dict[str, Sequence[Any]]) -> None:
    Path(path).write_text(json.dumps(content) + "\n", encoding="utf-8")
