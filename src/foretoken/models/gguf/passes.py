"""Passes: what one forward pass adds to the rows of a context, made into batches that llama.cpp takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from foretoken.models.gguf.cache import LOST, Contexts, Row, Shard
from foretoken.models.gguf.context import Context


class Pass:
    """One forward pass over the rows of one context.

    Tokens are gathered and computed when there are as many as a pass takes, or no sequence is left for another branch
    of a tree.

    Args:
        shard: whose rows these are.
        rows: all rows of the context, those that get no nodes too.
        contexts: what made the context.
        out: ``[…, V]`` float32, where logits go: to places in ``out.view(-1, V)``.
        later: nodes that each row will get besides those that it has.
    """

    def __init__(self, shard: Shard, rows: Sequence[Row], contexts: Contexts, out: Tensor, later: int = 0) -> None:
        self._shard, self._rows = shard, rows
        self._rolls_back, self._positions = contexts.rolls_back, contexts.positions
        self._outputs = contexts.options.outputs
        self._out = out
        cells, sequences = self._needs()
        self._context: Context = shard.make_room(rows, cells + later * len(rows), sequences)
        self._batch = self._context.batch
        self._batch.clear()  # the last pass may have failed
        self._targets: list[int] = []
        self._waiting: dict[int, list[tuple[int, int]]] = {}
        """Of each row (by identity), the batch's entries: their numbers and their nodes, -1 for committed ones."""

    def _needs(self) -> tuple[int, int]:
        """Most cells that the rows need, each prefix that they share counted for each, and most sequences."""
        cells = sum(len(row.tokens) + len(row.nodes) for row in self._rows)
        if self._rolls_back and all(row.is_chain for row in self._rows):
            return cells, len(self._rows)
        leaves = [row.leaves() for row in self._rows]
        sequences = len(leaves) + sum(len(found) - self._rolls_back for found in leaves if found)
        if not self._rolls_back or sequences > self._shard.most or self._shard.lacks(sequences):
            # Paths may be computed again.
            for row, found in zip(self._rows, leaves, strict=True):
                if len(found) > 1:
                    cells += sum(row.depths[leaf] + 1 for leaf in found)
        return cells, sequences

    def add(self, row: Row, first: int, place: int) -> None:
        """Compute what a row lags behind and its new nodes.

        Args:
            row: with nodes that have no home yet.
            first: the first node whose logits are wanted; so are those of all after it.
            place: where the logits of that node go to; those of the others go behind them.
        """
        self.catch_up(row)
        known, count = len(row.homes), len(row.nodes)
        outputs = max(0, count - max(first, known))
        if self._continues(row, known, outputs):
            self._batch.extend(row.nodes[known:], len(row.tokens) + known, row.sequence, outputs)
            self._targets += range(place + count - outputs - first, place + count - first)
            row.homes += [row.sequence] * (count - known)
            row.ends[row.sequence] = count - 1
            return
        for node in range(known, count):
            row.homes.append(LOST)
            self._place(row, node, place + node - first if node >= first else None)

    def _continues(self, row: Row, known: int, outputs: int) -> bool:
        """Whether a row's nodes are a chain in its own sequence for which the batch and the model have room.

        Args:
            row: with new nodes.
            known: how many of its nodes the context has.
            outputs: new nodes whose logits are wanted.
        """
        new, length = len(row.nodes) - known, len(row.tokens) + len(row.nodes)
        return (
            self._rolls_back
            and row.is_chain
            and not row.branches
            and row.end(row.sequence) == known - 1
            and (self._positions is None or length <= self._positions)
            and self._batch.count + new <= self._context.tokens
            and len(self._targets) + outputs <= self._outputs
        )

    def catch_up(self, row: Row, target: int | None = None) -> None:
        """Compute the committed tokens that the context does not have.

        Args:
            row: without tentative nodes, if there are such tokens.
            target: the place that the logits of the last one go to; None if they are not wanted.
        """
        last = len(row.tokens) - 1
        for position in range(row.kept, last + 1):
            wanted = target if position == last else None
            self._put(row, row.tokens[position], position, row.sequence, -1, wanted)
        row.kept = last + 1

    def _place(self, row: Row, node: int, target: int | None) -> None:
        """Append a node to a sequence that ends with its parent, which is made if there is none.

        A node at a position that the model has no entry for is left out: its logits are zeros. Drafters ask for such
        nodes in rows at the end of their context, while others go on, and use none of them.
        """
        if self._positions is not None and len(row.tokens) + row.depths[node] >= self._positions:
            if target is not None:
                self._out.view(-1, self._out.shape[-1])[target] = 0
            return
        missing = [node]
        above = row.parents[node]
        while above >= 0 and not self._usable(row, above):
            missing.append(above)
            above = row.parents[above]
        home = row.sequence if above < 0 else row.homes[above]
        if row.end(home) != above or (not self._rolls_back and home == row.sequence):
            home = self._branch(row, home, above)
            if home == LOST:  # all sequences were in use, and now none but the rows' own
                self._place(row, node, target)
                return
        for one in reversed(missing):
            position = len(row.tokens) + row.depths[one]
            row.ends[home] = one
            row.homes[one] = home
            self._put(row, row.nodes[one], position, home, one, target if one == node else None)

    def _usable(self, row: Row, node: int) -> bool:
        """Whether another node can follow this one without computing it again."""
        home = row.homes[node]
        return home != LOST and (self._rolls_back or row.end(home) == node)

    def _branch(self, row: Row, home: int, node: int) -> int:
        """A new sequence with the row's committed tokens and the path to a node; `LOST` if there was none left."""
        new = self._shard.take()
        if new is None:
            self.flush()
            for one in self._rows:
                self._release(one)
            assert self._shard.free
            return LOST
        row.branches.append(new)
        row.ends[new] = node
        if not self._rolls_back:
            if any(member < 0 for _, member in self._waiting.get(id(row), ())):
                self.flush()
            self._context.share(row.sequence, new)
            return new
        on_path = {-1, *row.path(node)}
        first = len(row.tokens) + len(on_path) - 1  # cached before this position
        for entry, member in self._waiting.get(id(row), ()):
            if member in on_path:
                self._batch.share(entry, new)
                first = min(first, self._batch.position(entry))
        if first:
            self._context.share(home, new, first)
        return new

    def _release(self, row: Row) -> None:
        """Empty the row's sequences but its own."""
        for branch in row.branches:
            self._shard.drop(branch)
        row.homes = [home if home == row.sequence else LOST for home in row.homes]
        row.ends = {row.sequence: row.end(row.sequence)}
        row.branches = []

    def _put(self, row: Row, token: int, position: int, sequence: int, node: int, target: int | None) -> None:
        full = self._batch.count >= self._context.tokens
        if full or (target is not None and len(self._targets) >= self._outputs):
            self.flush()
        entry = self._batch.add(token, position, sequence, target is not None)
        self._waiting.setdefault(id(row), []).append((entry, node))
        if target is not None:
            self._targets.append(target)

    def flush(self) -> None:
        """Compute what was gathered."""
        if not self._batch.count:
            return
        logits, targets = self._context.decode(), self._targets
        if len(self._out) == 1 and logits.numel() == self._out.numel() and targets == list(range(len(targets))):
            self._out.copy_(logits.view_as(self._out))
        elif targets:
            places = self._out.view(-1, logits.shape[-1])
            first = targets[0]
            if targets == list(range(first, first + len(targets))):
                places[first : first + len(targets)] = logits[0]
            else:
                places[targets] = logits[0]
        self._batch.clear()
        self._targets, self._waiting = [], {}


def run_chain(
    row: Row, contexts: Contexts, token: int, parent: int, most: int, choose: Callable[[Tensor], int | None]
) -> bool:
    """What a `Pass` over one more node of a row by itself gives, again and again, in a fraction of the time besides.

    Args:
        row: the only one of its context.
        contexts: what made that.
        token, parent: of the first node.
        most: passes.
        choose: as in `LanguageModel.decode_row`; the logits are in the context's memory.

    Returns:
        False where the nodes do not simply follow what the context has, and nothing was done.
    """
    context, known, first = row.shard.context, len(row.nodes), len(row.tokens) + len(row.nodes)
    if (
        context is None
        or not contexts.rolls_back
        or not parent == row.end(row.sequence) == known - 1
        or row.kept < len(row.tokens)
        or not row.is_chain
        or first + most > (context.cells if contexts.positions is None else min(context.cells, contexts.positions))
    ):
        return False
    batch, nodes = context.batch, row.nodes
    batch.clear()
    batch.add(token, first, row.sequence, True)
    computed = known
    try:
        for _ in range(most):
            nodes.append(token)
            logits = context.decode()
            computed += 1
            following = choose(logits)
            if following is None:
                break
            token = following
            batch.follow(token)
    finally:
        batch.clear()
        row.parents += range(known - 1, len(nodes) - 1)
        row.depths += range(known, len(nodes))
        row.homes += [row.sequence] * (computed - known)
        row.ends[row.sequence] = computed - 1
    return True
