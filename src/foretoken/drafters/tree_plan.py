"""Which trees a drafter grows: a static shape, a dynamic tree, or chains."""

from __future__ import annotations

import os
from dataclasses import dataclass

from foretoken.drafters.shapes import TYPICAL, AcceptanceTable, TreeShape, best_shape, load
from foretoken.errors import ParameterError, shown
from foretoken.sampling.params import check_integer

KINDS = ("none", "static", "dynamic")
DEPTH = 8
"""Deepest that trees grow, unless a shape says otherwise: each depth is a pass of the drafter."""
WIDTH = 8
"""Nodes of a depth that a dynamic tree expands."""


@dataclass(frozen=True)
class TreePlan:
    """Which trees a drafter grows; by default it drafts chains.

    Attributes:
        shape: the shape of static trees: one for every row, cut to a row's limit, or a table of acceptance rates from
            which the best shape for each limit follows. None for chains, unless trees are dynamic.
        dynamic: trees of the nodes that are most probable by the drafter.
        depth: most tokens of a path, in shapes made of a table and in dynamic trees.
        width: nodes that a dynamic tree expands at each depth.

    With a table, greedy rows get dynamic trees: a table holds rates of drawn tokens, and the drafter's probabilities
    say more about chosen ones.
    """

    shape: TreeShape | AcceptanceTable | None = None
    dynamic: bool = False
    depth: int = DEPTH
    width: int = WIDTH

    def __repr__(self) -> str:
        if not self.branches:
            return "TreePlan()"
        kind = "dynamic=True" if self.dynamic else repr(self.shape)
        return f"TreePlan({kind}, depth={self.depth}, width={self.width})"

    def __post_init__(self) -> None:
        check_integer("depth of trees", self.depth, 1, cure="1 drafts children of the root alone")
        check_integer("width of trees", self.width, 1, cure="1 expands one node a depth")

    @property
    def branches(self) -> bool:
        """Whether drafts may branch."""
        return self.dynamic or self.shape is not None

    def fitting(self, limit: int, depth: int) -> TreeShape:
        """The static shape of a row that may draft `limit` nodes, none below `depth`."""
        if isinstance(self.shape, TreeShape):
            return self.shape.cut(limit, depth)
        if self.shape is None:
            return TreeShape.chain(min(limit, depth))
        return best_shape(self.shape, limit, min(depth, self.depth))

    def chain_length(self, limit: int, depth: int) -> int:
        """Tokens of the chain that is drafted instead in rows whose verifier takes no trees."""
        if not self.branches:
            deepest = limit
        elif isinstance(self.shape, TreeShape):
            deepest = self.shape.depth
        else:
            deepest = self.depth
        return min(limit, depth, deepest)


Tree = str | os.PathLike[str] | TreeShape | AcceptanceTable | TreePlan
"""What users give as ``tree=``: one of `KINDS`, a file with a saved shape or acceptance table, or such an object."""


def plan_of(tree: Tree) -> TreePlan:
    """The plan for what a user has given as ``tree=``.

    Raises:
        ParameterError: it is none of `KINDS`, and no file with a shape or a table.
    """
    if isinstance(tree, TreePlan):
        return tree
    if isinstance(tree, TreeShape | AcceptanceTable):
        return TreePlan(tree)
    if not isinstance(tree, str | os.PathLike):
        raise ParameterError(
            f"tree is {shown(tree)}: use {', '.join(KINDS)}, a file, a TreeShape or an AcceptanceTable"
        )
    if tree == "none":
        return TreePlan()
    if tree == "static":
        return TreePlan(TYPICAL)
    if tree == "dynamic":
        return TreePlan(dynamic=True)
    return TreePlan(load(tree))
