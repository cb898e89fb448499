"""The OpenVINO backend: scores feeds over a paged KV cache on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from itertools import accumulate
from threading import Lock
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from foretoken.models.chain import Chains, Draws, placed, probs_of
from foretoken.models.mapped import trim
from foretoken.models.native.cache import Feed, NativeCache, prefill_chunk
from foretoken.models.native.chaining import (
    CHAIN_STEPS,
    MOST_CHAINED,
    chain_keys,
    draw_arrays,
    next_pass_arrays,
    steps_of_call,
)
from foretoken.models.native.checkpoint import Weights
from foretoken.models.native.compilation import CompiledGraph, CompiledGraphs
from foretoken.models.native.feed_arrays import begin_earlier, bends, rotation, score_by_path, trees
from foretoken.models.native.graph_keys import CompileOptions, GraphKey
from foretoken.models.native.linear import ROUNDED_INPUTS, Quantize
from foretoken.models.native.narrow import MOST_BYTES, NarrowGraphs, lengthened
from foretoken.models.native.openvino_network import DecoderNetwork, Network
from foretoken.models.native.paging import BLOCK, FIRST_BLOCKS, BlockPool, PagedStore, context_room
from foretoken.models.native.rope import Rotary
from foretoken.models.native.sequences import Sequences, first_wanted, stands_alone
from foretoken.models.native.widening import Widening
from foretoken.models.processor import multiplies_rows_alike
from foretoken.models.widths import WIDE, PassWidths, least_for, patience_for

_PREFILL_ROUNDED = 128
"""Tokens of a prefill pass over rounded weights: what lies between layers takes memory for each of them.

495 tokens of a 468M model in passes of 512, 256, 128, 64 and 32 took 1.40, 1.35, 1.36, 1.44 and 1.50 s as Q8_0, and
1.48, 1.47, 1.42, 1.48 and 1.80 s as Q4_K_M; as BF16 3.28, 3.32, 3.44, 4.16 and 4.20 s.
"""

_PREFILL_SAVING = 64
"""The same for GGUF files that are large enough for their memory to count: it takes 7 MiB less of 910.

495 tokens of a 500M model in passes of 128 and 64 took 0.59 and 0.61 s as Q8_0, and 0.73 and 0.79 s as Q4_K_M (AVX-512
with VNNI, two threads; llama.cpp 2.4 and 2.3 s).
"""

_ADDRESSED = 65536
"""Slots for which a small model's keys and values have addresses at least. Where they lie is part of some of its
graphs, which are lost when it changes; addresses cost nothing."""

_MARK = 0x3F
"""Bytes of memory that is looked at for keys and values. They may well be zeros: those of a token that is a zero vector
are, and such a vector is what padding often has. As numbers of any type, these bytes are some 0.75."""

AnyFeed = TypeVar("AnyFeed", bound=Feed)

Continue = Callable[[AnyFeed, int, list[Tensor]], None]
"""Given a feed, the last token of its chain and the graph's `carried` outputs: puts what the next call starts with in
place of the feed's tokens."""


class OpenVinoBackend:
    """Scores feeds with OpenVINO's runtime on the CPU, with as many threads as torch has when the model is loaded.

    The graph of a plain pass is compiled at once, that of passes with hidden states by `warm_up`, those of chains by
    `warm_up_chains`; what has not been compiled is when it is first needed. Small models have graphs for few tokens of
    one row besides: see `foretoken.models.native.narrow`.

    Args:
        weights: of the checkpoint.
        dtype: of weights: float32 or bfloat16.
        quantize: "int8" for linear layers of eight bits, "int4" for `Int4Weights`; "w8a8" and "w4a8" for inputs of
            eight bits too.
        network: what is run; None for the decoder of the weights.
    """

    name = "openvino"
    ragged = True
    own_threads = True
    prepares_in_turn = False
    layer_seconds = 0.0  # which is of GPUs alone
    chain_sizes: tuple[int, ...] = CHAIN_STEPS[::-1]

    def __init__(
        self, weights: Weights, dtype: torch.dtype, quantize: Quantize | None = None, network: Network | None = None
    ) -> None:
        self.spec = spec = weights.spec
        self._weights, self._dtype, self.quantize = weights, dtype, quantize
        cache_dtype = weights.cache_dtype or dtype
        size = weights.bytes()
        small = size <= MOST_BYTES
        rounds = quantize in ROUNDED_INPUTS or weights.rounds_inputs
        # In float32, many weights of 16 bits are multiplied with few rows by another kernel than with more rows.
        exact = small or dtype is torch.bfloat16 or not weights.keeps_16_bits
        self.rounds_alike = quantize is None and not weights.rounds_inputs and exact and multiplies_rows_alike()
        group = weights.input_group if rounds else 0
        decoder = DecoderNetwork(weights, cache_dtype, quantize, group, small=small)
        self._network = network or decoder
        self._windows = set(spec.windows)
        self._single = spec.groups >= torch.get_num_threads()  # else threads would be idle in a long row's attention
        self.chains = weights.bytes() <= MOST_CHAINED
        self._rotary = Rotary(spec.config, spec.rotary_dim)
        room = max(spec.max_length, _ADDRESSED) if small else spec.max_length
        self.pool = BlockPool(spec.layers, spec.groups, spec.head_dim, cache_dtype, room)
        self._lock = Lock()
        self._layers: int | None = None  # that are run; all
        least = least_for(size, bfloat16=dtype is torch.bfloat16 and quantize is None)
        self._saves = weights.rounds_inputs and not small
        self.prefill_tokens = _PREFILL_SAVING if self._saves else _PREFILL_ROUNDED if rounds else None
        tells = WIDE - 1 if quantize is not None or weights.rounds_inputs else 1
        patience, threads = patience_for(size), torch.get_num_threads()
        self._options = CompileOptions(dtype, cache_dtype, group, threads, patience, least, tells)
        narrows = small and network is None  # networks that are fed more than tokens take any number of them
        widens = quantize is None and weights.keeps_16_bits
        # In a branch the runtime would widen 16-bit weights as it compiles it, and its passes would read twice as much.
        joins = narrows and not widens
        lands = self.lands if joins else None
        self.graphs = CompiledGraphs(self._network.graphs, self.pool, self._options, lands)
        self._scratch = [self.pool.take()]  # where padding writes keys and values
        start = perf_counter()
        self._plain = self.graphs(GraphKey())
        price = perf_counter() - start
        self.narrow: NarrowGraphs | None = None
        if narrows:
            widening = Widening(self.graphs, self.try_out, decoder.forget_widened) if widens else None
            further = {"lags": joins, "prompts": joins and tells == 1}
            self.narrow = NarrowGraphs(self.graphs, self._plain.widths, self.try_out, price, widening, **further)

    def exit_after(self, layers: int) -> OpenVinoBackend:
        """The same caches, with the first layers alone run: in graphs of their own, which hold their weights again."""
        early = copy(self)
        early._layers, early.narrow = layers, None
        early.graphs = CompiledGraphs(self._network.graphs, self.pool, self._options)
        early.chains = self._weights.bytes(layers) <= MOST_CHAINED
        early._plain = early.graphs(GraphKey(layers=layers))
        return early

    def embeddings(self) -> Tensor:
        """See `LanguageModel`."""
        return self._weights.embedding()

    def open(self, batch_size: int) -> NativeCache:
        """A cache of empty rows."""
        return NativeCache(PagedStore(self.pool, batch_size), batch_size)

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """See `LanguageModel.cache_bytes`."""
        blocks = sum(-(-length // BLOCK) for length in lengths)
        return (blocks + max(blocks // 2, FIRST_BLOCKS)) * BLOCK * self.spec.slot_size * self.pool.tensors[0].itemsize

    def score(
        self, cache: NativeCache, feeds: Sequence[Feed], picks: Sequence[tuple[int, int]], hidden_layers: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """See `TorchBackend.score`."""
        if any(bends(feed, self._windows) for feed in feeds):
            return score_by_path(lambda paths, wanted: self.score(cache, paths, wanted, hidden_layers), feeds, picks)
        narrow = self.narrow if not hidden_layers else None
        graph = narrow.for_pass(feeds, len(picks)) if narrow and picks else None
        start = perf_counter()
        outputs = None
        with self._lock:
            if graph is not None:
                fed: Sequence[Feed] = feeds
            else:
                graph = self._graph(hidden_layers)
                fed = self._padded(feeds, graph.widths)
                graph = (narrow.for_tokens(sum(len(feed.tokens) for feed in fed)) if narrow else None) or graph
            apart = [
                stands_alone(feed, wanted, alike=self.rounds_alike, single=self._single)
                for feed, wanted in zip(feeds, first_wanted(feeds, picks), strict=True)
            ]
            arrays = self._arrays(cache, fed, apart=apart, width=graph.width)
            begins = [0, *accumulate(len(feed.tokens) for feed in feeds)]
            nodes = [begins[feed] + node for feed, node in picks] or [0]
            arrays["picks"] = nodes + [0] * (graph.picks - len(nodes))
            if not graph.moved:
                outputs = graph.run(arrays)
        if outputs is None:  # the rows' blocks took more memory than was set aside
            return self.score(cache, feeds, picks, hidden_layers)
        if narrow and picks:
            narrow.took(feeds, perf_counter() - start)
        if self._saves and any(len(feed.tokens) == self.prefill_tokens for feed in feeds):
            trim()  # what has been freed of such a pass: 0.6 ms of a heap of 0.8 GB
        if len(picks) < len(arrays["picks"]):
            outputs = [values[: len(picks)] for values in outputs]
        return outputs[0], outputs[1:]

    def try_out(self, graph: CompiledGraph, tokens: int = 1) -> Tensor:
        """Logits ``[T, V]`` of as many tokens as a graph takes, or so many: its first run packs weights.

        None of them where it has lost the pool.
        """
        size = graph.width or min(tokens, self.spec.max_length)
        with self._lock:
            cache, text = self.open(1), [at % self.spec.vocab_size for at in range(size)]
            arrays = self._arrays(cache, [Feed(0, 0, text, 0, None)])
            if graph.moved:  # it has no place for blocks that were taken since; it will not be used
                return torch.empty(0)
            return graph.run(arrays | {"picks": list(range(graph.picks or size))})[0]

    def lands(self, graph: CompiledGraph, key: GraphKey) -> bool:
        """Whether a graph of a fixed width writes its keys and values to the pool, by running it for no request."""
        width, steps, store = graph.width or 1, key.steps or 1, PagedStore(self.pool, 1)
        cache, feed = NativeCache(store, 1), Feed(0, 0, [0] * width, 0, None)
        with self._lock:
            if key.steps is None:
                arrays = self._arrays(cache, [feed]) | {"picks": list(range(graph.picks))}
            else:
                arrays = self._chain_arrays(cache, [feed], steps, width)
            if key.draws:
                arrays |= draw_arrays(Draws(torch.ones(1), torch.zeros(1, steps, dtype=torch.float64)), slice(0, steps))
            with self.pool.lock:
                found, blocks = [array.view(np.uint8) for array in self.pool.arrays], store.tables[0]
                for array in found:
                    array[blocks] = _MARK
            if graph.moved:  # while it was compiled: it has no place for the blocks that were taken since
                return False
            graph.run(arrays)
            return not graph.moved and all(bool((array[blocks] != _MARK).any()) for array in found)

    def pass_widths(self, hidden_layers: Sequence[int]) -> PassWidths:
        """See `LanguageModel.pass_widths`."""
        return self._graph(hidden_layers).widths

    def warm_up(self, hidden_layers: Sequence[int]) -> None:
        """See `LanguageModel.warm_up`."""
        self._graph(hidden_layers)

    def _graph(self, hidden_layers: Sequence[int]) -> CompiledGraph:
        """The graph of passes over any number of tokens."""
        return self.graphs(GraphKey(tuple(hidden_layers), layers=self._layers)) if hidden_layers else self._plain

    def warm_up_chains(self, drawn: bool) -> list[int]:
        """See `LanguageModel.warm_up_chains`.

        Returns:
            Steps of the graphs that were compiled now.
        """
        keys = chain_keys(drawn, self._layers) if self.chains else []
        made = [key.steps or 0 for key in self.graphs.prepare(keys)]
        if made and not drawn and self.narrow is not None:
            # A model that drafts best tokens reads outputs (`Drafter.read`): the first such pass packs weights again.
            self.try_out(self._plain, WIDE)
        return made

    def chain(self, cache: NativeCache, rows: Sequence[Sequence[int]], steps: int, draws: Draws | None) -> Chains:
        """See `NativeModel.chain`."""
        feeds = [
            Feed(index, row.kept, list(tokens), row.regime, None)
            for index, (row, tokens) in enumerate(zip(cache.rows, rows, strict=True))
            if tokens
        ]

        def go_on(feed: Feed, token: int, outputs: list[Tensor]) -> None:
            feed.tokens = [min(token, self.spec.vocab_size - 1)]

        return self.chain_feeds(cache, feeds, steps, draws, len(rows), go_on)

    def chain_feeds(
        self,
        cache: NativeCache,
        feeds: Sequence[AnyFeed],
        steps: int,
        draws: Draws | None,
        rows: int,
        go_on: Continue[AnyFeed],
    ) -> Chains:
        """Draft a chain after each feed: a call of the runtime for every five steps, and one for those left over.

        Args:
            cache: the rows'.
            feeds: what comes before the chains, one a row at most.
            steps: of all chains.
            draws: of the rows; None for the best tokens.
            rows: how many there are.
            go_on: prepares a feed for the next call.
        """
        if draws is not None:
            draws = draws.of([feed.row for feed in feeds])
        for feed in feeds:
            while len(feed.tokens) > (most := prefill_chunk(self.prefill_tokens)):
                self.score(cache, [feed.split(most)], [], ())
        lag = self.narrow.for_lag(feeds, draws) if self.narrow else None
        if lag is not None:  # keys and values of all tokens but the last
            first = copy(feeds[0])
            first.tokens = first.tokens[:-1]
            with self._lock:
                arrays = self._chain_arrays(cache, [first], 1, lag.width)
                if draws is not None:
                    arrays |= draw_arrays(draws, slice(0, 1))
                if not lag.moved:
                    lag.run(arrays)
                    feeds[0].split(len(first.tokens))
        chains: list[list[int]] = [[] for _ in range(rows)]
        probs: list[Tensor] = []
        done = 0
        while done < steps:
            size = steps_of_call(steps - done)
            graph = self.narrow.for_chain(feeds, size, draws) if self.narrow else None
            graph = graph or self.graphs(GraphKey((), size, draws is not None, self._layers))
            with self._lock:
                if done == 0 and graph.width is None:  # later on, the tokens before a feed are the chain's own
                    given = sum(len(feed.tokens) for feed in feeds)
                    missing = graph.widths.fit(given) - given
                    if self._layers is None:  # else the cache is another model's
                        begin_earlier(cache, feeds, missing)
                arrays = self._chain_arrays(cache, feeds, size, graph.width)
                if graph.moved:  # the row's blocks took more memory than was set aside
                    continue
                if draws is not None:
                    arrays |= draw_arrays(draws, slice(done, done + size))
                drafted, *outputs = graph.run(arrays)
            if draws is not None:
                probs.append(outputs.pop(0))
            for feed, tokens in zip(feeds, drafted.T.tolist(), strict=True):
                chains[feed.row] += tokens
                feed.start += len(feed.tokens) + size - 1
                go_on(feed, tokens[-1], outputs)
            done += size
        chains = [chain[:steps] for chain in chains]
        if draws is None:
            return Chains(chains)
        drawn = probs_of((probs[0] if len(probs) == 1 else torch.cat(probs, dim=1))[:, :steps])
        return Chains(chains, placed(drawn, [feed.row for feed in feeds], rows))

    def _chain_arrays(self, cache: NativeCache, feeds: Sequence[Feed], steps: int, width: int | None) -> dict[str, Any]:
        """Inputs of a graph of so many steps, which takes any number of tokens or so many of one row."""
        ends = [feed.start + len(feed.tokens) for feed in feeds]
        arrays = self._arrays(cache, feeds, steps - 1, width=width)
        arrays["picks"] = [end - 1 for end in accumulate(len(feed.tokens) for feed in feeds)]
        if steps > 1:
            arrays |= next_pass_arrays(self._rotary.table(0, max(ends) + steps), ends, steps)
        return arrays

    def _padded(self, feeds: Sequence[Feed], widths: PassWidths) -> Sequence[Feed]:
        """The feeds, and one of no row if the pass is to be wider."""
        size = sum(len(feed.tokens) for feed in feeds)
        missing = widths.fit(size) - size
        if not missing:
            return feeds
        while len(self._scratch) * BLOCK < missing:
            self._scratch.append(self.pool.take())
        return [*feeds, Feed(-1, 0, [0] * missing, 0, None)]

    def _arrays(
        self,
        cache: NativeCache,
        feeds: Sequence[Feed],
        margin: int = 0,
        *,
        apart: Sequence[bool] = (),
        width: int | None = None,
    ) -> dict[str, Any]:
        """A graph's inputs for feeds, all but `picks`.

        Args:
            cache: the rows'.
            feeds: of the pass.
            margin: slots that each row gets blocks for besides.
            apart: of the first feeds, whether each token is a sequence by itself (`stands_alone`); not so of others.
            width: tokens that the graph takes of one feed; None for any number.
        """
        store = cache.store
        assert isinstance(store, PagedStore)
        apart, padding = [*apart, *[False] * (len(feeds) - len(apart))], 0
        if width is not None:
            padding = width - len(feeds[0].tokens)
            if not apart[0]:
                feeds, padding = [lengthened(feeds[0], width)], 0
        sequences = Sequences()
        for feed, is_apart in zip(feeds, apart, strict=True):
            end = feed.start + len(feed.tokens)
            table = store.reserve(feed.row, end + margin) if feed.row >= 0 else self._scratch
            add = sequences.add_each if is_apart else sequences.add
            add(feed.start, len(feed.tokens), table[: -(-(end + margin) // BLOCK)])
        if any(apart):
            sequences.close(padding, self._scratch[0])
        cosines, sines = rotation(self._rotary, feeds, padding)
        masks, mask_begins = trees(feeds, apart, len(sequences.starts))
        return {
            "tokens": [token for feed in feeds for token in feed.tokens] + [0] * padding,
            "cosines": cosines,
            "sines": sines,
            "max_context_len": context_room(max(feed.start + len(feed.tokens) for feed in feeds)),
            "tree": masks,
            "tree_begins": mask_begins,
            **sequences.arrays(),
            **self._network.arrays(feeds),
        }
