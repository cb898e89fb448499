"""LongRopeModel: a transformers model with one set of rotary frequencies for short sequences and one for long ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.limits import current_limits
from foretoken.models import traits
from foretoken.models.base import Cache, Keep, Scores
from foretoken.models.cache import SlotCache
from foretoken.models.feed import prompt_part
from foretoken.models.hf import HFModel
from foretoken.models.masks import Pattern
from foretoken.models.recompute import TokenCache


class TwoSetCache(TokenCache):
    """Tokens of each row, and two caches of their keys and values: one for each set of frequencies.

    Each of the two has a prefix of a row's committed tokens, and, if that is all of them, the first tentative nodes. It
    is brought up to date when the row is scored with its frequencies.

    Args:
        batch_size: rows.
        switch: longest sequence, in tokens, of the first set.
    """

    def __init__(self, batch_size: int, switch: int) -> None:
        self.switch = switch
        self.parts = (SlotCache(batch_size), SlotCache(batch_size))
        super().__init__(batch_size)

    def _forget(self) -> None:
        super()._forget()
        self.ends: list[list[int]] = [[] for _ in self.committed]
        """Tokens of the sequence that ends with each tentative node."""
        self.done = [[0] * len(self.committed) for _ in self.parts]
        """Of each part and row: tentative nodes that the part has."""

    def append(self, tokens: Tensor, parents: Tensor, counts: Tensor) -> list[list[int]]:
        """See `TokenCache`."""
        new = super().append(tokens, parents, counts)
        for row, nodes in enumerate(new):
            ends, above = self.ends[row], self.parents[row]
            for node in nodes:
                ends.append(1 + (ends[above[node]] if above[node] >= 0 else len(self.committed[row])))
        return new

    def drop(self, part: int) -> None:
        """Let a part forget the tentative nodes of all rows."""
        rows = len(self.committed)
        self.parts[part].commit(torch.zeros((rows, 0), dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))
        self.done[part] = [0] * rows

    def commit(self, path: Tensor, counts: Tensor) -> None:
        """See `foretoken.models.Cache`."""
        path, counts = path.cpu(), counts.cpu()
        kept = [nodes[:count] for nodes, count in zip(path.tolist(), counts.tolist(), strict=True)]
        for part, done in zip(self.parts, self.done, strict=True):
            # Parents come before their children: the nodes that it has are the first ones of the path.
            known = [sum(node < had for node in nodes) for nodes, had in zip(kept, done, strict=True)]
            if part is self.parts[0]:  # beyond that, its positions are wrong
                rooms = (self.switch - part.lengths).clamp(min=0).tolist()
                known = [min(count, room) for count, room in zip(known, rooms, strict=True)]
            part.commit(path, torch.tensor(known, dtype=torch.int64))
        super().commit(path, counts)

    def select(self, rows: Sequence[int], keep: Sequence[int | None] | None = None) -> None:
        """See `foretoken.models.Cache`."""
        rows = list(rows)
        super().select(rows, keep)
        for part in self.parts:
            had = part.lengths.tolist()
            part.select(
                rows,
                keep
                and [
                    None if most is None or row < 0 else min(most, had[row])
                    for row, most in zip(rows, keep, strict=True)
                ],
            )


class LongRopeModel(HFModel):
    """An `HFModel` with "longrope" scaling: sequences of more than `switch` tokens have frequencies of their own.

    transformers picks the frequencies of a pass by the last position in it, whatever the other rows and the cached keys
    have. So rows of short and of long sequences are scored in passes of their own here, from keys of their own, and
    each node's logits are those of a pass over its sequence alone.

    Args:
        module: the model, on its device, in evaluation mode.
        tokenizer: its tokenizer, if it has one.
        name: what messages call it.
        patterns: see `HFModel`.
    """

    def __init__(
        self,
        module: Any,
        tokenizer: Any | None = None,
        name: str | None = None,
        patterns: dict[str, Pattern] | Pattern | None = None,
    ) -> None:
        super().__init__(module, tokenizer, name, patterns)
        switch = traits.switch_length(traits.text_config(module))
        assert switch is not None
        self._switch = switch
        self._whole: LongRopeModel | None = None  # whose first layers these are; a model does not hold itself

    def open(self, batch_size: int) -> Cache:
        """A new cache with `batch_size` empty rows."""
        return TwoSetCache(batch_size, self._switch)

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """See `LanguageModel.cache_bytes`."""
        most = self._switch + current_limits().prefill_tokens  # a pass that crosses the switch is in both parts
        short = super().cache_bytes([min(length, most) for length in lengths])
        return short + (super().cache_bytes(lengths) if max(lengths, default=0) > self._switch else 0)

    def exit_after(self, layers: int) -> LongRopeModel:
        """See `LanguageModel.exit_after`."""
        early = super().exit_after(layers)
        assert isinstance(early, LongRopeModel)
        early._whole = self._whole or self
        return early

    def layers_in(self, cache: Cache) -> int:
        """See `HFModel.layers_in`."""
        assert isinstance(cache, TwoSetCache)
        return len(cache.parts[0].layers)

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        counts: Tensor,
        cache: Cache,
        keep: Keep = "all",
        hidden_layers: Sequence[int] = (),
    ) -> Scores:
        """See `LanguageModel.forward`."""
        assert isinstance(cache, TwoSetCache)
        added = cache.append(tokens, parents, counts)
        width = tokens.shape[1]
        long = [[cache.ends[row][node] > self._switch for node in nodes] for row, nodes in enumerate(added)]
        wanted = long if keep == "all" or hidden_layers else [flags[-1:] for flags in long]
        rows = [[row for row, flags in enumerate(wanted) if part in flags] for part in (False, True)]
        found = [
            self._part(cache, part, rows[part], [len(nodes) for nodes in added], width, keep, hidden_layers)
            for part in (0, 1)
            if rows[part] or (part == 0 and not rows[1])
        ]
        if len(found) == 1:
            return found[0]
        is_long = torch.tensor([flags + [False] * (width - len(flags)) for flags in long], device=self.device)
        hidden = tuple(
            torch.where(is_long[:, :, None], *pair) for pair in zip(found[1].hidden, found[0].hidden, strict=True)
        )
        if keep == "none":
            return Scores(None, hidden)
        if keep == "last":
            is_long = torch.tensor([[flags[-1] if flags else False] for flags in long], device=self.device)
        early, late = found[0].logits, found[1].logits
        assert early is not None
        assert late is not None
        return Scores(torch.where(is_long[:, :, None], late, early), hidden)

    def _part(
        self,
        cache: TwoSetCache,
        part: int,
        rows: Sequence[int],
        added: Sequence[int],
        width: int,
        keep: Keep,
        hidden_layers: Sequence[int],
    ) -> Scores:
        """Scores of the last `added` nodes of each of these rows, with one set of frequencies for all of them."""
        (self._whole or self)._catch_up(cache, part, rows)  # the first layers alone would leave the others without keys
        done = cache.done[part]
        size = len(added)
        nodes: list[list[int]] = [[] for _ in range(size)]
        parents: list[list[int]] = [[] for _ in range(size)]
        for row in rows:
            nodes[row], parents[row] = cache.nodes[row][done[row] :], cache.parents[row][done[row] :]
            done[row] = len(cache.nodes[row])
        counts = torch.tensor([len(row) for row in nodes], dtype=torch.int64)
        columns = max([width, *map(len, nodes)])
        limit = self.max_length if part else self._switch
        scores = self._score(
            _padded(nodes, columns), _padded(parents, columns), counts, cache.parts[part], keep, hidden_layers, limit
        )
        starts = [max(0, len(row) - new) for row, new in zip(nodes, added, strict=True)]
        if columns == width and not any(starts):
            return scores
        index = (torch.tensor(starts)[:, None] + torch.arange(width)).clamp(max=columns - 1).to(self.device)
        every = torch.arange(size, device=self.device)[:, None]
        logits = scores.logits
        if logits is not None and keep == "all":
            logits = logits[every, index]
        return Scores(logits, tuple(layer[every, index] for layer in scores.hidden))

    def _catch_up(self, cache: TwoSetCache, part: int, rows: Sequence[int]) -> None:
        """Compute keys of committed tokens that a part lacks, each row's in chunks as a prompt's."""
        size = len(cache.committed)
        most = current_limits().prefill_tokens
        while True:
            had = cache.parts[part].lengths.tolist()
            lags: list[list[int]] = [[] for _ in range(size)]
            for row in rows:
                committed, start = cache.committed[row], had[row]
                lags[row] = committed[start : start + prompt_part(len(committed) - start, most)]
            width = max(map(len, lags), default=0)
            if width == 0:
                return
            cache.drop(part)
            counts = torch.tensor([len(lag) for lag in lags], dtype=torch.int64)
            path = torch.arange(width).expand(size, width)
            tokens = _padded(lags, width + part)
            # With the position of a long sequence in a column of padding, all of the pass is one's.
            limit, last = (self.max_length, self._switch) if part else (self._switch, None)
            above = torch.arange(-1, width + part - 1).expand(size, -1)
            self._score(tokens, above, counts, cache.parts[part], "none", (), limit, last)
            cache.parts[part].commit(path, counts)


def _padded(rows: Sequence[Sequence[int]], width: int) -> Tensor:
    """``[B, width]`` int64."""
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int64).reshape(-1, width)
