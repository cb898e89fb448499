"""Running an EAGLE-3 head for batches whose rows come and go: committed tokens are cached, then draft nodes scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from foretoken.models.base import Cache
from foretoken.models.chain import Chains, Draws
from foretoken.models.native.linear import Quantize


class HeadCache:
    """A head's state of its rows: keys and values of slots, and the outputs that later slots take as input.

    Slots of the sequence are committed; those of draft tokens are tentative. All of these are dropped after the target
    has verified them: slots of accepted tokens are computed again, from the target's features instead of the head's own
    outputs.

    Args:
        slots: keys and values of a row each.
        hidden_size: H.
        dtype: of outputs.
        device: where outputs are.
    """

    def __init__(self, slots: Cache, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots = slots
        # Column 0 is the output of the last committed slot, column i + 1 that of tentative node i.
        self._outputs = torch.zeros((len(slots.lengths), 1, hidden_size), dtype=dtype, device=device)
        self._done = [0] * len(slots.lengths)

    @property
    def lengths(self) -> list[int]:
        """Committed slots of each row."""
        lengths: list[int] = self.slots.lengths.tolist()
        return lengths

    def states(self, parents: Tensor) -> Tensor:
        """Inputs of nodes in index of features, ``[B, F, H]``: the outputs of their parents, -1 for the root."""
        indices = (parents.to(self._outputs.device) + 1).clamp(max=self._outputs.shape[1] - 1)
        return self._outputs.gather(1, indices[..., None].expand(-1, -1, self._outputs.shape[2]))

    def keep_last(self, outputs: Tensor, rows: Sequence[int]) -> None:
        """Store the outputs ``[R, H]`` of the last committed slots of these rows."""
        self._outputs[torch.tensor(rows, device=outputs.device), 0] = outputs

    def keep_nodes(self, outputs: Tensor, counts: Sequence[int]) -> None:
        """Store the outputs ``[B, F, H]`` of new nodes, ``counts[b]`` of row b."""
        first = max(self._done)
        if min(self._done) == first:
            self._outputs = torch.cat([self._outputs[:, : first + 1], outputs], dim=1)
        else:
            size = first + outputs.shape[1] + 1
            grown = self._outputs.new_zeros((len(counts), size, outputs.shape[2]))
            grown[:, : self._outputs.shape[1]] = self._outputs[:, :size]
            indices = torch.tensor(self._done)[:, None] + 1 + torch.arange(outputs.shape[1])
            rows = torch.arange(len(counts))[:, None]
            grown[rows.to(grown.device), indices.to(grown.device)] = outputs
            self._outputs = grown
        self._done = [done + count for done, count in zip(self._done, counts, strict=True)]

    def forget(self) -> None:
        """Drop the tentative nodes."""
        size = len(self._done)
        self.slots.commit(torch.zeros((size, 0), dtype=torch.int64), torch.zeros(size, dtype=torch.int64))
        self._outputs, self._done = self._outputs[:, :1], [0] * size

    def select(self, rows: Sequence[int]) -> None:
        """New row i is old row ``rows[i]``, or an empty one where that is -1; without tentative nodes."""
        self.slots.select(rows)
        old = self._outputs
        self._outputs = old.new_zeros((len(rows), 1, old.shape[2]))
        for index, row in enumerate(rows):
            if row >= 0:
                self._outputs[index] = old[row, :1]
        self._done = [0] * len(rows)


class Runner(Protocol):
    """What computes a head."""

    name: str
    own_threads: bool
    """It computes with threads that are not torch's."""
    quantize: Quantize | None
    """Quantization of the head's weights."""

    @property
    def drafts_chains(self) -> bool:
        """Whether it has a `chain` that is faster than single steps."""

    @property
    def chain_sizes(self) -> tuple[int, ...]:
        """See `LanguageModel.chain_sizes`."""

    def warm_up_chains(self, drawn: bool) -> None:
        """See `LanguageModel.warm_up_chains`."""

    def open(self) -> HeadCache:
        """A cache without rows."""

    def read(self, cache: HeadCache, tokens: Sequence[Sequence[int]], states: Sequence[Tensor]) -> Tensor:
        """Append slots of committed tokens.

        Args:
            cache: from `open`, without tentative nodes.
            tokens: of each row, n tokens whose embeddings are the slots' inputs.
            states: of each row ``[n, H]``, the fused features, the slots' other inputs.

        Returns:
            ``[B, Vd]``: the head's logits after each row's last slot; rows without new slots are included.
        """

    def score(self, cache: HeadCache, tokens: Tensor, parents: Tensor, counts: Tensor) -> Tensor:
        """Append tentative nodes; arguments as in `LanguageModel.forward`, logits ``[B, F, Vd]``."""

    def chain(
        self,
        cache: HeadCache,
        tokens: Sequence[Sequence[int]],
        states: Sequence[Tensor],
        steps: int,
        draws: Draws | None = None,
    ) -> Chains:
        """`read`, then a chain of `steps` draft tokens, as ids of the draft vocabulary: most probable ones, or drawn.

        Leaves no tentative nodes, and rows without new slots unchanged. Only for runners with `drafts_chains`.
        """
