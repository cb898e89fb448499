"""Draft: a batch of token trees that a drafter proposes under the last emitted token of each row."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from foretoken.errors import ParameterError


class Listed(NamedTuple):
    """A draft's tensors of the same names as Python's lists."""

    tokens: list[list[int]]
    parents: list[list[int]]
    counts: list[int]


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Draft:
    """A batch of draft trees, parents before children.

    Node 0 of a row is the root (the last emitted token, not part of the draft); the token ``tokens[b, i]`` is node
    ``i + 1``. Children of one parent are tried in the order of their columns.

    Attributes:
        tokens: ``[B, N]`` int64, proposed tokens. Rows shorter than N are padded with 0.
        parents: ``[B, N]`` int64, node number of each token's parent (0 = root); a chain is 0, 1, 2, …
        counts: ``[B]`` int64, number of draft tokens in each row.
        probs: ``[B, M, V]`` float or None: q, the distribution that the children of each *parent* node were drawn from,
            exactly as they were drawn, indexed by node number. Only nodes with children need a valid q, so a chain of N
            tokens has ``M = N``. None means that the tokens were chosen, not drawn: q is one-hot at each child, in
            order. V may be smaller or larger than the target's vocabulary where the models are padded differently.
        replacement: whether siblings were drawn with (True) or without (False) replacement. Ignored for chains and
            chosen tokens.
        predicted: of each row, how many of its first tokens were copied from the request's prediction
            (`Sequence.prediction`), which statistics count apart; empty where none were.
        is_chain: every row is a chain. A flag, so that `parents` need not be copied from a device to find out.
    """

    tokens: Tensor
    parents: Tensor
    counts: Tensor
    probs: Tensor | None = None
    replacement: bool = True
    is_chain: bool = False
    predicted: tuple[int, ...] = ()

    @classmethod
    def chain(cls, tokens: Tensor, counts: Tensor | None = None, probs: Tensor | None = None) -> Draft:
        """A draft without branches.

        Args:
            tokens: ``[B, N]`` int64.
            counts: ``[B]`` int64, tokens used in each row; None means all N.
            probs: ``[B, N, V]``, the distribution that each token was drawn from, or None for chosen tokens.
        """
        batch_size, width = tokens.shape
        parents = _steps(width, tokens.device).expand(batch_size, width)
        if counts is None:
            counts = torch.full((batch_size,), width, dtype=torch.int64, device=tokens.device)
        return cls(tokens, parents, counts, probs, is_chain=True)

    @classmethod
    def empty(cls, batch_size: int, device: torch.device | str = "cpu") -> Draft:
        """A draft that proposes nothing in any row."""
        return cls.chain(torch.zeros((batch_size, 0), dtype=torch.int64, device=device))

    @classmethod
    def from_lists(
        cls, tokens: list[list[int]], device: torch.device | str = "cpu", parents: list[list[int]] | None = None
    ) -> Draft:
        """Chosen tokens, as many in each row as there are.

        Args:
            tokens: one list a row.
            device: device of the draft's tensors, which nobody may write to.
            parents: node number of each token's parent, parents first; None for chains. If all rows are chains the
                draft has `is_chain` set.
        """
        if not any(tokens):
            return no_draft(len(tokens), torch.device(device))
        counts = int_tensor([len(row) for row in tokens], device)
        width = max((len(row) for row in tokens), default=0)
        padded = int_tensor([row + [0] * (width - len(row)) for row in tokens], device).reshape(len(tokens), width)
        if parents is None or all(row == list(range(len(row))) for row in parents):
            return cls.chain(padded, counts)
        links = [row + list(range(len(row), width)) for row in parents]
        return cls(padded, int_tensor(links, device), counts)

    @cached_property
    def listed(self) -> Listed:
        """The tokens, parents and counts as lists, which are read from the device once. Nobody may change them."""
        return Listed(self.tokens.tolist(), self.parents.tolist(), self.counts.tolist())

    @property
    def batch_size(self) -> int:
        """Rows, B."""
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        """Tokens of the longest row, N; the draft has nodes 0 … N."""
        return self.tokens.shape[1]

    def part(self, rows: slice | list[int]) -> Draft:
        """The draft of some of the rows, without `predicted`; views for a slice."""
        return replace(
            self,
            tokens=self.tokens[rows],
            parents=self.parents[rows],
            counts=self.counts[rows],
            probs=None if self.probs is None else self.probs[rows],
            predicted=(),
        )

    def to(self, device: torch.device) -> Draft:
        """The draft on a device; itself where it is there."""
        if self.tokens.device == device:
            return self
        return replace(
            self,
            tokens=self.tokens.to(device),
            parents=self.parents.to(device),
            counts=self.counts.to(device),
            probs=None if self.probs is None else self.probs.to(device),
        )

    def chains(self) -> Draft:
        """The same draft for rows of which none branches, as wide as the longest of them."""
        width = int(self.counts.max()) if self.batch_size else 0
        probs = None if self.probs is None else self.probs[:, :width]
        return Draft.chain(self.tokens[:, :width], self.counts, probs)

    def has_chains(self) -> bool:
        """Whether no row branches; looks at `parents` unless `is_chain` is set."""
        steps = torch.arange(self.width, device=self.parents.device)
        return self.is_chain or bool(((self.parents == steps) | ~self.used()).all())

    def used(self) -> Tensor:
        """``[B, N]`` bool: which entries of `tokens` are part of the draft (not padding)."""
        return torch.arange(self.width, device=self.tokens.device) < self.counts[:, None]

    def depths(self) -> Tensor:
        """``[B, N+1]`` int64: number of draft tokens on the path to each node; 0 for the root."""
        if self.is_chain:
            return torch.arange(self.width + 1, device=self.tokens.device).expand(self.batch_size, -1)
        found = []
        for row in self.listed.parents:  # for so few numbers torch's and NumPy's calls take many times as long
            found.append(below := [0])
            for parent in row:
                below.append(below[parent] + 1)
        return int_tensor(found, self.tokens.device).reshape(self.batch_size, self.width + 1)

    def ancestors(self) -> Tensor:
        """``[B, N+1, N+1]`` bool: entry ``[b, i, j]``: node j is on the path to node i, i itself included."""
        return ancestor_matrix(
            torch.cat([self.parents.new_full((self.batch_size, 1), -1), self.parents], dim=1), self.is_chain
        )

    def path(self, node: Tensor) -> tuple[Tensor, Tensor]:
        """The path to one node of each row.

        Args:
            node: ``[B]`` int64.

        Returns:
            nodes: ``[B, D]`` int64, the path's nodes from below the root to `node`, padded with 0.
            counts: ``[B]`` int64, lengths of the paths (0 at the root).
        """
        if self.is_chain:
            depth = int(node.max()) if node.numel() else 0
            steps = _steps(depth + 1, node.device)[1:].expand(self.batch_size, depth)
            return steps if self.batch_size == 1 else torch.where(steps <= node[:, None], steps, 0), node
        paths = [self.walk(row, last) for row, last in enumerate(node.tolist())]
        depth = max(map(len, paths), default=0)
        padded = [walk + [0] * (depth - len(walk)) for walk in paths]
        nodes = int_tensor(padded, node.device).reshape(len(paths), depth)
        return nodes, int_tensor([len(walk) for walk in paths], node.device)

    def walk(self, row: int, node: int) -> list[int]:
        """The path to one node of a row, as `path` has it."""
        if self.is_chain:
            return list(range(1, node + 1))
        parents, nodes = self.listed.parents[row], []
        while node:
            nodes.append(node)
            node = parents[node - 1]
        return nodes[::-1]


def check_proposal(made: object, reads: AbstractSequence[bool], drafter: str) -> Draft:
    """The draft that a drafter made, if its tensors fit each other and the batch.

    Args:
        made: what its `propose` returned.
        reads: of each row of the batch, whether its `Draft.probs` count: not where they are ignored.
        drafter: its name.

    Raises:
        ParameterError: it is no draft, or has tensors of other shapes, types or ranges than `Draft` says.
    """
    if not isinstance(made, Draft):
        raise ParameterError(
            f"drafter {drafter!r} proposed a value of type {type(made).__name__}: return a foretoken.draft.Draft, "
            "Draft.empty(…) for nothing"
        )
    tokens, probs, rows = made.tokens, made.probs, len(reads)
    for name, given in (("tokens", tokens), ("parents", made.parents), ("counts", made.counts)):
        if not isinstance(given, Tensor):
            raise ParameterError(
                f"drafter {drafter!r} proposed a draft whose {name} are of type {type(given).__name__}: give a tensor"
            )
    size = tuple(tokens.shape)
    if len(size) != 2 or size[0] != rows or tokens.is_floating_point():
        raise _misshapen(drafter, "tokens", tokens, f"[{rows}, N] of int64, a row for each sequence of the batch")
    if tuple(made.parents.shape) != size or made.parents.is_floating_point():
        raise _misshapen(drafter, "parents", made.parents, f"{list(size)} of int64, as tokens has")
    if tuple(made.counts.shape) != (rows,) or made.counts.is_floating_point():
        raise _misshapen(drafter, "counts", made.counts, f"[{rows}] of int64, a number for each row")
    if probs is not None and (probs.dim() != 3 or len(probs) != rows):
        raise _misshapen(drafter, "probs", probs, f"[{rows}, {size[1]}, V], the distribution that each token is of")
    if tokens.numel() and tokens.device == _CPU:  # elsewhere looking at numbers would wait for the device
        counts = made.listed.counts
        if min(counts) < 0 or max(counts) > size[1]:
            raise ParameterError(
                f"drafter {drafter!r} proposed counts from {min(counts)} to {max(counts)}, and tokens has {size[1]} "
                "columns: each count is of the tokens that its row uses"
            )
        if probs is not None:
            used = [row[:count] for row, count, read in zip(made.listed.tokens, counts, reads, strict=True) if read]
            most, last = max(map(len, used), default=0), max((token for row in used for token in row), default=-1)
            if made.is_chain and probs.shape[1] < most:
                wanted = f"[{rows}, {most}, V], the distribution that each token is of"
                raise _misshapen(drafter, "probs", probs, wanted)
            if last >= probs.shape[2]:
                raise ParameterError(
                    f"drafter {drafter!r} proposed token {last}, and its probs end at {probs.shape[2] - 1}: a drawn "
                    "token is one of the distribution that it was drawn from"
                )
    return made


def _misshapen(drafter: str, name: str, found: Tensor, wanted: str) -> ParameterError:
    kind = str(found.dtype).removeprefix("torch.")
    return ParameterError(
        f"drafter {drafter!r} proposed a draft whose {name} are {list(found.shape)} of {kind}: give {wanted}"
    )


def ancestor_matrix(parents: Tensor, is_chain: bool = False) -> Tensor:
    """Which nodes each node descends from.

    Args:
        parents: ``[B, N]`` int64, each entry smaller than its own column, or -1 for a node without a parent.
        is_chain: every node's parent is the one before it.

    Returns:
        ``[B, N, N]`` bool: ``[b, i, j]``: j is i or one of i's ancestors.
    """
    batch_size, size = parents.shape
    if is_chain:
        full = torch.ones((size, size), dtype=torch.bool, device=parents.device)
        return full.tril().expand(batch_size, size, size)
    # A loop over nodes with little work in each step: NumPy takes a tenth of the time of torch's calls.
    above, numbers = np.zeros((batch_size, size, size), dtype=np.bool_), parents.cpu().numpy()
    rows = np.arange(batch_size)
    for i in range(size):
        parent = numbers[:, i]
        above[:, i, :i] = above[rows, parent.clip(min=0), :i] & (parent >= 0)[:, None]
        above[:, i, i] = True
    return torch.from_numpy(above).to(parents.device)


def int_tensor(values: AbstractSequence[Any], device: torch.device | str = "cpu") -> Tensor:
    """Python's integers, or lists of them that are equally long, as int64.

    `torch.tensor` takes three times as long for a few: 22 and 7 µs after a model's pass, which leaves nothing of either
    in the processor's caches.
    """
    made = torch.from_numpy(np.array(values, dtype=np.int64))
    return made if device == _CPU or device == "cpu" else made.to(device)


@lru_cache(512)
def _steps(count: int, device: torch.device) -> Tensor:
    """0, 1, 2, … as ``[count]`` int64, made once. Nobody may write to it."""
    return torch.arange(count, device=device)


@lru_cache(256)
def chain_of_row(nodes: int) -> tuple[Tensor, Tensor]:
    """Parents ``[1, N]`` and counts ``[1]``, as in `foretoken.models.LanguageModel.forward`, of a single row's chain.

    They are made once. Nobody may write to them.
    """
    return int_tensor([list(range(-1, nodes - 1))]), int_tensor([nodes])


@lru_cache(256)
def first_nodes_of_row(count: int, most: int) -> tuple[Tensor, Tensor]:
    """Arguments of `foretoken.models.Cache.commit` for the first `count` of the `most` nodes of a single row's chain.

    They are made once. Nobody may write to them.
    """
    return int_tensor([list(range(most))]).view(1, most), int_tensor([count])


@lru_cache(256)
def no_draft(batch_size: int, device: torch.device) -> Draft:
    """`Draft.empty`, made once: most rounds that draft nothing are alike. Nobody may write to its tensors."""
    return Draft.empty(batch_size, device)
