"""`load_gguf`: a `LanguageModel` from a GGUF file."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from foretoken.errors import ModelError, OutOfMemory
from foretoken.models.gguf.context import ContextOptions
from foretoken.models.gguf.file import parts_of
from foretoken.models.gguf.handle import Handle
from foretoken.models.gguf.library import Library, library
from foretoken.models.gguf.options import TYPE_BYTES, TYPES, Options
from foretoken.models.gguf.runner import ContextPool, GgufModel
from foretoken.models.gguf.tokenizer import GgufTokenizer

_UNROUNDED = ("all F32", "F32", "F16", "BF16")
_MMAP, _NO_MMAP = 1, 0
_POSITION_TABLES = ("gpt2", "starcoder", "mpt")
"""Architectures that may have a learned table of positions."""


def load_gguf(path: Path, name: str, options: Options | None = None, tokenizer: Any | None = None) -> GgufModel:
    """Load a GGUF file.

    Args:
        path: of the file, or of one of its parts.
        name: what messages call the model.
        options: how.
        tokenizer: used in place of the file's own.

    Raises:
        ModelError: llama.cpp is missing, the file is broken, or its model is none that writes text.
        OutOfMemory: it doesn't fit.
    """
    options = options or Options()
    parts = parts_of(path)
    handle = _open(library(), parts, name, options)
    calls = handle.library
    _check_kind(handle, name)
    own = GgufTokenizer(handle, name)
    rolls_back = not (calls.llama_model_is_recurrent(handle.pointer) or calls.llama_model_is_hybrid(handle.pointer))
    kind = calls.llama_ftype_name(calls.llama_model_ftype(handle.pointer)).decode()
    kind = kind.removeprefix("(guessed)").strip()
    cache_type = options.cache_type
    if cache_type == "auto":
        cache_type = "f32" if kind.endswith("F32") else "f16"
    context = ContextOptions(
        threads=options.n_threads or torch.get_num_threads(),
        cache_type=TYPES[cache_type],
        sequences=options.sequences if rolls_back else min(options.sequences, 16),
    )
    rows = options.rows if rolls_back else min(options.rows, context.sequences // 2)
    trained = calls.llama_model_n_ctx_train(handle.pointer)
    positions = trained if _has_position_table(handle) else None
    if positions is not None and (options.n_ctx or 0) > positions:
        raise ModelError(
            f"n_ctx is {options.n_ctx:,}, and {name} has a table of {positions:,} positions: give at most that"
        )
    pool = ContextPool(handle, context, rows, rolls_back, len(own), positions)
    has_text = handle.metadata("tokenizer.ggml.model") not in (None, "no_vocab", "none")
    return GgufModel(
        pool,
        name=name,
        vocab_size=len(own),
        max_length=options.n_ctx or trained,
        cell_bytes=_cell_bytes(handle, TYPE_BYTES[cache_type]),
        tokenizer=tokenizer if tokenizer is not None else own if has_text else None,
        eos_token_ids=own.eog_token_ids if has_text else (),
        num_parameters=calls.llama_model_n_params(handle.pointer),
        num_layers=calls.llama_model_n_layer(handle.pointer),
        weight_bytes=calls.llama_model_size(handle.pointer),
        quantize=None if kind in _UNROUNDED else kind,
    )


def _open(calls: Library, parts: Sequence[Path], name: str, options: Options) -> Handle:
    params = calls.model_params()
    params.load_mode = _MMAP if options.mmap else _NO_MMAP
    if options.n_gpu_layers is not None:
        params.n_gpu_layers = options.n_gpu_layers
    paths = (ctypes.c_char_p * len(parts))(*(str(part).encode() for part in parts))
    with calls.listening() as said:
        if len(parts) > 1:
            pointer = calls.llama_model_load_from_splits(paths, len(parts), params)
        else:
            pointer = calls.llama_model_load_from_file(paths[0], params)
    if not pointer:
        raise _refused(calls, name, said)
    return Handle(calls, pointer)


def _refused(calls: Library, name: str, said: Iterable[str]) -> Exception:
    """The error that says why llama.cpp did not load a file, by what it wrote to its log."""
    text = "; ".join(said)
    unknown = re.search(r"unknown model architecture: '([^']*)'", text)
    if unknown:
        return ModelError(
            f"{name} has the architecture {unknown[1]!r}, which {calls.home} does not know: update it "
            "(pip install -U xllamacpp), or take another model"
        )
    if re.search(r"unable to allocate|failed to allocate|out of memory|bad_alloc", text):
        return OutOfMemory(f"memory ran out while loading {name}: take a smaller quantisation of it")
    if re.search(r"not within the file bounds|failed to read|corrupted|incomplete|unexpectedly reached", text):
        return ModelError(f"{name} is cut off or broken: download it again ({_last(said)})")
    return ModelError(f"llama.cpp ({calls.home}) can't load {name}: {_last(said)}")


def _last(said: Iterable[str]) -> str:
    """The most telling line of a log: the one before the lines that only say that loading failed."""
    telling = [line for line in said if line and "failed to load model" not in line] or list(said)
    return telling[-1][:300] if telling else "it gives no reason"


def _check_kind(handle: Handle, name: str) -> None:
    """Check that a model writes text from left to right.

    Raises:
        ModelError: it doesn't.
    """
    calls, architecture = handle.library, handle.metadata("general.architecture")
    if calls.llama_model_has_encoder(handle.pointer):
        raise ModelError(
            f"{name} is an encoder-decoder model or an encoder ({architecture}), which don't run as GGUF files here: "
            "load a transformers checkpoint of it"
        )
    pooling = handle.number(f"{architecture}.pooling_type")
    if handle.metadata(f"{architecture}.attention.causal") == "false" or pooling not in (None, 0):
        raise ModelError(f"{name} is an embedding model ({architecture}), which writes no text: take a language model")
    if calls.llama_model_is_diffusion(handle.pointer):
        raise ModelError(f"{name} is a diffusion model ({architecture}), which has no next token: take another model")


def _has_position_table(handle: Handle) -> bool:
    """Whether positions are looked up in a table of the model's: llama.cpp ends the process where one is not in it."""
    architecture = handle.metadata("general.architecture")
    slopes = float(handle.metadata(f"{architecture}.attention.max_alibi_bias") or 0)
    return architecture in _POSITION_TABLES and not slopes


def _cell_bytes(handle: Handle, type_bytes: float) -> int:
    """Bytes of keys and values of one token."""
    calls, architecture = handle.library, handle.metadata("general.architecture")
    heads = calls.llama_model_n_head_kv(handle.pointer)
    default = calls.llama_model_n_embd(handle.pointer) // max(1, calls.llama_model_n_head(handle.pointer))
    width = sum(handle.number(f"{architecture}.attention.{part}_length") or default for part in ("key", "value"))
    return int(calls.llama_model_n_layer(handle.pointer) * heads * width * type_bytes)
