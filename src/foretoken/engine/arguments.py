"""Turns the arguments of `Engine.generate` into requests, one for each completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from foretoken.engine.prompts import PredictedOutput, Prompt, each_prediction, is_single
from foretoken.errors import ParameterError, shown
from foretoken.models import LanguageModel
from foretoken.sampling import SamplingParams

RequestArgs = tuple[Prompt, SamplingParams, PredictedOutput | None]
"""A prompt, how to sample, and what the output is expected to be."""


def request_of(
    prompt: Prompt, params: SamplingParams | None, prediction: PredictedOutput | None, target: LanguageModel
) -> RequestArgs:
    """The request of a call for one prompt; without parameters it is sampled as the target's makers want."""
    return prompt, SamplingParams(**target.sampling_defaults) if params is None else params, prediction


def requests_of(prompts: Any, params: Any, prediction: Any, n: int, target: LanguageModel) -> list[RequestArgs]:
    """The requests of a call: n in a row for each prompt.

    Args:
        prompts: one prompt or several.
        params: one for all, one for each prompt, or None for what the target's makers want.
        prediction: of one prompt; a list with one, or None, for each of several.
        n: completions of each prompt, the i-th with the seed of the first plus i where one is named.
        target: the target.

    Raises:
        ParameterError: `params` or `prediction` do not fit the prompts.
    """
    single = is_single(prompts)
    batch: Any = [prompts] if single else prompts
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams(**target.sampling_defaults)] * len(batch)
    elif single:
        raise ParameterError(f"one prompt takes one SamplingParams, not {type(params).__name__}")
    if not isinstance(params, Sequence):
        raise ParameterError(f"params is {shown(params)}: give one SamplingParams, or a list with one for each prompt")
    if len(params) != len(batch):
        raise ParameterError(f"{len(params)} SamplingParams for {len(batch)} prompts: give one, or one for each")
    predictions = [prediction] if single else each_prediction(prediction, len(batch))
    return [
        (prompt, numbered(one, i), predicted)
        for prompt, one, predicted in zip(batch, params, predictions, strict=True)
        for i in range(n)
    ]


def numbered(params: SamplingParams, i: int) -> SamplingParams:
    """The parameters of the i-th completion of a prompt: where a seed is named, it is the seed plus i."""
    if i == 0 or not isinstance(params, SamplingParams) or params.seed is None:
        return params
    return replace(params, seed=(params.seed + i) % 2**64)
