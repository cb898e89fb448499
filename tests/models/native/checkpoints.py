"""Small random models of every family, and variants of them that take other ways through the code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from transformers import PreTrainedModel

import tiny
from foretoken.models.native import NativeModel
from foretoken.models.native.checkpoint import Module, Weights
from foretoken.models.native.loader import openvino_refusal
from foretoken.models.native.room_backend import RoomBackend
from foretoken.models.native.spec import spec_of

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


def rope(name: str) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, **ROPES[name]}}


def longrope(original: int, head_dim: int, rotated: float = 1.0, longest: int = 256) -> dict[str, Any]:
    """Fields of a config whose texts of more than `original` tokens have other frequencies."""
    size = int(head_dim * rotated) // 2
    return {
        "max_position_embeddings": longest,
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0 + 0.1 * i for i in range(size)],
            "long_factor": [2.0 + 0.5 * i for i in range(size)],
            "partial_rotary_factor": rotated,
            "original_max_position_embeddings": original,
        },
    }


def qwen2(**fields: Any) -> PreTrainedModel:
    config = tf.Qwen2Config(**tiny._llama_like(fields.pop("vocab_size", 32), fields))
    return tiny.build(tf.Qwen2ForCausalLM, config, 0)


def smollm(**fields: Any) -> PreTrainedModel:
    return tiny.tiny_llama(
        **{"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48, "tie_word_embeddings": True, **fields}
    )


MODELS = {
    "llama": tiny.tiny_llama,
    "llama, every bias": lambda: tiny.tiny_llama(attention_bias=True, mlp_bias=True),
    "llama, no groups": lambda: tiny.tiny_llama(num_key_value_heads=4),
    "llama, head_dim 24": lambda: tiny.tiny_llama(head_dim=24),
    "smollm": smollm,
    "mistral": lambda: tiny.tiny_mistral(sliding_window=None),
    "mistral, window": tiny.tiny_mistral,
    "qwen2": qwen2,
    "qwen2, windows": lambda: qwen2(use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": tiny.tiny_qwen3,
    "phi3": tiny.tiny_phi3,
    "phi3, part of each head rotated": lambda: tiny.tiny_phi3(
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    ),
    "phi3, longrope": lambda: tiny.tiny_phi3(**longrope(original=12, head_dim=8)),
    **{f"llama, {name}": lambda name=name: tiny.tiny_llama(**rope(name)) for name in ROPES},
}


def skip_unless_usable(backend: str, dtype: torch.dtype = torch.float32) -> None:
    """Skip a test of OpenVINO where it is not installed, or has no kernels for the processor."""
    reason = openvino_refusal(dtype, torch.device("cpu"))
    if backend == "openvino" and reason is not None:
        pytest.skip(reason)


def plain(module: PreTrainedModel, text: list[int]) -> torch.Tensor:
    """`[n, V]`: what transformers says after each token of a text."""
    with torch.inference_mode():
        return module(torch.tensor([text], device=module.device), use_cache=False).logits[0].float().cpu()


def in_rooms(module, **options) -> NativeModel:
    """A model on the backend of GPUs, which computes the same on a CPU."""
    weights = Weights(spec_of(module.config), Module(module), "rooms", module.dtype)
    backend = RoomBackend(weights, module.device, module.dtype, **options)
    model = NativeModel(backend, "rooms", module.dtype, module.device)
    model.module = module  # what `walk` compares with
    return model
