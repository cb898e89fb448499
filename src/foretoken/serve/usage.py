"""What an answer tells of the tokens that it took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from foretoken.engine.outputs import DecodeStats


def usage(
    prompts: Iterable[Sequence[int]], stats: Iterable[DecodeStats], speculation: bool, prediction: bool = False
) -> dict[str, Any]:
    """The ``usage`` of OpenAI's API.

    Args:
        prompts: tokens of the request's prompts.
        stats: of its choices.
        speculation: also tell what speculation did.
        prediction: also tell how many tokens were drafted from the request's prediction.
    """
    total = DecodeStats.total(stats)
    prompt_tokens = sum(map(len, prompts))
    told: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": total.emitted,
        "total_tokens": prompt_tokens + total.emitted,
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
