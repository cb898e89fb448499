"""`load`: a `LanguageModel` from a path, a hub id or a transformers model.

The native runner's way imports no modelling code of transformers, which alone takes seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from foretoken.errors import ModelError, check_choice, check_flag, shown
from foretoken.models import gguf, native, sampling_defaults
from foretoken.models.base import LanguageModel, check_attributes
from foretoken.models.gguf_files import load_gguf
from foretoken.models.load_errors import translated_errors
from foretoken.models.locating import hub_resolves, locate
from foretoken.models.native import config as native_config
from foretoken.models.placement import resolve_device, resolve_dtype
from foretoken.models.tokenizers import check_tokenizer, load_tokenizer, quiet_transformers, tokenizer_for

Runner = Literal["auto", "native", "hf", "gguf"]

_DOWNLOADED = ("*.safetensors", "*.json")
_LEFT = ("consolidated*", "*/*")  # the same weights once more, as their authors lay them out; what is no part of them
"""Files of a hub model that the native runner has downloaded, and of these the ones that it leaves there."""


def load(
    model: Any,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    attn_implementation: str | None = None,
    tokenizer: Any | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    name: str | None = None,
    runner: Runner = "auto",
    drafted: bool = False,
    quantize: native.Quantize | Literal["auto"] | None = None,
    backend: Literal["auto", "openvino", "torch"] = "auto",
    eager: bool = False,
    n_ctx: int | None = None,
    n_gpu_layers: int | None = None,
    n_threads: int | None = None,
    cache_type: gguf.CacheType = "auto",
    mmap: bool = True,
    **kwargs: Any,
) -> LanguageModel:
    """Load a language model.

    Args:
        model: a folder, a hub id, a GGUF file (or the folder that holds it alone), a transformers model, or a
            `LanguageModel` (returned as it is). A transformers model is put in evaluation mode.
        dtype: of the weights, as torch or transformers name it. "auto" is the checkpoint's. On a CPU that doesn't
            multiply 16-bit numbers it is float32 instead; on one that does, it is bfloat16 instead of float16.
        device: where the model runs; None means a CUDA device where there is one, else the CPU. A transformers model
            stays where it is.
        attn_implementation: "sdpa" or "eager"; None means what transformers prefers.
        tokenizer: a tokenizer, or where to load one from; None looks next to the model.
        trust_remote_code: run code that comes with the checkpoint.
        revision: branch, tag or commit on the hub.
        name: what messages call the model; None means what it was loaded from.
        runner: "native" runs popular architectures (Llama, Mistral, Qwen2, Qwen3, Phi-3) faster than transformers
            does, "hf" runs any model with transformers, "auto" is "native" for checkpoints where it can be.
            GGUF files: "gguf" runs any on llama.cpp, "native" those of Llama, Qwen2 and Qwen3 on OpenVINO, and "auto"
            is "native" where it can be and is not slower without drafts, if no option is for llama.cpp.
            A transformers model runs on "hf" unless this is "native" or `quantize` is given.
        drafted: a draft model will draft for this model; `Engine` sets it for its target. For GGUF files: `runner`
            "auto" then takes the runner on which passes over several tokens are cheapest, even if plain decoding is
            slower there.
        quantize: "int8" rounds the weights of linear layers to eight bits, one scale an output feature. "int4" rounds
            them to four bits, in groups of up to 64 features with a scale each; the output layer gets eight. "w8a8" and
            "w4a8" also round the layers' inputs to eight bits, as llama.cpp does. With OpenVINO this makes passes over
            several tokens cheaper where the processor multiplies eight-bit integers; other backends refuse them. The
            model's distribution is then that of the rounded model. "auto" is for drafters: "w8a8" where it is faster,
            else nothing. Only the native runner quantises: with "hf" anything but "auto" is refused.
        backend: what the native runner computes with: "openvino", "torch", or "auto" for the fastest installed.
        eager: compile nothing: the native runner uses torch, operation by operation. Otherwise, where OpenVINO doesn't
            run the model, torch compiles the layers for the processor, once on a machine.
        n_ctx: for GGUF files: most tokens of a sequence; None for the file's context. `dtype` has no effect on such
            files, and `quantize` is refused.
        n_gpu_layers: for llama.cpp: layers that a GPU computes, where llama.cpp was built for one; None for all.
        n_threads: for llama.cpp: threads that compute a pass; None for as many as torch uses.
        cache_type: for llama.cpp: of keys and values, "f32", "f16", "bf16" or "q8_0"; "auto" is "f32" where the weights
            are, else "f16".
        mmap: for llama.cpp: map the file into memory instead of reading it.
        kwargs: passed on to `from_pretrained`, for example `quantization_config` or `device_map`; transformers then
            runs the model.

    Raises:
        ModelError: there is no such model, its files are broken, or it is no language model.
        OutOfMemory: it doesn't fit.
    """
    check_tokenizer(tokenizer)
    check_choice("runner", runner, get_args(Runner), ModelError)
    for flag, value in (("trust_remote_code", trust_remote_code), ("mmap", mmap), ("drafted", drafted)):
        check_flag(flag, value, ModelError)
    if name is not None and not isinstance(name, str):
        raise ModelError(f"name is {shown(name)}: give a string")
    options = native.Options(quantize, backend, eager)
    if runner == "hf" and quantize not in (None, "auto"):
        raise ModelError(f"runner is 'hf', which doesn't quantise, and quantize is {quantize!r}: leave one of them out")
    llama = gguf.Options(n_ctx, n_gpu_layers, n_threads, cache_type, mmap)
    if isinstance(model, nn.Module):
        tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
        return _of_module(model, tokenizer, name, options, runner)
    if not isinstance(model, (str, Path)):
        if isinstance(model, LanguageModel):
            return check_attributes(model)
        if hasattr(model, "forward") and hasattr(model, "cache_bytes"):
            raise ModelError(
                f"a {type(model).__name__} is no model: make it a subclass of foretoken.models.LanguageModel"
            )
        raise ModelError(
            f"can't load a model from a {type(model).__name__}: give a path, a hub id or a transformers model"
        )
    file = gguf.find(model)
    if file is not None:
        given = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
        return load_gguf(file, name or str(model), runner, options, llama, given, kwargs, drafted=drafted)
    if runner == "gguf":
        raise ModelError(f"{shown(model)} is no GGUF file, which runner='gguf' is for: leave it out")
    source = locate(model)
    name = name or str(model)
    target = resolve_device(device)
    if attn_implementation is not None:
        kwargs["attn_implementation"] = attn_implementation
    hub: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    with translated_errors(name, source):
        if (
            Path(source).is_dir()
            and target.type in ("cpu", "cuda")
            and runner != "hf"
            and not kwargs
            and revision is None
        ):
            found = _load_plain_folder(Path(source), name, dtype, target, tokenizer, options, hub)
            if found is not None:
                return found
        if revision is not None:
            hub["revision"] = revision
        if not Path(source).is_dir() and not hub_resolves():
            # What was downloaded before still loads; without this, the hub's client retries for half a minute.
            hub["local_files_only"] = True
        with quiet_transformers():
            return _load_by_transformers_config(source, name, dtype, target, tokenizer, options, runner, hub, kwargs)


def _load_plain_folder(
    folder: Path,
    name: str,
    dtype: str | torch.dtype,
    device: torch.device,
    tokenizer: Any | None,
    options: native.Options,
    hub: dict[str, Any],
) -> LanguageModel | None:
    """A native model of a folder whose config.json needs no transformers to be understood; None for other folders."""
    config = native_config.read_config(folder)
    eos_token_ids = None if config is None else native_config.read_eos_token_ids(folder, config)
    if config is None or eos_token_ids is None:
        return None
    resolved = resolve_dtype(dtype, config, device)
    if native.refusal(config, folder, resolved, device) is not None:
        return None
    model = native.build(
        folder,
        config,
        name=name,
        dtype=resolved,
        device=device,
        tokenizer=tokenizer_for(tokenizer, str(folder), hub),
        eos_token_ids=eos_token_ids,
        options=options,
    )
    model.sampling_defaults = sampling_defaults.of_folder(folder)
    return model


def _load_by_transformers_config(
    source: str,
    name: str,
    dtype: str | torch.dtype,
    device: torch.device,
    tokenizer: Any | None,
    options: native.Options,
    runner: Runner,
    hub: dict[str, Any],
    kwargs: dict[str, Any],
) -> LanguageModel:
    """A model of a type that transformers has: on the native runner if `runner` allows it, else on transformers."""
    from foretoken.models import transformers_loading

    config = transformers_loading.read_config(source, hub)
    architecture = transformers_loading.architecture_of(config, name)
    if runner != "hf":
        resolved = torch.float32 if config.is_encoder_decoder else resolve_dtype(dtype, config, device)
        folder = Path(source) if Path(source).is_dir() else None
        # Without that, transformers takes its own class of a type that it knows.
        own_code = hub["trust_remote_code"] and transformers_loading.has_own_code(config, architecture)
        reason = _refusal(config, folder, resolved, device, kwargs, own_code)
        if reason is None:
            folder = folder or _download(source, hub)
            reason = native.refusal(config, folder, resolved, device)
        if reason is None:
            assert folder is not None
            model = native.build(
                folder,
                config,
                name=name,
                dtype=resolved,
                device=device,
                tokenizer=tokenizer_for(tokenizer, source, hub),
                eos_token_ids=transformers_loading.read_eos_token_ids(source, config, hub),
                options=options,
            )
            model.sampling_defaults = sampling_defaults.of_folder(folder)
            return model
        _check_runner(runner, options.quantize, name, reason)
    return transformers_loading.load_module(
        source,
        config,
        architecture,
        name=name,
        dtype=dtype,
        device=device,
        tokenizer=tokenizer,
        hub=hub,
        options=kwargs,
    )


def _of_module(module: Any, tokenizer: Any, name: str | None, options: native.Options, runner: Runner) -> LanguageModel:
    """A model over a transformers model: on transformers, or on the native runner with its weights, device, dtype."""
    from foretoken.models import traits
    from foretoken.models.wrapping import wrap

    if runner != "native" and options.quantize in (None, "auto"):
        model = wrap(module, tokenizer, name)
        model.sampling_defaults = sampling_defaults.of_module(module, model.name)
        return model
    config = getattr(module, "config", None)
    name = name or getattr(config, "name_or_path", "") or type(module).__name__
    device = next(module.parameters()).device
    own_code = bool(getattr(config, "auto_map", None)) and not type(module).__module__.startswith("transformers.")
    reason = native.refusal(config, None, module.dtype, device, own_code=own_code)
    _check_runner(runner, options.quantize, name, reason)
    model = native.build(
        module,
        config,
        name=name,
        dtype=module.dtype,
        device=device,
        tokenizer=tokenizer,
        eos_token_ids=traits.eos_token_ids(module),
        options=options,
    )
    model.sampling_defaults = sampling_defaults.of_module(module, name)
    return model


def _refusal(
    config: Any,
    folder: Path | None,
    dtype: torch.dtype,
    device: torch.device,
    kwargs: dict[str, Any],
    own_code: bool,
) -> str | None:
    """Why a checkpoint can't run natively; None if it can."""
    if kwargs:
        return f"{next(iter(kwargs))}={shown(next(iter(kwargs.values())))} is an option of transformers"
    return native.refusal(config, folder, dtype, device, own_code=own_code)


def _check_runner(runner: Runner, quantize: str | None, name: str, reason: str | None) -> None:
    """Refuse what only the native runner could do, where it can't."""
    if reason is None:
        return
    if runner == "native":
        raise ModelError(f"{name} can't run natively ({reason}): use runner='auto' or 'hf'")
    if quantize not in (None, "auto"):
        raise ModelError(f"{name} can't be quantised to {quantize} ({reason}): leave quantize out")


def _download(source: str, hub: dict[str, Any]) -> Path:
    """The folder that holds a hub model's safetensors files, which are downloaded if need be."""
    import huggingface_hub

    return Path(
        huggingface_hub.snapshot_download(
            source,
            revision=hub.get("revision"),
            local_files_only=hub.get("local_files_only", False),
            allow_patterns=list(_DOWNLOADED),
            ignore_patterns=list(_LEFT),
        )
    )
