"""The torch backend for GPUs: passes over few tokens are CUDA graphs over static KV cache buffers (`rooms`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from foretoken.limits import current_limits
from foretoken.models.chain import UNITS, Chains, Draws, probs_of
from foretoken.models.native.cache import Feed, NativeCache, prefill_chunk
from foretoken.models.native.checkpoint import Weights
from foretoken.models.native.decoder_backend import DecoderBackend
from foretoken.models.native.kernels import attention_kernels
from foretoken.models.native.linear import Quantize
from foretoken.models.native.room_passes import RoomPasses
from foretoken.models.native.rooms import Room, Rooms, RoomShape, RoomStore

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 64)
"""Tokens of a row in passes that are captured; others are padded to these. Wider ones are told operation by operation:
there the arithmetic takes as long."""

CHAIN_STEPS = (5, 3, 2, 1)
"""Tokens of captured chains, of which others are made up; those beyond what is wanted are dropped."""

_CHAIN_WIDTHS, _LONG_WIDTH = (2, 8), 64
"""Tokens of a row that a captured chain begins with: two are left over where a whole draft was accepted, more where the
model did not draft for some rounds, and still more are a pass of their own before the chain."""

_WARM_SLOTS = (256, 512, 1024)
"""What is captured when a model is warmed up: one row's passes after up to a thousand tokens."""


@dataclass(frozen=True)
class PassKey:
    """What a captured pass is for.

    Attributes:
        width: tokens of each row, N: chains and trees.
        hidden_layers: layers whose hidden states are wanted.
        layers: how many are run; None for all.
    """

    width: int
    hidden_layers: tuple[int, ...]
    layers: int | None


@dataclass(frozen=True)
class ChainKey:
    """What a captured chain is for.

    Attributes:
        width: tokens of each row that it begins with.
        steps: tokens that are drafted.
        drawn: they are drawn; else they are the best ones.
        layers: how many are run; None for all.
    """

    width: int
    steps: int
    drawn: bool
    layers: int | None


class RoomBackend(DecoderBackend):
    """Scores feeds with torch on a GPU.

    Args:
        weights: of the checkpoint.
        device: where the model runs; a CPU computes the same, with nothing captured.
        dtype: of weights, keys and values.
        quantize: see `Decoder`.
        widths: of captured passes, in rising order.
    """

    chains = True
    chain_sizes: tuple[int, ...] = CHAIN_STEPS[::-1]
    prepares_in_turn = True
    layer_seconds = 5e-5  # a pass is launched at once: a layer took 50 to 60 µs on an H100

    def __init__(
        self,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype,
        quantize: Quantize | None = None,
        widths: Sequence[int] = WIDTHS,
    ) -> None:
        self._passes = RoomPasses(weights, device, dtype, quantize)
        super().__init__(self._passes.decoder, quantize)
        spec, self._device, self._widths = self.spec, device, tuple(widths)
        # Padding, and chains that end beyond what is wanted, are written behind the last token.
        most = spec.max_length + self._widths[-1] + _CHAIN_WIDTHS[-1] + CHAIN_STEPS[0]
        self._rooms = Rooms(RoomShape(spec.layers, spec.groups, spec.head_dim, dtype, device, most))

    def open(self, batch_size: int) -> NativeCache:
        """A cache of empty rows."""
        return NativeCache(RoomStore(self._rooms, batch_size), batch_size)

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """See `LanguageModel.cache_bytes`: a room, the one of half its size that it is copied from, and as much again
        of rooms that are kept (`KEPT_BYTES` of which are not counted).

        Where several rows share a prefill pass, the padding of the shorter ones takes slots, too.
        """
        shape, padding = self._rooms.shape, current_limits().prefill_tokens if len(lengths) > 1 else 0
        rows, slots = shape.for_lengths([length + padding for length in lengths])
        return shape.bytes(rows, 2 * slots + slots // 2)

    def score(
        self, cache: NativeCache, feeds: Sequence[Feed], picks: Sequence[tuple[int, int]], hidden_layers: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """See `TorchBackend.score`."""
        begins = [row.kept + row.scored for row in cache.rows]
        for feed in feeds:
            begins[feed.row] = feed.start
        width = self._width(feeds)
        with torch.inference_mode():
            states, rows = self._states(cache, begins, feeds, width, tuple(hidden_layers))
            places = [rows[feed] * width + node for feed, node in picks]
            last, *hidden = (_picked(each, places, self._device) for each in states)
            logits = self._decoder.head(last)
            # What a captured pass computed is overwritten by the next one.
            return logits, [layer.clone() for layer in hidden] if hidden else []

    def _width(self, feeds: Sequence[Feed]) -> int:
        """Tokens of a row in a pass, padding included."""
        wanted = max(len(feed.tokens) for feed in feeds)
        return next((size for size in self._widths if size >= wanted), wanted)

    def _states(
        self, cache: NativeCache, begins: list[int], feeds: Sequence[Feed], width: int, hidden_layers: tuple[int, ...]
    ) -> tuple[list[Tensor], list[int]]:
        """States of a pass, and of each feed where among its rows it is.

        Rows without a feed may be written to from their `begins` on, where nothing is read.
        """
        if width <= self._widths[-1]:
            room = _store(cache).reserve([begin + width for begin in begins])
            return self._captured(room, begins, feeds, width, hidden_layers), [feed.row for feed in feeds]
        ends: list[int | None] = [None] * len(cache.rows)
        for feed in feeds:
            ends[feed.row] = feed.start + width
        room = _store(cache).reserve(ends)
        return self._at_once(room, feeds, width, hidden_layers), list(range(len(feeds)))

    def _captured(
        self, room: Room, begins: list[int], feeds: Sequence[Feed], width: int, hidden_layers: tuple[int, ...]
    ) -> list[Tensor]:
        """States ``[B · N, hidden]`` of a pass over all rows of a room."""
        begins = begins + [0] * (room.rows - len(begins))
        told = _told(begins, [(feed.row, feed) for feed in feeds], width, chain=width == 1)
        key = PassKey(width, hidden_layers, self._layers)

        def work(inputs: list[Tensor]) -> list[Tensor]:
            return self._passes.run(room, None, inputs, hidden_layers, self._layers)

        return self._passes.replayed(room, key, told, work)

    def _at_once(self, room: Room, feeds: Sequence[Feed], width: int, hidden_layers: tuple[int, ...]) -> list[Tensor]:
        """States ``[F · N, hidden]`` of a pass over the rows of the feeds alone."""
        chain = all(feed.parents is None for feed in feeds)
        told = _told([feed.start for feed in feeds], list(enumerate(feeds)), width, chain)
        rows = torch.tensor([feed.row for feed in feeds], device=self._device)
        with attention_kernels(self._device, ready=True):
            return self._passes.run(room, rows, [one.to(self._device) for one in told], hidden_layers, self._layers)

    def warm_up(self, hidden_layers: Sequence[int]) -> None:
        """Capture one row's passes."""
        cache = self.open(1)
        for slots in self._warm_slots():
            for width in self._widths:
                cache.rows[0].kept = slots - width
                self.score(cache, [Feed(0, slots - width, [0] * width, 0, None)], [], hidden_layers)

    def warm_up_chains(self, drawn: bool) -> list[int]:
        """Capture one row's chains."""
        cache = self.open(1)
        for slots in self._warm_slots():
            for width, steps in product(_CHAIN_WIDTHS, CHAIN_STEPS):
                cache.rows[0].kept = slots - width - steps
                draws = Draws(torch.ones(1), torch.zeros(1, steps, dtype=torch.float64)) if drawn else None
                self.chain(cache, [[0] * width], steps, draws)
            cache.rows[0].kept = slots - _LONG_WIDTH - _CHAIN_WIDTHS[0] - 1
            self.chain(cache, [[0] * (_LONG_WIDTH + 1)], 1, None)
        return []

    def chain(self, cache: NativeCache, rows: Sequence[Sequence[int]], steps: int, draws: Draws | None) -> Chains:
        """See `NativeModel.chain`."""
        fed = [index for index, tokens in enumerate(rows) if tokens]
        begins = [row.kept + row.scored for row in cache.rows]
        given = [list(tokens) for tokens in rows]
        for index in fed:
            begins[index] = cache.rows[index].kept
        most = prefill_chunk(self.prefill_tokens)
        while long := [index for index in fed if len(given[index]) > _CHAIN_WIDTHS[-1]]:
            feeds = [Feed(index, begins[index], given[index][:-1][:most], 0, None) for index in long]
            with torch.inference_mode():
                self._states(cache, begins, feeds, max(_LONG_WIDTH, self._width(feeds)), ())
            for feed in feeds:
                begins[feed.row] += len(feed.tokens)
                given[feed.row] = given[feed.row][len(feed.tokens) :]
        chains: list[list[int]] = [[] for _ in rows]
        probs: list[Tensor] = []
        done = 0
        while done < steps:
            size = next((some for some in reversed(CHAIN_STEPS) if some >= steps - done), CHAIN_STEPS[0])
            uniforms = None if draws is None else draws.uniforms[:, done : done + size]
            tokens, *cumulative = self._chained(cache, begins, given, size, draws, uniforms)
            drafted = tokens.T.tolist()
            if draws is not None:
                probs.append(probs_of(cumulative[0][:, : len(rows)]))
            for index in fed:
                chains[index] += drafted[index]
                begins[index] += len(given[index]) + size - 1
                given[index] = [min(drafted[index][-1], self.spec.vocab_size - 1)]
            done += size
        chains = [chain[:steps] for chain in chains]
        return Chains(chains, torch.cat(probs)[:steps].transpose(0, 1) if probs else None)

    def _chained(
        self,
        cache: NativeCache,
        begins: list[int],
        given: list[list[int]],
        steps: int,
        draws: Draws | None,
        uniforms: Tensor | None,
    ) -> list[Tensor]:
        """Tokens ``[steps, B]`` after those that are given, and the distributions that they were drawn from."""
        width = next(size for size in _CHAIN_WIDTHS if size >= max(map(len, given)))
        with torch.inference_mode():
            room = _store(cache).reserve([begin + width + steps for begin in begins])
        spare = [0] * (room.rows - len(begins))
        feeds = [(index, Feed(index, begins[index], tokens, 0, None)) for index, tokens in enumerate(given) if tokens]
        counts = torch.tensor([max(1, len(tokens)) for tokens in given] + [1] * len(spare))
        told = [*_told(begins + spare, feeds, width, chain=True), counts]
        if draws is not None:
            assert uniforms is not None
            warmth, units = torch.ones(room.rows, 1), torch.zeros(steps, room.rows, 1, dtype=torch.float64)
            warmth[: len(given), 0] = draws.inverse_temperatures
            units[: uniforms.shape[1], : len(given), 0] = (uniforms.T * UNITS).floor()
            told += [warmth, units]

        def work(inputs: list[Tensor]) -> list[Tensor]:
            return self._passes.run_chain(room, steps, self._layers, *inputs)

        with torch.inference_mode():
            return self._passes.replayed(room, ChainKey(width, steps, draws is not None, self._layers), told, work)

    def _warm_slots(self) -> list[int]:
        return [slots for slots in _WARM_SLOTS if slots <= self._rooms.shape.largest]


def _store(cache: NativeCache) -> RoomStore:
    assert isinstance(cache.store, RoomStore)
    return cache.store


def _told(begins: Sequence[int], feeds: Sequence[tuple[int, Feed]], width: int, chain: bool) -> list[Tensor]:
    """`PassInputs` of rows that begin at these slots, some of which are fed, on the CPU."""
    numbers = np.zeros((len(begins), 2 + 2 * width), dtype=np.int64)
    numbers[:, 0] = begins
    numbers[:, 2 + width :] = np.arange(width)
    above = None if chain else np.broadcast_to(np.tri(width, dtype=np.bool_), (len(begins), width, width)).copy()
    for row, feed in feeds:
        size = len(feed.tokens)
        numbers[row, 0], numbers[row, 1] = feed.start, feed.regime
        numbers[row, 2 : 2 + size] = feed.tokens
        numbers[row, 2 + size : 2 + width] = feed.tokens[-1]  # padding: a token that is there anyway
        if feed.parents is not None:
            assert above is not None
            numbers[row, 2 + width : 2 + width + size] = feed.depths()
            above[row, :size, :size] = feed.ancestors()
    return [torch.from_numpy(numbers)] if above is None else [torch.from_numpy(numbers), torch.from_numpy(above)]


def _picked(states: Tensor, places: list[int], device: torch.device) -> Tensor:
    """Rows of ``[T, hidden]``: a view where they follow each other."""
    first = places[0] if places else 0
    if places == list(range(first, first + len(places))):
        return states[first : first + len(places)]
    return states[torch.tensor(places, dtype=torch.int64).to(device, non_blocking=True)]
