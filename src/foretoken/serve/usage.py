"""The `usage` of an answer: its tokens, and what speculation did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.engine.outputs import DecodeStats


def usage(
    prompts: Sequence[Sequence[int]],
    stats: Mapping[int, DecodeStats],
    speculation: bool,
    prediction: bool = False,
    n: int = 1,
) -> dict[str, Any]:
    """The ``usage`` of OpenAI's API. Cached tokens of a prompt are its first choice's: others may copy from that one.

    Args:
        prompts: tokens of the request's prompts.
        stats: of its choices that have begun.
        speculation: also tell what speculation did.
        prediction: also tell how many tokens were drafted from the request's prediction.
        n: choices of a prompt.
    """
    total = DecodeStats.total(stats.values())
    firsts = (stats.get(index * n) for index in range(len(prompts)))
    prompt_tokens = sum(map(len, prompts))
    told: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": total.emitted,
        "total_tokens": prompt_tokens + total.emitted,
        "prompt_tokens_details": {"cached_tokens": sum(first.cached for first in firsts if first is not None)},
    }
    if prediction:
        told["completion_tokens_details"] = {
            "accepted_prediction_tokens": total.accepted_prediction,
            "rejected_prediction_tokens": total.drafted_prediction - total.accepted_prediction,
        }
    if speculation:
        told["speculation"] = {
            "rounds": total.rounds,
            "drafts": total.drafts,
            "draft_tokens": total.drafted,
            "accepted_tokens": total.accepted,
            "draft_tokens_per_pos": total.drafted_by_position,
            "accepted_tokens_per_pos": total.accepted_by_position,
            "mean_acceptance_length": round(total.mean_acceptance_length, 4),
            "seconds": {name: round(value, 6) for name, value in total.seconds.items()},
        }
    return told
