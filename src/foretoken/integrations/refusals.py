"""Arguments of transformers' ``generate`` that a custom_generate function can't serve, refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType
from typing import Any

from foretoken.errors import ParameterError

_DROPPED = {
    "streamer": "give it to custom_generate(streamer=…)",
    "assistant_model": "give it to custom_generate as the drafter",
}
"""Arguments that transformers' ``generate`` does not pass on to a custom_generate function, and what to do instead."""


def refuse_what_transformers_drops(frame: FrameType | None) -> None:
    """Raise if the caller, ``generate``, was given such an argument; it is visible in the caller's frame only.

    If they were ignored silently a streamer would wait for ever, and an assistant would have no effect.
    """
    caller = frame.f_back if frame is not None else None
    if caller is None or caller.f_code.co_name != "generate":
        return
    for name, cure in _DROPPED.items():
        if caller.f_locals.get(name) is not None:
            if name == "streamer":
                caller.f_locals[name].end()
            raise ParameterError(f"{name}: transformers does not pass it on to a custom_generate function: {cure}")


_SERVED = frozenset({"attention_mask", "use_cache", "logits_to_keep"})
"""Inputs of a model that a caller of ``generate`` may give besides its tokens."""

_OTHERS = frozenset({"input_ids", "decoder_input_ids", "tokenizer"})
"""Arguments that ``generate`` takes for itself, and its config does not have."""

_PREPARED = frozenset({"position_ids", "past_key_values", "encoder_outputs"})
"""What ``generate`` itself makes for a model, by its own rules, where the caller gave nothing of the kind."""

_CURES = {
    "past_key_values": "speculation keeps a KV cache of its own; leave it out, and give the whole prompt",
    "inputs_embeds": "drafters need token ids; give input_ids",
}


def refuse_other_inputs(frame: FrameType | None, config: Any, model_kwargs: dict[str, Any], inputs: Any) -> None:
    """Raise for inputs of the model other than tokens and their mask: they would have no effect.

    Args:
        frame: of the function that ``generate`` called; what its caller was given tells what ``generate`` prepared.
        config: the generation config.
        model_kwargs: what ``generate`` gives to the model. Inputs that an encoder has read, images for example, are no
            longer there.
        inputs: the tensor that the encoder of an encoder-decoder model would get.

    Raises:
        ParameterError: there is one.
    """
    caller = frame.f_back if frame is not None else None
    given = caller.f_locals.get("kwargs") if caller is not None and caller.f_code.co_name == "generate" else None
    served, others = (_SERVED, given) if isinstance(given, dict) else (_SERVED | _PREPARED, model_kwargs)
    for name, value in others.items():
        known = name in served or (name not in model_kwargs and (name in _OTHERS or hasattr(config, name)))
        if value is not None and not known:
            cure = _CURES.get(name, "speculation is over tokens alone; leave it out, or leave out custom_generate")
            raise ParameterError(f"{name}: {cure}")
    if inputs is not None and inputs.is_floating_point():
        raise ParameterError("inputs are no tokens: custom_generate takes models that read text; leave it out")


def refuse_engine_options(options: Mapping[str, Any]) -> None:
    """Raise for options of `Engine` that have no effect in ``generate``."""
    if "cache_memory" in options:
        raise ParameterError(
            f"cache_memory={options['cache_memory']!r}: generate takes all rows of a call; leave it out, and limit the "
            "rows that are decoded at once by max_batch_size"
        )


def refuse_what_is_not_sampling(config: Any) -> None:
    """Raise for options of ``generate`` other than those of sampling and greedy search.

    Args:
        config: the generation config.

    Raises:
        ParameterError: there is one.
    """
    if (config.num_beams or 1) > 1:
        raise ParameterError(f"num_beams={config.num_beams}: custom_generate samples; for beams use beam_search")
    for name in ("penalty_alpha", "dola_layers"):
        if getattr(config, name, None):
            raise ParameterError(
                f"{name}={getattr(config, name)!r}: custom_generate samples from the model's own distribution; "
                "leave it out"
            )
    for name in ("prompt_lookup_num_tokens", "assistant_early_exit"):
        if getattr(config, name, None):
            raise ParameterError(
                f"{name}={getattr(config, name)!r}: choose the drafter in custom_generate(drafter=…), such as "
                "'prompt-lookup' or 'early-exit', and leave this out"
            )
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise ParameterError(
                f"{name}=True: speculation scores several positions at once and keeps none; leave it out"
            )


_STATEFUL = ("UnbatchedClassifierFreeGuidance", "ClassifierFreeGuidance", "SynthIDText")
"""Name prefixes of logits processors that keep a state between calls, or score rows of their own."""


def refuse_stateful(processors: Any) -> None:
    """Raise for logits processors that must be called once for each token, in order."""
    for processor in processors:
        name = type(processor).__name__
        if name.startswith(_STATEFUL):
            raise ParameterError(
                f"{name} (guidance_scale or watermarking) must be called once for each token, in order, and "
                "speculation scores several at once: leave it out"
            )
