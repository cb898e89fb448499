"""What a drafter is, and what it is told."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.models.base import Cache, LanguageModel
from foretoken.sampling import Sampler
from foretoken.sequence import Sequence
from foretoken.verify.base import Verdict


@dataclass(frozen=True)
class Batch:
    """The rows of one round.

    Attributes:
        sequences: one a row, as they stand; drafters read them and never change them.
        sampler: the rows' sampling parameters.
        seeds: ``[B]`` int64, key of each row's randomness.
        positions: ``[B]`` int64, tokens of each row: the absolute position of the first token to come.
        vocab_size: the target's; a drafter never proposes a token at or above it.
        shared_noise: of each row, whether its verifier is a coupled one: there a drafter with a law of its own should
            propose what that law picks under the noise it shares with the target (`Sampler.picks`). What the draft
            says of its law is not looked at in such a row.
        trees: of each row, whether its verifier and the target take trees: elsewhere a drafter drafts a chain.
        depths: of each row, the most tokens of a path that the text has room for; empty where nobody counted them.
            Longer ones do no harm.
        cache: the target's, for drafters that run layers of the target itself: it holds each row's text but the root.
            They forget the tentative nodes that they append.
        places: the row of the `cache` that each row is; rows whose prompts are still being read may lie between.
        drawn_only: of each row, whether siblings must be drawn there, with replacement; empty where there is no such
            row. See `takes_chosen_trees`.
        reproducible: of each row, whether its text depends on what is drafted, and its request names a seed, which is
            to give one text: there nothing that is drafted may depend on other rows or texts or the clock; empty where
            there is no such row.
    """

    sequences: list[Sequence]
    sampler: Sampler
    seeds: Tensor
    positions: Tensor
    vocab_size: int
    shared_noise: tuple[bool, ...]
    trees: tuple[bool, ...]
    depths: tuple[int, ...] = ()
    cache: Cache | None = None
    places: tuple[int, ...] = ()
    drawn_only: tuple[bool, ...] = ()
    reproducible: tuple[bool, ...] = ()

    @property
    def device(self) -> torch.device:
        """Where the draft is wanted."""
        return self.seeds.device

    def takes_chosen_trees(self, row: int) -> bool:
        """Whether a row's draft may branch where its tokens are chosen by rule."""
        return self.trees[row] and not (self.drawn_only and self.drawn_only[row])


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens. What it keeps about a sequence is its own affair, keyed by `Sequence.id`.

    Rows may join, leave or change places between any two calls, and rounds may pass without a call: a drafter
    compares what it knows with ``sequence.tokens`` and catches up. A proposal may depend on nothing but the
    sequences' past and the drafter's own draws.
    """

    name: str

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """A draft for every row.

        Args:
            batch: the rows.
            limits: most tokens that each row may draft; 0 is allowed.
        """

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        """What became of the draft. Called before the batch's sequences are extended.

        Args:
            batch: as at `propose`.
            draft: what was proposed.
            verdict: what was kept.
            logits: ``[B, N+1, V]``, the target's raw scores after each node.
        """


@runtime_checkable
class FeatureReader(Protocol):
    """What a drafter that works with the target's hidden states has besides: the loop asks the target for them.

    Attributes:
        hidden_layers: the layers whose output is wanted, as in `LanguageModel.forward`: 0 for the embeddings, the last
            one normalised.
    """

    hidden_layers: tuple[int, ...]

    def read(
        self,
        sequences: AbstractSequence[Sequence],
        starts: AbstractSequence[int],
        counts: AbstractSequence[int],
        hidden: AbstractSequence[Tensor],
    ) -> None:
        """What the target thought of tokens that are part of the text now; of each token once, in order.

        Prompts are read so before the first call of `propose`, and after every round, the sequences extended, the
        root and the accepted tokens. At `propose`, all tokens but the root have been read.

        Args:
            sequences: the rows.
            starts: of each row, the place of the first token that was read.
            counts: of each row, how many were; 0 is allowed.
            hidden: of each of the `hidden_layers`, ``[B, N, H]``: entry ``[b, i]`` belongs to token ``starts[b] + i``.
        """


@runtime_checkable
class TargetChecker(Protocol):
    """What a drafter has besides that does not fit every target: the engine asks it before the first round."""

    def check_target(self, target: LanguageModel) -> None:
        """See to it that the drafter can draft for the target.

        Raises:
            ForetokenError: it can't.
        """


@runtime_checkable
class CostKeeper(Protocol):
    """What a drafter has besides that learns what things cost on this machine, and may keep it for other processes."""

    def keep_costs(self, key: str) -> None:
        """Begin with what was kept under this name, if there is anything, and keep there what is learnt."""


class NoDrafter:
    """Proposes nothing: every round is one plain step of the target."""

    name = "none"

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """An empty draft."""
        return Draft.empty(len(batch.sequences), batch.device)

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        """Nothing to learn."""
