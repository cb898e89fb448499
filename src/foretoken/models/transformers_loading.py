"""Loading with transformers: any language model that it knows."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from foretoken.errors import ModelError
from foretoken.models import sampling_defaults, traits
from foretoken.models.base import LanguageModel
from foretoken.models.placement import resolve_dtype
from foretoken.models.tokenizers import tokenizer_for
from foretoken.models.wrapping import wrap


def read_config(source: str, hub: dict[str, Any]) -> Any:
    """Transformers' config of a folder or hub id."""
    return transformers.AutoConfig.from_pretrained(source, **hub)


def read_eos_token_ids(source: str, config: Any, hub: dict[str, Any]) -> tuple[int, ...]:
    """The tokens that end the output, where the checkpoint's files name any."""
    try:
        generation = transformers.GenerationConfig.from_pretrained(source, **hub)
    except (OSError, TypeError):  # it has none, or one that is no object
        generation = None
    return traits.eos_token_ids(SimpleNamespace(config=config, generation_config=generation))


def load_module(
    source: str,
    config: Any,
    architecture: Any,
    *,
    name: str,
    dtype: str | torch.dtype,
    device: torch.device,
    tokenizer: Any | None,
    hub: dict[str, Any],
    options: dict[str, Any],
) -> LanguageModel:
    """Load a transformers model and wrap it.

    Args:
        source: folder or hub id.
        config: its config.
        architecture: what `architecture_of` found.
        name: what messages call the model.
        dtype: as `foretoken.load` takes it.
        device: where the model will run.
        tokenizer: as `foretoken.load` takes it.
        hub: options of every `from_pretrained`.
        options: further ones of the model's.

    Raises:
        ModelError: weights are missing, or the model can't be scored exactly.
    """
    options = dict(options)
    quantised = "quantization_config" in options or getattr(config, "quantization_config", None) is not None
    if quantised:
        options.setdefault("dtype", dtype)
        if device.type != "cpu":
            options.setdefault("device_map", {"": str(device)})
    else:
        options["dtype"] = resolve_dtype(dtype, config, device)
    module, report = architecture.from_pretrained(source, output_loading_info=True, **hub, **options)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{name} lacks weights of a {type(module).__name__} ({len(missing)} of them, such as {missing[0]}): "
            "is the checkpoint complete, and that of a language model?"
        )
    if "device_map" not in options and not quantised:
        module = module.to(device)
    unused = sorted(report["unexpected_keys"])
    if unused:
        warnings.warn(
            f"{name} holds {len(unused)} weights that a {type(module).__name__} of its config.json has no use for, "
            f"such as {unused[0]}: if the model should have them, config.json is not the checkpoint's",
            stacklevel=3,
        )
    if (Path(source) / "adapter_config.json").is_file() and not getattr(module, "_hf_peft_config_loaded", False):
        warnings.warn(
            f"the adapter beside {name} is not applied, since peft is not installed: pip install peft, or merge the "
            "adapter into the model",
            stacklevel=3,
        )
    module.requires_grad_(False)  # nobody else has it
    model = wrap(module, tokenizer_for(tokenizer, source, hub), name)
    model.sampling_defaults = sampling_defaults.of_module(module, name)
    return model


def architecture_of(config: Any, name: str) -> Any:
    """The transformers class that loads a config's language model.

    Raises:
        ModelError: it is no language model.
    """
    masked = type(config) in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING
    if config.is_encoder_decoder:
        if type(config) in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING or hasattr(config, "auto_map"):
            return transformers.AutoModelForSeq2SeqLM
    elif type(config) in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING or hasattr(config, "auto_map"):
        # Encoders can be loaded as causal models too; only those trained as decoders can generate.
        if not masked or getattr(config, "is_decoder", False) or _named_causal(config):
            return transformers.AutoModelForCausalLM
    elif type(config) in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForImageTextToText
    named = ", ".join(getattr(config, "architectures", None) or [config.model_type])
    raise ModelError(f"{name} ({named}) is no language model: load a causal or an encoder-decoder language model")


def has_own_code(config: Any, architecture: Any) -> bool:
    """Whether transformers, where it trusts a checkpoint, runs code of the checkpoint's own for it.

    Args:
        config: the checkpoint's.
        architecture: what `architecture_of` found; code for another one, such as `AutoModel`, is not run.
    """
    named = architecture.__name__ in (getattr(config, "auto_map", None) or {})
    return named or not type(config).__module__.startswith("transformers.")


def _named_causal(config: Any) -> bool:
    return any("CausalLM" in architecture for architecture in getattr(config, "architectures", None) or [])
