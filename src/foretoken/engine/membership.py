"""Which rows take part in a round, as one immutable value that is replaced whenever they change."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.drafters.base import Batch
from foretoken.engine.draft_length import DraftLengths
from foretoken.engine.row import Row
from foretoken.engine.verification import VerifierGroup, group_by_verifier
from foretoken.models.base import Cache, LanguageModel
from foretoken.models.placement import moved
from foretoken.sampling import Sampler
from foretoken.sequence import Sequence
from foretoken.verify import is_coupled

MakeSampler = Callable[[AbstractSequence[Sequence]], Sampler]
"""Makes the sampler, which turns logits into distributions, for the rows of these sequences."""


@dataclass(frozen=True)
class Membership:
    """The rows of a round, those whose prompts are cached, and what stays the same while they do.

    Attributes:
        rows: the requests.
        slots: of each, its row of the target's KV cache.
        num_slots: rows of that cache; those that are still in prefill take no part.
        sequences: the rows' tokens.
        sampler: their sampling parameters.
        groups: rows by verifier.
        fixed_lengths: of each row, the draft length that the request or the engine fixes; None leaves it to the policy.
        chooses: whether the policy has anything to choose: a draft length, or who drafts.
        drafters: as in `Batch`.
        shared_noise: as in `Batch`; so are `trees`, `drawn_only` and `reproducible`.
    """

    rows: tuple[Row, ...]
    slots: tuple[int, ...]
    num_slots: int
    sequences: tuple[Sequence, ...]
    sampler: Sampler
    groups: tuple[VerifierGroup, ...]
    fixed_lengths: tuple[int | None, ...]
    chooses: bool
    drafters: tuple[frozenset[str] | None, ...]
    shared_noise: tuple[bool, ...]
    trees: tuple[bool, ...]
    drawn_only: tuple[bool, ...]
    reproducible: tuple[bool, ...]

    @classmethod
    def of(
        cls,
        rows: AbstractSequence[Row],
        slots: AbstractSequence[int],
        num_slots: int,
        target: LanguageModel,
        lengths: DraftLengths,
        make_sampler: MakeSampler | None = None,
        device: torch.device | None = None,
    ) -> Membership:
        """The membership of these rows.

        Args:
            rows: the requests.
            slots: of each, its row of the target's KV cache.
            num_slots: rows of that cache.
            target: the model.
            lengths: draft lengths.
            make_sampler: None takes the rows' sampling parameters.
            device: where logits are processed; None for the target's own.
        """
        sequences = [row.sequence for row in rows]
        fixed = tuple(map(lengths.fixed, rows))
        sampler = make_sampler(sequences) if make_sampler is not None else _own_sampler(sequences, target, device)
        return cls(
            rows=tuple(rows),
            slots=tuple(slots),
            num_slots=num_slots,
            sequences=tuple(sequences),
            sampler=sampler,
            groups=group_by_verifier([row.verifier for row in rows], sampler),
            fixed_lengths=fixed,
            chooses=None in fixed or any(row.sequence.prediction or row.drafters is not None for row in rows),
            shared_noise=tuple(is_coupled(row.verifier) for row in rows),
            drafters=tuple(row.drafters for row in rows) if any(row.drafters is not None for row in rows) else (),
            trees=tuple(row.verifier.trees and target.supports_trees and not row.chains for row in rows),
            drawn_only=tuple(row.verifier.drawn_only for row in rows),
            reproducible=tuple(map(lengths.matters, rows)),
        )

    def holds(self, rows: AbstractSequence[Row], slots: AbstractSequence[int], num_slots: int) -> bool:
        """Whether this is the membership of these rows in these slots, with the sequences that they have now."""
        return (
            self.num_slots == num_slots
            and self.slots == tuple(slots)
            and self.rows == tuple(rows)
            and all(row.sequence is sequence for row, sequence in zip(self.rows, self.sequences, strict=True))
        )

    def batch(self, cache: Cache, vocab_size: int) -> Batch:
        """The round as the drafter sees it."""
        sequences = list(self.sequences)
        return Batch(
            sequences,
            self.sampler,
            self.sampler.seeds,
            self.sampler.positions(sequences),
            vocab_size,
            shared_noise=self.shared_noise,
            trees=self.trees,
            depths=tuple(row.max_accepted for row in self.rows),
            cache=cache,
            slots=self.slots,
            drawn_only=self.drawn_only,
            reproducible=self.reproducible,
            exact=tuple(length is not None for length in self.fixed_lengths),
            drafters=self.drafters,
        )

    def to_slots(self, values: Tensor) -> Tensor:
        """Values of the rows, ``[B, …]``, as values of all rows of the KV cache: 0 for those that take no part."""
        if len(self.slots) == self.num_slots:
            return values
        spread = values.new_zeros((self.num_slots, *values.shape[1:]))
        spread[list(self.slots)] = values
        return spread

    def logits(self, scores: Tensor | None) -> Tensor:
        """The logits of a pass over all rows of the KV cache, ``[B, N, V]`` of the rows that take part."""
        assert scores is not None
        logits, device = self.from_slots(scores), self.sampler.device
        if device.type == "cpu" and logits.is_cpu:  # `logits.device` makes a new object at each access
            return logits
        return logits if logits.device.type == device.type else moved(logits.float(), device)

    def from_slots(self, values: Tensor) -> Tensor:
        """Values of all rows of the KV cache as values of the rows that take part."""
        return values if len(self.slots) == self.num_slots else values[list(self.slots)]


def _own_sampler(sequences: AbstractSequence[Sequence], target: LanguageModel, device: torch.device | None) -> Sampler:
    return Sampler(
        [sequence.params for sequence in sequences],
        [sequence.seed for sequence in sequences],
        vocab_size=target.vocab_size,
        eos_token_ids=target.eos_token_ids,
        device=device or target.device,
    )
