"""The model itself: a Llama-family decoder, from tokens to hidden states, in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu

from foretoken.models.native.checkpoint import Matrix, Weights
from foretoken.models.native.linear import Linear, Quantize, make
from foretoken.models.native.spec import Spec

Remember = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes a layer's number and its new keys and values ``[B, G, N, D]``; gives all that attention may see, ``K`` long."""

MOST_PACKED_ROWS = 512
"""With more queries a head than this, attention is arithmetic, and the mask for packed heads grows large."""


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int | None


class Decoder:
    """Weights in the form that they are multiplied in, and what is done with them.

    Args:
        weights: of the checkpoint.
        device: where they go.
        quantize: "int8" for linear layers of eight bits.
    """

    def __init__(self, weights: Weights, device: torch.device, quantize: Quantize | None = None) -> None:
        self.spec: Spec = weights.spec
        self.embedding = weights.embedding().to(device)
        """``[V, hidden]``: tokens to hidden states."""
        self._layers = [_layer(weights, number, device, quantize) for number in range(self.spec.layers)]
        self._norm = weights.final_norm().to(device)
        head = self.embedding if self.spec.tied else weights.head().to(device)
        self.head: Linear = make(Matrix(head), quantize)
        """Hidden states to logits."""

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
            rotation: cosines and sines of their positions, ``[B, 1, N, R]`` each, in the model's dtype.
            masks: by window size of a layer: ``[B, 1, N, K]``, added to attention's scores; None for causal attention
                among the new tokens, and for one token that sees all.
            remember: the cache.
            hidden_layers: layers whose output is wanted, 0 being the embeddings, the last one normalised.
            layers: how many are run, the first ones; None for all.

        Returns:
            The normalised output of the last layer that is run, ``[B, N, hidden]``, and that of the `hidden_layers`.
        """
        x = embedding(tokens, self.embedding)
        outputs = {0: x} if hidden_layers else {}
        epsilon = self.spec.norm_epsilon
        for number, layer in enumerate(self._layers[:layers]):
            x = x + self._attention(
                rms_norm(x, x.shape[-1:], layer.attention_norm, epsilon),
                layer,
                number,
                rotation,
                masks[layer.window],
                remember,
            )
            gates, values = layer.gate_up(rms_norm(x, x.shape[-1:], layer.mlp_norm, epsilon)).chunk(2, dim=-1)
            x = x + layer.down(silu(gates) * values)
            if hidden_layers:
                outputs[number + 1] = x
        x = rms_norm(x, x.shape[-1:], self._norm, epsilon)
        if hidden_layers:
            outputs[len(self._layers[:layers])] = x
        return x, [outputs[number] for number in hidden_layers]

    def _attention(
        self,
        x: Tensor,
        layer: _Layer,
        number: int,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | None,
        remember: Remember,
    ) -> Tensor:
        spec = self.spec
        batch_size, width, _ = x.shape
        heads = layer.qkv(x).view(batch_size, width, -1, spec.head_dim).transpose(1, 2)
        query, key, value = heads.split([spec.heads, spec.groups, spec.groups], dim=1)
        if layer.query_norm is not None:
            query = rms_norm(query, query.shape[-1:], layer.query_norm, spec.norm_epsilon)
            key = rms_norm(key, key.shape[-1:], layer.key_norm, spec.norm_epsilon)
        key, value = remember(number, rotate(key, rotation), value)
        result = attend(rotate(query, rotation), key, value, mask)
        return layer.output(result.transpose(1, 2).reshape(batch_size, width, -1))


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the first R features of ``[B, H, N, D]`` by their positions' angles; halves of them are a plane's axes."""
    cosines, sines = rotation
    size = cosines.shape[-1]
    turned, rest = (x, None) if size == x.shape[-1] else (x[..., :size], x[..., size:])
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cosines + torch.cat([-second, first], dim=-1) * sines
    return turned if rest is None else torch.cat([turned, rest], dim=-1)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention without copies of the keys and values where there are few queries.

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
    if size * width > MOST_PACKED_ROWS or size == 1:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=size > 1)
    # The heads of a group become further queries of one head.
    packed = query.reshape(batch_size, groups, size * width, -1)
    if mask is not None and width > 1:
        mask = mask.expand(-1, size, width, length).reshape(-1, 1, size * width, length)
    return scaled_dot_product_attention(packed, key, value, attn_mask=mask).view(batch_size, heads, width, -1)


def _layer(weights: Weights, number: int, device: torch.device, quantize: Quantize | None) -> _Layer:
    stored = weights.layer(number)

    def place(vector: Tensor | None) -> Tensor | None:
        return None if vector is None else vector.to(device)

    def prepare(matrix: Matrix) -> Linear:
        return make(Matrix(matrix.weight.to(device), place(matrix.bias)), quantize)

    return _Layer(
        attention_norm=stored.attention_norm.to(device),
        qkv=prepare(stored.qkv),
        query_norm=place(stored.query_norm),
        key_norm=place(stored.key_norm),
        output=prepare(stored.output),
        mlp_norm=stored.mlp_norm.to(device),
        gate_up=prepare(stored.gate_up),
        down=prepare(stored.down),
        window=weights.spec.windows[number],
    )
