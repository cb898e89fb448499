"""Forward passes that commit all their tokens, in chunks: for prefill, and for drafters that lag."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foretoken.limits import current_limits
from foretoken.models.base import Cache, Keep, LanguageModel
from foretoken.models.widths import WIDE

OnHidden = Callable[[list[int], list[int], tuple[Tensor, ...]], None]
"""Called after each pass with: the number of committed tokens of each row before it, the number that it added to each,
and the hidden states ``[B, N, H]`` of each layer."""


def prompt_part(missing: int, most: int) -> int:
    """Tokens of a prompt's next pass, of those that are missing; the last pass is left `WIDE` of them where it can be.

    So keys and values do not depend on where a prompt was split, nor on whether some of it was copied.
    """
    if most > WIDE and most < missing < most + WIDE:
        return missing - WIDE
    return min(missing, most)


def feed(
    model: LanguageModel,
    cache: Cache,
    rows: Sequence[Sequence[int]],
    keep: Keep = "none",
    hidden_layers: Sequence[int] = (),
    on_hidden: OnHidden | None = None,
) -> Tensor | None:
    """Append tokens to every row of a cache and commit them.

    Args:
        model: whose cache it is.
        cache: without tentative nodes.
        rows: new tokens of each row; rows may be empty and of different lengths.
        keep: "last" to get the logits after each row's last new token, "none" for nothing.
        hidden_layers: layers whose hidden states `on_hidden` gets.
        on_hidden: called after each pass.

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
        tokens = torch.tensor([part + [0] * (width - len(part)) for part in parts])
        steps = torch.arange(width).expand(len(parts), width)
        before = cache.lengths.tolist() if on_hidden is not None else []
        scores = model.forward(tokens, steps - 1, counts, cache, keep=keep, hidden_layers=hidden_layers)
        logits = scores.logits
        cache.commit(steps, counts)
        if on_hidden is not None:
            on_hidden(before, counts.tolist(), scores.hidden)
        if logits is not None:
            ends_here = (counts > 0).to(logits.device)[:, None]
            last = logits[:, 0] if last is None else torch.where(ends_here, logits[:, 0], last)
    return last
