"""`load`: a `LanguageModel` from a path, a hub id or a transformers model; `check_pair`: do two fit together?"""

from __future__ import annotations

import re
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args
from urllib.parse import urlsplit
from urllib.request import getproxies

import huggingface_hub
import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from foretoken.errors import ModelError, OutOfMemory
from foretoken.models import native, traits
from foretoken.models.base import LanguageModel
from foretoken.models.processor import multiplies_bfloat16
from foretoken.models.wrapping import wrap

Runner = Literal["auto", "native", "hf"]

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


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
    quantize: Literal["int8", "w8a8", "auto"] | None = None,
    backend: Literal["auto", "openvino", "torch"] = "auto",
    eager: bool = False,
    **kwargs: Any,
) -> LanguageModel:
    """Load a language model.

    Args:
        model: a folder, a hub id, a transformers model, or a `LanguageModel` (returned as it is).
        dtype: of the weights, as torch or transformers name it. "auto" is the checkpoint's, but on a CPU that
            doesn't multiply 16-bit numbers float32 in its place, and bfloat16 for float16 on one that does.
        device: where the model runs; None means a CUDA device where there is one, else the CPU. A transformers model
            stays where it is.
        attn_implementation: "sdpa" or "eager"; None means what transformers prefers.
        tokenizer: a tokenizer, or where to load one from; None looks next to the model.
        trust_remote_code: run code that comes with the checkpoint.
        revision: branch, tag or commit on the hub.
        name: what messages call the model; None means what it was loaded from.
        runner: "native" runs popular architectures (Llama, Mistral, Qwen2, Qwen3, Phi-3) faster than transformers
            does, "hf" runs any model with transformers, "auto" is "native" for checkpoints on the CPU where it can be.
            A transformers model runs on "hf" unless "native" is asked for.
        quantize: "int8" rounds the weights of linear layers to eight bits, one scale an output feature; the model's
            law is then that of the rounded weights. "w8a8" rounds what they are multiplied with too, and is for
            drafters; so is "auto": "w8a8" where it is faster, else nothing. Native runner alone.
        backend: what the native runner computes with: "openvino", "torch", or "auto" for the fastest installed.
        eager: compile nothing: the native runner's torch runs operation by operation. Else, where OpenVINO doesn't run
            the model, torch compiles the layers for the processor, once on a machine.
        kwargs: passed on to `from_pretrained`, `quantization_config` or `device_map` for example; transformers then
            runs the model.

    Raises:
        ModelError: there is no such model, its files are broken, or it is no language model.
        OutOfMemory: it doesn't fit.
    """
    if not (tokenizer is None or isinstance(tokenizer, str | Path) or hasattr(tokenizer, "decode")):
        raise ModelError(
            f"tokenizer is {tokenizer!r}: give a transformers tokenizer, or the folder or hub id to load one from"
        )
    if runner not in get_args(Runner):
        raise ModelError(f"runner is {runner!r}: use one of {', '.join(map(repr, get_args(Runner)))}")
    options = native.Options(quantize, backend, eager)
    if isinstance(model, nn.Module):
        tokenizer = _named_tokenizer(tokenizer, {}) if isinstance(tokenizer, str | Path) else tokenizer
        if runner == "native" or quantize not in (None, "auto"):
            return _native_module(model, tokenizer, name, options, runner)
        return wrap(model, tokenizer, name)
    if not isinstance(model, (str, Path)):
        if isinstance(model, LanguageModel):
            return model
        raise ModelError(
            f"can't load a model from a {type(model).__name__}: give a path, a hub id or a transformers model"
        )
    source = _locate(model)
    name = name or str(model)
    hub: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if revision is not None:
        hub["revision"] = revision
    if not Path(source).is_dir() and not _hub_resolves():
        # What was downloaded before still loads; without this, the hub's client retries for half a minute.
        hub["local_files_only"] = True
    target = _device(device)
    with _quiet(), _translated_errors(name, source):
        config = transformers.AutoConfig.from_pretrained(source, **hub)
        architecture = _architecture(config, name)
        if runner != "hf" or quantize not in (None, "auto"):
            resolved = torch.float32 if config.is_encoder_decoder else _resolve_dtype(dtype, config, target)
            folder = Path(source) if Path(source).is_dir() else None
            reason = _refusal(config, folder, resolved, target, runner, attn_implementation, kwargs)
            if reason is None:
                folder = folder or _download(source, hub)
                reason = native.refusal(config, folder, resolved, target)
            if reason is None:
                assert folder is not None
                return native.build(
                    folder,
                    config,
                    name=name,
                    dtype=resolved,
                    device=target,
                    tokenizer=_tokenizer_for(tokenizer, source, hub),
                    eos_token_ids=_eos_token_ids(source, config, hub),
                    options=options,
                )
            _check_runner(runner, quantize, name, reason)
        if attn_implementation is not None:
            kwargs["attn_implementation"] = attn_implementation
        quantised = "quantization_config" in kwargs or getattr(config, "quantization_config", None) is not None
        if quantised:
            kwargs.setdefault("dtype", dtype)
            if target.type != "cpu":
                kwargs.setdefault("device_map", {"": str(target)})
        else:
            kwargs["dtype"] = _resolve_dtype(dtype, config, target)
        module, report = architecture.from_pretrained(source, output_loading_info=True, **hub, **kwargs)
        missing = sorted(report["missing_keys"])
        if missing:
            raise ModelError(
                f"{name} lacks weights of a {type(module).__name__} ({len(missing)} of them, such as {missing[0]}): "
                "is the checkpoint complete, and that of a language model?"
            )
        if "device_map" not in kwargs and not quantised:
            module = module.to(target)
        unused = sorted(report["unexpected_keys"])
        if unused:
            warnings.warn(
                f"{name} holds {len(unused)} weights that a {type(module).__name__} of its config.json has no use for, "
                f"such as {unused[0]}: if the model should have them, config.json is not the checkpoint's",
                stacklevel=2,
            )
        return wrap(module, _tokenizer_for(tokenizer, source, hub), name)


def _native_module(module: Any, tokenizer: Any, name: str | None, options: native.Options, runner: Runner) -> Any:
    """A native model with the weights of a transformers model, on its device and in its dtype."""
    config = getattr(module, "config", None)
    name = name or getattr(config, "name_or_path", "") or type(module).__name__
    device = next(module.parameters()).device
    reason = native.refusal(config, None, module.dtype, device)
    _check_runner(runner, options.quantize, name, reason)
    if reason is not None:
        return wrap(module, tokenizer, name)
    return native.build(
        module,
        config,
        name=name,
        dtype=module.dtype,
        device=device,
        tokenizer=tokenizer,
        eos_token_ids=traits.eos_token_ids(module),
        options=options,
    )


def _refusal(
    config: Any,
    folder: Path | None,
    dtype: torch.dtype,
    device: torch.device,
    runner: Runner,
    attn_implementation: str | None,
    kwargs: dict[str, Any],
) -> str | None:
    """Why a checkpoint should not run natively; None if it should."""
    if attn_implementation is not None:
        return f"attn_implementation={attn_implementation!r} is an option of transformers"
    if kwargs:
        return f"{next(iter(kwargs))}={next(iter(kwargs.values()))!r} is an option of transformers"
    if runner == "auto" and device.type != "cpu":
        return f"on {device.type} it has not been shown to be faster"
    return native.refusal(config, folder, dtype, device)


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
    return Path(
        huggingface_hub.snapshot_download(
            source,
            revision=hub.get("revision"),
            local_files_only=hub.get("local_files_only", False),
            allow_patterns=["*.safetensors", "*.json"],
        )
    )


def _eos_token_ids(source: str, config: Any, hub: dict[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text, where the checkpoint's files name any."""
    try:
        generation = transformers.GenerationConfig.from_pretrained(source, **hub)
    except OSError:  # it has none
        generation = None
    return traits.eos_token_ids(SimpleNamespace(config=config, generation_config=generation))


def _tokenizer_for(tokenizer: Any | None, source: str, hub: dict[str, Any]) -> Any | None:
    """The tokenizer that was given or named, or the one at the model's place."""
    if tokenizer is None:
        return _tokenizer(source, hub)
    return _named_tokenizer(tokenizer, hub) if isinstance(tokenizer, str | Path) else tokenizer


def check_pair(target: LanguageModel, drafter: LanguageModel) -> None:
    """See to it that a drafter's tokens mean what the target's mean, and that both read texts of one kind.

    Output layers that differ only by padding are fine.

    Raises:
        ModelError: they have different vocabularies, or one alone has an encoder.
    """
    found = difference(target, drafter)
    if found is not None:
        raise ModelError(
            f"drafter {drafter.name} and target {target.name} have {found}: choose a drafter of the target's family, "
            "or one that needs no model, such as prompt-lookup"
        )
    check_kind(target, drafter)


def check_kind(target: LanguageModel, drafter: LanguageModel) -> None:
    """See to it that both or neither of two models have an encoder.

    Raises:
        ModelError: one has and the other has not.
    """
    if (drafter.decoder_start_token_id is None) != (target.decoder_start_token_id is None):
        raise ModelError(
            f"{drafter.name} can't draft for {target.name}: one is an encoder-decoder model and the other is not; "
            "use a drafter of the target's kind, or prompt-lookup"
        )


def difference(target: LanguageModel, drafter: LanguageModel) -> str | None:
    """What tells a drafter's vocabulary from the target's, as far as one can see; None if nothing does."""
    if target.tokenizer is None or drafter.tokenizer is None:
        if target.vocab_size == drafter.vocab_size:
            return None
        return (
            f"vocabularies of {drafter.vocab_size:,} and {target.vocab_size:,} tokens, and no two tokenizers to compare"
        )
    if target.tokenizer is drafter.tokenizer:
        return None
    ours, theirs = target.tokenizer.get_vocab(), drafter.tokenizer.get_vocab()
    if ours == theirs:
        return None
    differing = sum(theirs.get(token) != index for token, index in ours.items())
    differing += sum(token not in ours for token in theirs)
    return f"different vocabularies ({len(theirs):,} and {len(ours):,} tokens, {differing:,} of which differ)"


def _locate(model: str | Path) -> str:
    """The folder or hub id to load from; ModelError where it can't be either."""
    text = str(model)
    if not text.strip():
        raise ModelError(f"the model's name is {text!r}: give a path, a hub id or a transformers model")
    try:
        path = Path(model).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long; the home of a user there is none of
        shown = text if len(text) <= 100 else f"{text[:100]}…"
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelError(f"there is no folder {shown!r} ({reason}): check the path") from error
    if path.is_dir():
        if (path / "adapter_config.json").is_file() and not _has_weights(path):
            raise ModelError(
                f"{text} holds an adapter and no model: load its base model, or merge the adapter into it (in peft: "
                "merge_and_unload, then save_pretrained) and give the folder of the result"
            )
        if not (path / "config.json").is_file():
            raise ModelError(f"{text} has no config.json: give the folder that `save_pretrained` wrote")
        return str(path)
    if path.exists():
        raise ModelError(f"{text} is a file: give the folder that holds config.json and the weights")
    looks_like_path = isinstance(model, Path) or text.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(text)
    if looks_like_path:
        raise ModelError(f"there is no folder {text!r}: check the path, or give a hub id (organisation/model)")
    return text


def _has_weights(folder: Path) -> bool:
    """Whether a folder has a model's weights, and not only an adapter's."""
    names = ("model*.safetensors", "model*.safetensors.index.json", "pytorch_model*.bin*")
    return any(any(folder.glob(name)) for name in names)


def _device(device: str | torch.device | None) -> torch.device:
    """The device to load weights to; ModelError where this machine has no such device."""
    if device is None or device == "":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        raise ModelError(
            f"device {device!r} can't be used here ({str(error).splitlines()[0][:200]}): use cpu"
            + (f", or cuda:0 to cuda:{torch.cuda.device_count() - 1}" if torch.cuda.is_available() else "")
        ) from error
    return found


def _hub_resolves() -> bool:
    """Whether the hub's name resolves; True where a proxy does that."""
    if getproxies():
        return True
    try:
        socket.getaddrinfo(urlsplit(huggingface_hub.constants.ENDPOINT).hostname, None)
    except OSError:
        return False
    return True


def _architecture(config: Any, name: str) -> Any:
    """The transformers class that loads a config's language model."""
    masked = type(config) in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING
    if config.is_encoder_decoder:
        if type(config) in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING or hasattr(config, "auto_map"):
            return transformers.AutoModelForSeq2SeqLM
    elif type(config) in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING or hasattr(config, "auto_map"):
        # Encoders can be loaded as causal models too; only those trained as decoders write text.
        if not masked or getattr(config, "is_decoder", False) or _named_causal(config):
            return transformers.AutoModelForCausalLM
    elif type(config) in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForImageTextToText
    named = ", ".join(getattr(config, "architectures", None) or [config.model_type])
    raise ModelError(f"{name} ({named}) is no language model: load a causal or an encoder-decoder language model")


def _named_causal(config: Any) -> bool:
    return any("CausalLM" in architecture for architecture in getattr(config, "architectures", None) or [])


def _resolve_dtype(dtype: str | torch.dtype, config: Any, device: torch.device) -> torch.dtype:
    """The dtype to load weights in."""
    if dtype != "auto":
        found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
        # Eight bits are a format to store weights in, not one to multiply them in.
        if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
            raise ModelError(f"dtype {dtype!r} is unknown: use auto, float32, bfloat16 or float16")
        return found
    stored = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    if isinstance(stored, str):
        stored = getattr(torch, stored)
    if device.type == "cpu" and stored in (torch.bfloat16, torch.float16):
        return torch.bfloat16 if multiplies_bfloat16() else torch.float32
    return stored


def load_tokenizer(source: str | Path) -> Any:
    """The tokenizer of a folder or hub id.

    Raises:
        ModelError: there is none.
    """
    local = Path(source).expanduser().is_dir() or _hub_resolves()
    return _named_tokenizer(source, {} if local else {"local_files_only": True})


def _named_tokenizer(source: str | Path, hub: dict[str, Any]) -> Any:
    """The tokenizer that was asked for by its place; ModelError where there is none."""
    with _quiet():
        try:
            return transformers.AutoTokenizer.from_pretrained(str(Path(source).expanduser()), **hub)
        except Exception as error:
            raise ModelError(
                f"no tokenizer can be loaded from {str(source)!r} ({_first_line(error)}): give the folder or hub id "
                "of one"
            ) from error


def _tokenizer(source: str | Path, hub: dict[str, Any]) -> Any | None:
    """The tokenizer at a place, or None where there is none."""
    folder = Path(source)
    if folder.is_dir() and not any((folder / file).exists() for file in _TOKENIZER_FILES):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(str(source), **hub)
    except Exception as error:
        # Token ids still work; but say what happened, for text won't.
        warnings.warn(
            f"no tokenizer could be loaded from {source} ({_first_line(error)}): prompts must be token ids, or name a "
            "tokenizer",
            stacklevel=3,
        )
        return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars and advice away."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _translated_errors(name: str, source: str) -> Iterator[None]:
    """Turn what loading raises into errors that name the model and the cure."""
    try:
        yield
    except (ModelError, OutOfMemory):
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise _out_of_memory(name) from error
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        if isinstance(error, RuntimeError) and re.search("not enough memory|can't allocate memory", text):
            raise _out_of_memory(name) from error
        first = _first_line(error)
        if not Path(source).is_dir() and isinstance(error, OSError):
            message = (
                f"{name!r} is neither a folder here nor a model that the hub could give ({type(error).__name__}): "
                "check the name, the network and, for gated models, your access"
            )
        elif "model type" in text and ("not recognize" in text or "unrecognized" in text.lower()):
            message = f"{name} has an architecture unknown to transformers {transformers.__version__}: {first}"
        elif isinstance(error, ImportError):
            message = f"{name} can't be loaded without a package that is not installed: {first}"
        elif "unexpected keyword argument" in text or "`attn_implementation" in text:
            message = f"{name} can't be loaded with these options: {first}"
        elif "ignore_mismatched_sizes" in text:
            message = (
                f"{name} can't be loaded, its files are broken: the weights have other shapes than config.json says"
            )
        else:
            message = f"{name} can't be loaded, its files are broken or incomplete ({type(error).__name__}): {first}"
        raise ModelError(message) from error


def _first_line(error: Exception) -> str:
    """The beginning of what an error says."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    first = lines[0] if len(lines) == 1 or not lines[0].endswith(":") else f"{lines[0]} {lines[1].strip()}"
    return first[:300]


def _out_of_memory(name: str) -> OutOfMemory:
    return OutOfMemory(
        f"memory ran out while loading {name}: lower the dtype (bfloat16), or use a quantised or smaller checkpoint"
    )
