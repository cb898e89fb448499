"""Answers as JSON, for ``--json`` and for files of prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from foretoken.cli.answer import Answer
from foretoken.cli.screen import Screen
from foretoken.engine import detokenizer
from foretoken.engine.outputs import DecodeStats, TokenLogprob

if TYPE_CHECKING:
    from foretoken.engine.engine import Engine
    from foretoken.sampling import SamplingParams


def print_json(screen: Screen, value: Any) -> None:
    """One JSON document on one line, whatever the terminal's width; all ASCII where its encoding lacks a character."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode(screen.out.encoding)
    except UnicodeEncodeError:
        text = json.dumps(value, allow_nan=False)
    screen.out.file.write(text + "\n")
    screen.out.file.flush()


def settings_json(engine: Engine, params: SamplingParams) -> dict[str, Any]:
    """What an answer was made with.

    ``seed`` is null where none was given. A bias of -inf is the string ``"-inf"``, for JSON has no infinity.
    """
    settings = asdict(params)
    seed = settings.pop("seed")
    if params.grammar is not None:
        settings["grammar"] = {"kind": params.grammar.kind, "source": params.grammar.source}
    if params.logit_bias is not None:
        bias = {str(token): finite(value) for token, value in params.logit_bias.items()}
        settings["logit_bias"] = {token: "-inf" if value is None else value for token, value in bias.items()}
    return {
        "model": engine.target.name,
        "drafter": engine.drafter.name,
        "verifier": engine.verifier.name,
        "num_speculative_tokens": engine.num_speculative_tokens,
        "seed": seed,
        "settings": settings,
    }


def answer_json(engine: Engine, answer: Answer, trace: bool = False) -> dict[str, Any]:
    """What an answer is, and what it took."""
    result: dict[str, Any] = {
        "text": answer.text,
        "tokens": [token_text(engine, token) for token in answer.token_ids],
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stats": stats_json(answer.stats),
    }
    if answer.logprobs is not None:
        result["logprobs"] = _logprobs(engine, answer.logprobs)
    if trace:
        result["rounds"] = [
            {
                "drafted": [asdict(token) for token in event.drafted],
                "emitted": [asdict(piece) for piece in event.pieces],
            }
            for event in answer.rounds
        ]
    return result


def stats_json(stats: DecodeStats) -> dict[str, Any]:
    """Counts and rates; an acceptance rate is null where nothing was drafted."""
    return {
        **asdict(stats),
        "acceptance_rate": stats.acceptance_rate if stats.drafted else None,
        "acceptance_by_position": stats.acceptance_by_position,
        "mean_acceptance_length": stats.mean_acceptance_length if stats.rounds else None,
        "tokens_per_second": stats.tokens_per_second,
    }


def token_text(engine: Engine, token_id: int) -> str:
    """One token's text; empty without a tokenizer."""
    return detokenizer.token_text(engine.target.tokenizer, token_id)


def _logprobs(engine: Engine, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token_id": token_id, "token": token_text(engine, token_id), "logprob": finite(logprob)}

    return [
        {**entry(one.token_id, one.logprob), "top": [entry(token, value) for token, value in one.top.items()]}
        for one in logprobs
    ]


def finite(number: float) -> float | None:
    """JSON has no infinity."""
    return number if math.isfinite(number) else None
