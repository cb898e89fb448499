"""NativeCache: the tokens of a batch's rows, and for how many of them the backend has keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from foretoken.limits import current_limits
from foretoken.models.base import Cache, cut_rows, kept_lengths
from foretoken.models.feed import prompt_part
from foretoken.models.widths import WIDE

_FEW = WIDE - 1
"""Committed tokens that a pass over a tree computes along with it, of a prompt that takes passes before. With the root
they are wide enough to be rounded alike behind a long prompt and behind a copied one."""


def prefill_chunk(most: int | None) -> int:
    """Most tokens of a row in a prefill pass of a backend; `most` is None where the limits alone say it."""
    limit = current_limits().prefill_tokens
    return limit if most is None else min(most, limit)


@dataclass(slots=True)
class Feed:
    """What one pass adds to one row.

    Attributes:
        row: which row of the cache.
        start: keys and values that the row has before; the pass writes to slots `start`, `start` + 1, ….
        tokens: what is fed.
        regime: which set of rotary frequencies the row uses.
        parents: of each token, the one above it, numbered within the feed, -1 for none; None for a chain.
        lost: the pass left no keys and values of the tentative nodes behind.
    """

    row: int
    start: int
    tokens: list[int]
    regime: int
    parents: list[int] | None
    lost: bool = False

    def split(self, count: int) -> Feed:
        """Take the first tokens of a chain off, as a feed of their own.

        For feeds that carry more than tokens to override, as is `begin_earlier`.
        """
        first = Feed(self.row, self.start, self.tokens[:count], self.regime, None)
        self.tokens, self.start = self.tokens[count:], self.start + count
        return first

    def begin_earlier(self, committed: Sequence[int], most: int) -> int:
        """Put committed tokens that come before a chain in front of it, to compute their keys and values again.

        Args:
            committed: the row's committed tokens.
            most: how many tokens at most.

        Returns:
            How many there were: none where the feed starts among tentative nodes.
        """
        count = min(most, self.start) if self.start <= len(committed) else 0
        self.tokens = [*committed[self.start - count : self.start], *self.tokens]
        self.start -= count
        return count

    def depths(self) -> list[int]:
        """Of each token: how many of the feed are above it."""
        if self.parents is None:
            return list(range(len(self.tokens)))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    def positions(self) -> Sequence[int]:
        """Of each token, its position in the sequence."""
        if self.parents is None:
            return range(self.start, self.start + len(self.tokens))
        return [self.start + depth for depth in self.depths()]

    def paths(self) -> list[list[int]]:
        """The tokens on the way to each of those that no other is below of."""
        if self.parents is None:
            return [list(range(len(self.tokens)))]
        leaves = sorted(set(range(len(self.tokens))) - set(self.parents))
        lines = self.ancestors()
        return [[node for node, on_path in enumerate(lines[leaf]) if on_path] for leaf in leaves]

    def ancestors(self) -> list[list[bool]]:
        """Square: whether token j is token i or above it."""
        size = len(self.tokens)
        above: list[list[bool]] = []
        for node, parent in enumerate(range(-1, size - 1) if self.parents is None else self.parents):
            line = above[parent].copy() if parent >= 0 else [False] * size
            line[node] = True
            above.append(line)
        return above


class KeyValueStore(Protocol):
    """A backend's keys and values of a batch."""

    def move(self, rows: list[int], sources: list[int], targets: list[int]) -> None:
        """Copy what slots `sources` of `rows` hold to slots `targets` of the same rows, all at once."""

    def select(self, rows: Sequence[int], kept: Sequence[int], cut: Sequence[int] = ()) -> None:
        """Make row i what row ``rows[i]`` is, an empty one where that is -1; ``kept[i]`` slots of it are in use.

        New rows that are `cut` have nothing of the old one beyond those slots, not even where nothing looks at it.
        """


@dataclass(slots=True)
class CachedRow:
    """One row: its tokens, and how many of them are in the KV cache.

    Attributes:
        tokens: committed.
        kept: how many of them are in the KV cache.
        nodes: tokens of the tentative nodes.
        parents: their parents' numbers, -1 for none.
        chain: each of the nodes follows the one before it.
        scored: how many of the nodes are in the KV cache.
        regime: which set of rotary frequencies the kept keys were turned by.
    """

    tokens: list[int] = field(default_factory=list)
    kept: int = 0
    nodes: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chain: bool = True
    scored: int = 0
    regime: int = 0

    def forget(self) -> None:
        """Drop the tentative nodes."""
        self.nodes, self.parents, self.chain, self.scored = [], [], True, 0

    def behind(self, most: int) -> list[int]:
        """The next committed tokens that the KV cache lacks, for a pass of their own before one over the nodes."""
        missing = len(self.tokens) - self.kept
        if self.chain:
            count = min(missing, prompt_part(missing + len(self.nodes), most))
        else:
            count = prompt_part(missing - _FEW, most)
        return self.tokens[self.kept : self.kept + count]

    def lengths(self) -> list[int]:
        """Of each tentative node: tokens of the row that ends with it."""
        depths = Feed(0, 0, self.nodes, 0, None if self.chain else self.parents).depths()
        return [len(self.tokens) + depth + 1 for depth in depths]


class NativeCache(Cache):
    """A `foretoken.models.Cache`.

    Slot i of a row holds token i; tentative node i is in slot ``len(tokens) + i``. So a commit of the first nodes moves
    nothing, and one of a tree's branch moves that branch alone.

    Args:
        store: of the backend, for as many rows.
        batch_size: rows.
    """

    def __init__(self, store: KeyValueStore, batch_size: int) -> None:
        self.store = store
        self.rows = [CachedRow() for _ in range(batch_size)]

    @property
    def lengths(self) -> Tensor:
        """See `foretoken.models.Cache`."""
        return torch.tensor([len(row.tokens) for row in self.rows], dtype=torch.int64)

    def defer_prefill(self, rows: Sequence[Sequence[int]]) -> None:
        """Commit tokens to rows without tentative nodes; the next pass over a row computes them with its nodes."""
        for row, tokens in zip(self.rows, rows, strict=True):
            row.tokens += tokens

    def add(self, tokens: list[list[int]], parents: list[list[int]], counts: list[int]) -> None:
        """Append tentative nodes; see `LanguageModel.forward`."""
        for row, new, above, count in zip(self.rows, tokens, parents, counts, strict=True):
            before = len(row.nodes)
            row.nodes += new[:count]
            row.parents += above[:count]
            row.chain = row.chain and row.parents[before:] == list(range(before - 1, before - 1 + count))

    def catch_up(self, most: int) -> list[Feed]:
        """Feeds of up to `most` tokens for rows whose KV cache lags so far that they need a pass of their own.

        Before a tree that is soon the case: the cost of a pass over a tree can grow with all that it computes.
        """
        return [
            Feed(index, row.kept, row.behind(most), row.regime, None)
            for index, row in enumerate(self.rows)
            if row.nodes and len(row.tokens) - row.kept >= (most + 1 if row.chain else _FEW + WIDE)
        ]

    def lagging(self, most: int, wanted: Sequence[Any]) -> list[Feed]:
        """Feeds of up to `most` tokens for rows that are `wanted`, and whose KV cache lags behind their tokens."""
        return [
            Feed(
                index,
                row.kept,
                row.tokens[row.kept : row.kept + prompt_part(len(row.tokens) - row.kept, most)],
                row.regime,
                None,
            )
            for index, row in enumerate(self.rows)
            if row.kept < len(row.tokens) and wanted[index]
        ]

    def feeds(self) -> list[Feed]:
        """Feeds that bring the KV cache up to the tentative nodes.

        A tree that takes more than one pass is fed from its beginning: the tokens of a pass attend to all tokens of the
        row before it, and among each other to their ancestors.
        """
        feeds = []
        for index, row in enumerate(self.rows):
            if len(row.nodes) == row.scored:
                continue
            behind = row.tokens[row.kept :]
            if row.chain:
                start = row.kept + row.scored
                feeds.append(Feed(index, start, behind + row.nodes[row.scored :], row.regime, None))
                continue
            offset = len(behind)
            parents = [*range(-1, offset - 1), *(parent + offset for parent in row.parents)]
            feeds.append(Feed(index, row.kept, behind + row.nodes, row.regime, parents))
        return feeds

    def fed(self, feeds: Sequence[Feed]) -> None:
        """Note that the KV cache has what was fed."""
        for feed in feeds:
            row = self.rows[feed.row]
            row.kept = min(len(row.tokens), feed.start + len(feed.tokens))
            row.scored = 0 if feed.lost else max(0, feed.start + len(feed.tokens) - len(row.tokens))

    def commit(self, path: Tensor, counts: Tensor) -> None:
        """See `foretoken.models.Cache`."""
        rows: list[int] = []
        sources: list[int] = []
        targets: list[int] = []
        for index, (row, nodes, count) in enumerate(zip(self.rows, path.tolist(), counts.tolist(), strict=True)):
            length = len(row.tokens)
            row.tokens += [row.nodes[node] for node in nodes[:count]]
            if row.kept == length and all(node < row.scored for node in nodes[:count]):
                row.kept += count
                for i, node in enumerate(nodes[:count]):
                    if node != i:
                        rows.append(index)
                        sources.append(length + node)
                        targets.append(length + i)
            row.forget()
        if rows:
            with torch.inference_mode():  # takes as long as all the rest where nothing moves
                self.store.move(rows, sources, targets)

    @torch.inference_mode()
    def select(self, rows: Sequence[int], keep: Sequence[int | None] | None = None) -> None:
        """See `foretoken.models.Cache`."""
        rows, old = list(rows), self.rows
        lengths = kept_lengths([len(row.tokens) for row in old], rows, keep)
        if rows == list(range(len(old))) and all(len(row.tokens) == new for row, new in zip(old, lengths, strict=True)):
            return
        self.rows = [
            CachedRow(old[row].tokens[:length], min(old[row].kept, length), regime=old[row].regime)
            if row >= 0
            else CachedRow()
            for row, length in zip(rows, lengths, strict=True)
        ]
        self.store.select(rows, [row.kept for row in self.rows], cut_rows(rows, keep))
