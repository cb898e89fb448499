"""Grows draft trees with any scorer: which nodes to expand, which children to draw or choose, which nodes to keep.

A drafter passes the logits of the root and a function that scores a `Frontier`: nodes of all rows, of one depth, in one
pass. `grow` returns a `Draft`. Each row's tree depends on its own tokens, uniforms and limit alone.

Three kinds of trees:

- *drawn*, of a static shape: children are drawn without replacement from the drafter's distribution under the
  request's sampling parameters, and every drawn child is kept. Where fewer tokens are possible, there are fewer
  children.
- *chosen*, of a static shape: the best tokens of each node. In rows that are greedy, and where noise is shared with the
  target: there the best are those by probability and noise together.
- *dynamic*, chosen as well: at each depth the most probable nodes are expanded, by the drafter's probability of the
  whole path, and of all nodes seen the most probable make the draft (EAGLE-2, Li et al. 2024, arXiv 2406.16858,
  section 4).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from heapq import nlargest

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.drafters.base import Batch
from foretoken.drafters.shapes import AcceptanceTable, TreeShape
from foretoken.drafters.tree_plan import TreePlan
from foretoken.models.placement import moved
from foretoken.randomness import Stream, uniforms
from foretoken.sampling import all_finite, check_finite, draw_distinct
from foretoken.verify.base import Verdict


@dataclass(frozen=True)
class Frontier:
    """Nodes of all rows, of one depth, that are to be scored in one pass.

    Scored nodes are numbered in the order of the passes: row b's first is 0, and its next one always the sum of its
    counts so far, as in `LanguageModel.forward`.

    Attributes:
        tokens: ``[B, F]`` int64, padded with 0.
        parents: ``[B, F]`` int64: of each node its parent's number among the row's scored nodes, -1 for the root.
        counts: ``[B]`` int64 on the CPU, nodes of each row; 0 is possible.
        depth: of the nodes; children of the root have depth 1.
    """

    tokens: Tensor
    parents: Tensor
    counts: Tensor
    depth: int


Score = Callable[[Frontier], Tensor]
"""Logits ``[B, F, V]`` of the token after each node of a frontier; those of padding mean nothing."""


@dataclass(frozen=True)
class Grown:
    """Draft trees, and which of their nodes were scored.

    Attributes:
        draft: the trees.
        scored: ``[B, N]`` int64 on the CPU: number of node 1, 2, … among the row's scored nodes, -1 if it is none.
        sound: all logits were finite. Rows where some were not have shallower trees.
    """

    draft: Draft
    scored: Tensor
    sound: bool

    def kept(self, verdict: Verdict) -> tuple[Tensor, Tensor]:
        """The accepted nodes that were scored, as `Cache.commit` takes them: ``[B, D]`` numbers and ``[B]`` counts."""
        # A number for the root, too, which is what a path is padded with.
        numbers = torch.nn.functional.pad(self.scored, (1, 0), value=-1).gather(1, verdict.path.cpu())
        steps = torch.arange(numbers.shape[1])
        held = (numbers >= 0) & (steps < verdict.counts.cpu()[:, None])
        return numbers.clamp(min=0), held.to(torch.int64).cumprod(1).sum(1)


def grow(plan: TreePlan, batch: Batch, limits: AbstractSequence[int], root: Tensor, score: Score) -> Grown:
    """Grow a tree for every row.

    Args:
        plan: what trees.
        batch: the rows.
        limits: most nodes of each row's tree.
        root: ``[B, V]`` logits of the token after each row's root; those of rows with limit 0 mean nothing.
        score: gives the logits of what comes after further nodes.

    Returns:
        The trees; chains in rows whose verifier takes no trees.
    """
    trees = [_tree(plan, batch, row, limit) for row, limit in enumerate(limits)]
    size, device = len(trees), batch.device
    uniform = _uniforms(trees, batch)
    probs: list[tuple[Tensor, list[list[int]]]] = []  # by depth: q, and the nodes whose children were drawn from it
    logits, sound, depth = root[:, None], True, 0
    frontiers = [[0] if tree.wanted(0) else [] for tree in trees]
    while any(frontiers):
        counts = [len(nodes) for nodes in frontiers]
        if depth:
            logits = score(_frontier(trees, counts, depth, device))
        logits = moved(logits[..., : batch.vocab_size], device)
        if not all_finite(logits):
            used = torch.arange(logits.shape[1], device=device) < torch.tensor(counts, device=device)[:, None]
            bad = check_finite(logits.masked_fill(~used[..., None], 0.0))
            logits = logits.masked_fill((~used | bad[:, None])[..., None], 0.0)
            sound = sound and not bool(bad.any())
            frontiers = [[] if is_bad else nodes for nodes, is_bad in zip(frontiers, bad.tolist(), strict=True)]
        so_far, nodes = _so_far(trees, batch, counts, depth)
        if uniform is not None:
            q = batch.sampler.probabilities(logits, batch.sequences, so_far, nodes)
            probs.append((q, frontiers))
            # All tokens of the drafter's vocabulary may be forbidden: then there is nothing to draw from.
            possible = (q.amax(-1) > 0).tolist() if batch.sampler.alters else None
            _draw(trees, frontiers, q, uniform, possible)
        if not all(tree.drawn for tree in trees):
            _choose(trees, frontiers, batch, logits, so_far, nodes)
        depth += 1
        frontiers = [tree.expand() if nodes else [] for tree, nodes in zip(trees, frontiers, strict=True)]
    numbers = [tree.finish() for tree in trees]
    tokens = _table([tree.tokens[1:] for tree in trees], 0, device)
    parents = _table([tree.parents[1:] for tree in trees], 0, device)
    used = torch.tensor([len(tree.tokens) - 1 for tree in trees], device=device)
    is_chain = all(tree.parents == list(range(-1, len(tree.parents) - 1)) for tree in trees)
    if is_chain:
        parents = torch.arange(tokens.shape[1], device=device).expand(size, -1)
    by_parent = None if uniform is None else _by_parent(probs, trees, numbers)
    draft = Draft(tokens, parents, used, by_parent, replacement=is_chain, is_chain=is_chain)
    return Grown(draft, _table([tree.scored[1:] for tree in trees], -1), sound)


class _Tree(ABC):
    """One row's tree while it grows. Nodes are numbered as they come, the root being 0.

    Attributes:
        drawn: children are drawn, not chosen.
        tokens: of each node; the root's is not used.
        parents: of each node, -1 for the root.
        scored: of each node its number among the scored ones, -1 if it is not scored; the root is not.
        expanded: node number of each scored node.
    """

    def __init__(self, drawn: bool) -> None:
        self.drawn = drawn
        self.tokens, self.parents, self.scored = [0], [-1], [-1]
        self.expanded: list[int] = []
        self._newest = 1  # the first node of the deepest level

    def add(self, node: int, tokens: AbstractSequence[int], shares: AbstractSequence[float]) -> None:
        """Give a node of the frontier its children.

        Args:
            node: their parent.
            tokens: of the children, by rank; `wanted` at most.
            shares: logarithms of their probabilities by the drafter; empty for drawn ones.
        """
        self.tokens += tokens
        self.parents += [node] * len(tokens)
        self.scored += [-1] * len(tokens)

    def expand(self) -> list[int]:
        """The next frontier: nodes of the deepest level, which are numbered as scored ones."""
        first, self._newest = self._newest, len(self.tokens)
        nodes = self._expanded(range(first, self._newest))
        for node in nodes:
            self.scored[node] = len(self.expanded)
            self.expanded.append(node)
        return nodes

    @abstractmethod
    def wanted(self, node: int) -> int:
        """How many children a node of the frontier, or the root, should get."""

    @abstractmethod
    def _expanded(self, level: range) -> list[int]:
        """The nodes of the deepest level that get children."""

    @abstractmethod
    def finish(self) -> dict[int, int]:
        """Reduce the tree to the draft's nodes; returns their new numbers by the old ones."""


class _Static(_Tree):
    """A tree of a shape."""

    def __init__(self, shape: TreeShape, drawn: bool) -> None:
        super().__init__(drawn)
        self.size = len(shape)
        self._shape = shape
        self._shape_nodes = [0]  # of each node, its number in the shape

    def add(self, node: int, tokens: AbstractSequence[int], shares: AbstractSequence[float]) -> None:
        super().add(node, tokens, shares)
        self._shape_nodes += self.shape_children(node)[: len(tokens)]

    def shape_children(self, node: int) -> tuple[int, ...]:
        """The children of a node in the shape, by their numbers there."""
        return self._shape.children[self._shape_nodes[node]]

    def wanted(self, node: int) -> int:
        return len(self.shape_children(node))

    def finish(self) -> dict[int, int]:
        """All nodes: drawn ones must not be dropped."""
        return {node: node for node in range(len(self.tokens))}

    def _expanded(self, level: range) -> list[int]:
        return [node for node in level if self.wanted(node)]


class _Dynamic(_Tree):
    """A tree of the nodes that are most probable, given the root."""

    def __init__(self, plan: TreePlan, limit: int, depth: int) -> None:
        super().__init__(drawn=False)
        self._limit, self._width = limit, min(plan.width, limit)
        self._levels = min(plan.depth, depth, limit)  # that are still to be added
        self._values = [0.0]  # of each node: logarithm of the drafter's probability of the path to it

    def add(self, node: int, tokens: AbstractSequence[int], shares: AbstractSequence[float]) -> None:
        super().add(node, tokens, shares)
        self._values += [self._values[node] + share for share in shares]

    def wanted(self, node: int) -> int:
        return self._width if self._levels else 0

    def _expanded(self, level: range) -> list[int]:
        self._levels -= 1
        if not self._levels:
            return []
        best = sorted(level, key=lambda node: -self._values[node])[: self._width]
        if len(self._values) > self._limit:
            # No child of a node that is less probable than all of the draft's can become part of it.
            least = nlargest(self._limit, self._values[1:])[-1]
            best = [node for node in best if self._values[node] > least]
        return sorted(best)

    def finish(self) -> dict[int, int]:
        """Keep the most probable nodes: parents, which are at least as probable, before their children."""
        order = sorted(range(1, len(self.tokens)), key=lambda node: -self._values[node])[: self._limit]
        kept = [0, *sorted(order)]
        numbers = {node: number for number, node in enumerate(kept)}
        self.parents = [-1, *(numbers[self.parents[node]] for node in kept[1:])]
        self.tokens = [self.tokens[node] for node in kept]
        self.scored = [self.scored[node] for node in kept]
        return numbers


def _tree(plan: TreePlan, batch: Batch, row: int, limit: int) -> _Tree:
    sequence = batch.sequences[row]
    depth = batch.depths[row] if batch.depths else limit
    greedy = sequence.params.greedy
    drawn = not (greedy or batch.shared_noise[row] or plan.dynamic)
    if not batch.takes_chosen_trees(row):  # nor are they drawn with replacement
        return _Static(TreeShape.chain(plan.chain_length(limit, depth)), drawn)
    if plan.dynamic or (greedy and isinstance(plan.shape, AcceptanceTable)):
        return _Dynamic(plan, limit, depth)
    return _Static(plan.fitting(limit, depth), drawn)


def _uniforms(trees: list[_Tree], batch: Batch) -> Tensor | None:
    """``[B, N]``: one uniform for each drawn node, by its number in the shape; None where no node is drawn.

    Keyed by the root's position, so that no two rounds share a draw.
    """
    most = max((tree.size for tree in trees if isinstance(tree, _Static) and tree.drawn), default=0)
    if most == 0:
        return None
    streams = Stream.DRAFT + torch.arange(most, device=batch.device)
    return uniforms(batch.seeds, batch.positions[:, None].expand(-1, most), streams)


def _frontier(trees: list[_Tree], counts: list[int], depth: int, device: torch.device) -> Frontier:
    tokens, parents = [], []
    for tree, count in zip(trees, counts, strict=True):
        nodes = tree.expanded[len(tree.expanded) - count :]
        tokens.append([tree.tokens[node] for node in nodes])
        parents.append([tree.scored[tree.parents[node]] for node in nodes])
    return Frontier(_table(tokens, 0, device), _table(parents, -1, device), torch.tensor(counts), depth)


def _so_far(trees: list[_Tree], batch: Batch, counts: list[int], depth: int) -> tuple[Draft, Tensor]:
    """A draft that holds the frontier's nodes at their depth, and their node numbers ``[B, F]`` in it.

    Where earlier tokens alter logits (penalties), it is the tree of all scored nodes, else a chain of that depth.
    """
    size, width, device = len(trees), max(counts), batch.device
    if depth == 0 or not batch.sampler.alters:
        chain = Draft.chain(torch.zeros((size, depth), dtype=torch.int64, device=device))
        return chain, torch.full((size, width), depth, device=device)
    tokens = [[tree.tokens[node] for node in tree.expanded] for tree in trees]
    parents = [[tree.scored[tree.parents[node]] + 1 for node in tree.expanded] for tree in trees]
    sizes = [len(row) for row in tokens]
    nodes = [list(range(size - count + 1, size + 1)) for size, count in zip(sizes, counts, strict=True)]
    draft = Draft(_table(tokens, 0, device), _table(parents, 0, device), torch.tensor(sizes, device=device))
    return draft, _table(nodes, 0, device)


def _draw(
    trees: list[_Tree], frontiers: list[list[int]], q: Tensor, uniform: Tensor, possible: list[list[bool]] | None
) -> None:
    """Draw children from q, ``[B, F, V]``, for the frontiers of `drawn` trees: for all nodes, or those `possible`."""
    parents: list[tuple[int, int, int]] = []  # row, index in the frontier, node
    in_shape: list[tuple[int, ...]] = []
    for row, (tree, nodes) in enumerate(zip(trees, frontiers, strict=True)):
        if tree.drawn:
            assert isinstance(tree, _Static)
            found = [(row, index, node) for index, node in enumerate(nodes) if possible is None or possible[row][index]]
            parents += found
            in_shape += [tree.shape_children(node) for _, _, node in found]
    if not parents:
        return
    rows, columns, _ = (torch.tensor(numbers, device=q.device) for numbers in zip(*parents, strict=True))
    children = _table([list(one) for one in in_shape], 1, q.device)
    wanted = torch.tensor([len(one) for one in in_shape], device=q.device)
    tokens, drawn = draw_distinct(q[rows, columns], uniform[rows[:, None], children - 1], wanted)
    for (row, _, node), found, count in zip(parents, tokens.tolist(), drawn.tolist(), strict=True):
        trees[row].add(node, found[:count], [])


def _choose(
    trees: list[_Tree], frontiers: list[list[int]], batch: Batch, logits: Tensor, so_far: Draft, nodes: Tensor
) -> None:
    """Add the most probable children of the frontier's nodes, in the trees whose tokens are chosen, not drawn."""
    chosen = [(tree, frontier) for tree, frontier in zip(trees, frontiers, strict=True) if not tree.drawn]
    most = max((tree.wanted(node) for tree, frontier in chosen for node in frontier), default=0)
    if most == 0:
        return
    count = min(most, logits.shape[-1])
    best = batch.sampler.best(logits, batch.sequences, so_far, nodes, count, batch.shared_noise)
    tokens, shares = (values.tolist() for values in best)
    for row, (tree, frontier) in enumerate(zip(trees, frontiers, strict=True)):
        if tree.drawn:
            continue
        for index, node in enumerate(frontier):
            known = zip(tokens[row][index], shares[row][index], strict=True)
            found = [(token, share) for token, share in known if share > -math.inf][: tree.wanted(node)]
            tree.add(node, [token for token, _ in found], [share for _, share in found])


def _by_parent(
    probs_by_depth: list[tuple[Tensor, list[list[int]]]], trees: list[_Tree], numbers: list[dict[int, int]]
) -> Tensor:
    """``[B, M, V]``: by parent, the distribution that its children were drawn from; M covers all parents."""
    most = 1 + max(max(tree.parents) for tree in trees)
    first = probs_by_depth[0][0]
    probs = first.new_zeros((len(trees), max(most, 1), first.shape[-1]))
    for q, frontiers in probs_by_depth:
        at = [
            (row, index, numbers[row][node])
            for row, nodes in enumerate(frontiers)
            for index, node in enumerate(nodes)
            if numbers[row].get(node, most) < most
        ]
        if at:
            rows, columns, nodes = (torch.tensor(column, device=q.device) for column in zip(*at, strict=True))
            probs[rows, nodes] = q[rows, columns]
    return probs


def _table(rows: list[list[int]], fill: int, device: torch.device | str = "cpu") -> Tensor:
    """``[B, N]`` int64 of rows of any lengths."""
    width = max(map(len, rows), default=0)
    padded = [row + [fill] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int64, device=device).reshape(len(rows), width)
