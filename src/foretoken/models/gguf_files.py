"""Which runner a GGUF file is loaded on: OpenVINO's kernels where they compute it, and are no slower without drafts.

OpenVINO takes several tokens at little more than the price of one, which is what speculation lives on, and llama.cpp's
kernels for the CPU take each token's time: docs/gguf.md has the measurements.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from foretoken.errors import ModelError, shown
from foretoken.models import gguf, native, sampling_defaults
from foretoken.models.base import LanguageModel
from foretoken.models.gguf.header import Header


def load_gguf(
    file: Path,
    name: str,
    runner: str,
    options: native.Options,
    llama: gguf.Options,
    tokenizer: Any | None,
    kwargs: dict[str, Any],
    *,
    drafted: bool = False,
) -> LanguageModel:
    """Load a GGUF file.

    Args:
        file: or one of its parts.
        name: what messages call the model.
        runner: "auto", "native" or "gguf".
        options: of the native runner.
        llama: of llama.cpp's.
        tokenizer: used in place of the file's own.
        kwargs: options of transformers, which are refused.
        drafted: a model drafts for it.

    Raises:
        ModelError: an option is not for GGUF files or the runner, or the file is broken, or none that writes text.
        OutOfMemory: it doesn't fit.
    """
    _check_options(name, runner, options, kwargs)
    if runner == "gguf":
        return gguf.load(file, name, llama, tokenizer)
    parts = gguf.parts_of(file)
    header = gguf.read_header(parts)
    reason = _refusal(header, options, llama)
    if reason is None and runner == "auto":
        reason = _slower(header, options, drafted)
    if reason is not None:
        if runner == "native":
            raise ModelError(f"{name} can't run natively: {reason}; or use runner='auto' or 'gguf'")
        return gguf.load(file, name, llama, tokenizer)
    vocabulary = gguf.load_vocabulary(parts, header, name)
    model = native.build_gguf(
        header,
        name=name,
        tokenizer=tokenizer if tokenizer is not None else vocabulary.tokenizer,
        eos_token_ids=vocabulary.eos_token_ids,
        kind=vocabulary.kind,
        n_ctx=llama.n_ctx,
        options=options,
    )
    model.sampling_defaults = sampling_defaults.of_gguf(header.metadata.get, name)
    return model


def _check_options(name: str, runner: str, options: native.Options, kwargs: dict[str, Any]) -> None:
    """Refuse what is not for GGUF files, rather than pass it over."""
    if runner == "hf":
        raise ModelError(f"{name} is a GGUF file, which transformers doesn't run: use runner='native' or 'gguf'")
    if options.quantize not in (None, "auto"):
        raise ModelError(f"{name} is a GGUF file, rounded as it comes: leave quantize={options.quantize!r} out")
    if kwargs:
        option, value = next(iter(kwargs.items()))
        raise ModelError(
            f"{name} is a GGUF file, and {option}={shown(value)} is an option of transformers: leave it out"
        )


def _slower(header: Header, options: native.Options, drafted: bool) -> str | None:
    """Why a file that can run natively should not."""
    if gguf.uses_gpu():
        return "llama.cpp has a GPU"
    # Drafters are loaded with "auto": a chain of drafts is one call natively.
    return None if options.quantize == "auto" else native.slow(header, drafted=drafted)


def _refusal(header: Header, options: native.Options, llama: gguf.Options) -> str | None:
    """Why a file should not run natively; None if it should."""
    for option, default in vars(gguf.Options()).items():
        value = getattr(llama, option)
        if option != "n_ctx" and value != default:
            return f"{option}={shown(value)} is an option of llama.cpp: leave it out"
    if options.eager or options.backend == "torch":
        return "torch doesn't multiply with the weights of GGUF files: leave eager and backend out"
    return native.gguf_refusal(header) or native.openvino_refusal(torch.float32, torch.device("cpu"))
