"""Graphs for passes over a few tokens of one row, in which the runtime works out no shapes.

A graph for any number of tokens and rows asks each of its operations in each pass whether its shapes have changed, and
gets all of them ready anew where they have. Beside few weights that is a fifth of a pass, and more after a change.
Graphs of fixed sizes are free of it, but each takes some 0.2 s to compile, and packs the weights again. So a process
makes them when it is asked to be ready for many requests (`Engine.warm_up`), and never in a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from foretoken.models.chain import Draws
from foretoken.models.native.cache import Feed
from foretoken.models.native.chaining import CHAIN_STEPS
from foretoken.models.native.compilation import CompiledGraph, CompiledGraphs, GraphKey
from foretoken.models.widths import PassWidths

WIDTHS = (1, 4, 6, 9, 13, 17)
"""Tokens of passes that get graphs of their own; one over another number of tokens is padded to the next of them. The
widest takes the longest chain that the policy considers."""

CHAIN_WIDTH = 2
"""Tokens before a chain, at most, in its graph: after a round in which it drafted, a drafter lags by one or two."""

MOST_BYTES = 64_000_000
"""Bytes of weights of the largest model that has such graphs. More weights take longer to read than all of this."""


class NarrowGraphs:
    """The graphs of a model for one row by itself, once they are asked for.

    Args:
        graphs: of the model.
        widths: of its plain passes; they are told which ones have graphs.
    """

    def __init__(self, graphs: CompiledGraphs, widths: PassWidths) -> None:
        self._graphs, self._widths = graphs, widths
        self._ready: dict[GraphKey, CompiledGraph] = {}
        self._passes: list[CompiledGraph] = []  # of the `WIDTHS`, once there are any

    def for_pass(self, feeds: Sequence[Feed]) -> CompiledGraph | None:
        """The graph for a pass over these feeds; None if it is not one of few tokens of one row, or has no graph."""
        if not self._passes or len(feeds) > 1:
            return None
        for width, graph in zip(WIDTHS, self._passes, strict=True):
            if len(feeds[0].tokens) <= width:
                self._widths.hold(0)
                return graph
        return None

    def for_chain(self, feeds: Sequence[Feed], steps: int, draws: Draws | None) -> CompiledGraph | None:
        """The graph for chains after these feeds, as `for_pass`; none for draws that are to be reproducible.

        q of such a graph is rounded otherwise, and whether a process has it depends on what it was asked for before.
        """
        if draws is not None and draws.reproducible:
            return None
        if len(feeds) > 1 or feeds[0].parents is not None or len(feeds[0].tokens) > CHAIN_WIDTH:
            return None
        return self._ready.get(GraphKey((), steps, draws is not None, width=CHAIN_WIDTH))

    def prepare_passes(self) -> Sequence[int]:
        """Compile those for passes, if they have not been.

        Returns:
            Their widths, if they were compiled now.
        """
        if self._passes:
            return ()
        keys = [GraphKey(width=width) for width in WIDTHS]
        self._prepare(keys)
        self._passes, self._widths.narrow = [self._ready[key] for key in keys], WIDTHS
        return WIDTHS

    def prepare_chains(self, drawn: bool) -> None:
        """Compile those for chains of drawn tokens, or of most probable ones."""
        self._prepare(GraphKey((), steps, drawn, width=CHAIN_WIDTH) for steps in CHAIN_STEPS)

    def _prepare(self, keys: Iterable[GraphKey]) -> None:
        due = frozenset(keys) - self._ready.keys()
        self._graphs.prepare(due)
        self._ready |= {key: self._graphs(key) for key in due}


def lengthened(feed: Feed, width: int) -> Feed:
    """A feed with as many tokens as a graph takes: a chain hangs from its last token.

    Nothing attends to these tokens, and what comes next is written over their keys and values.
    """
    size = len(feed.tokens)
    if size == width:
        return feed
    parents = None if feed.parents is None else [*feed.parents, *range(size - 1, width - 1)]
    return Feed(feed.row, feed.start, [*feed.tokens, *[0] * (width - size)], feed.regime, parents)
