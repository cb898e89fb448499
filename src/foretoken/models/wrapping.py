"""Chooses how a transformers model in memory is scored."""

from __future__ import annotations

import warnings
from typing import Any

from foretoken.errors import ModelError
from foretoken.models import attention
from foretoken.models.base import LanguageModel
from foretoken.models.hf import HFModel
from foretoken.models.longrope import LongRopeModel
from foretoken.models.probe import refusal
from foretoken.models.recompute import RecomputeModel
from foretoken.models.seq2seq import RecomputeSeq2SeqModel, Seq2SeqModel
from foretoken.models.threads import turn_of
from foretoken.models.traits import switch_length, text_config

_EXACT_ATTENTION = ("eager", "sdpa", attention.NAME)


class SlowModelWarning(UserWarning):
    """A model works, but each pass recomputes the whole sequence."""


def wrap(module: Any, tokenizer: Any | None = None, name: str | None = None) -> LanguageModel:
    """A `LanguageModel` over a transformers model; it is put in evaluation mode.

    Raises:
        ModelError: the model has no output layer over tokens, or can't be scored exactly.
    """
    if not hasattr(module, "config"):
        raise ModelError(f"{name or 'the model'} is a {type(module).__name__}: give a transformers language model")
    name = name or getattr(module.config, "name_or_path", "") or type(module).__name__
    with turn_of(module):  # another engine may be running it
        return _wrapped(module, tokenizer, name)


def _wrapped(module: Any, tokenizer: Any, name: str) -> LanguageModel:
    module.eval()
    if not hasattr(module, "get_output_embeddings") or not module.can_generate():
        raise ModelError(
            f"{name} is a {type(module).__name__}, which generates no tokens: "
            "load a causal or an encoder-decoder language model"
        )
    if getattr(module.config, "_attn_implementation", None) not in _EXACT_ATTENTION:
        # Flash kernels take no arbitrary masks, which trees and rows of different lengths need.
        try:
            module.set_attn_implementation("sdpa")
        except ValueError:
            module.set_attn_implementation("eager")
    if module.config.is_encoder_decoder:
        reason = refusal(module, Seq2SeqModel)
        if reason is None:
            return Seq2SeqModel(module, tokenizer, name)
        return _slow(RecomputeSeq2SeqModel, module, tokenizer, name, reason)
    packed = attention.install(module)
    wrapper = HFModel if switch_length(text_config(module)) is None else LongRopeModel
    reason = refusal(module, wrapper)
    if reason is not None and packed:
        module.set_attn_implementation("sdpa")
        reason = refusal(module, wrapper)
    if reason is None:
        return wrapper(module, tokenizer, name)
    return _slow(RecomputeModel, module, tokenizer, name, reason)


def _slow(wrapper: type[RecomputeModel], module: Any, tokenizer: Any, name: str, reason: str) -> LanguageModel:
    kind = type(module).__name__
    problem = refusal(module, wrapper)
    if problem is not None:
        broken = any(bool(weight.isnan().any()) for weight in module.parameters() if weight.is_floating_point())
        cure = "Its weights hold NaN: take an unbroken checkpoint" if broken else "Load a model of another architecture"
        raise ModelError(f"{name} ({kind}) can't be scored exactly: {problem}. {cure}")
    warnings.warn(
        f"{name} ({kind}) is slow here: each pass recomputes the whole sequence, because {reason}",
        SlowModelWarning,
        stacklevel=5,
    )
    return wrapper(module, tokenizer, name)
