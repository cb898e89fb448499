"""The OpenVINO backend: keys and values in blocks that all batches of a model share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cache
from itertools import accumulate
from threading import Lock, RLock
from typing import Any, TypeVar
from weakref import finalize

import numpy as np
import openvino as ov
import torch
from torch import Tensor

from foretoken.limits import current_limits
from foretoken.models.chain import Chains, Draws, placed
from foretoken.models.native.cache import Feed, NativeCache
from foretoken.models.native.checkpoint import Weights
from foretoken.models.native.linear import Quantize
from foretoken.models.native.openvino_graph import BLOCK, UNITS, Graph, shared
from foretoken.models.native.rope import Rotary

_AnyFeed = TypeVar("_AnyFeed", bound=Feed)

CHAINS = (5, 3, 2, 1)
"""Steps that are compiled into one graph; whatever number is asked for is made up of these, the rest dropped."""

MOST_CHAINED = 64_000_000
"""Bytes of weights of the largest model that takes several steps in one call.

Between two steps there is a third of a millisecond to save. Reading more weights than these takes several times that,
and a graph of several steps takes several times as long to compile.
"""

_INPUT_GROUP = 32

_FEW_ROWS, _PADDED_ROWS = 2, 4
"""Passes over so few tokens are padded to so many where many weights are bfloat16.

oneDNN's kernel for AVX-512 multiplies a matrix with four rows faster than with one or two: it read 34 GB/s of weights
for four, 29 for one and 26 for two on a machine whose memory gives 36 (and 41, 33 and 28 where it gives 59).
"""

_LEAST_PADDED = 100_000_000
"""Bytes of weights from which on that is so. Those that stay in the processor's caches are fastest with one row: 17 MB
took 1.2 ms, and 1.6 ms with four."""

_PATIENCE, _PATIENCE_OF_LARGE = 28, 4
"""Padding, in tokens, that is spent before a pass of another width than the last one; see `Widths`.

A pass of another width costs 25 to 60 % more than one of the same: 1.2 ms of 2, where another token costs 0.06 ms, with
17 MB of weights; 5 ms of 37, where it costs 1.2 ms or more, with 900 MB.
"""

_FIRST_BLOCKS = 16
"""Blocks that a model begins with; when they run out, there are half as many more."""


class Pool:
    """Blocks of keys and values, of `BLOCK` slots in every layer.

    Args:
        layers: of the model.
        groups: key and value heads, G.
        head_dim: D.
        dtype: of keys and values.

    Attributes:
        tensors: keys, then values, of each layer in turn: ``[blocks, G, BLOCK, D]``.
        version: changes when the tensors are others.
    """

    def __init__(self, layers: int, groups: int, head_dim: int, dtype: torch.dtype) -> None:
        shape = (_FIRST_BLOCKS, groups, BLOCK, head_dim)
        self.tensors = [torch.zeros(shape, dtype=dtype) for _ in range(2 * layers)]
        self.version = 0
        self._free = list(range(_FIRST_BLOCKS))
        self._lock = RLock()  # the garbage collector may give blocks back at any time, in `take` as well

    def take(self) -> int:
        """A block that nobody else has."""
        with self._lock:
            if not self._free:
                self._grow()
            return self._free.pop()

    def give_back(self, blocks: Sequence[int]) -> None:
        """Let others have blocks."""
        with self._lock:
            self._free.extend(blocks)

    def _grow(self) -> None:
        size = self.tensors[0].shape[0]
        for number, old in enumerate(self.tensors):
            new = old.new_zeros((size + size // 2, *old.shape[1:]))
            new[:size] = old
            self.tensors[number] = new
        self._free.extend(range(size, size + size // 2))
        self.version += 1


def _release(pool: Pool, tables: list[list[int]]) -> None:
    for table in tables:
        pool.give_back(table)


class PagedStore:
    """The blocks of a batch's rows: rows come, go and change places by their lists of blocks alone.

    Args:
        pool: where blocks come from.
        rows: how many there are.
    """

    def __init__(self, pool: Pool, rows: int) -> None:
        self._pool = pool
        self.tables: list[list[int]] = [[] for _ in range(rows)]
        finalize(self, _release, pool, self.tables)

    def reserve(self, row: int, slots: int) -> list[int]:
        """The row's blocks, at least as many as the slots take."""
        table = self.tables[row]
        while len(table) * BLOCK < slots:
            table.append(self._pool.take())
        return table

    def move(self, rows: list[int], sources: list[int], targets: list[int]) -> None:
        """See `Store`."""
        old, new = (
            [self.tables[row][slot // BLOCK] for row, slot in zip(rows, slots, strict=True)]
            for slots in (sources, targets)
        )
        old_slots, new_slots = ([slot % BLOCK for slot in slots] for slots in (sources, targets))
        for tensor in self._pool.tensors:
            tensor[new, :, new_slots] = tensor[old, :, old_slots]

    def select(self, rows: Sequence[int], kept: Sequence[int], cut: Sequence[int] = ()) -> None:
        """See `Store`."""
        old = list(self.tables)
        sizes = [-(-slots // BLOCK) for slots in kept]
        heirs: dict[int, int] = {}  # of each old row, the new one that takes its blocks over: the longest
        for place, row in enumerate(rows):
            if row >= 0 and (row not in heirs or sizes[place] > sizes[heirs[row]]):
                heirs[row] = place
        for row, table in enumerate(old):  # before others are taken, or there would be too many at once
            size = sizes[heirs[row]] if row in heirs else 0
            spare = table[size:]
            del table[size:]
            self._pool.give_back(spare)
        self.tables[:] = [
            [] if row < 0 else old[row] if heirs[row] == place else self._copy(old[row][: sizes[place]])
            for place, row in enumerate(rows)
        ]

    def _copy(self, table: list[int]) -> list[int]:
        new = [self._pool.take() for _ in table]
        for tensor in self._pool.tensors:
            tensor[new] = tensor[table]
        return new


class Widths:
    """How many tokens the passes of a graph are padded to, so that they are as many as in the pass before.

    The runtime gets every operation ready anew when their number is another one, which may take as long as the pass.
    A pass over more tokens than the last one is as wide as it must be. One over fewer is padded to the same width,
    until the padding since the last pass that filled it has cost what another width would. What a pass computes does
    not depend on its width but for rounding: the runtime may sum in another order.

    Args:
        patience: tokens of padding that are spent on one width; never more in one pass.
    """

    def __init__(self, patience: int) -> None:
        self._patience = min(patience, BLOCK - _PADDED_ROWS)  # padding has one block of slots
        self._width = self._spent = self._most = 0

    def fit(self, tokens: int) -> int:
        """The width of the next pass, over so many tokens."""
        if tokens >= self._width:
            self._width, self._spent, self._most = tokens, 0, 0
            return tokens
        self._spent += self._width - tokens
        self._most = max(self._most, tokens)
        if self._spent > self._patience:
            width = self._most if self._most - tokens <= self._patience else tokens
            self._width, self._spent, self._most = width, 0, 0
        return self._width


class OpenVinoBackend:
    """Scores feeds with OpenVINO's runtime on the CPU, with as many threads as torch has when the model is loaded.

    Args:
        weights: of the checkpoint.
        dtype: of weights, keys and values: float32 or bfloat16.
        quantize: "int8" for linear layers of eight bits, "w8a8" for inputs of eight bits too.
    """

    name = "openvino"
    ragged = True
    own_threads = True

    def __init__(self, weights: Weights, dtype: torch.dtype, quantize: Quantize | None = None) -> None:
        self.spec = spec = weights.spec
        self._weights, self._dtype, self.quantize = weights, dtype, quantize
        self._windows = set(spec.windows)
        self.chains = weights.bytes() <= MOST_CHAINED
        self._rotary = Rotary(spec.config, spec.rotary_dim)
        self._pool = Pool(spec.layers, spec.groups, spec.head_dim, dtype)
        self._requests: dict[tuple[tuple[int, ...], int | None, bool], _Request] = {}
        self._lock = Lock()
        self._threads = torch.get_num_threads()
        self._layers: int | None = None  # that are run; all
        large = weights.bytes() >= _LEAST_PADDED
        self._pads = large and dtype is torch.bfloat16 and quantize is None
        self._patience = _PATIENCE_OF_LARGE if large else _PATIENCE
        self._scratch = [self._pool.take()]  # where tokens that are padding leave keys and values
        self._request(())

    def exit_after(self, layers: int) -> OpenVinoBackend:
        """The same caches, with the first layers alone run: in graphs of their own, which hold their weights again."""
        early = copy(self)
        early._layers, early._requests = layers, {}
        early.chains = self._weights.bytes(layers) <= MOST_CHAINED
        return early

    def embeddings(self) -> Tensor:
        """See `LanguageModel`."""
        return self._weights.embedding()

    def open(self, batch_size: int) -> NativeCache:
        """A cache of empty rows."""
        return NativeCache(PagedStore(self._pool, batch_size), batch_size)

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """See `LanguageModel.cache_bytes`."""
        blocks = sum(-(-length // BLOCK) for length in lengths)
        return (blocks + max(blocks // 2, _FIRST_BLOCKS)) * BLOCK * self.spec.slot_size * self._dtype.itemsize

    def score(
        self, cache: NativeCache, feeds: Sequence[Feed], picks: Sequence[tuple[int, int]], hidden_layers: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """See `TorchBackend.score`."""
        if any(self._bends(feed) for feed in feeds):
            return self._score_by_path(cache, feeds, picks, hidden_layers)
        request = self._request(tuple(hidden_layers))
        with self._lock:
            arrays = self._arrays(cache, self._padded(feeds, request.widths))
            begins = arrays["subsequence_begins"]
            arrays["picks"] = _int32([begins[feed] + node for feed, node in picks] or [0])
            logits, *hidden = request.run(arrays)
        return logits[: len(picks)], [states[: len(picks)] for states in hidden]

    def _bends(self, feed: Feed) -> bool:
        """Whether a tree reaches beyond a window, which OpenVINO counts in slots, and not in positions."""
        end = feed.start + len(feed.tokens)
        return feed.parents is not None and any(window is not None and end > window for window in self._windows)

    def _score_by_path(
        self, cache: NativeCache, feeds: Sequence[Feed], picks: Sequence[tuple[int, int]], hidden_layers: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """`score` by passes over chains: in each pass the next path of every tree."""
        missing = {pick: place for place, pick in enumerate(picks)}
        places: list[int] = []
        parts: list[list[Tensor]] = []
        paths = [feed.paths() for feed in feeds]
        for turn in range(max(map(len, paths))):
            chains: list[Feed] = []
            wanted: list[tuple[int, int]] = []
            for number, (feed, ways) in enumerate(zip(feeds, paths, strict=True)):
                if turn >= len(ways):
                    continue
                path = ways[turn]
                for place, node in enumerate(path):
                    if (number, node) in missing:
                        places.append(missing.pop((number, node)))
                        wanted.append((len(chains), place))
                chains.append(Feed(feed.row, feed.start, [feed.tokens[node] for node in path], feed.regime, None))
            logits, hidden = self.score(cache, chains, wanted, hidden_layers)
            parts.append([logits, *hidden])
        for feed in feeds:
            feed.lost = feed.parents is not None
        order = torch.tensor(places, dtype=torch.int64).argsort()
        first, *others = (torch.cat(same)[order] for same in zip(*parts, strict=True))
        return first, others

    def _rotation(self, feeds: Sequence[Feed]) -> tuple[Any, Any]:
        """Cosines and sines ``[T, 1, 1, R]``."""
        parts = []
        for feed in feeds:
            size = len(feed.tokens)
            table = self._rotary.table(feed.regime, feed.start + size)
            if feed.parents is None:
                parts.append(table[:, feed.start : feed.start + size])
            else:
                parts.append(table[:, torch.tensor(feed.depths()) + feed.start])
        both = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))[:, :, None, None]
        # Copies: an input's memory is written to later on.
        return both[0].clone().numpy(), both[1].clone().numpy()

    def warm_up(self) -> None:
        """Compile what `chain` needs for the likeliest tokens, all at a time: else it would be done within a text."""
        self._warm_up(draws=False)

    def _warm_up(self, draws: bool) -> None:
        if self.chains and not all(((), steps, draws) in self._requests for steps in CHAINS):
            with ThreadPoolExecutor(len(CHAINS)) as pool:
                list(pool.map(lambda steps: self._request((), steps, draws), CHAINS))

    def chain(self, cache: NativeCache, rows: Sequence[Sequence[int]], steps: int, draws: Draws | None) -> Chains:
        """See `NativeModel.chain`: a call of the runtime for every five steps, and one for what is left of them."""
        feeds = [
            Feed(place, row.kept, list(tokens), row.regime, None)
            for place, (row, tokens) in enumerate(zip(cache.rows, rows, strict=True))
            if tokens
        ]

        def go_on(feed: Feed, token: int, outputs: list[Tensor]) -> None:
            feed.tokens = [min(token, self.spec.vocab_size - 1)]

        return self._chain(cache, feeds, steps, draws, len(rows), go_on)

    def _chain(
        self,
        cache: NativeCache,
        feeds: Sequence[_AnyFeed],
        steps: int,
        draws: Draws | None,
        rows: int,
        go_on: Callable[[_AnyFeed, int, list[Tensor]], None],
    ) -> Chains:
        """Chains of so many steps after feeds, as those of so many rows.

        Args:
            cache: the rows'.
            feeds: what comes before the chains, one a row at most.
            steps: of all chains.
            draws: of the rows; None for the likeliest tokens.
            rows: how many there are.
            go_on: given a feed, the last token of its chain and what else the graph gave, puts what goes on from there
                in place of the feed's tokens.
        """
        if draws is not None:
            self._warm_up(draws=True)
            draws = draws.of([feed.row for feed in feeds])
        for feed in feeds:
            while len(feed.tokens) > (chunk := current_limits().prefill_tokens):
                self.score(cache, [self._beginning(feed, chunk)], [], ())
        chains: list[list[int]] = [[] for _ in range(rows)]
        laws: list[Tensor] = []
        done = 0
        while done < steps:
            size = _size_of_call(steps - done)
            request = self._request((), size, draws is not None)
            with self._lock:
                if done == 0:  # later on, what comes before are tokens of the chain
                    self._widened(cache, feeds, request.widths)
                arrays = self._chain_arrays(cache, feeds, size)
                if draws is not None:
                    arrays |= _draw_arrays(draws, slice(done, done + size))
                found, *outputs = request.run(arrays)
            if draws is not None:
                laws.append(torch.stack(outputs[:size], dim=1))
                outputs = outputs[size:]
            for feed, tokens in zip(feeds, found.T.tolist(), strict=True):
                chains[feed.row] += tokens
                feed.start += len(feed.tokens) + size - 1
                go_on(feed, tokens[-1], outputs)
            done += size
        chains = [chain[:steps] for chain in chains]
        if draws is None:
            return Chains(chains)
        drawn = _laws(torch.cat(laws, dim=1)[:, :steps])
        return Chains(chains, placed(drawn, [feed.row for feed in feeds], rows))

    def _chain_arrays(self, cache: NativeCache, feeds: Sequence[Feed], steps: int) -> dict[str, Any]:
        """Inputs of a graph of so many steps."""
        ends = [feed.start + len(feed.tokens) for feed in feeds]
        arrays = self._arrays(cache, feeds, steps - 1)
        arrays["picks"] = arrays["subsequence_begins"][1:] - 1
        if steps > 1:
            table = self._rotary.table(0, max(ends) + steps)
            turns = table[:, (torch.arange(steps - 1)[:, None] + torch.tensor(ends)).flatten(), None, None].numpy()
            arrays["next_cosines"], arrays["next_sines"] = turns[0], turns[1]
            arrays["next_lens"] = _int32(ends)
            arrays["next_begins"] = np.arange(len(ends) + 1, dtype=np.int32)
        return arrays

    def _padded(self, feeds: Sequence[Feed], widths: Widths) -> Sequence[Feed]:
        """The feeds, and one of no row's if the pass is to be wider."""
        size = sum(len(feed.tokens) for feed in feeds)
        missing = widths.fit(_PADDED_ROWS if self._pads and size <= _FEW_ROWS else size) - size
        return [*feeds, Feed(-1, 0, [0] * missing, 0, None)] if missing else feeds

    def _widened(self, cache: NativeCache, feeds: Sequence[_AnyFeed], widths: Widths) -> None:
        """Have feeds begin earlier in their texts, if the pass is to be wider and nobody else has those texts.

        What they hold is computed again. Padding that is no row's would go through all steps of a chain.
        """
        size = sum(len(feed.tokens) for feed in feeds)
        missing = widths.fit(size) - size
        for feed in feeds if self._layers is None else ():
            missing -= self._begin_earlier(cache, feed, missing)

    def _beginning(self, feed: Any, count: int) -> Feed:
        """The first tokens of a feed as one of their own; the feed goes on from there."""
        first = Feed(feed.row, feed.start, feed.tokens[:count], feed.regime, None)
        feed.tokens, feed.start = feed.tokens[count:], feed.start + count
        return first

    def _begin_earlier(self, cache: NativeCache, feed: Any, most: int) -> int:
        """Put up to so many tokens that come before a feed in front of it; how many there were."""
        text = cache.rows[feed.row].tokens
        count = min(most, feed.start) if feed.start <= len(text) else 0  # else it begins within what is new
        feed.tokens = text[feed.start - count : feed.start] + feed.tokens
        feed.start -= count
        return count

    def _arrays(self, cache: NativeCache, feeds: Sequence[Feed], room: int = 0) -> dict[str, Any]:
        """A graph's inputs for feeds, all but `picks`; the rows get blocks for so many more slots."""
        store = cache.store
        assert isinstance(store, PagedStore)
        sizes = [len(feed.tokens) for feed in feeds]
        starts = [feed.start for feed in feeds]
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        tables = [
            store.reserve(feed.row, end + room) if feed.row >= 0 else self._scratch
            for feed, end in zip(feeds, ends, strict=True)
        ]
        used = [table[: -(-(end + room) // BLOCK)] for table, end in zip(tables, ends, strict=True)]
        cosines, sines = self._rotation(feeds)
        trees, tree_begins = _trees(feeds)
        return {
            "tokens": _int32([token for feed in feeds for token in feed.tokens]),
            "cosines": cosines,
            "sines": sines,
            "past_lens": _int32(starts),
            "subsequence_begins": _int32([0, *accumulate(sizes)]),
            "block_indices": _int32([block for table in used for block in table]),
            "block_indices_begins": _int32([0, *accumulate(map(len, used))]),
            "max_context_len": np.array(max(ends), dtype=np.int32),
            "tree": trees,
            "tree_begins": tree_begins,
        }

    def _request(self, hidden_layers: tuple[int, ...], steps: int | None = None, draws: bool = False) -> _Request:
        """The compiled model that gives the hidden states of these layers, or takes so many steps."""
        key = hidden_layers, steps, draws
        if key not in self._requests:
            graph = self._graph(hidden_layers, steps, draws)
            rounds = self.quantize == "w8a8"
            self._requests[key] = _Request(
                graph, self._dtype, self._pool, self._threads, rounds, Widths(self._patience)
            )
        return self._requests[key]

    def _graph(self, hidden_layers: tuple[int, ...], steps: int | None, draws: bool) -> Graph:
        """What is compiled for `_request`."""
        return Graph(self._weights, self._dtype, self.quantize, hidden_layers, steps, self._layers, draws)


@cache
def _core() -> ov.Core:
    """OpenVINO's runtime, one for as long as the process lives.

    Its CPU plugin gives the thread that loads it a stack for signal handlers, and takes the memory back when the
    runtime goes. With several that go in another order than they came, the thread is left without: its next signal,
    such as Ctrl-C, ends the process with a segmentation fault.
    """
    return ov.Core()


class _Request:
    """A compiled graph, its inputs, and the memory of its outputs."""

    def __init__(
        self, graph: Graph, dtype: torch.dtype, pool: Pool, threads: int, round_inputs: bool, widths: Widths
    ) -> None:
        self.widths = widths
        precision = "f32" if dtype is torch.float32 else "bf16"
        options = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            # Features of a layer's input that share a scale, in eight bits; with 0 they keep their precision.
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(_INPUT_GROUP if round_inputs else 0),
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": str(threads),
            "ENABLE_CPU_PINNING": "NO",
        }
        self._graph = graph  # holds the memory of the weights
        compiled = _core().compile_model(graph.model, "CPU", options)
        self._request = compiled.create_infer_request()
        self._outputs = len(compiled.outputs)
        self._pool, self._version = pool, -1
        self._memory: list[Any] = []
        self._names = graph.inputs
        self._inputs: list[Any] = [None] * len(self._names)

    def run(self, arrays: dict[str, Any]) -> list[Tensor]:
        """Outputs ``[P, …]`` for inputs by name; they belong to the caller."""
        request = self._request
        if self._version != self._pool.version:
            self._memory = [shared(tensor) for tensor in self._pool.tensors[: self._graph.caches]]
            for number, (tensor, _) in enumerate(self._memory):
                request.set_input_tensor(len(self._names) + number, tensor)
            self._version = self._pool.version
        for number, name in enumerate(self._names):
            array, bound = arrays[name], self._inputs[number]
            if bound is not None and bound.shape == array.shape:
                np.copyto(bound, array)  # a tenth of the time that another tensor would take
            else:
                request.set_input_tensor(number, ov.Tensor(array, shared_memory=True))
                self._inputs[number] = array
        request.infer()
        return [torch.from_numpy(request.get_output_tensor(i).data.copy()) for i in range(self._outputs)]


def _trees(feeds: Sequence[Feed]) -> tuple[Any, Any]:
    """For each feed the square of which token sees which, and where the squares begin; nothing for chains."""
    if all(feed.parents is None for feed in feeds):
        return np.zeros(0, dtype=np.uint8), np.zeros(0, dtype=np.int32)
    squares = [np.array(feed.ancestors(), dtype=np.uint8).ravel() for feed in feeds]
    return np.concatenate(squares), _int32([0, *accumulate(map(len, squares))])


def _size_of_call(steps: int) -> int:
    """Steps of the next call where so many are left: a step too many costs less than another call."""
    longest = CHAINS[0]
    return longest if steps >= longest else min(size for size in CHAINS if size >= steps)


def _draw_arrays(draws: Draws, steps: slice) -> dict[str, Any]:
    """Inputs of a graph that draws, for some of the steps."""
    coins = np.zeros((steps.stop - steps.start, len(draws.coins)), dtype=np.float32)
    given = draws.coins[:, steps].numpy().T
    coins[: len(given)] = np.floor(given * UNITS)
    # A copy: an input's memory is written to later on.
    return {"inverse_temperatures": draws.inverse_temperatures[:, None].numpy().copy(), "coins": coins.reshape(-1, 1)}


def _laws(sums: Tensor) -> Tensor:
    """Laws ``[…, V]`` whose cumulative ones are given in whole units. All of this is exact."""
    laws = sums.clone()
    laws[..., 1:] -= sums[..., :-1]
    return laws.mul_(1 / UNITS)


def _int32(values: list[int]) -> Any:
    return np.array(values, dtype=np.int32)
