"""Graphs for passes over a few tokens of one row, in which the runtime works out no shapes.

A graph for any number of tokens and rows asks each of its operations in each pass whether its shapes have changed, and
gets all of them ready anew where they have. Beside few weights that is a fifth of a pass, and more after a change.
Graphs of fixed sizes are free of it, but each takes some 0.4 s to compile, and packs the weights again. So a process
makes them when it is asked to be ready for many requests (`Engine.warm_up`), and else beside requests, once passes
without them have lost as much time as they take to make. That is the rule for renting skis: rent until the rent would
have bought them. Whatever is to come, it costs at most twice what the best decision would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import Thread, main_thread
from typing import Any
from weakref import WeakMethod

from foretoken.models.chain import Draws
from foretoken.models.native.cache import Feed
from foretoken.models.native.chaining import CHAIN_STEPS
from foretoken.models.native.compilation import CompiledGraph, CompiledGraphs, GraphKey
from foretoken.models.native.widening import FEW, MOST, Widening
from foretoken.models.widths import PassWidths

WIDTHS = (1, 4, 6, 9, 13, 17)
"""Tokens of passes that get graphs of their own; one over another number of tokens is padded to the next of them. The
widest takes the longest chain that the policy considers."""

_STAGES = ((1, 4, 17), (6, 9, 13))
"""Those that are made together, beside requests. With the first ones there is none that has to get ready anew."""

_LOST = 0.2
"""Share of a pass that is lost without them. On outputs of the shipped target it was 0.13 in plain decoding, 0.36 with
drafts of three tokens, which pay for changes, and 0.08 with eight. By widening weights in a pass over five tokens or
more 0.1 to 0.25 of it were lost on a processor with AVX2."""

CHAIN_WIDTH = 2
"""Tokens before a chain, at most, in its graph: after a round in which it drafted, a drafter lags by one or two."""

MOST_BYTES = 64_000_000
"""Bytes of weights of the largest model that has such graphs. More weights take longer to read than all of this."""


class NarrowGraphs:
    """The graphs of a model for one row by itself, once they are made.

    Args:
        graphs: of the model.
        widths: of its plain passes; they are told which ones have graphs.
        run: a method that runs a graph for the first time, which packs its weights.
        price: seconds that it takes to make one.
        widening: of the model; None where no weights can be widened.
    """

    def __init__(
        self,
        graphs: CompiledGraphs,
        widths: PassWidths,
        run: Callable[[CompiledGraph], Any],
        price: float,
        widening: Widening | None = None,
    ) -> None:
        self._graphs, self._widths, self._price, self._widening = graphs, widths, price, widening
        self._run = WeakMethod(run)  # of the backend that holds these graphs
        self._ready: dict[GraphKey, CompiledGraph] = {}
        self._passes: dict[int, CompiledGraph] = {}  # by width, in rising order
        self._lost, self._lost_by_widening = [0.0 for _ in _STAGES], 0.0
        self._maker: Thread | None = None

    def for_pass(self, feeds: Sequence[Feed]) -> CompiledGraph | None:
        """The graph for a pass over these feeds; None if it is not one of few tokens of one row, or has no graph."""
        # Of several rows none fits, and what was planned for one row is over.
        tokens = len(feeds[0].tokens) if len(feeds) == 1 else WIDTHS[-1] + 1
        width = self._widths.narrow_for(tokens)  # before the graphs are looked at: they may be made meanwhile
        return self._passes.get(width)

    def for_tokens(self, tokens: int) -> CompiledGraph | None:
        """The graph for a pass over so many tokens of any rows; None for the usual one."""
        return self._widening.graph if self._widening is not None and FEW < tokens <= MOST else None

    def took(self, feeds: Sequence[Feed], seconds: float) -> None:
        """A pass over these feeds took so long: graphs that would have been faster are made beside it, once due."""
        size = sum(len(feed.tokens) for feed in feeds)
        if self._widening is not None and not self._widening.decided and FEW < size <= MOST:
            self._lost_by_widening += _LOST * seconds
            if self._lost_by_widening >= self._price:
                self._start(())
        stage = 0 if not self._passes else 1
        if len(feeds) > 1 or size > WIDTHS[-1] or len(self._passes) == len(WIDTHS):
            return
        if stage == 0 or _STAGES[0][1] < size <= _STAGES[1][-1]:
            self._lost[stage] += _LOST * seconds
            if self._lost[stage] >= len(_STAGES[stage]) * self._price:
                self._start(_STAGES[stage])

    def _start(self, widths: Sequence[int]) -> None:
        """Make graphs for these widths beside requests, and decide on widening before; unless some are being made."""
        if self._maker is None:
            self._maker = Thread(target=self._make, args=(widths,), name="foretoken-graphs")
            self._maker.start()

    def join(self) -> None:
        """Wait until what is being made is there."""
        maker = self._maker
        if maker is not None:
            maker.join()

    def for_chain(self, feeds: Sequence[Feed], steps: int, draws: Draws | None) -> CompiledGraph | None:
        """The graph for chains after these feeds, as `for_pass`; none for draws that are to be reproducible.

        q of such a graph is rounded otherwise, and whether a process has it depends on what it was asked for before.
        """
        if draws is not None and draws.reproducible:
            return None
        if len(feeds) > 1 or feeds[0].parents is not None or len(feeds[0].tokens) > CHAIN_WIDTH:
            return None
        return self._ready.get(GraphKey((), steps, draws is not None, width=CHAIN_WIDTH))

    def decide(self) -> None:
        """Try whether weights are widened before passes over 5 to 64 tokens, unless that was tried."""
        if self._widening is not None:
            self._widening.decide()

    def prepare_passes(self) -> None:
        """Compile those for passes."""
        self.join()
        self.decide()
        self._add(WIDTHS)

    def _make(self, widths: Sequence[int]) -> None:
        """`_add` beside requests. A process that ends waits for no more than what is being tried or made."""
        try:
            self.decide()
            for width in widths:
                if main_thread().is_alive():
                    self._graphs(self._key(width))
            if main_thread().is_alive():
                self._add(widths)
        except (RuntimeError, MemoryError):  # decoding goes on as it did
            self._price = float("inf")
        finally:
            self._maker = None

    def _add(self, widths: Sequence[int]) -> None:
        """Have graphs for passes of these widths."""
        keys = {self._key(width): width for width in widths if width not in self._passes}
        self._prepare(keys)
        run = self._run()
        if run is None:
            return
        for key in keys:
            run(self._ready[key])
        made = self._passes | {width: self._ready[key] for key, width in keys.items()}
        self._passes = dict(sorted(made.items()))
        self._widths.narrow = tuple(self._passes)

    def _key(self, width: int) -> GraphKey:
        return GraphKey(width=width, widened=self.for_tokens(width) is not None)

    def prepare_chains(self, drawn: bool) -> list[int]:
        """Compile those for chains of drawn tokens, or of most probable ones; the lengths of those that are new."""
        keys = {GraphKey((), steps, drawn, width=CHAIN_WIDTH): steps for steps in CHAIN_STEPS}
        return [keys[key] for key in self._prepare(keys)]

    def _prepare(self, keys: Iterable[GraphKey]) -> list[GraphKey]:
        due = [key for key in keys if key not in self._ready]
        self._graphs.prepare(due)
        self._ready |= {key: self._graphs(key) for key in due}
        return due


def lengthened(feed: Feed, width: int) -> Feed:
    """A feed with as many tokens as a graph takes: a chain hangs from its last token.

    Nothing attends to these tokens, and what comes next is written over their keys and values.
    """
    size = len(feed.tokens)
    if size == width:
        return feed
    parents = None if feed.parents is None else [*feed.parents, *range(size - 1, width - 1)]
    return Feed(feed.row, feed.start, [*feed.tokens, *[0] * (width - size)], feed.regime, parents)
