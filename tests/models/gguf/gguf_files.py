"""GGUF files of tiny transformers models, written with the `gguf` package."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from foretoken.models.gguf.library import library

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "mamba": gguf.MODEL_ARCH.MAMBA,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "phi3": gguf.MODEL_ARCH.PHI3,
}
_GAINS_MINUS_ONE = ("gemma2",)
"""Architectures whose norms multiply with one plus the weight."""


def rounded(values: Any, kind: str) -> Any:
    """Rows of float32 numbers in a type that rounds them, by llama.cpp: ``[rows, bytes]`` uint8."""
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    rows, width = values.shape
    out = np.empty((rows, width // block * size), dtype=np.uint8)
    function = library().ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *3 * (ctypes.c_int64,), ctypes.c_void_p)
    assert function(int(number), values.ctypes.data, out.ctypes.data, 0, rows, width, None) == out.nbytes
    return out


def write(
    module: Any,
    path: Path,
    tokenizer: Any | None = None,
    kinds: Callable[[str], str] | None = None,
    tensors: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    **metadata: Any,
) -> Path:
    """Write a model.

    Args:
        module: a transformers model.
        path: where to.
        tokenizer: a byte-level BPE tokenizer, or a function that writes a vocabulary; None for none.
        kinds: gives the type of a matrix of which the name is given; None for float32 throughout.
        tensors: further ones, by their names in the file.
        without: keys that are left out.
        metadata: further keys and values.
    """
    config = module.config
    kind = config.model_type
    arch = _ARCHITECTURES[kind]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    layers = getattr(config, "num_hidden_layers", None) or config.n_layer
    writer.add_block_count(layers)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _HEADERS[kind](writer, config)
    names = gguf.get_tensor_name_map(arch, layers)
    for name, tensor in module.state_dict().items():
        if name == "lm_head.weight" and getattr(config, "tie_word_embeddings", False):
            continue
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            continue
        new, values = _converted(kind, config, name, tensor.float(), names)
        numbers = np.ascontiguousarray(values.numpy())
        kind_of_matrix = "F32" if kinds is None or numbers.ndim == 1 else kinds(new)
        if kind_of_matrix == "F32":
            writer.add_tensor(new, numbers)
        else:
            stored = rounded(numbers, kind_of_matrix)
            writer.add_tensor(new, stored, raw_dtype=gguf.GGMLQuantizationType[kind_of_matrix])
    for name, extra in (tensors or {}).items():
        writer.add_tensor(name, extra)
    for key in without:
        del writer.kv_data[0][key]
    _add_vocabulary(writer, config, tokenizer)
    for key, value in metadata.items():
        _add(writer, key.replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _converted(kind: str, config: Any, name: str, values: torch.Tensor, names: Any) -> tuple[str, torch.Tensor]:
    new = names.get_name(name, try_suffixes=(".weight", ".bias")) or names.get_name(name.removeprefix("transformer."))
    assert new is not None, name
    if kind == "llama" and (".q_proj." in name or ".k_proj." in name):
        # Its rotary embedding turns neighbouring coordinates, transformers' those half a head apart.
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if kind in _GAINS_MINUS_ONE and name.endswith("norm.weight"):
        values = values + 1
    if kind == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        values = values.T
    if kind == "mamba":
        if name.endswith("A_log"):
            values = -torch.exp(values)
        if name.endswith("conv1d.weight"):
            values = values.squeeze(1)
    if kind == "lfm2" and name.endswith("conv.conv.weight"):
        values = values.squeeze(1)
    return new, values


def _llama_like(writer: Any, config: Any) -> None:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    if config.model_type != "lfm2":
        writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.norm_eps if config.model_type == "lfm2" else config.rms_norm_eps)
    writer.add_rope_freq_base((config.rope_parameters or {}).get("rope_theta", 10000.0))
    if config.model_type == "llama":
        writer.add_rope_dimension_count(head)


def _gemma2(writer: Any, config: Any) -> None:
    _llama_like(writer, config)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def _phi3(writer: Any, config: Any) -> None:
    """With two sets of rotary frequencies."""
    _llama_like(writer, config)
    rope, original = config.rope_parameters, config.original_max_position_embeddings
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_scaling_orig_ctx_len(original)
    scale = math.sqrt(1.0 + math.log(config.max_position_embeddings / original) / math.log(original))
    writer.add_rope_scaling_attn_factors(scale)
    for name in ("long", "short"):
        writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], dtype=np.float32))


def _gpt2(writer: Any, config: Any) -> None:
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)


def _mamba(writer: Any, config: Any) -> None:
    writer.add_context_length(256)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(config.intermediate_size)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_time_step_rank(config.time_step_rank)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)


def _lfm2(writer: Any, config: Any) -> None:
    _llama_like(writer, config)
    kinds = config.layer_types
    writer.add_head_count_kv([config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds])
    writer.add_shortconv_l_cache(config.conv_L_cache)


_HEADERS = {
    "llama": _llama_like,
    "qwen2": _llama_like,
    "qwen3": _llama_like,
    "gemma2": _gemma2,
    "gpt2": _gpt2,
    "mamba": _mamba,
    "lfm2": _lfm2,
    "phi3": _phi3,
}


def _add_vocabulary(writer: Any, config: Any, tokenizer: Any | None) -> None:
    size = config.vocab_size
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
        return
    if callable(tokenizer) and not hasattr(tokenizer, "get_vocab"):
        tokenizer(writer)
        return
    tokens, kinds = [f"[PAD{i}]" for i in range(size)], [gguf.TokenType.UNUSED] * size
    special = set(tokenizer.all_special_ids)
    for name, token in tokenizer.get_vocab().items():
        tokens[token] = name
        kinds[token] = gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL
    stored = json.loads(tokenizer.backend_tokenizer.to_str())
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in stored["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    if tokenizer.eos_token_id is not None:
        writer.add_eos_token_id(tokenizer.eos_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)
