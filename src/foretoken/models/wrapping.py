"""Chooses how a transformers model in memory is scored."""

from __future__ import annotations

import warnings
from typing import Any

from foretoken.errors import ModelError
from foretoken.models.base import LanguageModel
from foretoken.models.hf import HFModel
from foretoken.models.probe import refusal
from foretoken.models.recompute import RecomputeModel

_EXACT_ATTENTION = ("eager", "sdpa")


class SlowModelWarning(UserWarning):
    """A model works, but each pass reads the whole text again."""


def wrap(module: Any, tokenizer: Any | None = None, name: str | None = None) -> LanguageModel:
    """A `LanguageModel` over a transformers model; it is put in evaluation mode.

    Raises:
        ModelError: the model has no output layer over a vocabulary.
    """
    name = name or getattr(module.config, "name_or_path", "") or type(module).__name__
    module.eval().requires_grad_(False)
    if not hasattr(module, "get_output_embeddings") or not module.can_generate():
        raise ModelError(
            f"{name} is a {type(module).__name__}, which writes no text: "
            "load a causal or an encoder-decoder language model"
        )
    if module.config.is_encoder_decoder:
        from foretoken.models.seq2seq import Seq2SeqModel

        return Seq2SeqModel(module, tokenizer, name)
    if getattr(module.config, "_attn_implementation", None) not in _EXACT_ATTENTION:
        # Flash kernels take no mask of ours, so that they could score neither trees nor ragged rows.
        module.set_attn_implementation("sdpa")
    reason = refusal(module)
    if reason is None:
        return HFModel(module, tokenizer, name)
    warnings.warn(
        f"{name} ({type(module).__name__}) is slow here: each pass reads the whole text again, because {reason}",
        SlowModelWarning,
        stacklevel=3,
    )
    return RecomputeModel(module, tokenizer, name)
