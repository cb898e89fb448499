"""How a checkpoint's makers want it to be sampled: ``generation_config.json``, or a GGUF file's metadata.

What is not said otherwise is sampled so, as in vLLM, SGLang, transformers and llama.cpp. As in vLLM ``do_sample`` is
not looked at: many checkpoints name a temperature without it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foretoken.errors import ParameterError
from foretoken.models.locating import read_json
from foretoken.sampling.params import CHECKPOINT_FIELDS, SamplingParams

_IN_GGUF = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def checked(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Those parameters among some fields that a checkpoint may set.

    One that is out of its range is left out, with a warning: a model is of use without it.

    Args:
        found: the fields.
        where: they were found, for messages.
    """
    result: dict[str, Any] = {}
    for field in CHECKPOINT_FIELDS:
        value = found.get(field)
        if value is None:
            continue
        try:
            result[field] = getattr(SamplingParams(**{field: value}), field)
        except ParameterError as error:
            warnings.warn(f"{where} asks for sampling with a value that is not used: {error}", stacklevel=3)
    return result


_UNUSED = (
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "exponential_decay_length_penalty",
    "sequence_bias",
    "guidance_scale",
    "num_beams",
)
"""What a checkpoint may ask for besides, and does not get."""
_TOKENS = ("forced_bos_token_id", "forced_eos_token_id")
_NOTHING_AT_ONE = ("typical_p", "encoder_repetition_penalty", "guidance_scale", "num_beams")


def _without_unused(found: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The fields, with a warning where some change the distribution and are not used."""
    names = [name for name in _UNUSED if _asks(name, found.get(name))]
    if names:
        warnings.warn(
            f"{where} asks for {', '.join(names)}, which is not used: say what you need of it in each request",
            stacklevel=4,
        )
    return found


def _asks(name: str, value: Any) -> bool:
    """Whether a value of a field among `_UNUSED` asks for anything."""
    if value is None or name in _TOKENS:
        return value not in (None, [])  # 0 is a token, too
    return value not in (0, [], {}, 1 if name in _NOTHING_AT_ONE else None)


def of_folder(folder: Path) -> dict[str, Any]:
    """What a checkpoint's folder says."""
    path = folder / "generation_config.json"
    if not path.exists():
        return {}
    found = read_json(path)
    if found is None:
        warnings.warn(f"{path} is not used, for it holds no JSON object: correct it, or remove it", stacklevel=2)
    return checked(_without_unused(found or {}, str(path)), str(path))


def of_module(module: Any, name: str) -> dict[str, Any]:
    """What a transformers model says: what it does not leave to transformers' own defaults."""
    config = getattr(module, "generation_config", None)
    if config is None or not hasattr(config, "to_diff_dict"):
        return {}
    where = f"the generation_config of {name}"
    return checked(_without_unused(config.to_diff_dict(), where), where)


def of_gguf(read: Callable[[str], Any], name: str) -> dict[str, Any]:
    """What a GGUF file says.

    Args:
        read: a value of its metadata, by its key; None where it has none.
        name: what messages call the model.
    """
    found = {field: _number(read(key)) for field, key in _IN_GGUF.items()}
    return checked(found, f"the metadata of {name}")


def _number(value: Any) -> Any:
    """A number that llama.cpp has written as a string; whole where it is written so."""
    if not isinstance(value, str):
        return value
    try:
        return int(value) if value.lstrip("-").isdigit() else float(value)
    except ValueError:
        return value
