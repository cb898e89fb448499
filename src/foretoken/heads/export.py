"""Heads to folders: the EAGLE repository's layout, that of `speculators`, which vLLM loads too, and Medusa's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from torch import Tensor

from foretoken.errors import ModelError
from foretoken.heads.eagle3 import Eagle3Head
from foretoken.heads.loading import CONFIG
from foretoken.heads.medusa import MedusaHeads

Layout = Literal["eagle", "speculators"]

SPECULATORS_VERSION = "0.9.0"
"""Release of `speculators` whose format is written."""


def save_eagle3(
    head: Eagle3Head,
    folder: str | Path,
    *,
    layout: Layout = "eagle",
    target: str | None = None,
    target_architectures: tuple[str, ...] = (),
    embeddings: Tensor | None = None,
    num_speculative_tokens: int = 5,
) -> None:
    """Write an EAGLE-3 head; `load_eagle3` reads it again, in either layout.

    Args:
        head: its weights are written in their dtype.
        folder: is made where it does not exist.
        layout: "eagle" or "speculators".
        target: name or path of the target. vLLM and `speculators` look there, for the tokenizer above all.
        target_architectures: what the target's config.json has under that name.
        embeddings: ``[V, H]``, the target's, to be stored with a head that has none of its own; "eagle" needs none,
            and of `speculators`' format some readers expect them.
        num_speculative_tokens: default draft length of other engines.

    Raises:
        ModelError: the layout can't represent something that the head has.
    """
    path = Path(folder)
    config = head.config
    weights = {name: value.detach().cpu().contiguous() for name, value in head.state_dict().items()}
    layer = _layer_fields(head)
    shared: dict[str, Any] = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "target_num_hidden_layers": config.target_num_layers,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(config.target_layers),
        "dtype": str(head.fc.weight.dtype).removeprefix("torch."),
    }
    if layout == "speculators":
        if config.target_hidden_size != config.hidden_size:
            raise ModelError(
                f"a head that is {config.hidden_size} wide for a target that is {config.target_hidden_size} wide has "
                "no place in the speculators format: save it in the EAGLE repository's layout"
            )
        weights = {name.replace("midlayer.", "layers.0."): value for name, value in weights.items()}
        if embeddings is not None and not config.own_embeddings:
            weights["embed_tokens.weight"] = embeddings.detach().to(head.fc.weight.dtype).cpu().contiguous()
        method = {
            "proposal_type": "greedy",
            "speculative_tokens": num_speculative_tokens,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        fields: dict[str, Any] = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": SPECULATORS_VERSION,
            **shared,
            "transformer_layer_config": layer,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [method],
                "verifier": {"name_or_path": target, "architectures": list(target_architectures)},
            },
        }
    else:
        fields = {
            **layer,
            "architectures": ["LlamaForCausalLMEagle3"],
            **shared,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": list(config.target_layers),
            },
            "target_model": target,
        }
    _write(path, fields, weights, "model.safetensors")


def save_medusa(heads: MedusaHeads, folder: str | Path, *, target: str | None = None) -> None:
    """Write Medusa heads in the Medusa repository's layout, as a safetensors file; `load_medusa` reads it again.

    Args:
        heads: their weights are written in their dtype.
        folder: is made where it does not exist.
        target: name or path of the target.
    """
    config = heads.config
    fields = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": target,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "target_num_hidden_layers": config.target_num_layers,
    }
    weights = {name: value.detach().cpu().contiguous() for name, value in heads.state_dict().items()}
    _write(Path(folder), fields, weights, "medusa_lm_head.safetensors")


def _layer_fields(head: Eagle3Head) -> dict[str, Any]:
    """The decoder layer in the words of a config of transformers."""
    config = head.config
    return {
        "model_type": "qwen3" if config.head_norms else "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": dict(config.rope_parameters),
        "rope_theta": config.rope_parameters.get("rope_theta", 10000.0),
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def _write(path: Path, fields: dict[str, Any], weights: dict[str, Tensor], file: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / file, metadata={"format": "pt"})
    (path / CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
