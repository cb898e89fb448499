"""Small worlds and draft models for the modes of transformers that need more than a causal model as assistant.

All weights are random: what is audited is whether outputs have the target's distribution, which no draft model may
change, and not how often drafts are accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from foretoken.audit.errors import AuditError
from foretoken.audit.world_models import LLAMA, Architecture, set_weights
from foretoken.audit.worlds import World, no_progress_bars

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_WINDOW = 512  # of sliding attention: longer than any sequence here
_EXPERTS = 4


@dataclass(frozen=True)
class Mode:
    """A mode of `generate`.

    Attributes:
        options: its arguments that switch the mode on.
        architecture: of the target.
        assistant: makes the draft model for a world's target and k draft tokens; None where the target brings it.
        prepare: gives a world's target what it must bring for k draft tokens; returns the target.
    """

    options: dict[str, Any] = field(default_factory=dict)
    architecture: Architecture = LLAMA
    assistant: Callable[[World, int], Any] | None = None
    prepare: Callable[[World, int], Any] = lambda world, k: world.target


def _glm(vocab_size: int) -> Any:
    """GLM 4.5 with dense layers; the layers behind them predict further tokens (`num_mtp_layers`)."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    config = Glm4MoeConfig(
        vocab_size=vocab_size,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        n_routed_experts=_EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        **_SIZES,
    )
    return Glm4MoeForCausalLM(config)


def _with_mtp_layers(world: World, k: int) -> Any:
    """Write k prediction layers into the target's checkpoint, where transformers looks for them, and load it again."""
    from safetensors.torch import load_file, save_file
    from transformers import Glm4MoeForCausalLM
    from transformers.modeling_layers import MtpModel

    config = world.target.config
    config.num_mtp_layers = k
    layers = MtpModel(world.target, k)
    own = {id(parameter) for parameter in world.target.parameters()}
    set_weights(layers, np.random.default_rng(1), world.vocab_size, skip=own)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in layers.state_dict().items():
        if not name.startswith("layers."):
            continue  # embedding and output layer are the target's
        _, number, rest = name.split(".", 2)
        place = f"model.layers.{config.num_hidden_layers + int(number)}."
        rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        if rest == "mlp.experts.gate_up_proj":
            for expert, weights in enumerate(value):
                gate, up = weights.chunk(2)
                tensors[f"{place}mlp.experts.{expert}.gate_proj.weight"] = gate.contiguous()
                tensors[f"{place}mlp.experts.{expert}.up_proj.weight"] = up.contiguous()
        elif rest == "mlp.experts.down_proj":
            for expert, weights in enumerate(value):
                tensors[f"{place}mlp.experts.{expert}.down_proj.weight"] = weights.contiguous()
        else:
            tensors[place + rest] = value.contiguous()
    with no_progress_bars():
        world.target.save_pretrained(world.target_path)
        file = f"{world.target_path}/model.safetensors"
        save_file({**load_file(file), **tensors}, file, {"format": "pt"})
        target = Glm4MoeForCausalLM.from_pretrained(world.target_path, dtype=torch.float32).eval()
    # The class names the prediction layers of the released checkpoints alone, which have 46 or 92 layers before them.
    target._keys_to_ignore_on_load_unexpected = [
        rf"model\.layers\.{config.num_hidden_layers + number}\." for number in range(k)
    ]
    return target


def _gemma(vocab_size: int) -> Any:
    """Gemma 4: its last two layers share keys and values with those before, which its assistant reads."""
    from transformers import Gemma4ForCausalLM

    return Gemma4ForCausalLM(_gemma_config(vocab_size, 4, 16))


def _gemma_config(vocab_size: int, layers: int, per_layer: int) -> Any:
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(
        vocab_size=vocab_size,
        num_hidden_layers=layers,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        num_kv_shared_layers=2,
        global_head_dim=_SIZES["head_dim"],
        sliding_window=_WINDOW,
        hidden_size_per_layer_input=per_layer,
        vocab_size_per_layer_input=vocab_size if per_layer else 0,
        tie_word_embeddings=False,
        **_SIZES,
    )


def _gemma_assistant(world: World, k: int) -> Any:
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

    with _assistants_that_share_all_layers():
        config = Gemma4AssistantConfig(
            text_config=_gemma_config(world.vocab_size, 2, 0),
            backbone_hidden_size=_SIZES["hidden_size"],
            tie_word_embeddings=False,
        )
        assistant = Gemma4AssistantForCausalLM(config)
    set_weights(assistant, np.random.default_rng(2), world.vocab_size, GEMMA.embedding_scale)
    assistant.generation_config.num_assistant_tokens = k
    return assistant


@contextmanager
def _assistants_that_share_all_layers() -> Iterator[None]:
    """Let Gemma 4's assistant be made: all its layers take keys and values of the target.

    Its configuration demands that; in transformers 5.23.0 the text model refuses it, since no layer of its own makes
    what the others take.
    """
    from transformers import Gemma4TextConfig

    own = Gemma4TextConfig.kv_sharing_modes

    def modes(config: Any) -> Any:
        if config.num_kv_shared_layers == config.num_hidden_layers:
            return ["reuse"] * config.num_hidden_layers
        return own.fget(config)

    Gemma4TextConfig.kv_sharing_modes = property(modes)
    try:
        yield
    finally:
        Gemma4TextConfig.kv_sharing_modes = own


def _dflash_assistant(world: World, k: int) -> Any:
    """A draft model that denoises a block of k tokens at once (DFlash), in the one form that transformers has."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    config = MuseGlimmerAssistantConfig(
        num_hidden_layers=1,
        sliding_window=_WINDOW,
        block_size=k + 1,
        mask_token_id=world.vocab_size - 1,
        target_layer_ids=[0, 1],
        **_SIZES,
    )
    assistant = MuseGlimmerAssistantModel(config)
    set_weights(assistant, np.random.default_rng(3), world.vocab_size)
    return assistant


GEMMA = Architecture(_gemma, embedding_scale=1 / math.sqrt(_SIZES["hidden_size"] or 1))
GLM = Architecture(_glm)

WORLD_MODES = {
    "mtp": Mode({"use_mtp": True}, GLM, prepare=_with_mtp_layers),
    "dflash": Mode({"speculation_type": "dflash"}, assistant=_dflash_assistant),
    "single-position": Mode({}, GEMMA, _gemma_assistant),
}
"""Modes that are audited in worlds of their own."""


def in_world(world: World, mode: str, k: int) -> tuple[Any, Any, dict[str, Any]]:
    """Target, assistant (or None) and options of `generate`, for one of `WORLD_MODES` in a world of its architecture.

    Raises:
        AuditError: this transformers has no such mode.
    """
    here = WORLD_MODES[mode]
    try:
        with torch.random.fork_rng(devices=[]):  # models are made with weights that are drawn anew after it
            target = here.prepare(world, k)
            assistant = here.assistant(world, k).eval() if here.assistant is not None else None
    except ImportError as error:
        import transformers

        raise AuditError(
            f"mode {mode}: transformers {transformers.__version__} does not have it ({error}): install a later one"
        ) from error
    return target, assistant, dict(here.options)
