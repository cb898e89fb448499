"""Rounds of a single row with drafts, one after another, with little but the models' calls between them.

What a round does besides the calls takes as long as a fifth of a small pair's round, and calls behind it are slower,
since they find their data evicted from the processor's caches. These rounds make no batch, draft and verdict of their
own, and the row gets their tokens together at the end. They are the tokens that single rounds would have given, of the
same draws.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from torch import Tensor

from foretoken.draft import Draft, chain_of_row, first_nodes_of_row, int_tensor
from foretoken.drafters.base import Batch, Drafter
from foretoken.drafters.cascade_costs import passes_together
from foretoken.drafters.chains import draft_of
from foretoken.drafters.row_rounds import Drafted, RowRounds
from foretoken.engine.membership import Membership
from foretoken.engine.recording import RoundClock, emit, emit_drafted
from foretoken.engine.verification import Verified, verify_round
from foretoken.limits import Limits
from foretoken.models.base import Cache, LanguageModel
from foretoken.models.chain import Chains
from foretoken.sampling.vocabulary import best_tokens

_PASSES = 2
"""Plain passes that a round counts as: drafts of three tokens that pay take two to three, and so do more tokens."""

Guard = Callable[[str], AbstractContextManager[None]]
"""Makes what turns errors of allocation in the model or drafter of this name into `OutOfMemory`."""


class InRow(NamedTuple):
    """Rounds that go together.

    Attributes:
        rounds: the drafter's part.
        most: how many there are at most.
    """

    rounds: RowRounds
    most: int


def rounds_in_row(
    target: LanguageModel,
    members: Membership,
    drafter: Drafter,
    batch: Batch,
    limit: int,
    limits: Limits,
    *,
    told: bool,
) -> InRow | None:
    """The rounds of a single row that go together from this one on; None where this one goes by itself.

    Args:
        target: the model.
        members: the rows of the round.
        drafter: that drafts.
        batch: of the round.
        limit: most draft tokens that a round may have.
        limits: of the engine.
        told: as in `DecodeLoop.step`.
    """
    row = members.rows[0]
    if members.num_slots > 1 or limit <= 0 or drafter.hidden_layers or drafter.reads_cache:
        return None
    # A row's first token is emitted at once.
    if not row.ends_by_token or row.logprobs is not None or row.trace or not row.stats.emitted:
        return None
    passes = passes_together(target, 1, limits.plain_passes)
    most = (passes if told or passes == 1 else passes * limits.untold_times) // _PASSES
    rounds = drafter.in_row(batch, limit) if most > 1 else None
    return None if rounds is None else InRow(rounds, most)


class DraftedRounds:
    """Runs such rounds.

    Args:
        target: the model.
        cache: its KV cache, of one row.
        members: that row.
        batch: of the first round.
        clock: of the round that these are one of, for the engine.

    Attributes:
        done: how many are over.
        verified: the last round's result where its logits were unusable, else None.
    """

    def __init__(
        self, target: LanguageModel, cache: Cache, members: Membership, batch: Batch, clock: RoundClock
    ) -> None:
        self._target, self._cache, self._members, self._batch, self._clock = target, cache, members, batch, clock
        sampler, verifier = members.sampler, members.groups[0].verifier
        # In greedy rows all lossless verifiers accept the best tokens, coupled ones too.
        self._best = verifier.lossless and sampler.all_greedy and not sampler.alters
        self._later: list[Drafted] = []  # what the row did not get yet
        self.done = 0
        self.verified: Verified | None = None

    def run(self, rounds: RowRounds, most: int, begun: float, drafter: str, guard: Guard) -> None:
        """Run up to `most` rounds; they end early with the row, or where logits are unusable.

        Args:
            rounds: the drafter's part.
            most: at least 1.
            begun: seconds of the clock that belong to no round.
            drafter: its name.
            guard: see `Guard`.
        """
        (row,), clock, target = self._members.rows, self._clock, self._target
        tokens = row.sequence.tokens
        first, drafting, scoring = len(tokens), guard(f"the drafter {drafter}"), guard(target.name)
        verifying = guard("the verification")
        try:
            while True:
                clock.turn_to("drafter")
                with drafting:
                    chains = rounds.propose(row.max_accepted)
                clock.turn_to("target")
                with scoring:
                    logits = self._score(tokens[-1], chains.tokens[0])
                clock.turn_to("verification")
                with verifying:
                    found = self._verify(chains, logits)
                clock.turn_to("drafter")
                with drafting:
                    rounds.observe(found, logits)
                clock.turn_to("target")
                with scoring:
                    nodes = len(chains.tokens[0]) + 1
                    self._cache.commit(*first_nodes_of_row(found.accepted + 1, nodes))
                clock.turn_to("other")
                if self.verified is None:
                    self._later.append(found)
                    tokens += found.tokens
                self.done += 1
                begun, before = clock.so_far(), begun
                rounds.observe_seconds(begun - before)
                ends = self.verified is not None or row.finished or any(map(row.stops_at, found.tokens))
                if ends or self.done >= most or not rounds.goes_on(row.max_accepted):
                    break
        finally:  # after an error, too, the row gets the tokens before it
            del tokens[first:]
            later, self._later = self._later, []
            emit_drafted(row, later)
        if self.verified is not None and not row.finished:  # it may have been cancelled, or have failed
            with verifying:
                draft = self._draft(chains)
                emit((row,), draft, self.verified, logits, more=bool(later))

    def _score(self, root: int, chain: list[int]) -> Tensor:
        """The target's logits ``[1, N+1, V]`` at the root and the chain's tokens: one pass."""
        nodes = len(chain) + 1
        scores = self._target.forward(int_tensor([[root, *chain]]), *chain_of_row(nodes), self._cache)
        return self._members.logits(scores.logits)

    def _draft(self, chains: Chains) -> Draft:
        return draft_of(chains, [len(chains.tokens[0])], self._batch.device)[0]

    def _verify(self, chains: Chains, logits: Tensor) -> Drafted:
        """Which of the chain's tokens are accepted, and the token after them."""
        (chain,) = chains.tokens
        best = best_tokens(logits) if self._best else None
        if best is not None:
            accepted = 0
            while accepted < len(chain) and chain[accepted] == best[accepted]:
                accepted += 1
            following = best[accepted]
        else:
            verified = verify_round(self._members.groups, self._batch.sequences, self._draft(chains), logits)
            accepted, following = len(verified.accepted[0]), verified.following[0]
            if not all(verified.usable):
                self.verified = verified
        return Drafted(len(chain), accepted, [*chain[:accepted], following])
