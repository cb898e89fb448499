"""Graphs for passes over a few tokens of one row, in which the runtime works out no shapes.

A graph for any number of tokens and rows asks each of its operations in each pass whether its shapes have changed, and
gets all of them ready anew where they have. Beside few weights that is a fifth of a pass, and more after a change.
Graphs of fixed sizes are free of it, but each takes some 0.2 s to compile. They are branches of one (`branching`), so
that weights are packed once for all. A process makes them when it is asked to be ready for many requests
(`Engine.warm_up`), and else beside requests, once passes without them have lost as much time as they take to make. That
is the rule for renting skis: rent until the rent would have bought them. Whatever is to come, each of its two stages
costs at most twice what the best decision on it would have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Thread, main_thread
from typing import Any
from weakref import WeakMethod

from foretoken.models.chain import Draws
from foretoken.models.native.cache import Feed
from foretoken.models.native.chaining import CHAIN_STEPS
from foretoken.models.native.compilation import CompiledGraph, CompiledGraphs
from foretoken.models.native.graph_keys import GraphKey, together
from foretoken.models.native.openvino_graph import MOST_PICKS
from foretoken.models.native.widening import FEW, MOST, Widening
from foretoken.models.widths import PassWidths

WIDTHS = (1, 4, 6, 9, 13, 17)
"""Tokens of passes that get graphs of their own; one over another number of tokens is padded to the next of them. The
widest takes the longest chain that the policy considers."""

_STAGES = ((1, 4, 17), WIDTHS)
"""Those that are made together, beside requests. With the first ones there is none that has to get ready anew; passes
of other widths lose time to padding, and the second ones take the place of the first."""

_PADDED = WIDTHS[-2]
"""Tokens of the longest passes that are padded to more with the first ones alone than with all."""

_LOST = 0.2
"""Share of a pass that is lost without them. On outputs of the shipped target it was 0.13 in plain decoding, 0.36 with
drafts of three tokens, which pay for changes, and 0.08 with eight. By widening weights in a pass over five tokens or
more 0.1 to 0.25 of it were lost on a processor with AVX2."""

PROMPT_WIDTHS = (33, 65)
"""Tokens of passes over short prompts, and over the ends of longer ones, that get graphs of their own in a process that
is asked to be ready, where they are branches. Drafts are not padded to these. The first token of prompts of 18 to 33
and of 34 to 65 tokens took 5.2 and 6.3 ms without them, and 3.6 and 5.0 ms with them: 20 MB of weights, two cores."""

CHAIN_WIDTH = 2
"""Tokens before a chain, at most, in its graph: after a round in which it drafted, a drafter lags by one or two."""

_LAGS = (4, 17)
"""Tokens of graphs that read a longer lag before a chain, all of it but the last token: when others drafted, or a
request begins. Chains of two, three and five tokens, by turns after one or two tokens and after 3 to 18, took 0.9 and
1.2 to 1.3 ms where a graph for any number of tokens reads the longer lags, and 0.7 and 1.0 to 1.1 ms with these."""

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
        lags, prompts: make those of `_LAGS` and of `PROMPT_WIDTHS`, too: where graphs are branches. One by itself holds
            the weights once more, which it would find in no cache.
    """

    def __init__(
        self,
        graphs: CompiledGraphs,
        widths: PassWidths,
        run: Callable[[CompiledGraph], Any],
        price: float,
        widening: Widening | None = None,
        *,
        lags: bool = False,
        prompts: bool = False,
    ) -> None:
        self._lags, self._prompt_widths = _LAGS if lags else (), PROMPT_WIDTHS if prompts else ()
        self._graphs, self._widths, self._price, self._widening = graphs, widths, price, widening
        self._run = WeakMethod(run)  # of the backend that holds these graphs
        self._passes: dict[int, CompiledGraph] = {}  # by width, in rising order
        self._prompts: dict[int, CompiledGraph] = {}  # likewise
        self._chains: dict[tuple[int, int, bool], CompiledGraph] = {}  # by width, steps, and whether they draw
        self._lost_chains: set[bool] = set()  # whether they drew, of those whose keys and values lie elsewhere now
        self._lost, self._lost_by_widening = [0.0 for _ in _STAGES], 0.0
        self._maker: Thread | None = None

    def for_pass(self, feeds: Sequence[Feed], picks: int) -> CompiledGraph | None:
        """The graph for a pass over these feeds; None if it is not one of few tokens of one row, or has no graph.

        Args:
            feeds: of the pass.
            picks: of how many tokens logits are wanted, at least 1.
        """
        # Of several rows none fits, and what was planned for one row is over.
        tokens = len(feeds[0].tokens) if len(feeds) == 1 else PROMPT_WIDTHS[-1] + 1
        width = self._widths.narrow_for(tokens)  # before the graphs are looked at: they may be made meanwhile
        graph = self._passes.get(width)
        if not width and picks <= MOST_PICKS:
            width = next((each for each in self._prompts if each >= tokens), 0)
            graph = self._prompts.get(width)
            if graph is not None:
                self._widths.take(width)
        if graph is not None and graph.moved:
            self._forget()
            return None
        return graph

    def _forget(self) -> None:
        """Passes have no graphs any more, until they have lost as much again."""
        self._passes, self._prompts, self._widths.narrow = {}, {}, ()
        self._graphs.drop_moved()
        self._lost = [0.0 for _ in _STAGES]

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
        if stage == 0 or _STAGES[0][1] < size <= _PADDED:
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
        return self._chain(feeds, CHAIN_WIDTH, steps, draws) if len(feeds[0].tokens) <= CHAIN_WIDTH else None

    def for_lag(self, feeds: Sequence[Feed], draws: Draws | None) -> CompiledGraph | None:
        """The graph that reads all tokens before a chain but the last, as a chain of one step; else as `for_chain`.

        None, too, for so few tokens that the graph of the chain takes them all.
        """
        lag = len(feeds[0].tokens) - 1
        width = next((width for width in self._lags if width >= lag), 0)
        return self._chain(feeds, width, 1, draws) if lag >= CHAIN_WIDTH else None

    def _chain(self, feeds: Sequence[Feed], width: int, steps: int, draws: Draws | None) -> CompiledGraph | None:
        if (draws is not None and draws.reproducible) or len(feeds) > 1 or feeds[0].parents is not None:
            return None
        graph = self._chains.get((width, steps, draws is not None))
        if graph is not None and graph.moved:  # so are others: they are made again, beside requests
            graph = None
            moved = [key for key, each in list(self._chains.items()) if each.moved]
            self._lost_chains.update(key[2] for key in moved)
            for key in moved:
                self._chains.pop(key, None)
            self._graphs.drop_moved()
        if graph is None and self._lost_chains:
            self._start(())
        return graph

    def decide(self) -> None:
        """Try whether weights are widened before passes over 5 to 64 tokens, unless that was tried."""
        if self._widening is not None:
            self._widening.decide()

    def prepare_passes(self) -> None:
        """Compile those for passes."""
        self.join()
        self.decide()
        self._add(WIDTHS, self._prompt_widths)

    def _make(self, widths: Sequence[int]) -> None:
        """`_add` beside requests. A process that ends waits for no more than what is being tried or made."""
        try:
            self.decide()
            for key in self._keys_of(widths):
                if main_thread().is_alive():
                    self._graphs(key)
            if main_thread().is_alive():
                self._add(widths)
            while self._lost_chains and main_thread().is_alive():
                self.prepare_chains(next(iter(self._lost_chains)))
        except (RuntimeError, MemoryError):  # decoding goes on as it did
            self._price = float("inf")
            self._lost_chains.clear()
        finally:
            self._maker = None

    def _add(self, widths: Sequence[int], prompts: Sequence[int] = ()) -> None:
        """Have graphs for passes of these widths, in place of any others."""
        if len(widths) <= len(self._passes) and len(prompts) <= len(self._prompts):  # they are there
            return
        old, keys = self._keys_of([*self._passes, *self._prompts]), self._keys_of([*widths, *prompts])
        self._graphs.prepare(keys)
        made = {width: self._graphs(key) for width, key in zip([*widths, *prompts], keys, strict=True)}
        run = self._run()
        if run is None:
            return
        for graph in made.values():
            run(graph)
        self._prompts = {width: made.pop(width) for width in prompts}
        self._passes, self._widths.narrow = made, tuple(made)
        self._graphs.drop(set(old).difference(keys))  # another thread may have added the same

    def _keys_of(self, widths: Sequence[int]) -> list[GraphKey]:
        """Keys of graphs for passes that are made together; asked for once it is decided which weights are widened."""
        return together([GraphKey(width=width, widened=self.for_tokens(width) is not None) for width in widths])

    def prepare_chains(self, drawn: bool) -> list[int]:
        """Compile those for chains of drawn tokens, or of most probable ones; how many steps each new one takes."""
        sizes = [(CHAIN_WIDTH, steps) for steps in CHAIN_STEPS] + [(width, 1) for width in self._lags]
        keys = together([GraphKey((), steps, drawn, width=width) for width, steps in sizes])
        new = self._graphs.prepare(keys)
        self._chains |= {(*size, drawn): self._graphs(key) for size, key in zip(sizes, keys, strict=True)}
        self._lost_chains.discard(drawn)
        return [key.steps or 0 for key in new if key.width == CHAIN_WIDTH]


def lengthened(feed: Feed, width: int) -> Feed:
    """A feed with as many tokens as a graph takes: a chain hangs from its last token.

    Nothing attends to these tokens, and what comes next is written over their keys and values.
    """
    size = len(feed.tokens)
    if size == width:
        return feed
    parents = None if feed.parents is None else [*feed.parents, *range(size - 1, width - 1)]
    return Feed(feed.row, feed.start, [*feed.tokens, *[0] * (width - size)], feed.regime, parents)
