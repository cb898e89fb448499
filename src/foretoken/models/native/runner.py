"""NativeModel: a Llama-family decoder on a backend of this package."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from math import prod
from threading import RLock
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from foretoken.models.base import Cache, Keep, LanguageModel, Scores
from foretoken.models.chain import Chains, Draws
from foretoken.models.native.cache import Feed, NativeCache, prefill_chunk
from foretoken.models.native.checkpoint import expected_shapes
from foretoken.models.native.rope import Rotary
from foretoken.models.native.spec import Spec
from foretoken.models.processor import position_share
from foretoken.models.widths import PassWidths

if TYPE_CHECKING:  # it needs OpenVINO
    from foretoken.models.native.narrow import NarrowGraphs


class Backend(Protocol):
    """What runs the decoder; see `TorchBackend`."""

    name: str
    spec: Spec
    chains: bool
    """It has a `chain`, and gains by it."""
    chain_sizes: tuple[int, ...]
    """See `LanguageModel`."""
    narrow: NarrowGraphs | None
    """What makes graphs for a row by itself, if it has such graphs."""
    ragged: bool
    """Rows of different lengths cost it no more than as many tokens of one row."""
    own_threads: bool
    """It computes with threads that are not torch's."""
    prepares_in_turn: bool
    """What a warm-up prepares shares memory with passes: no other thread may run the model meanwhile."""
    layer_seconds: float
    """See `LanguageModel`."""
    prefill_tokens: int | None
    """Most tokens of a row in a prefill pass, where the limits allow more; None for as many as they allow."""
    rounds_alike: bool
    """See `LanguageModel`."""

    @property
    def quantize(self) -> str | None:
        """How the weights were quantised, "auto" resolved."""

    def embeddings(self) -> Tensor:
        """See `LanguageModel`."""

    def open(self, batch_size: int) -> NativeCache:
        """A cache of empty rows."""

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """See `LanguageModel.cache_bytes`."""

    def score(
        self, cache: NativeCache, feeds: Sequence[Feed], picks: Sequence[tuple[int, int]], hidden_layers: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Run feeds; logits and hidden states of the picked tokens."""

    def exit_after(self, layers: int) -> Backend:
        """What runs the first layers alone, with the last norm and the output layer, over the same caches."""

    def pass_widths(self, hidden_layers: Sequence[int]) -> PassWidths | None:
        """See `LanguageModel.pass_widths`."""

    def warm_up(self, hidden_layers: Sequence[int]) -> None:
        """See `LanguageModel.warm_up`."""

    def warm_up_chains(self, drawn: bool) -> list[int]:
        """See `LanguageModel.warm_up_chains`; lengths of chains that were made ready now, and have not been run."""

    def chain(self, cache: NativeCache, rows: Sequence[Sequence[int]], steps: int, draws: Draws | None) -> Chains:
        """Append a chain of tokens to each row that is given new ones: each token the most probable one, or drawn.

        The vocabulary's size stands for scores that are no numbers.
        """


class NativeModel(LanguageModel):
    """A `LanguageModel`; `foretoken.load` makes one.

    Args:
        backend: runs it.
        name: what messages call it.
        dtype: of the weights, rounded ones aside.
        device: where it runs.
        tokenizer: its tokenizer, if it has one.
        eos_token_ids: the end tokens.
        quantize: how the weights were quantised: the model's distribution is that of the rounded weights.
        weight_bytes: where weights are of several types; None where `dtype` and `quantize` tell.
    """

    supports_trees = True
    shares_prefixes = True
    supports_hidden_states = True
    supports_early_exit = True

    def __init__(
        self,
        backend: Backend,
        name: str,
        dtype: torch.dtype,
        device: torch.device,
        tokenizer: Any | None = None,
        eos_token_ids: tuple[int, ...] = (),
        quantize: str | None = None,
        weight_bytes: int | None = None,
    ) -> None:
        self.backend = backend
        self.name = name
        self.dtype, self.device = dtype, device
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.quantize = quantize
        self.vocab_size = backend.spec.vocab_size
        self.num_layers = backend.spec.layers
        numbers = sum(prod(shape) for shape in expected_shapes(backend.spec).values())
        self.weight_bytes = weight_bytes or numbers * (1 if quantize else dtype.itemsize)
        self.layer_seconds = backend.layer_seconds
        if dtype is torch.float32 and quantize in (None, "int4") and device.type == "cpu":
            # Unpacking four bits takes as long as reading eight.
            self.position_share = position_share(max(self.weight_bytes / numbers, 1.0), wide=True)
        self.max_length = backend.spec.max_length
        self._switch = Rotary(backend.spec.config, backend.spec.rotary_dim).switch
        self.own_threads, self.backend_name = backend.own_threads, backend.name
        self.prefills_with_decode = backend.ragged and self._switch is None
        self.rounds_alike = backend.rounds_alike
        self.prefers_chains = backend.rounds_alike and backend.narrow is not None
        self.commits_late = self._switch is None
        self.chain_sizes = backend.chain_sizes if self.drafts_chains else ()

    @property
    def hidden_size(self) -> int:
        """See `LanguageModel`."""
        return self.backend.spec.hidden_size

    def embeddings(self) -> Tensor:
        """See `LanguageModel`."""
        return self.backend.embeddings()

    def open(self, batch_size: int) -> Cache:
        """A new cache with `batch_size` empty rows."""
        return self.backend.open(batch_size)

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """See `LanguageModel.cache_bytes`."""
        return int(self.backend.cache_bytes(lengths))

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        counts: Tensor,
        cache: Cache,
        keep: Keep = "all",
        hidden_layers: Sequence[int] = (),
    ) -> Scores:
        """See `LanguageModel.forward`. Arguments on the CPU spare a synchronisation with the device."""
        assert isinstance(cache, NativeCache)
        added = counts.tolist()
        cache.add(tokens.tolist(), parents.tolist(), added)
        width = tokens.shape[1]
        if self._switch is None:
            return self._score(cache, added, width, keep, hidden_layers)
        return self._score_long(cache, added, width, keep, hidden_layers, self._switch)

    @property
    def drafts_chains(self) -> bool:
        """Whether it has a `chain`, and gains by it."""
        return self.backend.chains and self._switch is None

    def pass_widths(self, hidden_layers: Sequence[int] = ()) -> PassWidths | None:
        """See `LanguageModel.pass_widths`."""
        return self.backend.pass_widths(hidden_layers)

    def warm_up(self, hidden_layers: Sequence[int], *, alone: bool = False) -> None:
        """See `LanguageModel.warm_up`."""
        with self.turn if self.backend.prepares_in_turn else nullcontext():
            self.backend.warm_up(hidden_layers)
            if alone and self.backend.narrow is not None:
                self.backend.narrow.prepare_passes()

    def warm_up_verification(self) -> None:
        """See `LanguageModel.warm_up_verification`."""
        if self.backend.narrow is not None:
            self.backend.narrow.decide()

    def warm_up_chains(self, drawn: bool, *, alone: bool = False) -> None:
        """See `LanguageModel.warm_up_chains`."""
        with self.turn if self.backend.prepares_in_turn else nullcontext():
            _run_chains(self.backend, self.backend.warm_up_chains(drawn), drawn)
            if alone and self.backend.narrow is not None:
                _run_chains(self.backend, self.backend.narrow.prepare_chains(drawn), drawn)

    def chain(self, rows: Sequence[Sequence[int]], steps: int, cache: Cache, draws: Draws | None = None) -> Chains:
        """Commit tokens to rows, and append a chain to each: a token, then one that follows it, ….

        The same as `forward` and a commit of the tokens, then `forward` with one node a row, each node the most
        probable token after the one before (the lowest id of equal ones) or drawn; but in one call of the backend,
        which may round scores otherwise. Only for models with `drafts_chains`.

        Args:
            rows: new tokens of each row; rows without any get no chain, and stay as they are.
            steps: tokens of each chain, at least 1.
            cache: from `open`, without tentative nodes in rows that get tokens.
            draws: of each row, if tokens are drawn.

        Returns:
            Each row's chain; all but its last token are tentative nodes now.
        """
        assert isinstance(cache, NativeCache)
        self.catch_up(cache, rows)
        chains = self.backend.chain(cache, rows, steps, draws)
        for row, tokens, chain in zip(cache.rows, rows, chains.tokens, strict=True):
            if tokens:
                row.tokens += tokens
                row.kept += len(tokens)
                row.nodes, row.parents = chain[:-1], list(range(-1, len(chain) - 2))
                row.scored = len(row.nodes)
        return chains.below(self.vocab_size)

    def exit_after(self, layers: int) -> NativeModel:
        """See `LanguageModel.exit_after`."""
        return _Exit(self, layers)

    def catch_up(self, cache: NativeCache, wanted: Sequence[Any]) -> None:
        """Bring the KV cache up to the committed tokens, in rows that are `wanted`: the last ones of others may wait.

        They are rounded as all of a prompt where they are computed with its root.
        """
        while lagging := cache.lagging(prefill_chunk(self.backend.prefill_tokens), wanted):
            self.backend.score(cache, lagging, [], ())
            cache.fed(lagging)

    def _score(
        self, cache: NativeCache, counts: list[int], width: int, keep: Keep, hidden_layers: Sequence[int]
    ) -> Scores:
        """Logits and hidden states of the nodes that were added last, ``counts[b]`` to row b."""
        while behind := cache.catch_up(prefill_chunk(self.backend.prefill_tokens)):
            self.backend.score(cache, behind, [], ())
            cache.fed(behind)
        feeds = cache.feeds()
        spec = self.backend.spec
        picks: list[tuple[int, int]] = []
        indices: list[int] = []
        last = keep == "last" and not hidden_layers
        for number, feed in enumerate(feeds):
            first = len(feed.tokens) - counts[feed.row]
            if last:
                picks.append((number, len(feed.tokens) - 1))
                indices.append(feed.row)
            elif keep != "none" or hidden_layers:
                picks.extend((number, first + i) for i in range(counts[feed.row]))
                indices.extend(range(feed.row * width, feed.row * width + counts[feed.row]))
        rows, columns = len(counts), 1 if last else width
        if feeds:
            logits, hidden = self.backend.score(cache, feeds, picks, hidden_layers)
            cache.fed(feeds)
        else:
            logits = torch.zeros(0, spec.vocab_size, dtype=self.dtype, device=self.device)
            hidden = [logits.new_zeros(0, spec.hidden_size) for _ in hidden_layers]
        states = tuple(spread(layer, indices, rows, columns) for layer in hidden)
        if keep == "none":
            return Scores(None, states)
        padded = spread(logits, indices, rows, columns)
        if keep == "last" and not last:
            padded = _last(padded, counts)
        return Scores(padded, states)

    def _score_long(
        self, cache: NativeCache, counts: list[int], width: int, keep: Keep, hidden_layers: Sequence[int], switch: int
    ) -> Scores:
        """The same for a model whose rotary frequencies differ for long and short sequences.

        The KV cache of a row that becomes long, or short again, is recomputed. If some new nodes of a row end short
        sequences and others long ones, both kinds of frequencies are used, one pass each, and each node's logits are
        taken from the pass that fits its length.
        """
        lengths = [row.lengths() for row in cache.rows]
        long = [int(max(row, default=0) > switch) for row in lengths]
        new = [row[len(row) - count :] for row, count in zip(lengths, counts, strict=True)]
        split = [bool(is_long and row and min(row) <= switch) for is_long, row in zip(long, new, strict=True)]
        if not any(split) or (keep == "none" and not hidden_layers):
            _set_regimes(cache, long, counts)
            return self._score(cache, counts, width, keep, hidden_layers)
        _set_regimes(cache, [is_long and not both for is_long, both in zip(long, split, strict=True)], counts)
        early = self._score(cache, counts, width, "all", hidden_layers)
        for row, count in zip(cache.rows, counts, strict=True):  # all are scored a second time
            row.scored = len(row.nodes) - count if row.chain else 0
        _set_regimes(cache, long, counts)
        late = self._score(cache, counts, width, "all", hidden_layers)
        is_short = torch.tensor([[length <= switch for length in row] + [False] * (width - len(row)) for row in new])
        is_short = is_short.to(self.device)[:, :, None]
        hidden = tuple(torch.where(is_short, *pair) for pair in zip(early.hidden, late.hidden, strict=True))
        if keep == "none":
            return Scores(None, hidden)
        assert early.logits is not None
        assert late.logits is not None
        logits = torch.where(is_short, early.logits, late.logits)
        return Scores(logits if keep == "all" else _last(logits, counts), hidden)


class _Exit(NativeModel):
    """A model's first layers, over the model's caches.

    Args:
        model: the whole one.
        layers: how many.
    """

    def __init__(self, model: NativeModel, layers: int) -> None:
        super().__init__(
            model.backend.exit_after(layers),
            f"{model.name} after {layers} of {model.num_layers} layers",
            model.dtype,
            model.device,
            model.tokenizer,
            model.eos_token_ids,
            model.quantize,
        )
        self.num_layers = layers
        self._model = model

    @property
    def turn(self) -> RLock:
        """See `LanguageModel.turn`."""
        return self._model.turn

    def chain(self, rows: Sequence[Sequence[int]], steps: int, cache: Cache, draws: Draws | None = None) -> Chains:
        """As of the whole model, but nothing is committed or appended."""
        assert isinstance(cache, NativeCache)
        self._model.catch_up(cache, rows)
        return self.backend.chain(cache, rows, steps, draws).below(self.vocab_size)

    def _score(
        self, cache: NativeCache, counts: list[int], width: int, keep: Keep, hidden_layers: Sequence[int]
    ) -> Scores:
        # Tokens cached by these layers alone would count as cached by all layers.
        self._model.catch_up(cache, [row.nodes for row in cache.rows])
        return super()._score(cache, counts, width, keep, hidden_layers)


def _set_regimes(cache: NativeCache, regimes: Sequence[int], counts: list[int]) -> None:
    """Mark rows that get new nodes for recomputation from their beginning if their frequencies change."""
    for row, regime, count in zip(cache.rows, regimes, counts, strict=True):
        if count and row.regime != regime:
            row.regime, row.kept, row.scored = regime, 0, 0


def _last(logits: Tensor, counts: list[int]) -> Tensor:
    """``[B, 1, V]``: of each row's last node, of ``[B, N, V]``."""
    ends = torch.tensor([max(0, count - 1) for count in counts], device=logits.device)
    return logits[torch.arange(len(counts), device=logits.device), ends][:, None]


def spread(values: Tensor, indices: list[int], rows: int, columns: int) -> Tensor:
    """``[R, C, …]`` with the values at the indices ``row * C + column``, zeros elsewhere."""
    if indices == list(range(rows * columns)):
        return values.view(rows, columns, -1)
    spread = values.new_zeros(rows * columns, values.shape[-1])
    spread[torch.tensor(indices, dtype=torch.int64, device=values.device)] = values
    return spread.view(rows, columns, -1)


def _run_chains(backend: Backend, lengths: Sequence[int], drawn: bool) -> None:
    """Chains of these lengths, whose graphs are new: a graph's first run packs weights and prepares its kernels."""
    for steps in lengths:
        draws = Draws(torch.ones(1), torch.zeros(1, steps, dtype=torch.float64)) if drawn else None
        backend.chain(backend.open(1), [[0]], steps, draws)
