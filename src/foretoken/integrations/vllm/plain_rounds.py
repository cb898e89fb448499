"""Rounds of vLLM in which no row drafts: sampled as without speculation.

vLLM 0.32.0 takes every round through its rejection sampler once a method of speculation is named, rounds without a
draft too. They come out right, but what is computed for drafts that are not there takes longer than sampling itself: on
a CPU some tenth of a small model's round. A policy that drafts where it pays has many such rounds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

from foretoken.integrations.vllm.plugin import SWITCH

_PARAMETERS = ["self", "metadata", "draft_probs", "logits", "sampling_metadata"]


def shorten() -> None:
    """Have the installed vLLM sample rounds without drafts plainly, if it is of the form that is known."""
    if os.environ.get(SWITCH, "1") == "0":
        return
    try:
        from vllm.v1.sample.rejection_sampler import RejectionSampler
    except ImportError:  # no vLLM, or a version with another layout
        return
    RejectionSampler.forward = shortened(RejectionSampler.forward)


def shortened(forward: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's rejection sampler, which leaves rounds without drafts to the sampler.

    Args:
        forward: ``RejectionSampler.forward``.

    Returns:
        Itself, if it is shortened already or has other parameters than those that are known.
    """
    if hasattr(forward, "__wrapped__") or list(signature(forward).parameters) != _PARAMETERS:
        return forward

    @wraps(forward)
    def short(self: Any, metadata: Any, draft_probs: Any, logits: Any, sampling_metadata: Any) -> Any:
        if metadata.max_spec_len > 0:
            return forward(self, metadata, draft_probs, logits, sampling_metadata)
        # Without drafts a row's only logits are those of its bonus token.
        return self.sampler(logits=logits[metadata.bonus_logits_indices], sampling_metadata=sampling_metadata)

    return short
