"""Rounds without drafts inside vLLM, for a sampler and a rejection sampler of its form."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.integrations.vllm.plain_rounds import shorten, shortened
from foretoken.integrations.vllm.plugin import SWITCH


class RejectionSampler:
    """What vLLM's has: a sampler of its own, and `forward`."""

    def sampler(self, logits: Tensor, sampling_metadata: str) -> tuple[str, list[int]]:
        return sampling_metadata, logits.argmax(-1).tolist()

    def forward(self, metadata: Any, draft_probs: Any, logits: Tensor, sampling_metadata: str) -> str:
        return f"rejection {sampling_metadata}"


def test_rounds_without_drafts_are_sampled_and_others_verified() -> None:
    forward, sampler = shortened(RejectionSampler.forward), RejectionSampler()
    logits = torch.eye(5)[[3, 1, 4]]
    without = SimpleNamespace(max_spec_len=0, bonus_logits_indices=torch.tensor([0, 1, 2]))
    assert forward(sampler, without, None, logits, "settings") == ("settings", [3, 1, 4])
    moved = SimpleNamespace(max_spec_len=0, bonus_logits_indices=torch.tensor([2, 0]))
    assert forward(sampler, moved, None, logits, "settings") == ("settings", [4, 3])
    some = SimpleNamespace(max_spec_len=1, bonus_logits_indices=torch.tensor([1, 2]))
    assert forward(sampler, some, None, logits, "settings") == "rejection settings"


def test_it_is_shortened_once() -> None:
    once = shortened(RejectionSampler.forward)
    assert once is not RejectionSampler.forward
    assert shortened(once) is once


def test_another_form_is_left_alone() -> None:
    def forward(self: Any, metadata: Any, logits: Tensor) -> None: ...

    assert shortened(forward) is forward


@pytest.mark.parametrize("switch", ["0", "1"])
def test_without_vllm_nothing_happens(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, switch)
    shorten()
