"""Arguments of transformers' ``generate`` that a custom_generate function can't serve, refused by name."""

from __future__ import annotations

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


def refuse_what_is_not_sampling(config: Any, model_kwargs: dict[str, Any]) -> None:
    """Raise for options of ``generate`` other than those of sampling and greedy search.

    Args:
        config: the generation config.
        model_kwargs: what ``generate`` gives to the model.

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
    if model_kwargs.get("inputs_embeds") is not None:
        raise ParameterError("inputs_embeds: drafters need token ids; give input_ids")


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
