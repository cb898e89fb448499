"""Spec: the shape of a Llama-family decoder by a checkpoint's config.json; refuses other architectures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foretoken.models import traits
from foretoken.models.masks import patterns_of
from foretoken.models.native.rope import ROPE_TYPES

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")
"""Model types of transformers that this package knows: SmolLM, TinyLlama, Phi-4 and many others are of these types."""


@dataclass(frozen=True)
class Spec:
    """The shape of a decoder.

    Attributes:
        family: one of `FAMILIES`.
        config: transformers' own config, which rotary frequencies are computed from.
        vocab_size: tokens, V.
        hidden_size: width of the residual stream.
        intermediate_size: neurons of each MLP.
        layers: number of layers.
        heads: query heads.
        groups: key and value heads, a divisor of `heads`.
        head_dim: features of a head, D.
        rotary_dim: features of a head that are rotated, the first ones.
        norm_epsilon: added to the mean square before its root is taken.
        qkv_bias: queries, keys and values have a bias.
        output_bias: attention's output has one.
        mlp_bias: the MLP's layers have one.
        head_norms: queries and keys are normalised head by head.
        tied: the output layer is the embedding table.
        windows: of each layer: how many positions a position attends to, itself included; None for all.
        max_length: most positions of a sequence.
    """

    family: str
    config: Any
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    groups: int
    head_dim: int
    rotary_dim: int
    norm_epsilon: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool
    tied: bool
    windows: tuple[int | None, ...]
    max_length: int

    @property
    def slot_size(self) -> int:
        """Numbers that the keys and values of one token are, in all layers."""
        return 2 * self.layers * self.groups * self.head_dim


def refusal(config: Any) -> str | None:
    """Why a model of this config is not one that runs natively; None if it is."""
    family = getattr(config, "model_type", None)
    if family not in FAMILIES:
        return f"the architecture {family!r} is none of {', '.join(FAMILIES)}"
    if getattr(config, "quantization_config", None) is not None:
        return "the checkpoint is quantised"
    if config.hidden_act not in ("silu", "swish"):
        return f"the activation is {config.hidden_act!r}, and not 'silu'"
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if rope_type not in ROPE_TYPES:
        return f"the rotary embedding is {rope_type!r}, none of {', '.join(ROPE_TYPES)}"
    patterns = patterns_of(config)
    if patterns is None:
        return "some layers are not attention"
    return None


def spec_of(config: Any) -> Spec:
    """The `Spec` of a config that `refusal` has nothing against."""
    family = config.model_type
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary_dim = int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
    attention_bias = bool(getattr(config, "attention_bias", False))
    return Spec(
        family=family,
        config=config,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        groups=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim if family == "phi3" else head_dim,
        norm_epsilon=config.rms_norm_eps,
        qkv_bias=family == "qwen2" or (family in ("llama", "qwen3") and attention_bias),
        output_bias=family in ("llama", "qwen3") and attention_bias,
        mlp_bias=family == "llama" and bool(getattr(config, "mlp_bias", False)),
        head_norms=family == "qwen3",
        tied=bool(config.tie_word_embeddings),
        windows=_windows(config),
        max_length=traits.max_length(config),
    )


def _windows(config: Any) -> tuple[int | None, ...]:
    patterns = patterns_of(config)
    assert patterns is not None
    if isinstance(patterns, dict):
        return tuple(patterns[layer_type].window for layer_type in config.layer_types)
    return (patterns.window,) * int(config.num_hidden_layers)
