"""The structures of llama.cpp's C API that are passed by value, as its versions lay them out.

Their fields move between versions, and a binding with yesterday's offsets writes into other fields without an error. So
nothing is taken on trust: the defaults that the library fills in are compared, field by field, with those that a layout
expects, and the first layout that explains all of them is used.
"""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_float, c_int32, c_uint32, c_void_p
from typing import Any

_F16 = 1  # as ggml numbers types

_SPARE = 256
"""Bytes behind the known fields, which a later version may use: callees read what they know of."""


class Batch(ctypes.Structure):
    """``llama_batch``: the tokens of a pass. It has not changed since 2024."""

    _fields_ = [
        ("n_tokens", c_int32),
        ("token", c_void_p),
        ("embd", c_void_p),
        ("pos", c_void_p),
        ("n_seq_id", c_void_p),
        ("seq_id", c_void_p),
        ("logits", c_void_p),
    ]


_POINTERS = ("devices", "tensor_buft_overrides")
_LOADING = ("tensor_split", "progress_callback", "progress_callback_user_data", "kv_overrides")


class ModelParams(ctypes.Structure):
    """``llama_model_params`` since the load modes (July 2026)."""

    _fields_ = [
        *((name, c_void_p) for name in _POINTERS),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int32),
        ("load_mode", c_int32),
        ("lazy_mode", c_int32),
        ("main_gpu", c_int32),
        *((name, c_void_p) for name in _LOADING),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
        ("spare", ctypes.c_ubyte * _SPARE),
    ]


def _context_fields(pointers_after_types: int) -> list[tuple[str, Any]]:
    return [
        *((name, c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int32),
        ("rope_scaling_type", c_int32),
        ("pooling_type", c_int32),
        ("attention_type", c_int32),
        ("flash_attn_type", c_int32),
        *((f"rope_freq_{name}", c_float) for name in ("base", "scale")),
        *((f"yarn_{name}", c_float) for name in ("ext_factor", "attn_factor", "beta_fast", "beta_slow")),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int32),
        ("type_v", c_int32),
        *((f"pointer_{number}", c_void_p) for number in range(pointers_after_types)),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", ctypes.c_size_t),
        ("ctx_other", c_void_p),
        ("spare", ctypes.c_ubyte * _SPARE),
    ]


class ContextParams05(ctypes.Structure):
    """``llama_context_params`` of llama.cpp 0.5."""

    _fields_ = _context_fields(2)


class ContextParams06(ctypes.Structure):
    """``llama_context_params`` of llama.cpp 0.6: one more callback."""

    _fields_ = _context_fields(3)


MODEL_LAYOUTS: dict[str, type[Any]] = {"0.5": ModelParams}
CONTEXT_LAYOUTS: dict[str, type[Any]] = {"0.5": ContextParams05, "0.6": ContextParams06}

_MODEL_DEFAULTS = {
    "n_gpu_layers": {-1},
    "split_mode": {1},
    "load_mode": {-1, 1},
    "lazy_mode": {0, 1},
    "main_gpu": {0},
    "vocab_only": {0},
    "check_tensors": {0},
    "use_extra_bufts": {1},
    "no_host": {0},
    "no_alloc": {0},
    **{name: {None} for name in (*_POINTERS, *_LOADING)},
}
_CONTEXT_DEFAULTS = {
    "n_ctx": {512},
    "n_batch": {2048},
    "n_ubatch": {512},
    "n_seq_max": {1},
    "n_rs_seq": {0},
    "n_outputs_max": {0},
    "n_outputs_max_per_seq": {0, 1},
    "n_threads": set(range(1, 1025)),
    "n_threads_batch": set(range(1, 1025)),
    "ctx_type": {0},
    "rope_scaling_type": {-1},
    "pooling_type": {-1},
    "attention_type": {-1},
    "flash_attn_type": {-1},
    "rope_freq_base": {0.0},
    "rope_freq_scale": {0.0},
    "yarn_ext_factor": {-1.0},
    "yarn_orig_ctx": {0},
    "defrag_thold": {-1.0},
    "cb_eval": {None},
    "cb_eval_user_data": {None},
    "type_k": {_F16},
    "type_v": {_F16},
    "embeddings": {0},
    "offload_kqv": {1},
    "no_perf": {1},
    "op_offload": {1},
    "swa_full": {1},
    "kv_unified": {0},
    "samplers": {None},
    "n_samplers": {0},
    "ctx_other": {None},
}


def model_mismatch(params: Any) -> str | None:
    """What of default model parameters does not fit their layout; None if all does."""
    return _mismatch(params, _MODEL_DEFAULTS)


def context_mismatch(params: Any) -> str | None:
    """What of default context parameters does not fit their layout; None if all does."""
    return _mismatch(params, _CONTEXT_DEFAULTS)


def _mismatch(params: Any, expected: dict[str, Any]) -> str | None:
    for name, values in expected.items():
        # The byte of a bool, as it is: 2 would be a sign of another field.
        offset = getattr(type(params), name).offset
        kind = dict(params._fields_)[name]
        found = ctypes.string_at(ctypes.addressof(params) + offset, 1)[0] if kind is c_bool else getattr(params, name)
        if found not in values:
            return f"{name} is {found!r}, not {' or '.join(map(repr, sorted(values, key=str)[:3]))}"
    return None
