"""An EAGLE-3 head on OpenVINO's runtime: graphs like those of the native decoder, of one layer that is fed states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import openvino as ov
import torch
from openvino import opset13 as ops
from torch import Tensor

from foretoken.heads.eagle3 import Eagle3Config, Eagle3Head, RopeConfig
from foretoken.heads.runner import HeadCache
from foretoken.limits import current_limits
from foretoken.models.chain import Chains, Draws
from foretoken.models.native.cache import Feed, NativeCache
from foretoken.models.native.checkpoint import Layer, Matrix, Weights
from foretoken.models.native.linear import Quantize
from foretoken.models.native.loader import rounding
from foretoken.models.native.openvino_backend import OpenVinoBackend
from foretoken.models.native.openvino_graph import Graph, integers
from foretoken.models.native.runner import spread
from foretoken.models.native.spec import Spec
from foretoken.models.traits import NO_LIMIT

_REMEMBERED = 32
"""States of a row's last tokens that are kept, to read these tokens once more along with others."""


class _Weights(Weights):
    """A head's weights in the form that a graph takes."""

    def __init__(self, head: Eagle3Head, embeddings: Tensor) -> None:
        self.spec = _spec(head.config)
        self.config = head.config
        self.draft_tokens = head.draft_tokens().tolist() if head.config.reduced else None
        self._head, self._embeddings = head, embeddings
        self.hidden_norm = head.midlayer.hidden_norm.weight.data

    def known(self, token: int) -> int:
        """A draft token in the target's numbers; some token for what stands for scores that are no numbers."""
        token = min(token, self.spec.vocab_size - 1)
        return token if self.draft_tokens is None else self.draft_tokens[token]

    def bytes(self, layers: int | None = None) -> int:
        """Of what a pass reads, in all of its one layer."""
        return sum(weight.nbytes for weight in self._head.parameters())

    def embedding(self) -> Tensor:
        """``[V, H]``."""
        return self._embeddings

    def head(self) -> Tensor:
        """``[Vd, H]``."""
        return self._head.lm_head.weight.data

    def final_norm(self) -> Tensor:
        """``[H]``."""
        return self._head.norm.weight.data

    def layer(self, number: int) -> Layer:
        """The one layer; its `qkv` takes embedding and feature side by side."""
        layer, norms = self._head.midlayer, self.config.head_norms
        attention, mlp = layer.self_attn, layer.mlp
        return Layer(
            attention_norm=layer.input_layernorm.weight.data,
            qkv=_joined([attention.q_proj, attention.k_proj, attention.v_proj]),
            query_norm=attention.q_norm.weight.data if norms else None,
            key_norm=attention.k_norm.weight.data if norms else None,
            output=_joined([attention.o_proj]),
            mlp_norm=layer.post_attention_layernorm.weight.data,
            gate_up=_joined([mlp.gate_proj, mlp.up_proj]),
            down=_joined([mlp.down_proj]),
        )


class _Graph(Graph):
    """One pass: logits and outputs of the picked tokens. Several steps: as in `Graph`, and the outputs of the last one.

    Args:
        weights: of the head.
        dtype: of weights, keys and values.
        quantize: see `Graph`.
        steps: see `Graph`.
        draws: see `Graph`.
    """

    def __init__(
        self, weights: _Weights, dtype: torch.dtype, quantize: Quantize | None, steps: int | None, draws: bool
    ) -> None:
        self._config, self._hidden_norm, self._draft_tokens = weights.config, weights.hidden_norm, weights.draft_tokens
        super().__init__(weights, dtype, quantize, (), steps, None, draws)

    def _inputs_of(self, steps: int | None) -> dict[str, tuple[Any, list[int]]]:
        return {**super()._inputs_of(steps), "states": (ov.Type.f32, [-1, self._config.hidden_size])}

    def _pass(self, hidden_layers: Sequence[int]) -> list[Any]:
        outputs = self._pick(self._outputs())
        return [self._logits(self._normalised(outputs)), outputs]

    def _chain(self, steps: int) -> list[Any]:
        turns = self._turns(steps)
        outputs = self._pick(self._outputs())
        token = self._token(self._normalised(outputs))
        for turn in turns:
            self._now |= {"tokens": self._known(token), "states": outputs, **turn}
            outputs = self._outputs()
            token = self._token(self._normalised(outputs))
        return [*self._chained(), outputs]

    def _known(self, token: Any) -> Any:
        """Draft tokens in the target's numbers; some token where the scores were no numbers."""
        token = ops.minimum(token, integers(self._spec.vocab_size - 1))
        if self._draft_tokens is None:
            return token
        return ops.gather(integers(self._draft_tokens), token, integers(0))

    def _outputs(self) -> Any:
        """`Eagle3Head.forward` for the tokens of now."""
        layer, states = self._layers[0], self._now["states"]
        embedded = ops.gather(self._vector(self._table), self._now["tokens"], integers(0))
        normalised = self._norm(states, self._hidden_norm)
        both = ops.concat([self._norm(embedded, layer.attention_norm), normalised], -1)
        x = normalised if self._config.norm_before_residual else states
        x = self._mlp(ops.add(x, self._attention(both, layer, 0)), layer)
        return self._norm(x, self._last_norm) if self._config.norm_output else x

    def _normalised(self, outputs: Any) -> Any:
        return outputs if self._config.norm_output else self._norm(outputs, self._last_norm)


@dataclass(slots=True)
class _Feed(Feed):
    """What a pass adds to a row, with the states ``[n, H]`` that go with the tokens, and those of tokens before."""

    states: Tensor = field(default_factory=lambda: torch.zeros(0))
    past: Tensor = field(default_factory=lambda: torch.zeros(0))


class _Backend(OpenVinoBackend):
    """The native decoder's backend, for feeds that have states."""

    def __init__(self, weights: _Weights, dtype: torch.dtype, quantize: Quantize | None) -> None:
        self._parts = weights
        super().__init__(weights, dtype, quantize)

    def chain_after(self, cache: NativeCache, feeds: Sequence[_Feed], steps: int, draws: Draws | None) -> Chains:
        """Of each row so many draft tokens after its feed; see `OpenVinoBackend.chain`."""
        places = {feed.row: place for place, feed in enumerate(feeds)}

        def go_on(feed: _Feed, token: int, outputs: list[Tensor]) -> None:
            feed.tokens = [self._parts.known(token)]
            feed.states = outputs[0][places[feed.row], None]

        return self._chain(cache, feeds, steps, draws, len(cache.rows), go_on)

    def _beginning(self, feed: Any, count: int) -> Feed:
        first = super()._beginning(feed, count)
        states, feed.states = feed.states[:count], feed.states[count:]
        return _Feed(first.row, first.start, first.tokens, first.regime, None, states=states)

    def _begin_earlier(self, cache: NativeCache, feed: Any, most: int) -> int:
        count = super()._begin_earlier(cache, feed, min(most, len(feed.past)))
        if count:
            feed.states = torch.cat([feed.past[-count:], feed.states])
            feed.past = feed.past[:-count]
        return count

    def _arrays(self, cache: NativeCache, feeds: Sequence[Feed], room: int = 0) -> dict[str, Any]:
        states = [
            feed.states.float() if isinstance(feed, _Feed) else torch.zeros((len(feed.tokens), self.spec.hidden_size))
            for feed in feeds
        ]
        return {**super()._arrays(cache, feeds, room), "states": torch.cat(states).numpy()}

    def _graph(self, hidden_layers: tuple[int, ...], steps: int | None, draws: bool) -> Graph:
        return _Graph(self._parts, self._dtype, self.quantize, steps, draws)


class _Cache(HeadCache):
    """With the states of each row's last tokens.

    Args:
        slots: keys and values, without rows.
        hidden_size: H.
    """

    def __init__(self, slots: NativeCache, hidden_size: int) -> None:
        super().__init__(slots, hidden_size, torch.float32, torch.device("cpu"))
        self._size = hidden_size
        self._past: list[Tensor] = []

    def feeds(self, tokens: Sequence[Sequence[int]], states: Sequence[Tensor]) -> list[_Feed]:
        """Feeds of the rows that get tokens."""
        assert isinstance(self.slots, NativeCache)
        return [
            _Feed(place, row.kept, list(new), 0, None, states=fed, past=past)
            for place, (row, new, fed, past) in enumerate(zip(self.slots.rows, tokens, states, self._past, strict=True))
            if new
        ]

    def commit(self, tokens: Sequence[Sequence[int]], states: Sequence[Tensor]) -> None:
        """Note that the rows hold these tokens, whose keys and values have been computed."""
        assert isinstance(self.slots, NativeCache)
        for place, (row, new, fed) in enumerate(zip(self.slots.rows, tokens, states, strict=True)):
            row.tokens += new
            row.kept += len(new)
            if new:
                self._past[place] = torch.cat([self._past[place], fed.float()])[-_REMEMBERED:].clone()

    def select(self, rows: Sequence[int]) -> None:
        """See `HeadCache`."""
        super().select(rows)
        old = self._past
        self._past = [old[row] if row >= 0 else torch.zeros(0, self._size) for row in rows]


class OpenVinoRunner:
    """See `Runner`. A tree is read from its beginning at every depth, a chain a token a step.

    Args:
        head: on the CPU.
        embeddings: ``[V, H]``, the table that the head reads tokens with.
        quantize: of the linear layers but the one that fuses features; "auto" for what is fastest.
    """

    name = "openvino"
    own_threads = True

    def __init__(
        self, head: Eagle3Head, embeddings: Tensor, quantize: Quantize | Literal["auto"] | None = "auto"
    ) -> None:
        weight = head.fc.weight
        self._size = head.config.hidden_size
        weights = _Weights(head, embeddings.to(weight))
        self.quantize = rounding(weights.bytes(), weight.dtype) if quantize == "auto" else quantize
        self._backend = _Backend(weights, weight.dtype, self.quantize)
        self._backend.warm_up()

    @property
    def drafts_chains(self) -> bool:
        """See `Runner`."""
        return self._backend.chains

    def open(self) -> HeadCache:
        """See `Runner`."""
        return _Cache(self._backend.open(0), self._size)

    def read(self, cache: HeadCache, tokens: Sequence[Sequence[int]], states: Sequence[Tensor]) -> Tensor:
        """See `Runner`."""
        assert isinstance(cache, _Cache)
        slots = cache.slots
        assert isinstance(slots, NativeCache)
        scores = torch.zeros((len(tokens), self._backend.spec.vocab_size))
        chunk = current_limits().prefill_tokens
        for start in range(0, max(map(len, tokens)), chunk):
            parts = [row[start : start + chunk] for row in tokens]
            fed = [row[start : start + chunk] for row in states]
            feeds = cache.feeds(parts, fed)
            ends = [(number, len(feed.tokens) - 1) for number, feed in enumerate(feeds)]
            logits, (outputs,) = self._backend.score(slots, feeds, ends, ())
            cache.commit(parts, fed)
            rows = [feed.row for feed in feeds]
            scores[rows] = logits
            cache.keep_last(outputs, rows)
        return scores

    def score(self, cache: HeadCache, tokens: Tensor, parents: Tensor, counts: Tensor) -> Tensor:
        """See `Runner`."""
        slots, added = cache.slots, counts.tolist()
        assert isinstance(slots, NativeCache)
        slots.add(tokens.tolist(), parents.tolist(), added)
        longest = max(len(row.nodes) for row in slots.rows)
        above = torch.tensor([row.parents + [-1] * (longest - len(row.parents)) for row in slots.rows])
        states = cache.states(above)
        feeds: list[_Feed] = []
        picks: list[tuple[int, int]] = []
        places: list[int] = []
        for number, feed in enumerate(slots.feeds()):
            end, size = len(slots.rows[feed.row].nodes), len(feed.tokens)
            fed = states[feed.row, end - size : end]
            feeds.append(_Feed(feed.row, feed.start, feed.tokens, feed.regime, feed.parents, states=fed))
            new = range(added[feed.row])
            picks.extend((number, size - added[feed.row] + i) for i in new)
            places.extend(feed.row * tokens.shape[1] + i for i in new)
        logits, (outputs,) = self._backend.score(slots, feeds, picks, ())
        slots.fed(feeds)
        cache.keep_nodes(spread(outputs, places, *tokens.shape), added)
        return spread(logits, places, *tokens.shape)

    def chain(
        self,
        cache: HeadCache,
        tokens: Sequence[Sequence[int]],
        states: Sequence[Tensor],
        steps: int,
        draws: Draws | None = None,
    ) -> Chains:
        """See `Runner`."""
        assert isinstance(cache, _Cache)
        slots = cache.slots
        assert isinstance(slots, NativeCache)
        chains = self._backend.chain_after(slots, cache.feeds(tokens, states), steps, draws)
        cache.commit(tokens, states)
        return chains.below(self._backend.spec.vocab_size)


def _joined(parts: list[Any]) -> Matrix:
    """One matrix of linear layers that take the same."""
    biases = [part.bias.data for part in parts if part.bias is not None]
    return Matrix(torch.cat([part.weight.data for part in parts]), torch.cat(biases) if biases else None)


def _spec(config: Eagle3Config) -> Spec:
    return Spec(
        family="llama",
        config=RopeConfig(config),
        vocab_size=config.draft_vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=1,
        heads=config.num_attention_heads,
        groups=config.num_key_value_heads,
        head_dim=config.head_dim,
        rotary_dim=config.head_dim,
        norm_epsilon=config.rms_norm_eps,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        head_norms=config.head_norms,
        tied=False,
        windows=(None,),
        max_length=NO_LIMIT,
    )
