"""Where the time goes: memory traffic beside what memory gives, parts of a round, and what speculation could give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.bench.records import Record

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_ROUNDED = {"int8": 1.0, "w8a8": 1.0, "int4": 0.5625, "w4a8": 0.5625}
"""Bytes of a weight by the target's `quantize`; of int4 with the scales of groups of 64."""


def bandwidth_share(runs: Sequence[Record], settings: Mapping[str, Any], bandwidth: float | None) -> float | None:
    """Bytes that decoding had to read a second, over the bytes a second that memory gives.

    Each target pass reads the target's weights once and the keys and values of every row; each step of a draft model
    reads the drafter's weights. Prompts are left out. Weights that fit into the processor's caches may give more
    than 1. None if an engine does not report its passes; one that does not report its drafts counts as always drafting
    k tokens.
    """
    target, drafter = settings.get("target") or {}, settings.get("drafter") or {}
    reporting = [run for run in runs if run.get("rounds", 0) > 1]
    if drafter and not _is_sized(drafter) and any(run["mode"] == "draft-model" for run in reporting):
        return None
    if bandwidth is None or not reporting or not _is_sized(target):
        return None
    size = _BYTES[settings["dtype"]]
    quantized = [width for name, width in _ROUNDED.items() if f"quantize={name}" in reporting[0]["family"]]
    weight = quantized[0] if quantized else size
    drafter_weight = 1 if reporting[0].get("drafter_quantize") else size
    total = seconds = 0.0
    for run in reporting:
        passes = run["rounds"] - 1  # the first token's is in what the prompt costs
        context = sum(run["prompt_tokens"]) + run["generated"] / 2
        total += passes * (target["read_parameters"] * weight + context * target["cached_per_token"] * size)
        if run["mode"] == "draft-model" and drafter:
            steps = run["drafted"] / run["batch"] if run.get("drafted") is not None else passes * run["k"]
            total += steps * drafter["read_parameters"] * drafter_weight
        seconds += max(run["seconds"] - run["first_seconds"], 1e-9)
    return float(total / seconds / bandwidth)


def limit_rate(settings: Mapping[str, Any], bandwidth: float | None) -> float | None:
    """Tokens a second that plain decoding of one sequence can't exceed, if its weights come from memory."""
    target = settings.get("target") or {}
    if bandwidth is None or not _is_sized(target):
        return None
    return float(bandwidth / (target["read_parameters"] * _BYTES[settings["dtype"]]))


def _is_sized(model: Mapping[str, Any]) -> bool:
    """Whether the sizes of a model are known."""
    return "read_parameters" in model


def parts(runs: Sequence[Record]) -> dict[str, float]:
    """Seconds by part of a round for each generated token; empty if the engine does not report it."""
    reporting = [run for run in runs if run.get("parts")]
    names = dict.fromkeys(name for run in reporting for name in run["parts"])
    generated = sum(run["generated"] for run in reporting)
    return {name: sum(run["parts"].get(name, 0.0) for run in reporting) / generated for name in names}


def acceptance_by_position(runs: Sequence[Record]) -> list[float]:
    """Share of the drafts of which the token at depth 1, 2, … was accepted, all those before it included."""
    reporting = [run for run in runs if run.get("drafted_by_position")]
    if not reporting:
        return []
    drafts = sum(run["drafted_by_position"][0] for run in reporting)
    depth = max(len(run["accepted_by_position"]) for run in reporting)
    kept = [
        sum(sum(run["accepted_by_position"][position : position + 1]) for run in reporting) for position in range(depth)
    ]
    return [count / drafts for count in kept] if drafts else []


def predicted_speed_up(accepted: Sequence[float], k: int, step_cost: float) -> float:
    """What speculation gives if nothing but passes costs time, and a pass over k + 1 positions costs one over 1.

    Args:
        accepted: see `acceptance_by_position`; at least k of them.
        k: tokens drafted a round.
        step_cost: seconds of drafting one token, over those of a plain token.
    """
    return (1.0 + sum(accepted[:k])) / (1.0 + k * step_cost)


def step_cost(runs: Sequence[Record], plain: Sequence[Record]) -> float | None:
    """Drafter's seconds for each drafted token of a row, over the seconds of a plain token; None if not reported."""
    reporting = [run for run in runs if run.get("parts") and run.get("drafted")]
    known = [run for run in plain if run.get("parts")]
    if not reporting or not known:
        return None
    steps = sum(run["drafted"] / run["batch"] for run in reporting)
    each = sum(run["parts"].get("drafter", 0.0) for run in reporting) / steps
    passes = sum(run["rounds"] for run in known)
    return float(each / (sum(sum(run["parts"].values()) for run in known) / passes))
