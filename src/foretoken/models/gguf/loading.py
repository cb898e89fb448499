"""`load_gguf`: a `LanguageModel` from a GGUF file."""

from __future__ import annotations

import ctypes
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from foretoken.errors import ModelError, OutOfMemory
from foretoken.limits import TENTATIVE
from foretoken.models import sampling_defaults
from foretoken.models.gguf.context import PAD, ContextOptions
from foretoken.models.gguf.file import parts_of
from foretoken.models.gguf.handle import Handle
from foretoken.models.gguf.header import Header, read_header
from foretoken.models.gguf.library import Library, library
from foretoken.models.gguf.options import TYPE_BYTES, TYPES, Options
from foretoken.models.gguf.runner import ContextPool, GgufModel
from foretoken.models.gguf.tokenizer import GgufTokenizer
from foretoken.models.processor import position_share

_UNROUNDED = ("all F32", "F32", "F16", "BF16")
_MMAP, _NO_MMAP = 1, 0
_POSITION_TABLES = ("gpt2", "starcoder", "mpt")
"""Architectures that may have a learned table of positions."""
_LONG_FACTORS = "rope_factors_long.weight"


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
    header = _read_header(parts)
    own = GgufTokenizer(handle, name, partial(_tokenizer, parts, name))
    rolls_back = not (calls.llama_model_is_recurrent(handle.pointer) or calls.llama_model_is_hybrid(handle.pointer))
    kind = _kind(calls, calls.llama_model_ftype(handle.pointer))
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
    max_length = options.n_ctx or trained
    if (original := _original_context(handle, header, trained)) is not None:
        if max_length > original:
            context = replace(context, cells=max(context.cells, (original // PAD + 1) * PAD))
        else:
            rows, most = 1, original // PAD * PAD
            context = replace(context, most_cells=most)
            max_length = min(max_length, most - TENTATIVE)
            if max_length < 1:
                raise ModelError(
                    f"{name} has two sets of rotary frequencies, one for up to {original:,} tokens, which leaves none "
                    f"beside drafts: give an n_ctx above {original:,}, for the other one"
                )
    window = max(calls.llama_model_n_swa(handle.pointer), 0) if rolls_back else 0  # else no sequence is cut to a part
    pool = ContextPool(handle, context, rows, rolls_back, len(own), positions, window)
    has_text, heads = _has_text(handle), _heads_of_keys(handle, header)
    weight_bytes, numbers = calls.llama_model_size(handle.pointer), calls.llama_model_n_params(handle.pointer)
    # Its kernels for the CPU take a row of weights for one token after another, and are mostly built for AVX2.
    share = None if calls.llama_supports_gpu_offload() else position_share(weight_bytes / max(numbers, 1), wide=False)
    model = GgufModel(
        pool,
        name=name,
        vocab_size=len(own),
        max_length=max_length,
        cell_bytes=_cell_bytes(handle, heads, TYPE_BYTES[cache_type]),
        state_bytes=0 if rolls_back else _state_bytes(handle, heads.count(0) or len(heads)),
        tokenizer=tokenizer if tokenizer is not None else own if has_text else None,
        eos_token_ids=own.eog_token_ids if has_text else (),
        num_parameters=numbers,
        num_layers=calls.llama_model_n_layer(handle.pointer),
        weight_bytes=weight_bytes,
        position_share=share,
        quantize=None if kind in _UNROUNDED else kind,
    )
    model.sampling_defaults = sampling_defaults.of_gguf(handle.metadata, name)
    return model


@dataclass(frozen=True)
class Vocabulary:
    """What a file says about text, without its weights.

    Attributes:
        tokenizer: None where the file has none.
        eos_token_ids: the end tokens.
        kind: how the weights are rounded, as llama.cpp names it; None for not at all.
    """

    tokenizer: GgufTokenizer | None
    eos_token_ids: tuple[int, ...]
    kind: str | None


def load_vocabulary(parts: Sequence[Path], header: Header, name: str) -> Vocabulary:
    """Have llama.cpp read a file's vocabulary alone.

    Args:
        parts: all files of the model.
        header: what they say.
        name: what messages call it.

    Raises:
        ModelError: llama.cpp is missing, or can't read the file.
    """
    own = _tokenizer(parts, name)
    handle = own.handle
    kinds = Counter(tensor.kind for tensor in header.tensors.values() if len(tensor.shape) > 1)
    number = header.metadata.get("general.file_type")  # with a vocabulary alone, llama.cpp doesn't say
    kind = kinds.most_common(1)[0][0] if number is None else _kind(handle.library, number)
    kept = None if kind in _UNROUNDED else kind
    return Vocabulary(own, own.eog_token_ids, kept) if _has_text(handle) else Vocabulary(None, (), kept)


def _tokenizer(parts: Sequence[Path], name: str) -> GgufTokenizer:
    handle = _open(library(), parts, name, Options(), vocab_only=True)
    return GgufTokenizer(handle, name, partial(_tokenizer, parts, name))


def _kind(calls: Library, number: int) -> str:
    """The name of a file's type, that of most of its weights."""
    return str(calls.llama_ftype_name(number).decode().removeprefix("(guessed)").strip())


def _has_text(handle: Handle) -> bool:
    return handle.metadata("tokenizer.ggml.model") not in (None, "no_vocab", "none")


def _open(calls: Library, parts: Sequence[Path], name: str, options: Options, vocab_only: bool = False) -> Handle:
    params = calls.model_params()
    params.vocab_only = vocab_only
    params.load_mode = _MMAP if options.mmap else _NO_MMAP
    if options.n_gpu_layers is not None:
        params.n_gpu_layers = options.n_gpu_layers
    paths = (ctypes.c_char_p * len(parts))(*(os.fsencode(part) for part in parts))
    with calls.listening() as said:
        if len(parts) > 1:
            pointer = calls.llama_model_load_from_splits(paths, len(parts), params)
        else:
            pointer = calls.llama_model_load_from_file(paths[0], params)
    if not pointer:
        raise _no_model(_read_header(parts).metadata, len(parts), name) or _refused(calls, name, said)
    return Handle(calls, pointer)


_NO_MODELS = {
    "adapter": "an adapter: merge it into its model (with llama.cpp's llama-export-lora), and give the file of that",
    "mmproj": "the part of a model that reads pictures or sounds: give the file of the model itself",
    "imatrix": "a matrix of importance, which weights are rounded by: give the file of the model",
}
"""By what files say of themselves."""


def _no_model(metadata: dict[str, Any], given: int, name: str) -> ModelError | None:
    """The error for a file, or so many `given` ones, that belong to a model, and are none."""
    kind = "mmproj" if metadata.get("general.architecture") == "clip" else metadata.get("general.type")
    if kind in _NO_MODELS:
        return ModelError(f"{name} is {_NO_MODELS[kind]}")
    count, number = metadata.get("split.count", 0), metadata.get("split.no", 0) + 1
    if count > 1 and given == 1:
        return ModelError(
            f"{name} is part {number} of {count}: put all of them into one folder, with the names that they had "
            f"(such as model-{number:05d}-of-{count:05d}.gguf)"
        )
    return None


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


def _read_header(parts: Sequence[Path]) -> Header:
    """What the files of a model say; nothing where llama.cpp alone can read them."""
    try:
        return read_header(parts)
    except ModelError:
        return Header({}, {}, ())


def _original_context(handle: Handle, header: Header, trained: int) -> int | None:
    """The longest sequence for the first of a model's two sets of rotary frequencies; None where it has but one.

    llama.cpp takes the second in each context with more room than that, whatever it holds, and cached keys keep the
    frequencies that they were made with. So all contexts of a model have more room, or none has: as `n_ctx` says, or
    the file. Without more, a context has one row, as they share its room.
    """
    if _LONG_FACTORS not in header.tensors:
        return None
    return handle.number(f"{handle.metadata('general.architecture')}.rope.scaling.original_context_length") or trained


def _has_position_table(handle: Handle) -> bool:
    """Whether positions are looked up in a table of the model's: llama.cpp ends the process where one is not in it."""
    architecture = handle.metadata("general.architecture")
    slopes = float(handle.metadata(f"{architecture}.attention.max_alibi_bias") or 0)
    return architecture in _POSITION_TABLES and not slopes


def _heads_of_keys(handle: Handle, header: Header) -> list[int]:
    """Heads of keys and values of each layer: none in one that has a state of fixed size alone."""
    found = header.metadata.get(f"{handle.metadata('general.architecture')}.attention.head_count_kv")
    layers, first = handle.library.llama_model_n_layer(handle.pointer), handle.library.llama_model_n_head_kv
    return found[:layers] if isinstance(found, list) else [first(handle.pointer)] * layers


def _cell_bytes(handle: Handle, heads: Sequence[int], type_bytes: float) -> int:
    """Bytes of keys and values of one token, whose heads are given for each layer."""
    calls, architecture = handle.library, handle.metadata("general.architecture")
    default = calls.llama_model_n_embd(handle.pointer) // max(1, calls.llama_model_n_head(handle.pointer))
    width = sum(handle.number(f"{architecture}.attention.{part}_length") or default for part in ("key", "value"))
    return int(sum(heads) * width * type_bytes)


def _state_bytes(handle: Handle, layers: int) -> int:
    """Bytes of a sequence's state that can't be cut: what layers of Mamba, RWKV and short convolutions keep."""
    architecture, width = handle.metadata("general.architecture"), handle.library.llama_model_n_embd(handle.pointer)

    def get(key: str) -> int:
        return handle.number(f"{architecture}.{key}") or 0

    inner, state, head = get("ssm.inner_size"), get("ssm.state_size"), get("wkv.head_size")
    numbers = max(get("ssm.conv_kernel") - 1, 0) * (inner + 2 * get("ssm.group_count") * state) + inner * state
    numbers += max(get("shortconv.l_cache") - 1, 0) * width
    if head:
        numbers += width * (head + (get("token_shift_count") or 2))
    return 4 * numbers * layers  # float32, whatever keys and values are
