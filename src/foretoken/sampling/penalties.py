"""Changes to logits before temperature: bias, penalties, and the ban of end tokens before `min_new_tokens`."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence

import numpy as np
import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.sampling.occurrences import Occurrences
from foretoken.sampling.params import SamplingParams
from foretoken.sequence import Sequence

_LARGEST = 1e38
"""Limit of changed scores: float32 ends at 3.4e38."""

_LARGEST_INT = 2**62
"""Limit of `min_new_tokens`: int64 ends at 2**63 - 1."""


class _Entries:
    """A sparse ``[B, V]`` tensor: (row, token id, value) triples."""

    def __init__(self, entries: Iterable[tuple[int, int, float]], device: torch.device) -> None:
        entries = list(entries)
        self.rows = torch.tensor([row for row, _, _ in entries], dtype=torch.int64, device=device)
        self.ids = torch.tensor([token for _, token, _ in entries], dtype=torch.int64, device=device)
        self.values = torch.tensor([value for _, _, value in entries], dtype=torch.float32, device=device)
        self.end = max((token + 1 for _, token, _ in entries), default=0)

    def __len__(self) -> int:
        return len(self.rows)

    def within(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, ids and values of the entries with ids below `width`."""
        if self.end <= width:
            return self.rows, self.ids, self.values
        inside = self.ids < width
        return self.rows[inside], self.ids[inside], self.values[inside]


class Penalties:
    """Logit bias, penalties and minimum lengths of a batch's rows.

    Every node of a draft is treated as a sequence of its own: the row's tokens, then the draft tokens on its path.

    Attributes:
        rows: rows whose parameters change logits, at the beginning of the output at least.
        any: whether there are such rows.
    """

    def __init__(
        self, params: AbstractSequence[SamplingParams], eos_token_ids: AbstractSequence[int], device: torch.device
    ) -> None:
        self._bias = _Entries(
            ((row, *item) for row, p in enumerate(params) for item in (p.logit_bias or {}).items()), device
        )
        self._ends = _Entries(
            (
                (row, token, -torch.inf)
                for row, p in enumerate(params)
                if p.min_new_tokens > 0
                for token in sorted({*eos_token_ids, *p.stop_token_ids})
            ),
            device,
        )
        self._min_new_tokens = [min(p.min_new_tokens, _LARGEST_INT) for p in params]
        self._penalised = [
            row
            for row, p in enumerate(params)
            if (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1.0, 0.0, 0.0)
        ]

        def column(name: str) -> Tensor:  # [P, 1, 1]
            values = [getattr(params[row], name) for row in self._penalised]
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]

        self._repetition = column("repetition_penalty")
        self._presence = column("presence_penalty")
        self._frequency = column("frequency_penalty")
        self._device = device
        self._forbidding = frozenset(row for row, p in enumerate(params) if -torch.inf in (p.logit_bias or {}).values())
        self._ending = frozenset(self._ends.rows.tolist())
        self.rows = frozenset([*self._bias.rows.tolist(), *self._ending, *self._penalised])
        self.any = bool(self.rows)

    def banning(self, sequences: AbstractSequence[Sequence]) -> list[int]:
        """Rows in which tokens are forbidden that may follow the root of one of these sequences."""
        early = {row for row in self._ending if _missing(sequences[row], self._min_new_tokens[row]) > 0}
        return sorted(self._forbidding | early)

    def apply(self, scores: Tensor, sequences: AbstractSequence[Sequence], draft: Draft, nodes: Tensor | None) -> None:
        """Change ``[B, M, V]`` float32 scores in place.

        Args:
            scores: logits of M nodes of each row.
            sequences: the rows' sequences, root included.
            draft: the draft trees under the roots.
            nodes: ``[B, M]`` int64, node numbers; None means all nodes in order.
        """
        width = scores.shape[-1]
        if len(self._bias):
            rows, ids, values = self._bias.within(width)
            scores[rows, :, ids] += values[:, None]
        if self._penalised:
            self._penalise(scores, sequences, draft, nodes)
        missing = list(map(_missing, sequences, self._min_new_tokens))
        if len(self._ends) and max(missing) > 0:
            rows, ids, _ = self._ends.within(width)
            early = node_depths(draft, nodes) < torch.tensor(missing, device=self._device)[:, None]  # [B, M]
            scores[rows, :, ids] = scores[rows, :, ids].masked_fill_(early[rows], -torch.inf)

    def _penalise(
        self, scores: Tensor, sequences: AbstractSequence[Sequence], draft: Draft, nodes: Tensor | None
    ) -> None:
        width = scores.shape[-1]
        rows = torch.tensor(self._penalised, device=self._device)
        drafted = draft.tokens[rows]  # [P, N]
        ids, generated = self._counts([sequences[row] for row in self._penalised], drafted.tolist(), width)
        on_path = draft.ancestors()[rows]  # [P, N+1, N+1]
        if nodes is not None:
            on_path = on_path.gather(1, nodes[rows][..., None].expand(-1, -1, on_path.shape[-1]))
        on_path = on_path[..., 1:] & (drafted < width)[:, None]  # [P, M, N]
        column = torch.searchsorted(ids, drafted).clamp_(max=ids.shape[1] - 1)[:, None].expand_as(on_path)
        drafts = on_path.new_zeros((*on_path.shape[:2], ids.shape[1]), dtype=torch.float32)
        drafts.scatter_add_(2, column, on_path.to(torch.float32))  # [P, M, U]: occurrences on the path to the node
        drafts = drafts.gather(2, torch.searchsorted(ids, ids)[:, None].expand_as(drafts))  # the same for repeated ids
        count = drafts + generated.clamp(min=0)[:, None]
        occurs = (generated >= 0)[:, None] | (drafts > 0)

        index = (rows[:, None, None], torch.arange(scores.shape[1], device=self._device)[:, None], ids[:, None])
        values = scores[index]  # [P, M, U]
        repeated = torch.where(values < 0, values * self._repetition, values / self._repetition)
        # A bias and a penalty may overflow together: what was finite stays so.
        repeated = torch.where(values.isfinite(), repeated.clamp(-_LARGEST, _LARGEST), repeated)
        values = torch.where(occurs, repeated, values)
        scores[index] = values - self._frequency * count - self._presence * (count > 0)

    def _counts(
        self, sequences: AbstractSequence[Sequence], drafted: list[list[int]], width: int
    ) -> tuple[Tensor, Tensor]:
        """The token ids of each sequence and its draft, sorted, and how often each occurs in the output.

        Returns:
            ids: ``[P, U]`` int64; shorter rows repeat their last id.
            generated: ``[P, U]`` float32; -1 for ids that do not occur in the sequence, prompt included.
        """
        found = [
            Occurrences.of(sequence).beside(tokens, width) for sequence, tokens in zip(sequences, drafted, strict=True)
        ]
        longest = max(len(ids) for ids, _ in found)
        ids, generated = np.empty((len(found), longest), np.int64), np.empty((len(found), longest), np.float32)
        for row, (own, counts) in enumerate(found):
            ids[row, : len(own)], ids[row, len(own) :] = own, own[-1]
            generated[row, : len(own)], generated[row, len(own) :] = counts, counts[-1]
        return torch.from_numpy(ids).to(self._device), torch.from_numpy(generated).to(self._device)


def _missing(sequence: Sequence, least: int) -> int:
    """Tokens that an output, root included, lacks to have `least`; 0 or less if it has enough."""
    return least - (len(sequence.tokens) - sequence.prompt_length)


def node_depths(draft: Draft, nodes: Tensor | None) -> Tensor:
    """``[B, M]`` int64: the number of draft tokens on the path to each of the nodes; all nodes if None."""
    depths = draft.depths()
    return depths if nodes is None else depths.gather(1, nodes)
