"""Tiny random transformers models for tests: float32, deterministic, distributions far from uniform.

Every function takes `vocab_size`, `seed` and any field of the config. The global random state is untouched.
"""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import PreTrainedModel

from foretoken.models import base

DEVICE = torch.device(os.environ.get("FORETOKEN_TEST_DEVICE", "cpu"))
"""Where tests run models that they make in memory; ``make test-gpu`` says cuda."""


def assume_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have passes be taken to last as long as on a CPU with AVX2, by the bytes of their weights, wherever tests run."""
    seconds = property(lambda model: model.weight_bytes / 7.5e9)
    monkeypatch.setattr(base.LanguageModel, "assumed_seconds", seconds)


NO_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def randomize(model: PreTrainedModel, seed: int, scale: float = 1.0, logit_scale: float = 2.0) -> PreTrainedModel:
    """Fill weights so that each layer matters and logits have a standard deviation of about `logit_scale`."""
    generator = torch.Generator().manual_seed(seed)
    output = model.get_output_embeddings()
    output_weight = None if output is None else output.weight
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter is output_weight:
                parameter.copy_(noise * logit_scale / math.sqrt(parameter.shape[-1]))
            elif id(parameter) in tables:
                parameter.copy_(noise * (0.5 if "relative" not in name else 2.0))
            elif name.rsplit(".", 1)[-1] in ("A_log", "D", "dt_bias", "conv1d") or parameter.dim() == 3:
                continue
            elif parameter.dim() >= 2:
                fan_in = parameter.shape[0] if "Conv1D" in _owner(model, name) else parameter.shape[-1]
                parameter.copy_(noise * scale * 1.5 / math.sqrt(fan_in))
            elif name.endswith("bias"):
                parameter.copy_(noise * 0.1)
            else:
                parameter.add_(noise * 0.1)
    return model.eval().requires_grad_(False).to(DEVICE)


def _owner(model: PreTrainedModel, parameter_name: str) -> str:
    return type(model.get_submodule(parameter_name.rsplit(".", 1)[0])).__name__


def build(architecture: type[PreTrainedModel], config: Any, seed: int) -> PreTrainedModel:
    """An `architecture` of `config` with random weights of `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = architecture(config)
    return randomize(model, seed)


def _llama_like(vocab_size: int, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        **NO_SPECIAL,
        **fields,
    }


def tiny_llama(vocab_size: int = 32, seed: int = 0, **fields: Any) -> PreTrainedModel:
    return build(tf.LlamaForCausalLM, tf.LlamaConfig(**_llama_like(vocab_size, fields)), seed)


def tiny_qwen3(vocab_size: int = 32, seed: int = 0, **fields: Any) -> PreTrainedModel:
    fields = {"head_dim": 8, **fields}
    return build(tf.Qwen3ForCausalLM, tf.Qwen3Config(**_llama_like(vocab_size, fields)), seed)


def tiny_phi3(vocab_size: int = 32, seed: int = 0, **fields: Any) -> PreTrainedModel:
    return build(tf.Phi3ForCausalLM, tf.Phi3Config(**_llama_like(vocab_size, fields)), seed)


def tiny_mistral(vocab_size: int = 32, seed: int = 0, sliding_window: int | None = 4, **fields: Any) -> PreTrainedModel:
    fields = {"sliding_window": sliding_window, **fields}
    return build(tf.MistralForCausalLM, tf.MistralConfig(**_llama_like(vocab_size, fields)), seed)


def tiny_gemma2(vocab_size: int = 32, seed: int = 0, sliding_window: int = 4, **fields: Any) -> PreTrainedModel:
    fields = {"sliding_window": sliding_window, "head_dim": 8, **fields}
    return build(tf.Gemma2ForCausalLM, tf.Gemma2Config(**_llama_like(vocab_size, fields)), seed)


def tiny_gemma3(vocab_size: int = 32, seed: int = 0, sliding_window: int = 4, **fields: Any) -> PreTrainedModel:
    fields = {
        "sliding_window": sliding_window,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        **fields,
    }
    return build(tf.Gemma3ForCausalLM, tf.Gemma3TextConfig(**_llama_like(vocab_size, fields)), seed)


def tiny_gemma4(vocab_size: int = 32, seed: int = 0, sliding_window: int = 4, **fields: Any) -> PreTrainedModel:
    """Full attention has wider heads than a sliding window, in fewer groups, and keys that are the values, too."""
    fields = {
        "sliding_window": sliding_window,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": vocab_size,
        **fields,
    }
    return build(tf.Gemma4ForCausalLM, tf.Gemma4TextConfig(**_llama_like(vocab_size, fields)), seed)


def tiny_gpt2(vocab_size: int = 32, seed: int = 0, **fields: Any) -> PreTrainedModel:
    given = {
        "vocab_size": vocab_size,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        **NO_SPECIAL,
    }
    return build(tf.GPT2LMHeadModel, tf.GPT2Config(**{**given, **fields}), seed)


def tiny_gpt_neo(vocab_size: int = 32, seed: int = 0, window_size: int = 4, **fields: Any) -> PreTrainedModel:
    given = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": window_size,
        "max_position_embeddings": 256,
        **NO_SPECIAL,
    }
    return build(tf.GPTNeoForCausalLM, tf.GPTNeoConfig(**{**given, **fields}), seed)


def tiny_opt(vocab_size: int = 32, seed: int = 0, **fields: Any) -> PreTrainedModel:
    given = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        **NO_SPECIAL,
    }
    return build(tf.OPTForCausalLM, tf.OPTConfig(**{**given, **fields}), seed)


def tiny_gpt_neox(vocab_size: int = 32, seed: int = 0, **fields: Any) -> PreTrainedModel:
    given = _llama_like(vocab_size, fields)
    given.pop("num_key_value_heads")
    return build(tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig(**given), seed)


def tiny_falcon(vocab_size: int = 32, seed: int = 0, **fields: Any) -> PreTrainedModel:
    given = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "alibi": False,
        **NO_SPECIAL,
    }
    return build(tf.FalconForCausalLM, tf.FalconConfig(**{**given, **fields}), seed)


def tiny_bloom(vocab_size: int = 32, seed: int = 0, **fields: Any) -> PreTrainedModel:
    given = {"vocab_size": vocab_size, "hidden_size": 32, "n_layer": 2, "n_head": 4, **NO_SPECIAL}
    return build(tf.BloomForCausalLM, tf.BloomConfig(**{**given, **fields}), seed)


def tiny_mamba(vocab_size: int = 32, seed: int = 0, **fields: Any) -> PreTrainedModel:
    given = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "state_size": 4,
        "num_hidden_layers": 2,
        **NO_SPECIAL,
    }
    return build(tf.MambaForCausalLM, tf.MambaConfig(**{**given, **fields}), seed)


def tiny_lfm2(vocab_size: int = 32, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """A hybrid: one short-convolution layer, one attention layer."""
    fields = {"layer_types": ["conv", "full_attention"], **fields}
    return build(tf.Lfm2ForCausalLM, tf.Lfm2Config(**_llama_like(vocab_size, fields)), seed)


def tiny_t5(vocab_size: int = 32, seed: int = 0, **fields: Any) -> PreTrainedModel:
    given = {
        "vocab_size": vocab_size,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "tie_word_embeddings": False,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    return build(tf.T5ForConditionalGeneration, tf.T5Config(**{**given, **fields}), seed)


def tiny_bart(vocab_size: int = 32, seed: int = 0, **fields: Any) -> PreTrainedModel:
    given = {
        "vocab_size": vocab_size,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 256,
        "decoder_start_token_id": 1,
        "pad_token_id": 1,
        "bos_token_id": None,
        "eos_token_id": None,
        "forced_eos_token_id": None,
    }
    return build(tf.BartForConditionalGeneration, tf.BartConfig(**{**given, **fields}), seed)
