"""The EAGLE-3 head (Li et al. 2025, arXiv 2503.01840): one decoder layer over fused features of the target.

Inputs and outputs, for a sequence of tokens x_0, x_1, …: *slot* i of the head holds the fused feature of token
x_i (hidden states of three of the target's layers, combined by `Eagle3Head.fuse`) and the embedding of the token after
it, x_(i+1). Its output predicts x_(i+2). The slot's rotary position is i, that of the feature.

So a sequence of n tokens, the last of which is not in the target's KV cache yet, fills slots 0 … n - 2, and the output
of the last one gives the distribution of the first draft token. From there on the head feeds itself: slot n - 1 + j has
the output of the slot before it in place of a feature, and the embedding of the (j + 1)-th draft token. Training does
the same for some steps ("training-time test").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from foretoken.errors import ModelError
from foretoken.models.native.rope import ROPE_TYPES, Rotary
from foretoken.models.traits import layer_configs

Remember = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes the new keys and values ``[B, G, N, D]``; returns all that attention covers, K long."""


def default_layers(target_layers: int) -> tuple[int, ...]:
    """Whose outputs a head fuses where its config names none: EAGLE's choice, early, middle and late layers.

    Numbers as in `LanguageModel.forward`: i is the output of the i-th layer, 0 the embeddings. Targets of fewer than
    seven layers, for which that rule would name a layer twice, give the embeddings, a middle layer and the one before
    the last, each once.
    """
    if target_layers >= 7:
        return 2, target_layers // 2, target_layers - 3
    return tuple(sorted({0, target_layers // 2, target_layers - 1}))


@dataclass(frozen=True)
class Eagle3Config:
    """The shape of a head.

    Attributes:
        hidden_size: width of the head, H; the target's embeddings have it too, unless the head has its own.
        intermediate_size: neurons of the MLP.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads, G, a divisor of `num_attention_heads`.
        head_dim: features of a head, D.
        vocab_size: the target's, V.
        draft_vocab_size: tokens that the head can propose; V for all.
        target_hidden_size: width of the target's hidden states.
        target_layers: which of the target's hidden states are fused, as in `LanguageModel.forward`.
        target_num_layers: layers of the target; None if the config does not have it.
        max_position_embeddings: longest sequence of the training, in tokens.
        rms_norm_eps: added to the mean square before its root is taken.
        rope_parameters: as in a config of transformers: ``rope_type``, ``rope_theta``, and what the type takes.
        attention_bias: queries, keys, values and attention's output have a bias.
        mlp_bias: the MLP's layers have one.
        head_norms: queries and keys are normalised head by head, as in Qwen3.
        own_embeddings: the head has an embedding table of its own.
        norm_before_residual: the residual stream begins with the normalised feature.
        norm_before_fc: the features are normalised together before they are fused.
        fc_norm: each feature is normalised by itself before they are fused.
        norm_output: what is fed back is the normalised output.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    target_layers: tuple[int, ...]
    target_num_layers: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    attention_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    own_embeddings: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "target_hidden_size",
        ):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} of an EAGLE-3 head is {getattr(self, name)}: it must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"num_key_value_heads of an EAGLE-3 head is {self.num_key_value_heads}: it must divide the "
                f"{self.num_attention_heads} heads"
            )
        rope_type = self.rope_parameters.get("rope_type", "default")
        if rope_type not in ROPE_TYPES or rope_type == "longrope":
            possible = ", ".join(sorted(set(ROPE_TYPES) - {"longrope"}))
            raise ModelError(
                f"an EAGLE-3 head with the rotary embedding {rope_type!r} can't be run: only those of {possible} can"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ModelError(
                f"a head's draft_vocab_size is {self.draft_vocab_size:,} and its vocab_size {self.vocab_size:,}: "
                "the first is a part of the second"
            )
        if self.norm_before_fc and self.fc_norm:
            raise ModelError("a head's config has both norm_before_fc and fc_norm: it can have but one of them")
        if not self.target_layers:
            raise ModelError("a head's config names no layers of the target: it needs at least one")

    @classmethod
    def for_target(cls, config: Any, *, draft_vocab_size: int | None = None, **fields: Any) -> Eagle3Config:
        """A head in the manner of a target: as wide, with as many heads, one layer of its kind.

        Where the target's layers differ, the head is like the first one.

        Args:
            config: transformers' config of the target's language model.
            draft_vocab_size: tokens that the head can propose; None for all.
            fields: other values for any attribute.
        """
        layer = layer_configs(config)[0]
        heads = layer.num_attention_heads
        given: dict[str, Any] = {
            "hidden_size": config.hidden_size,
            "intermediate_size": getattr(layer, "intermediate_size", None) or 4 * config.hidden_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(layer, "num_key_value_heads", None) or heads,
            "head_dim": getattr(layer, "head_dim", None) or config.hidden_size // heads,
            "vocab_size": config.vocab_size,
            "draft_vocab_size": draft_vocab_size or config.vocab_size,
            "target_hidden_size": config.hidden_size,
            "target_layers": default_layers(config.num_hidden_layers),
            "target_num_layers": config.num_hidden_layers,
            "max_position_embeddings": getattr(config, "max_position_embeddings", None) or 2048,
            "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
        }
        return cls(**(given | fields))

    @property
    def reduced(self) -> bool:
        """Whether some of the target's tokens are never proposed."""
        return self.draft_vocab_size < self.vocab_size


class _Attention(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        given, bias = 2 * config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(given, queries, bias=bias)
        self.k_proj = nn.Linear(given, keys, bias=bias)
        self.v_proj = nn.Linear(given, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)
        if config.head_norms:
            self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self._config = config

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None, remember: Remember) -> Tensor:
        config = self._config
        batch_size, width, _ = x.shape
        shape = (batch_size, width, -1, config.head_dim)
        query, key, value = self.q_proj(x).view(shape), self.k_proj(x).view(shape), self.v_proj(x).view(shape)
        if config.head_norms:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = _rotate(query.transpose(1, 2), rotation), _rotate(key.transpose(1, 2), rotation)
        key, value = remember(key, value.transpose(1, 2))
        groups = config.num_attention_heads != config.num_key_value_heads
        is_causal = mask is None and width > 1
        attended = scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, enable_gqa=groups)
        return self.o_proj(attended.transpose(1, 2).reshape(batch_size, width, -1))


class _Mlp(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._norm_before_residual = config.norm_before_residual

    def forward(
        self,
        embeddings: Tensor,
        states: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | None,
        remember: Remember,
    ) -> Tensor:
        normalised = self.hidden_norm(states)
        x = normalised if self._norm_before_residual else states
        both = torch.cat([self.input_layernorm(embeddings), normalised], dim=-1)
        x = x + self.self_attn(both, rotation, mask, remember)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Head(nn.Module):
    """The weights, and what is done with them; names are those of the EAGLE repository's checkpoints.

    ``d2t`` (``[Vd]`` int64) is what to add to a draft token's number to get the target's, ``t2d`` (``[V]`` bool) which
    of the target's tokens have a draft id; heads of the whole vocabulary have neither.

    Args:
        config: the shape.
        device: where the weights are made; ``"meta"`` for shapes alone.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config = config
        inputs = len(config.target_layers)
        with torch.device(device or "cpu"):
            self.fc = nn.Linear(inputs * config.target_hidden_size, config.hidden_size, bias=False)
            self.midlayer = _Layer(config)
            self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            if config.own_embeddings:
                self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            if config.norm_before_fc:
                self.input_norm = nn.RMSNorm(inputs * config.target_hidden_size, eps=config.rms_norm_eps)
            if config.fc_norm:
                self.fc_norm = nn.ModuleList(
                    nn.RMSNorm(config.target_hidden_size, eps=config.rms_norm_eps) for _ in range(inputs)
                )
            if config.reduced:
                self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
                self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    def set_draft_tokens(self, tokens: Tensor) -> None:
        """Say which of the target's tokens a head of a reduced vocabulary proposes: ``[Vd]`` int64, rising."""
        if tokens.shape != self.d2t.shape or not bool((tokens.diff() > 0).all()):
            raise ModelError(f"a head of {len(self.d2t):,} draft tokens needs as many tokens, each once, rising")
        tokens = tokens.to(self.d2t.device)
        self.d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))
        self.t2d.zero_()[tokens] = True

    def draft_tokens(self) -> Tensor:
        """``[Vd]`` int64: the target's number of each draft token."""
        steps = torch.arange(self.config.draft_vocab_size, device=self.lm_head.weight.device)
        return steps + self.d2t if self.config.reduced else steps

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features as the head's.

        Args:
            features: ``[…, L · target_hidden_size]``, of the `target_layers` side by side, in the config's order.

        Returns:
            ``[…, H]``.
        """
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def forward(
        self,
        embeddings: Tensor,
        states: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        remember: Remember = lambda keys, values: (keys, values),
    ) -> Tensor:
        """Run new slots.

        Args:
            embeddings: ``[B, N, H]``: of slot i, that of the token after its feature's.
            states: ``[B, N, H]``: fused features, or the head's own outputs in their place.
            positions: ``[B, N]`` int64, of the features.
            mask: ``[B or 1, 1, N, K]``, bool (True: seen) or added to the scores; None for causal attention among the
                new slots, or for a single slot that attends to all.
            remember: the cache; without one the new slots attend to each other only.

        Returns:
            ``[B, N, H]``: what is fed back in place of the next slot's feature, and what `logits` takes.
        """
        rotation = self._rotation(positions, states.dtype)
        x = self.midlayer(embeddings, states, rotation, mask, remember)
        return self.norm(x) if self.config.norm_output else x

    def logits(self, outputs: Tensor) -> Tensor:
        """``[…, Vd]``: scores of the draft tokens after outputs ``[…, H]`` of `forward`."""
        return self.lm_head(outputs if self.config.norm_output else self.norm(outputs))

    @cached_property
    def rotary(self) -> Rotary:
        """Cosines and sines by position."""
        return Rotary(RopeConfig(self.config), self.config.head_dim)

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[B, 1, N, D]``."""
        table = self.rotary.table(0, int(positions.max()) + 1).to(positions.device)
        cosines, sines = table[:, positions].to(dtype)
        return cosines[:, None], sines[:, None]


class RopeConfig:
    """What transformers' functions for rotary frequencies look at."""

    def __init__(self, config: Eagle3Config) -> None:
        self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, **config.rope_parameters}
        self.hidden_size, self.num_attention_heads = config.hidden_size, config.num_attention_heads
        self.head_dim = config.head_dim
        self.max_position_embeddings = config.max_position_embeddings

    def standardize_rope_params(self) -> None:
        """The parameters are in their final form."""


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * rotation[0] + torch.cat([-second, first], dim=-1) * rotation[1]
