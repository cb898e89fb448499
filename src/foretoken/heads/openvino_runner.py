"""An EAGLE-3 head on OpenVINO: the native decoder's backend, over a network of one layer that is fed states too."""

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
from foretoken.models.native.checkpoint import LayerWeights, Matrix, Weights
from foretoken.models.native.graph_keys import GraphKey
from foretoken.models.native.linear import Quantize
from foretoken.models.native.loader import rounding
from foretoken.models.native.openvino_backend import OpenVinoBackend
from foretoken.models.native.openvino_graph import DecoderGraph
from foretoken.models.native.runner import spread
from foretoken.models.native.spec import Spec
from foretoken.models.traits import NO_LIMIT

_REMEMBERED = 32
"""States of a row's last tokens that are kept, so that passes can begin earlier (`Feed.begin_earlier`)."""


class HeadWeights(Weights):
    """A head's weights in the form that a graph takes; `draft_tokens` are the target's ids of the draft vocabulary."""

    def __init__(self, head: Eagle3Head, embeddings: Tensor) -> None:
        self.spec = _spec(head.config)
        self.config = head.config
        self.draft_tokens = head.draft_tokens().tolist() if head.config.reduced else None
        self._head, self._embeddings = head, embeddings
        self.hidden_norm = head.midlayer.hidden_norm.weight.data

    def target_token(self, token: int) -> int:
        """A draft token in the target's numbering; any token for the vocabulary's size, which stands for NaN."""
        token = min(token, self.spec.vocab_size - 1)
        return token if self.draft_tokens is None else self.draft_tokens[token]

    @property
    def keeps_16_bits(self) -> bool:
        """Never: a head is computed in the dtype that its weights are in."""
        return False

    def bytes(self, layers: int | None = None) -> int:
        """Of all weights that a pass reads."""
        return sum(weight.nbytes for weight in self._head.parameters())

    def table(self) -> Tensor:
        """``[V, H]``."""
        return self._embeddings

    def head(self) -> Tensor:
        """``[Vd, H]``."""
        return self._head.lm_head.weight.data

    def final_norm(self) -> Tensor:
        """``[H]``."""
        return self._head.norm.weight.data

    def layer(self, number: int) -> LayerWeights:
        """The one layer; its `qkv` takes embedding and feature side by side."""
        layer, norms = self._head.midlayer, self.config.head_norms
        attention, mlp = layer.self_attn, layer.mlp
        return LayerWeights(
            attention_norm=layer.input_layernorm.weight.data,
            qkv=_joined([attention.q_proj, attention.k_proj, attention.v_proj]),
            query_norm=attention.q_norm.weight.data if norms else None,
            key_norm=attention.k_norm.weight.data if norms else None,
            output=_joined([attention.o_proj]),
            mlp_norm=layer.post_attention_layernorm.weight.data,
            gate_up=_joined([mlp.gate_proj, mlp.up_proj]),
            down=_joined([mlp.down_proj]),
        )


class HeadGraph(DecoderGraph):
    """One layer over embeddings and features: a pass also gives its outputs, a chain those of its last step.

    Args:
        weights: of the head.
        dtype: of weights, keys and values.
        quantize: see `DecoderGraph`.
        key: which graph.
    """

    def __init__(self, weights: HeadWeights, dtype: torch.dtype, quantize: Quantize | None, key: GraphKey) -> None:
        self._config, self._hidden_norm, self._draft_tokens = weights.config, weights.hidden_norm, weights.draft_tokens
        super().__init__(weights, dtype, quantize, (), key.steps, None, key.draws)

    def extra_inputs(self) -> dict[str, tuple[Any, list[int]]]:
        """``[T, H]``, the second input of each token: a feature, or the output after the token before."""
        return {"states": (ov.Type.f32, [-1, self._config.hidden_size])}

    def run(self) -> list[Any]:
        """`Eagle3Head.forward` over `now`: its outputs."""
        layer, states = self.layers[0], self.now["states"]
        embedded = self.weights.rows(self.table, self.now["tokens"])
        normed = self.norm(states, self._hidden_norm)
        both = ops.concat([self.norm(embedded, layer.attention_norm), normed], -1)
        x = normed if self._config.norm_before_residual else states
        x = self.mlp(ops.add(x, self.attention(both, layer, 0)), layer)
        return [self.norm(x, self.last_norm) if self._config.norm_output else x]

    def scored(self, state: Any) -> Any:
        """The outputs, normed."""
        return state if self._config.norm_output else self.norm(state, self.last_norm)

    def next_inputs(self, token: Any, state: Any) -> dict[str, Any]:
        """Draft tokens in the target's numbering (any token where a logit was NaN), and the outputs."""
        token = ops.minimum(token, self.constants.i32(self.spec.vocab_size - 1))
        if self._draft_tokens is not None:
            token = ops.gather(self.constants.i32(self._draft_tokens), token, self.constants.i32(0))
        return {"tokens": token, "states": state}

    def carried(self, state: Any) -> list[Any]:
        """The outputs."""
        return [state]


@dataclass(slots=True)
class StateFeed(Feed):
    """What a pass adds to a row, with the states that go with the tokens.

    Attributes:
        states: ``[n, H]``, one for each token.
        past: ``[m, H]``, those of committed tokens right before the feed.
    """

    states: Tensor = field(default_factory=lambda: torch.zeros(0))
    past: Tensor = field(default_factory=lambda: torch.zeros(0))

    def split(self, count: int) -> Feed:
        """See `Feed`."""
        first = Feed.split(self, count)
        states, self.states = self.states[:count], self.states[count:]
        return StateFeed(first.row, first.start, first.tokens, first.regime, None, states=states)

    def begin_earlier(self, committed: Sequence[int], most: int) -> int:
        """See `Feed`."""
        count = Feed.begin_earlier(self, committed, min(most, len(self.past)))
        if count:
            self.states = torch.cat([self.past[-count:], self.states])
            self.past = self.past[:-count]
        return count


class HeadNetwork:
    """An EAGLE-3 head as the `Network` of an `OpenVinoBackend`.

    Args:
        weights: of the head.
        dtype: of weights, keys and values.
        quantize: see `OpenVinoBackend`.
    """

    def __init__(self, weights: HeadWeights, dtype: torch.dtype, quantize: Quantize | None) -> None:
        self._weights, self._dtype, self._quantize = weights, dtype, quantize

    def graphs(self, keys: Sequence[GraphKey], memory: Sequence[Tensor] | None) -> list[DecoderGraph]:
        """See `Network`; they take keys and values as inputs."""
        return [HeadGraph(self._weights, self._dtype, self._quantize, key) for key in keys]

    def arrays(self, feeds: Sequence[Feed]) -> dict[str, Any]:
        """The states of all feeds, zeros for padding."""
        size = self._weights.config.hidden_size
        states = [
            feed.states.float() if isinstance(feed, StateFeed) else torch.zeros((len(feed.tokens), size))
            for feed in feeds
        ]
        return {"states": torch.cat(states).numpy()}


class PagedHeadCache(HeadCache):
    """With the states of each row's last tokens.

    Args:
        slots: keys and values, without rows.
        hidden_size: H.
    """

    def __init__(self, slots: NativeCache, hidden_size: int) -> None:
        super().__init__(slots, hidden_size, torch.float32, torch.device("cpu"))
        self._size = hidden_size
        self._past: list[Tensor] = []

    def feeds(self, tokens: Sequence[Sequence[int]], states: Sequence[Tensor]) -> list[StateFeed]:
        """Feeds of the rows that get tokens."""
        assert isinstance(self.slots, NativeCache)
        return [
            StateFeed(index, row.kept, list(new), 0, None, states=fed, past=past)
            for index, (row, new, fed, past) in enumerate(zip(self.slots.rows, tokens, states, self._past, strict=True))
            if new
        ]

    def commit(self, tokens: Sequence[Sequence[int]], states: Sequence[Tensor]) -> None:
        """Add tokens to the rows, whose keys and values have been computed."""
        assert isinstance(self.slots, NativeCache)
        for index, (row, new, fed) in enumerate(zip(self.slots.rows, tokens, states, strict=True)):
            row.tokens += new
            row.kept += len(new)
            if new:
                self._past[index] = torch.cat([self._past[index], fed.float()])[-_REMEMBERED:].clone()

    def select(self, rows: Sequence[int]) -> None:
        """See `HeadCache`."""
        super().select(rows)
        old = self._past
        self._past = [old[row] if row >= 0 else torch.zeros(0, self._size) for row in rows]


class OpenVinoRunner:
    """See `Runner`. A tree is computed from its root at every depth, a chain a token a step.

    Args:
        head: on the CPU.
        embeddings: ``[V, H]``, embeddings of the head's input tokens.
        quantize: of the linear layers but the one that fuses features; "auto" for what is fastest.
    """

    name = "openvino"
    own_threads = True

    def __init__(
        self, head: Eagle3Head, embeddings: Tensor, quantize: Quantize | Literal["auto"] | None = "auto"
    ) -> None:
        weight = head.fc.weight
        self._size = head.config.hidden_size
        self._weights = weights = HeadWeights(head, embeddings.to(weight))
        self.quantize = rounding(weights.bytes(), weight.dtype) if quantize == "auto" else quantize
        network = HeadNetwork(weights, weight.dtype, self.quantize)
        self._backend = OpenVinoBackend(weights, weight.dtype, self.quantize, network)

    def warm_up_chains(self, drawn: bool) -> None:
        """See `Runner`."""
        self._backend.warm_up_chains(drawn)

    @property
    def drafts_chains(self) -> bool:
        """See `Runner`."""
        return self._backend.chains

    @property
    def chain_sizes(self) -> tuple[int, ...]:
        """See `Runner`."""
        return self._backend.chain_sizes if self._backend.chains else ()

    def open(self) -> HeadCache:
        """See `Runner`."""
        return PagedHeadCache(self._backend.open(0), self._size)

    def read(self, cache: HeadCache, tokens: Sequence[Sequence[int]], states: Sequence[Tensor]) -> Tensor:
        """See `Runner`."""
        assert isinstance(cache, PagedHeadCache)
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
        feeds: list[StateFeed] = []
        picks: list[tuple[int, int]] = []
        indices: list[int] = []
        for number, feed in enumerate(slots.feeds()):
            end, size = len(slots.rows[feed.row].nodes), len(feed.tokens)
            fed = states[feed.row, end - size : end]
            feeds.append(StateFeed(feed.row, feed.start, feed.tokens, feed.regime, feed.parents, states=fed))
            new = range(added[feed.row])
            picks.extend((number, size - added[feed.row] + i) for i in new)
            indices.extend(feed.row * tokens.shape[1] + i for i in new)
        logits, (outputs,) = self._backend.score(slots, feeds, picks, ())
        slots.fed(feeds)
        cache.keep_nodes(spread(outputs, indices, *tokens.shape), added)
        return spread(logits, indices, *tokens.shape)

    def chain(
        self,
        cache: HeadCache,
        tokens: Sequence[Sequence[int]],
        states: Sequence[Tensor],
        steps: int,
        draws: Draws | None = None,
    ) -> Chains:
        """See `Runner`."""
        assert isinstance(cache, PagedHeadCache)
        slots = cache.slots
        assert isinstance(slots, NativeCache)
        feeds = cache.feeds(tokens, states)
        indices = {feed.row: index for index, feed in enumerate(feeds)}

        def go_on(feed: StateFeed, token: int, outputs: list[Tensor]) -> None:
            feed.tokens = [self._weights.target_token(token)]
            feed.states = outputs[0][indices[feed.row], None]

        chains = self._backend.chain_feeds(slots, feeds, steps, draws, len(slots.rows), go_on)
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
