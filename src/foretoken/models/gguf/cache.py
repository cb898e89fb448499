"""GgufCache: rows of a batch as sequences of llama.cpp contexts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from foretoken.models.base import Cache, kept_lengths
from foretoken.models.gguf.context import Context, ContextOptions

LOST = -1
"""In place of a sequence: the KV cache does not have the node."""
FIRST_SEQUENCES = 8
"""Of a new context. llama.cpp holds logits of one token for each: 1 MiB with a vocabulary of 262,144."""


class Contexts(Protocol):
    """Makes llama.cpp contexts, and takes them back."""

    options: ContextOptions
    """How they are made."""
    rows: int
    """Most rows of one context."""
    sequences: int
    """Most sequences of one context."""
    rolls_back: bool
    """A sequence can be cut, and its beginning shared; else only whole sequences can be copied."""
    positions: int | None
    """Places in a sequence that the model has entries of a table for; None where it needs no table."""
    window: int
    """Tokens that layers with a window see; 0 where there are none."""

    def take(self, cells: int, sequences: int) -> Context:
        """An empty context with room for so many tokens of so many sequences."""

    def give_back(self, context: Context) -> None:
        """A context that is no longer used."""


@dataclass(slots=True)
class Row:
    """One row.

    Attributes:
        shard: whose context it is in.
        sequence: that holds its committed tokens, and tentative nodes that continue them.
        tokens: committed.
        kept: how many of them are in the KV cache.
        nodes: tokens of the tentative nodes.
        parents: their parents' numbers, -1 for none.
        depths: of each node, how many are above it.
        homes: of each node, a sequence that ends with it or goes through it; `LOST` where there is none.
        branches: sequences of the row besides its own.
        ends: the last node of each of the row's sequences, -1 for none.
    """

    shard: Shard
    sequence: int
    tokens: list[int] = field(default_factory=list)
    kept: int = 0
    nodes: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    homes: list[int] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)

    def append(self, token: int, parent: int) -> None:
        """Add a tentative node."""
        self.nodes.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)

    @property
    def is_chain(self) -> bool:
        """Each tentative node but the first is the child of the one before it."""
        return not self.depths or self.depths[-1] == len(self.depths) - 1

    def leaves(self) -> Collection[int]:
        """Tentative nodes without a child."""
        if self.is_chain:
            return range(len(self.nodes))[-1:]
        return set(range(len(self.nodes))).difference(self.parents)

    def path(self, node: int) -> list[int]:
        """Nodes on the way to one, itself included."""
        found = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def end(self, sequence: int) -> int:
        """The last node of one of the row's sequences."""
        return self.ends.get(sequence, -1)

    def forget(self) -> None:
        """Drop the tentative nodes, but not what the context has of them."""
        self.nodes, self.parents, self.depths = [], [], []
        self.homes, self.branches, self.ends = [], [], {}


class Shard:
    """A context and the sequences of it that are in use.

    Args:
        contexts: what makes contexts.

    Attributes:
        context: None before the first pass.
        rows: how many rows are in it.
    """

    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts
        self.context: Context | None = None
        self.rows = 0
        self._known = 0  # sequences that were ever in use: the first ones
        self._free: list[int] = []

    @property
    def most(self) -> int:
        """Sequences that a context may have."""
        return self._contexts.sequences

    @property
    def free(self) -> int:
        """Sequences that are not in use."""
        return len(self._free) + (self.most if self.context is None else self.context.sequences) - self._known

    def take(self) -> int | None:
        """A sequence that is not in use; None where the context has no other."""
        if self._free:
            return self._free.pop()
        if not self.free:
            return None
        self._known += 1
        return self._known - 1

    def drop(self, sequence: int) -> None:
        """Empty a sequence, and have it used again."""
        if self.context is not None:
            self.context.cut(sequence)
        self._free.append(sequence)

    def lacks(self, sequences: int) -> bool:
        """Whether there is a context, which has less than so many sequences and could have more."""
        return self.context is not None and self.context.sequences < min(sequences, self.most)

    def make_room(self, rows: Sequence[Row], cells: int, sequences: int) -> Context:
        """A context for so many tokens, which has what the last one had of these rows' own sequences.

        The KV cache is not copied while both exist: what it has is saved first, and the old context freed.

        Args:
            rows: all rows in the context.
            cells: tokens that they need room for.
            sequences: that they need; they get no more than a context may have.
        """
        cells = self._contexts.options.within(cells)
        if self.context is not None and self.context.cells >= cells and not self.lacks(sequences):
            return self.context
        sequences = max(sequences, self._known, FIRST_SEQUENCES)
        old, self.context = self.context, None
        saved = []
        if old is not None:
            for row in rows:
                for branch in row.branches:
                    self._free.append(branch)
                row.homes = [home if home == row.sequence else LOST for home in row.homes]
                row.branches, row.ends = [], {row.sequence: row.end(row.sequence)}
                if row.kept or row.end(row.sequence) >= 0:
                    saved.append((row, old.save(row.sequence)))
            cells = old.cells if cells <= old.cells else max(cells, old.cells + old.cells // 2)
            cells = self._contexts.options.within(cells)
            sequences = old.sequences if sequences <= old.sequences else max(sequences, 2 * old.sequences)
            old.close()
        try:
            self.context = self._contexts.take(cells, min(sequences, self.most))
        except Exception:
            for row in rows:
                self._lose(row)
            raise
        for row, state in saved:
            if not self.context.restore(row.sequence, state):
                self.context.cut(row.sequence)
                self._lose(row)
        return self.context

    @staticmethod
    def _lose(row: Row) -> None:
        row.kept, row.homes, row.ends = 0, [LOST] * len(row.nodes), {}

    def close(self) -> None:
        """Give the context back."""
        if self.context is not None:
            self._contexts.give_back(self.context)
            self.context = None


class GgufCache(Cache):
    """A `foretoken.models.Cache`.

    A row's committed tokens are one sequence. A chain of tentative nodes continues it; where a node gets a second
    child, a new sequence shares the cells of the path up to the node.

    Args:
        contexts: what makes contexts.
        batch_size: rows.
    """

    def __init__(self, contexts: Contexts, batch_size: int) -> None:
        self._contexts = contexts
        self.shards: list[Shard] = []
        self.rows = [self._new_row() for _ in range(batch_size)]

    def __del__(self) -> None:
        for shard in self.shards:
            shard.close()

    @property
    def lengths(self) -> Tensor:
        """See `foretoken.models.Cache`."""
        return torch.tensor([len(row.tokens) for row in self.rows], dtype=torch.int64)

    def defer_prefill(self, rows: Sequence[Sequence[int]]) -> None:
        """Commit tokens to rows without tentative nodes; the next pass over a row computes them with its nodes."""
        for row, tokens in zip(self.rows, rows, strict=True):
            row.tokens += tokens

    def commit(self, path: Tensor, counts: Tensor) -> None:
        """See `foretoken.models.Cache`."""
        for row, nodes, count in zip(self.rows, path.tolist(), counts.tolist(), strict=True):
            if row.nodes or count:
                self._commit(row, nodes[:count])

    def _commit(self, row: Row, nodes: list[int]) -> None:
        shard, length = row.shard, len(row.tokens)
        last = nodes[-1] if nodes else -1
        row.tokens += [row.nodes[node] for node in nodes]
        holder = self._holder(row, last) if row.kept == length else None
        if holder is None:  # the next pass over the row computes them again
            holder, kept = row.sequence, row.kept
        else:
            kept = len(row.tokens)
        for sequence in (row.sequence, *row.branches):
            if sequence != holder:
                shard.drop(sequence)
        if (
            self._contexts.rolls_back
            and shard.context is not None
            and row.end(holder) != (last if kept > length else -1)
        ):
            if kept:
                shard.context.cut(holder, kept)
            else:
                shard.context.cut(holder)
        row.sequence, row.kept = holder, kept
        row.forget()
        self._see_window(row)

    def _holder(self, row: Row, node: int) -> int | None:
        """A sequence of the row that goes through a node, and can be cut after it."""
        if node < 0:
            return row.sequence
        home = row.homes[node]
        if home == LOST or (not self._contexts.rolls_back and row.end(home) != node):
            return None
        return home

    def select(self, rows: Sequence[int], keep: Sequence[int | None] | None = None) -> None:
        """See `foretoken.models.Cache`."""
        old = self.rows
        for shard in self.shards:
            sequences = min(len(rows), self._contexts.rows)
            if shard.context is not None and shard.lacks(sequences):
                shard.make_room([row for row in old if row.shard is shard], shard.context.cells, sequences)
        lengths = kept_lengths([len(row.tokens) for row in old], rows, keep)
        made: list[Row | None] = [None] * len(rows)
        # Rows that keep all of an old one take over its sequence, before others share it.
        order = sorted(range(len(rows)), key=lambda i: rows[i] < 0 or lengths[i] < len(old[rows[i]].tokens))
        left = [row for index, row in enumerate(old) if index not in set(rows)]
        for row in left:
            self._leave(row)
        pending: list[tuple[int, int]] = []
        for index in order:
            source = rows[index]
            if source < 0:
                made[index] = self._new_row()
            elif rows.count(source) == 1:
                made[index] = self._cut(old[source], lengths[index])
            else:
                pending.append((index, source))
        # Of an old row with several heirs, the last one takes its sequence, after the others have shared it.
        for position, (index, source) in enumerate(pending):
            if any(later == source for _, later in pending[position + 1 :]):
                made[index] = self._shared(old[source], lengths[index])
            else:
                made[index] = self._cut(old[source], lengths[index])
        self.rows = [row for row in made if row is not None]

    def _new_row(self) -> Row:
        for shard in self.shards:
            if shard.rows < self._contexts.rows:
                break
        else:
            shard = Shard(self._contexts)
            self.shards.append(shard)
        shard.rows += 1
        sequence = shard.take()
        assert sequence is not None  # there are fewer rows than sequences, and no tentative nodes
        return Row(shard, sequence)

    def _leave(self, row: Row) -> None:
        row.shard.drop(row.sequence)
        row.shard.rows -= 1

    def _cut(self, row: Row, length: int) -> Row:
        row.tokens = row.tokens[:length]
        if row.kept > length:
            if self._contexts.rolls_back and length:
                row.kept = length
            else:
                row.kept = 0
            if row.shard.context is not None:
                row.shard.context.cut(row.sequence, row.kept)
                self._see_window(row)
        return row

    def _shared(self, row: Row, length: int) -> Row:
        """A new row with the first tokens of one: in its context, if there is room."""
        shard = row.shard
        if shard.rows >= self._contexts.rows:
            new = self._new_row()
            new.tokens = row.tokens[:length]
            return new
        shard.rows += 1
        sequence = shard.take()
        assert sequence is not None
        new = Row(shard, sequence, row.tokens[:length])
        kept = min(row.kept, length)
        if not self._contexts.rolls_back and kept < row.kept:
            kept = 0
        if kept and shard.context is not None:
            shard.context.share(row.sequence, sequence, kept if self._contexts.rolls_back else -1)
            new.kept = kept
            self._see_window(new)
        return new

    def _see_window(self, row: Row) -> None:
        """Have a row computed again if layers with a window lack tokens in that of the row's next one.

        Such layers keep what the window of the longest sequence's next token needs: other rows get the cells of what is
        before it. A sequence that is cut back, or shares a part of another one, may need that again.
        """
        context, window = row.shard.context, self._contexts.window
        if context is None or not window or not row.kept:
            return
        if not 0 <= context.first(row.sequence) <= max(0, row.kept - window):
            context.cut(row.sequence)
            row.kept = 0
