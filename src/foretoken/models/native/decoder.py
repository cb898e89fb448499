"""The model itself: a Llama-family decoder, from tokens to hidden states, in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu

from foretoken.models.native.checkpoint import AnyMatrix, Matrix, Parts, Weights
from foretoken.models.native.linear import Linear, Quantize, make
from foretoken.models.native.packed import PackedMatrix
from foretoken.models.native.spec import Spec

Remember = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes a layer's index and its new keys and values ``[B, G, N, D]``; returns all that attention covers, K long."""

MOST_PACKED_ROWS = 512
"""With more queries a head than this a CPU is limited by arithmetic, and the mask for packed heads grows large. On GPUs
heads are always packed: torch's kernel for a mask and shared keys keeps all scores in memory."""


@dataclass(frozen=True)
class Layer:
    """A layer's weights."""

    attention_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int | None


class Between(Protocol):
    """Does `finish` and the next layer's `begin` in one call; see `compiled.py`."""

    def takes(self, rows: int) -> bool:
        """Whether it is for so many tokens."""

    def __call__(
        self, x: Tensor, attended: Tensor, cosines: Tensor, sines: Tensor, layer: Layer, following: Layer
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The residual stream behind `layer`; queries, keys and values of the one that follows."""


class Decoder:
    """Weights in the form that they are multiplied in, and what is done with them.

    Args:
        weights: of the checkpoint.
        device: where they go.
        quantize: "int8" for linear layers of eight bits, "int4" for those that are not packed.
        compiled: does what lies between two layers' attentions; None leaves that to torch, operation by operation.
    """

    def __init__(
        self,
        weights: Weights,
        device: torch.device,
        quantize: Quantize | None = None,
        compiled: Between | None = None,
    ) -> None:
        self.spec: Spec = weights.spec
        self.embedding = weights.embedding().to(device)
        """``[V, hidden]``: tokens to hidden states."""
        self._layers = [_layer(weights, number, device, quantize) for number in range(self.spec.layers)]
        self._norm = weights.final_norm().to(device)
        head = self.embedding if self.spec.tied else weights.head()
        assert isinstance(head, Tensor)
        self.head: Linear = make(Matrix(head.to(device)), quantize)
        """Hidden states to logits."""
        self._compiled = compiled

    def __call__(
        self,
        tokens: Tensor,
        rotation: tuple[Tensor, Tensor],
        masks: dict[int | None, Tensor | None],
        remember: Remember,
        hidden_layers: Sequence[int] = (),
        layers: int | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states of new tokens.

        Args:
            tokens: ``[B, N]`` int64.
            rotation: cosines and sines of their positions, ``[B * N, 1, R]`` each, in the model's dtype.
            masks: by window size of a layer: ``[B, 1, N, K]``, added to attention's scores; None for causal attention
                among the new tokens, and for a single token that attends to all.
            remember: the cache.
            hidden_layers: layers whose output is wanted, 0 being the embeddings, the last one normalised.
            layers: how many are run, the first ones; None for all.

        Returns:
            The normalised output of the last layer that is run, ``[B, N, hidden]``, and that of the `hidden_layers`.
        """
        batch_size, width = tokens.shape
        x = embedding(tokens.reshape(-1), self.embedding)
        outputs = [x]
        run = self._layers[:layers]
        cosines, sines = rotation
        query, key, value = begin(x, cosines, sines, run[0], self.spec)
        for number, layer in enumerate(run):
            keys, values = remember(number, *(_by_head(each, batch_size) for each in (key, value)))
            attended = attend(_by_head(query, batch_size), keys, values, masks[layer.window])
            attended = attended.transpose(1, 2).reshape(batch_size * width, -1)
            if number + 1 < len(run):
                x, query, key, value = self._between(x, attended, cosines, sines, layer, run[number + 1])
            else:
                x = finish(x, attended, layer, self.spec)
            outputs.append(x)
        outputs[-1] = rms_norm(x, x.shape[-1:], self._norm, self.spec.norm_epsilon)
        shape = (batch_size, width, -1)
        return outputs[-1].view(shape), [outputs[number].view(shape) for number in hidden_layers]

    def _between(
        self, x: Tensor, attended: Tensor, cosines: Tensor, sines: Tensor, layer: Layer, following: Layer
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The residual stream after a layer, and the next one's queries, keys and values."""
        if self._compiled is not None and self._compiled.takes(len(x)):
            return self._compiled(x, attended, cosines, sines, layer, following)
        x = finish(x, attended, layer, self.spec)
        return x, *begin(x, cosines, sines, following, self.spec)


def begin(x: Tensor, cosines: Tensor, sines: Tensor, layer: Layer, spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """A layer up to its attention.

    Args:
        x: the residual stream, ``[T, hidden]``.
        cosines: of the tokens' positions, ``[T, 1, R]``.
        sines: the same.
        layer: its weights.
        spec: of the model.

    Returns:
        Queries ``[T, H, D]``, keys ``[T, G, D]``, values ``[T, G, D]``.
    """
    heads = layer.qkv(rms_norm(x, x.shape[-1:], layer.attention_norm, spec.norm_epsilon))
    heads = heads.view(x.shape[0], -1, spec.head_dim)
    if layer.query_norm is None:
        both, value = heads.split([spec.heads + spec.groups, spec.groups], dim=1)
        query, key = rotate(both, cosines, sines).split([spec.heads, spec.groups], dim=1)
        return query, key, value
    query, key, value = heads.split([spec.heads, spec.groups, spec.groups], dim=1)
    query = rms_norm(query, query.shape[-1:], layer.query_norm, spec.norm_epsilon)
    key = rms_norm(key, key.shape[-1:], layer.key_norm, spec.norm_epsilon)
    return rotate(query, cosines, sines), rotate(key, cosines, sines), value


def finish(x: Tensor, attended: Tensor, layer: Layer, spec: Spec) -> Tensor:
    """A layer from its attention's result ``[T, H * D]`` on: the residual stream ``[T, hidden]`` behind it."""
    x = x + layer.output(attended)
    gates, values = layer.gate_up(rms_norm(x, x.shape[-1:], layer.mlp_norm, spec.norm_epsilon)).chunk(2, dim=-1)
    return x + layer.down(silu(gates) * values)


def _by_head(each: Tensor, batch_size: int) -> Tensor:
    """``[B, H, N, D]`` of ``[B * N, H, D]``."""
    return each.view(batch_size, -1, *each.shape[1:]).transpose(1, 2)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn the first R features of ``[T, H, D]`` by their positions' angles; halves of them are a plane's axes."""
    size = cosines.shape[-1]
    turned, rest = (x, None) if size == x.shape[-1] else (x[..., :size], x[..., size:])
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cosines + torch.cat([-second, first], dim=-1) * sines
    return turned if rest is None else torch.cat([turned, rest], dim=-1)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention without copies of the keys and values, on CPUs where there are few queries.

    Args:
        query: ``[B, H, N, D]``.
        key: ``[B, G, K, D]``.
        value: ``[B, G, K, D]``.
        mask: ``[B or 1, 1, N, K]``, added to the scores; None is causal among the last N keys.

    Returns:
        ``[B, H, N, D]``.
    """
    batch_size, heads, width, _ = query.shape
    groups, length = key.shape[1], key.shape[2]
    size = heads // groups
    if mask is None and width == length > 1:
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=size > 1)
    if size == 1 or (size * width > MOST_PACKED_ROWS and query.device.type == "cpu"):
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=size > 1)
    # The heads of a group become further queries of one head.
    packed = query.reshape(batch_size, groups, size * width, -1)
    if mask is not None and width > 1:
        mask = mask.expand(-1, size, width, length).reshape(-1, 1, size * width, length)
    return scaled_dot_product_attention(packed, key, value, attn_mask=mask).reshape(batch_size, heads, width, -1)


def _layer(weights: Weights, number: int, device: torch.device, quantize: Quantize | None) -> Layer:
    stored = weights.layer(number)

    def moved(vector: Tensor | None) -> Tensor | None:
        return None if vector is None else vector.to(device)

    def prepare(matrix: AnyMatrix) -> Linear:
        assert not isinstance(matrix, Parts)
        if isinstance(matrix, PackedMatrix):
            # Torch's product of weights of four bits (`_weight_int4pack_mm_for_cpu`) takes 4.6 times as long as one of
            # float32's over one row with AVX2, and 20 times over 16 rows.
            weight = matrix.weight.widened().to(device, stored.attention_norm.dtype)
            return make(Matrix(weight, moved(matrix.bias)))
        return make(Matrix(matrix.weight.to(device), moved(matrix.bias)), quantize)

    return Layer(
        attention_norm=stored.attention_norm.to(device),
        qkv=prepare(stored.qkv),
        query_norm=moved(stored.query_norm),
        key_norm=moved(stored.key_norm),
        output=prepare(stored.output),
        mlp_norm=stored.mlp_norm.to(device),
        gate_up=prepare(stored.gate_up),
        down=prepare(stored.down),
        window=weights.spec.windows[number],
    )
