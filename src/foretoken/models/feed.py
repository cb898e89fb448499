"""Feeding text to a model: committed tokens in chunks, for prefill and for catching up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foretoken.limits import current_limits
from foretoken.models.base import Cache, Keep, LanguageModel

Heard = Callable[[list[int], list[int], tuple[Tensor, ...]], None]
"""Is told of each pass: committed tokens of each row before it, tokens that it added to each, the hidden states."""


def feed(
    model: LanguageModel,
    cache: Cache,
    rows: Sequence[Sequence[int]],
    keep: Keep = "none",
    hidden_layers: Sequence[int] = (),
    heard: Heard | None = None,
) -> Tensor | None:
    """Append text to every row and commit it.

    Args:
        model: scores the text.
        cache: its cache, without tentative nodes.
        rows: new tokens of each row; rows may be empty and of different lengths.
        keep: "last" to get the logits after each row's last new token, "none" for nothing.
        hidden_layers: layers whose hidden states are wanted, each ``[B, N, H]``.
        heard: gets them.

    Returns:
        ``[B, V]`` logits with ``keep="last"`` (those of empty rows mean nothing), else None.
    """
    longest = max((len(row) for row in rows), default=0)
    last: Tensor | None = None
    chunk = current_limits().prefill_tokens
    for start in range(0, longest, chunk):
        parts = [list(row[start : start + chunk]) for row in rows]
        counts = torch.tensor([len(part) for part in parts])
        width = max(len(part) for part in parts)
        tokens = torch.tensor([part + [0] * (width - len(part)) for part in parts], device=model.device)
        steps = torch.arange(width, device=model.device).expand(len(parts), width)
        before = cache.lengths.tolist() if heard is not None else []
        scores = model.forward(tokens, steps - 1, counts, cache, keep=keep, hidden_layers=hidden_layers)
        logits = scores.logits
        cache.commit(steps, counts)
        if heard is not None:
            heard(before, counts.tolist(), scores.hidden)
        if logits is not None:
            ends_here = (counts > 0).to(logits.device)[:, None]
            last = logits[:, 0] if last is None else torch.where(ends_here, logits[:, 0], last)
    return last
