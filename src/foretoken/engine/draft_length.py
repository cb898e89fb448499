"""How many tokens each row may draft in a round: fixed by the request or the engine, or chosen by the policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as AbstractSequence
from typing import Literal, Protocol

from foretoken.drafters.base import Drafter, NoDrafter
from foretoken.engine.row import Row
from foretoken.limits import MAX_SPECULATIVE_TOKENS
from foretoken.policy.controller import AUTO, Choice
from foretoken.policy.costs import Acceptance
from foretoken.verify import is_coupled


class SpeculationPolicy(Protocol):
    """All that the decode loop asks of what chooses draft lengths."""

    @property
    def first(self) -> int:
        """The draft length where nothing is known yet, or where it must not depend on the clock."""

    @property
    def new_record(self) -> Callable[..., Acceptance]:
        """What is kept of a request: which of its draft tokens were accepted."""

    def choose(
        self,
        requests: AbstractSequence[Acceptance],
        rooms: AbstractSequence[int],
        lags: AbstractSequence[int] | None = None,
        crowded: bool = False,
    ) -> Choice:
        """The draft length of the next round, and the rows that draft.

        Args:
            requests: of each row, which of its draft tokens were accepted.
            rooms: of each row, most draft tokens that could still be accepted.
            lags: of each row, tokens that the drafter has to catch up with first; None for none.
            crowded: other requests wait for the place of the first that finishes.
        """

    def learn(
        self,
        limits: AbstractSequence[int],
        width: int,
        accepted: AbstractSequence[int],
        requests: AbstractSequence[Acceptance],
        seconds: Mapping[str, float],
        clean: bool,
        lags: AbstractSequence[int] | None = None,
    ) -> None:
        """Take note of a round.

        Args:
            limits: of each row, tokens that it might draft.
            width: tokens of the longest draft.
            accepted: of each row, accepted draft tokens.
            requests: of the rows; they are brought up to date.
            seconds: by part of the round, as in `DecodeStats.seconds`.
            clean: the round did nothing else in that time, no prefill.
            lags: as at `choose`.
        """


class DraftLengths:
    """Draft lengths of the rows of a decode loop.

    With "auto", a request that names a seed still gets a fixed draft length if its output depends on it: the policy
    goes by the clock, and a seed has to give one output.

    Args:
        drafter: what drafts.
        num_speculative_tokens: the engine's setting, for requests without one.
        policy: chooses where the setting is "auto".
    """

    def __init__(
        self, drafter: Drafter, num_speculative_tokens: int | Literal["auto"], policy: SpeculationPolicy
    ) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.policy = policy
        self._never = isinstance(drafter, NoDrafter)
        self._branches = drafter.trees
        self._lags: list[int] = []  # of the round that goes on

    def fixed(self, row: Row) -> int | None:
        """The draft length that is fixed for a row; None where the policy chooses."""
        if self._never:
            return 0
        length = self.num_speculative_tokens if row.num_speculative_tokens is None else row.num_speculative_tokens
        if length != AUTO:
            return length
        return self.policy.first if self.matters(row) else None

    def matters(self, row: Row) -> bool:
        """Whether the request names a seed that would give another output with another draft."""
        params, verifier = row.sequence.params, row.verifier
        sampled = not (params.greedy and verifier.lossless) and not is_coupled(verifier)
        return sampled and params.seed is not None

    def limits(
        self, rows: AbstractSequence[Row], fixed_lengths: AbstractSequence[int | None], crowded: bool
    ) -> list[int]:
        """How many tokens each row may draft this round.

        A round emits one token more than it accepts. That bounds the length of a chain and the depth of a tree; the
        number of a tree's nodes has no bound but `MAX_SPECULATIVE_TOKENS` then.

        Args:
            rows: of the round.
            fixed_lengths: of each row, what `fixed` says.
            crowded: other requests wait.
        """
        rooms = [row.max_accepted for row in rows]
        self._lags = [row.drafter_lag for row in rows]
        lengths = list(fixed_lengths)
        free = [place for place, length in enumerate(lengths) if length is None]
        if free:
            choice = self.policy.choose(
                [self._acceptance(rows[place]) for place in free],
                [rooms[place] for place in free],
                [self._lags[place] for place in free],
                crowded,
            )
            for number, place in enumerate(free):
                lengths[place] = choice.draft_length if choice.rows is None or number in choice.rows else 0
        return [
            min(length or 0, MAX_SPECULATIVE_TOKENS if room and self._branches and row.verifier.trees else room)
            for row, length, room in zip(rows, lengths, rooms, strict=True)
        ]

    def learn(
        self,
        rows: AbstractSequence[Row],
        fixed_lengths: AbstractSequence[int | None],
        limits: AbstractSequence[int],
        width: int,
        accepted: AbstractSequence[int],
        seconds: Mapping[str, float],
        clean: bool,
    ) -> None:
        """Report a round to the policy, and note which rows the drafter was called for.

        Rows that draft different numbers of tokens tell what no draft length costs or gives to all: such a round is not
        reported.
        """
        fixed = set(fixed_lengths)
        if fixed == {None} or (self.num_speculative_tokens == AUTO and len(fixed) == 1):
            requests = [self._acceptance(row) for row in rows]
            self.policy.learn(limits, width, accepted, requests, seconds, clean, self._lags)
        for row, limit in zip(rows, limits, strict=True):
            row.drafted_last = limit > 0
            if row.drafted_last:
                row.drafter_length = len(row.sequence.tokens)

    def _acceptance(self, row: Row) -> Acceptance:
        if row.acceptance is None:
            row.acceptance = self.policy.new_record(memory=30)
        return row.acceptance
