"""Graphs for passes over a few tokens of one row, in which the runtime works out no shapes.

A graph for any number of tokens and rows asks each of its operations in each pass whether its shapes have changed, and
gets all of them ready anew where they have. Beside few weights that is a fifth of a pass, and more after a change.
Graphs of fixed sizes are free of it, but each takes some 0.2 s to compile, and packs the weights again. So a process
makes them when it has run for a while, and only those that it uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from foretoken.models.native.cache import Feed
from foretoken.models.native.compilation import CompiledGraph, CompiledGraphs, GraphKey
from foretoken.models.widths import PassWidths

WIDTHS = (1, 4, 6, 9)
"""Tokens of passes that get graphs of their own; one over another number of tokens is padded to the next of them."""

CHAIN_WIDTH = 2
"""Tokens before a chain, at most, in its graph: after a round in which it drafted, a drafter lags by one or two."""

PASSES, OF_EACH = 200, 20
"""Passes or chains of one row that a model has run before it gets any graph, and those that the graph is for."""

MOST_BYTES = 64_000_000
"""Bytes of weights of the largest model that has such graphs. More weights take longer to read than all of this."""


class NarrowGraphs:
    """The graphs of a model that are made once it has run for a while.

    Args:
        graphs: of the model.
        widths: of its plain passes; they are told which ones have graphs.
    """

    def __init__(self, graphs: CompiledGraphs, widths: PassWidths) -> None:
        self._graphs, self._widths = graphs, widths
        self._used: Counter[GraphKey] = Counter()
        self._ready: frozenset[GraphKey] = frozenset()

    def for_pass(self, feeds: Sequence[Feed]) -> CompiledGraph | None:
        """The graph for a pass over these feeds; None if it is not one of few tokens, or has no graph yet."""
        found = self._find(feeds, WIDTHS, GraphKey())
        if found is not None:
            self._widths.hold(0)
        return found

    def for_chain(self, feeds: Sequence[Feed], steps: int, draws: bool) -> CompiledGraph | None:
        """The graph for chains after these feeds, as `for_pass`."""
        return self._find(feeds, (CHAIN_WIDTH,), GraphKey((), steps, draws))

    def prepare(self) -> None:
        """Compile what is due."""
        if self._used.total() < PASSES:
            return
        due = frozenset(key for key, count in self._used.items() if count >= OF_EACH)
        if due != self._ready:
            self._graphs.prepare(due)
            self._ready = due
            self._widths.narrow = tuple(sorted(key.width or 0 for key in due if key.steps is None))

    def _find(self, feeds: Sequence[Feed], widths: Sequence[int], key: GraphKey) -> CompiledGraph | None:
        if len(feeds) > 1 or feeds[0].parents is not None or len(feeds[0].tokens) > widths[-1]:
            return None
        width = next(width for width in widths if width >= len(feeds[0].tokens))
        key = replace(key, width=width)
        self._used[key] += 1
        return self._graphs(key) if key in self._ready else None


def lengthened(feed: Feed, width: int) -> Feed:
    """A chain with as many tokens as a graph takes.

    Nothing attends to tokens behind the last one, and what comes next is written over their keys and values.
    """
    missing = width - len(feed.tokens)
    return Feed(feed.row, feed.start, [*feed.tokens, *[0] * missing], feed.regime, None) if missing else feed
