"""Reading config.json of plain checkpoints without transformers, whose configuration classes take seconds to import."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from foretoken.errors import ModelError
from foretoken.models.locating import CONFIG, read_json

FAMILIES = ("llama", "qwen2", "qwen3")

_NEEDED: dict[str, type] = {
    "vocab_size": int,
    "hidden_size": int,
    "intermediate_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "max_position_embeddings": int,
    "hidden_act": str,
    "rms_norm_eps": float,
    "tie_word_embeddings": bool,
}
"""Fields that config.json must state itself: transformers' defaults for them have changed from release to release."""

_COUNTS = [name for name, kind in _NEEDED.items() if kind is int]

_OTHER_WAYS = ("auto_map", "quantization_config", "text_config", "rope_scaling", "partial_rotary_factor")
"""Fields that mean an architecture which is not supported here, unless they are null."""


def read_config(folder: Path) -> Any | None:
    """A config with the attributes of transformers' one, as far as the native runner reads them.

    Args:
        folder: of a checkpoint.

    Returns:
        None where config.json is not one whose every field is certain: transformers has to read it.
    """
    fields = read_json(folder / CONFIG)
    if fields is None or fields.get("model_type") not in FAMILIES:
        return None
    if any(fields.get(name) is not None for name in _OTHER_WAYS):
        return None
    if not all(_is_a(fields.get(name), kind) for name, kind in _NEEDED.items()) or "eos_token_id" not in fields:
        return None
    for name in _COUNTS:
        count: Any = fields[name]
        if count < 1:
            raise ModelError(f"{folder / CONFIG} has {name} {count}, which must be at least 1: correct the file")
    rope = _rope(fields)
    dtype = fields.get("dtype", fields.get("torch_dtype"))
    if rope is None or not (dtype is None or isinstance(dtype, str)) or not _sees_all(fields):
        return None
    head_dim = fields.get("head_dim")
    if head_dim is None and fields["model_type"] == "qwen3":  # does not follow from the other sizes
        return None
    return SimpleNamespace(
        **{name: fields[name] for name in _NEEDED},
        model_type=fields["model_type"],
        head_dim=head_dim,
        attention_bias=bool(fields.get("attention_bias", False)),
        mlp_bias=bool(fields.get("mlp_bias", False)),
        rope_parameters=rope,
        dtype=dtype,
        eos_token_id=fields.get("eos_token_id"),
        is_encoder_decoder=False,
        sliding_window=None,
        layer_types=None,
        auto_map=None,
        quantization_config=None,
    )


def read_eos_token_ids(folder: Path, config: Any) -> tuple[int, ...] | None:
    """The tokens that end the output; None where the files don't say it plainly."""
    path = folder / "generation_config.json"
    fields = read_json(path) if path.is_file() else {}
    if fields is None:
        return None
    value: Any = fields.get("eos_token_id")
    value = config.eos_token_id if value is None else value
    found: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    if not all(_is_a(token, int) for token in found):
        return None
    return tuple(token for token in found if token >= 0)  # some configs have -1 for none


def _is_a(value: object, kind: type) -> bool:
    if kind is bool:
        return isinstance(value, bool)
    return isinstance(value, kind if kind is not float else (float, int)) and not isinstance(value, bool)


def _rope(fields: dict[str, Any]) -> dict[str, Any] | None:
    """Rotary parameters where they are the default ones, in the words of transformers 5."""
    found = fields.get("rope_parameters")
    if found is None:
        theta = fields.get("rope_theta")
        return {"rope_type": "default", "rope_theta": theta} if _is_a(theta, float) else None
    plain = isinstance(found, dict) and set(found) == {"rope_type", "rope_theta"} and found["rope_type"] == "default"
    return dict(found) if plain and _is_a(found["rope_theta"], float) else None


def _sees_all(fields: dict[str, Any]) -> bool:
    """Whether it is certain that every layer attends to all positions."""
    types = fields.get("layer_types")
    if types is not None and (not isinstance(types, list) or set(types) != {"full_attention"}):
        return False
    if fields["model_type"] == "llama":
        return fields.get("sliding_window") is None
    return fields.get("use_sliding_window") is False
