"""Heads from folders: the layouts of the EAGLE repository, of `speculators` and of the Medusa repository."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from foretoken.errors import ModelError
from foretoken.heads.eagle3 import Eagle3Config, Eagle3Head, default_layers
from foretoken.heads.medusa import MedusaConfig, MedusaHeads

Kind = Literal["eagle3", "medusa"]
_Module = TypeVar("_Module", bound=nn.Module)

CONFIG = "config.json"
_FILES = {
    "eagle3": ("model.safetensors", "pytorch_model.bin"),
    "medusa": ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors", "pytorch_model.bin"),
}
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_USELESS = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
"""Ends of names of weights that some layouts keep beside the head's own."""


def kind_of(folder: str | PathLike[str]) -> Kind | None:
    """The kind of head in a folder, by its config.json; None if it has none."""
    try:
        path = Path(folder) / CONFIG
        config = json.loads(path.read_text()) if path.is_file() else None
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    architectures = config.get("architectures")
    named = [str(one) for one in architectures] if isinstance(architectures, list) else []
    if config.get("speculators_model_type") == "eagle3" or any(one.lower().endswith("eagle3") for one in named):
        return "eagle3"
    if "medusa_num_heads" in config:
        return "medusa"
    if any("eagle3" in one.lower() for one in named):  # such as Eagle3LlamaForCausalLM, Eagle3Speculator
        return "eagle3"
    return None


def load_eagle3(folder: str | PathLike[str], target_num_layers: int, dtype: torch.dtype | None = None) -> Eagle3Head:
    """An EAGLE-3 head.

    Args:
        folder: holds config.json and the weights, in the EAGLE repository's layout or that of `speculators`.
        target_num_layers: layers of the target, by which the fused layers are chosen where the config names none.
        dtype: of the weights; None for that of the files.

    Raises:
        ModelError: the folder holds no such head, or its files are broken or incomplete.
    """
    path = _folder(folder, "eagle3")
    fields = _read_config(path)
    speculators = "speculators_model_type" in fields
    found = _weights(path, "eagle3")
    weights = {_eagle_name(name): value for name, value in found.items() if not name.endswith(_USELESS)}
    layer = fields.get("transformer_layer_config", {}) if speculators else fields
    try:
        config = _eagle_config(fields, layer, weights, target_num_layers)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(
            f"{path / CONFIG} does not describe an EAGLE-3 head ({type(error).__name__}: {error}): is it that of the "
            "checkpoint?"
        ) from error
    head = Eagle3Head(config, device="meta")
    _complete_tables(head, weights, path)
    _assign(head, weights, path)
    _check_tables(head, path)
    return _ready(head, dtype)


def load_medusa(folder: str | PathLike[str], dtype: torch.dtype | None = None) -> MedusaHeads:
    """Medusa heads.

    Args:
        folder: holds config.json and ``medusa_lm_head.pt`` or a safetensors file.
        dtype: of the weights; None for that of the files.

    Raises:
        ModelError: the folder holds no such heads, or its files are broken or incomplete.
    """
    path = _folder(folder, "medusa")
    fields = _read_config(path)
    weights = {name.removeprefix("medusa_head."): value for name, value in _weights(path, "medusa").items()}
    try:
        heads, layers = int(fields["medusa_num_heads"]), int(fields.get("medusa_num_layers", 1))
        size = fields.get("target_num_hidden_layers")
        size = None if size is None else int(size)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{path / CONFIG} does not describe Medusa heads: it needs the numbers medusa_num_heads and "
            "medusa_num_layers, and if it has target_num_hidden_layers, that must be one too"
        ) from error
    last = weights.get(f"0.{layers}.weight")
    if last is None or last.dim() != 2:
        raise ModelError(
            f"{path} lacks the weight 0.{layers}.weight, the first head's output layer: its files are truncated, or "
            f"its heads have not the {layers} blocks that config.json says"
        )
    config = MedusaConfig(last.shape[1], last.shape[0], heads, layers, size)
    module = MedusaHeads(config, device="meta")
    _assign(module, weights, path)
    return _ready(module, dtype)


def _folder(folder: str | PathLike[str], kind: Kind) -> Path:
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ModelError(f"there is no folder {str(folder)!r}: check the path of the {kind} head")
    if not (path / CONFIG).is_file():
        raise ModelError(f"{folder} has no config.json: give the folder of a checkpoint of the kind {kind}")
    found = kind_of(path)
    if found not in (kind, None):
        raise ModelError(f"{folder} holds a checkpoint of the kind {found}, and not {kind}: name it {found}:{folder}")
    return path


def _read_config(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads((path / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path / CONFIG} can't be read ({error}): its file is broken") from error
    if not isinstance(fields, dict):
        raise ModelError(f"{path / CONFIG} holds a {type(fields).__name__} and no fields: its file is broken")
    return fields


def _eagle_config(
    fields: Mapping[str, Any], layer: Mapping[str, Any], weights: Mapping[str, Tensor], target_num_layers: int
) -> Eagle3Config:
    """The shape that a config.json describes.

    Args:
        fields: the whole of it.
        layer: the part that describes the decoder layer, in transformers' words.
        weights: they decide whether there are an embedding table and norms of queries and keys, not the config.
        target_num_layers: of the target.
    """
    family = layer.get("model_type", "llama")
    if "speculators_model_type" in fields and family not in ("llama", "qwen3"):
        raise ModelError(f"an EAGLE-3 head of a {family!r} layer can't be run: only llama and qwen3 ones can")
    count = int(layer.get("num_hidden_layers", 1))
    if count != 1:
        raise ModelError(f"an EAGLE-3 head of {count} layers can't be run: only heads of one layer can")
    if layer.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"an EAGLE-3 head with the activation {layer['hidden_act']!r} can't be run: only silu can")
    if "sliding_attention" in (layer.get("layer_types") or ()):
        raise ModelError("an EAGLE-3 head with a sliding window can't be run: only full attention can")
    hidden, heads = int(layer["hidden_size"]), int(layer["num_attention_heads"])
    eagle = fields.get("eagle_config") or {}
    layers = (
        fields.get("eagle_aux_hidden_state_layer_ids")
        or _counted_from_one(eagle.get("eagle_aux_hidden_state_layer_ids"))
        or default_layers(target_num_layers)
    )
    vocab_size = int(layer["vocab_size"])
    stored = fields.get("target_num_hidden_layers")
    return Eagle3Config(
        hidden_size=hidden,
        intermediate_size=int(layer["intermediate_size"]),
        num_attention_heads=heads,
        num_key_value_heads=int(layer.get("num_key_value_heads") or heads),
        head_dim=int(layer.get("head_dim") or hidden // heads),
        vocab_size=vocab_size,
        draft_vocab_size=int(fields.get("draft_vocab_size") or vocab_size),
        target_hidden_size=int(fields.get("target_hidden_size") or hidden),
        target_layers=tuple(int(number) for number in layers),
        target_num_layers=None if stored is None else int(stored),
        max_position_embeddings=int(layer.get("max_position_embeddings") or 2048),
        rms_norm_eps=float(layer.get("rms_norm_eps") or 1e-6),
        rope_parameters=_rope(layer),
        attention_bias=bool(layer.get("attention_bias", False)),
        mlp_bias=bool(layer.get("mlp_bias", False)),
        head_norms="midlayer.self_attn.q_norm.weight" in weights,
        own_embeddings="embed_tokens.weight" in weights,
        norm_before_residual=bool(fields.get("norm_before_residual", False)),
        norm_before_fc=bool(fields.get("norm_before_fc", eagle.get("norm_before_fc", False))),
        fc_norm=bool(fields.get("fc_norm", False)),
        norm_output=bool(fields.get("norm_output", False)),
    )


def _counted_from_one(layers: Sequence[int] | None) -> list[int]:
    """The fused layers of an ``eagle_config``, in the numbers of `LanguageModel.forward`.

    SpecForge and SGLang count layers from 0 there, so that EAGLE's choice begins with 1 and not with 2.
    """
    found = [int(number) for number in layers or ()]
    return [number + 1 for number in found] if found[:1] == [1] else found


def _rope(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters, in the words of transformers 5: older configs keep them in two fields."""
    found = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    if "type" in found:
        found.setdefault("rope_type", found.pop("type"))
    found.setdefault("rope_type", "default")
    found.setdefault("rope_theta", float(layer.get("rope_theta") or 10000.0))
    return found


def _eagle_name(name: str) -> str:
    """A weight's name in the EAGLE repository's words."""
    name = name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def _weights(path: Path, kind: Kind) -> dict[str, Tensor]:
    """All weights of a folder, on the CPU."""
    files = [path / name for name in _FILES[kind] if (path / name).is_file()][:1]
    for index in _INDICES:
        if not files and (path / index).is_file():
            try:
                parts = set(json.loads((path / index).read_text())["weight_map"].values())
            except (OSError, ValueError, KeyError, AttributeError) as error:
                raise ModelError(f"{path / index} can't be read ({error}): its file is broken") from error
            files = [path / name for name in sorted(parts)]
    if not files:
        raise ModelError(f"{path} has no weights: one of {', '.join(_FILES[kind])} should be there")
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            # Nothing but tensors is taken from a pickle, which could hold any program.
            found = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # torch's own words are of ways to run it all the same
            raise ModelError(
                f"{file} can't be read: it is broken, or a pickle that holds more than tensors, which could be any "
                "program; save its weights as safetensors"
            ) from error
        except (OSError, SafetensorError, RuntimeError, EOFError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise ModelError(f"{file} can't be read, it is broken or incomplete: {reason}") from error
        if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
            raise ModelError(f"{file} holds something else than named weights: give a checkpoint's state dict")
        weights.update(found)
    return weights


def _complete_tables(head: Eagle3Head, weights: dict[str, Tensor], path: Path) -> None:
    """Bring the tables of the draft vocabulary into their form; a head of the whole vocabulary needs none."""
    config = head.config
    if not config.reduced:
        table = weights.pop("d2t", None)
        weights.pop("t2d", None)
        if table is not None and bool(table.any()):
            raise ModelError(
                f"{path} maps draft tokens to others, although config.json says that the head has all "
                f"{config.vocab_size:,} tokens: the checkpoint and its config.json don't belong together"
            )
        return
    if "d2t" in weights:
        weights["d2t"] = weights["d2t"].to(torch.int64)
        if "t2d" not in weights and weights["d2t"].shape == head.d2t.shape:
            mask = torch.zeros(config.vocab_size, dtype=torch.bool)
            tokens = weights["d2t"] + torch.arange(config.draft_vocab_size)
            mask[tokens.clamp(0, config.vocab_size - 1)] = True
            weights["t2d"] = mask
        elif "t2d" in weights:
            weights["t2d"] = weights["t2d"].to(torch.bool)


def _check_tables(head: Eagle3Head, path: Path) -> None:
    """Check that no two draft tokens are the same token of the target."""
    if not head.config.reduced:
        return
    tokens = head.draft_tokens()
    size = head.config.vocab_size
    if bool(((tokens < 0) | (tokens >= size)).any()):
        raise ModelError(f"{path} maps draft tokens to numbers outside of its vocabulary of {size:,} tokens (d2t)")
    if not torch.equal(tokens.sort().values, head.t2d.nonzero()[:, 0]):
        raise ModelError(f"{path} has tables of draft tokens that contradict each other (d2t and t2d)")


def _assign(module: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Make the weights the module's own, all of them and no others."""
    expected = module.state_dict()
    missing, unexpected = sorted(set(expected) - set(weights)), sorted(set(weights) - set(expected))
    if missing:
        raise ModelError(
            f"{path} lacks {len(missing)} weights that its config.json asks for, such as {missing[0]}: the file is "
            "truncated, or config.json is another checkpoint's" + _having(unexpected)
        )
    if unexpected:
        raise ModelError(
            f"{path} has {len(unexpected)} weights that a head of its config.json has no use for, such as "
            f"{unexpected[0]}: config.json is another checkpoint's"
        )
    for name, value in expected.items():
        if weights[name].shape != value.shape:
            raise ModelError(
                f"{path} has weights of other shapes than its config.json says: {name} is "
                f"{list(weights[name].shape)} and not {list(value.shape)}"
            )
    module.load_state_dict(dict(weights), assign=True)


def _having(unexpected: list[str]) -> str:
    return f" (it has others, such as {unexpected[0]})" if unexpected else ""


def _ready(module: _Module, dtype: torch.dtype | None) -> _Module:
    if dtype is None:
        dtype = next(value.dtype for value in module.state_dict().values() if value.is_floating_point())
    return module.to(dtype).eval().requires_grad_(False)
