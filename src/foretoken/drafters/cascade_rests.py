"""Plain rounds of a cascade: rows rest, and a single one is followed meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from weakref import WeakKeyDictionary

from foretoken.drafters.base import Batch, Drafter
from foretoken.drafters.cascade_following import Followed
from foretoken.drafters.cascade_rounds import Round, Saved, Sleep, State
from foretoken.drafters.cascade_steady import SteadyRounds
from foretoken.models.widths import PassWidths
from foretoken.policy.policy import Policy
from foretoken.sequence import Sequence


class CascadeRests(Drafter):
    """What a `Cascade` does in rounds for which it proposes nothing."""

    policy: Policy
    free: list[bool]
    _states: WeakKeyDictionary[Sequence, State]
    _widths: Callable[[AbstractSequence[int]], PassWidths | None]
    _left_alone: bool
    _round: Round | None
    _steady: SteadyRounds | None
    _sleep: Sleep
    _saved: Saved
    _followed: Followed | None

    def idle_rounds(self) -> int:
        """Those in which all rows rest."""
        now = self._round
        return max(1, self._sleep.left(self.policy)) if now is not None and now.is_rest else 1

    @property
    def may_rest(self) -> bool:
        """Whether the next rounds may be plain ones that are as wide as this one."""
        widths = self._widths(self.hidden_layers)
        narrow = widths is None or widths.last == (widths.narrow or (widths.least,))[0] == widths.least
        decided = self._steady is None and self._round is not None and bool(self._round.turns)
        return decided and narrow and self._left_alone

    def rest(self, batch: Batch, limits: AbstractSequence[int]) -> int:
        """Rounds in which all rows rest, if they do; the first of them is begun."""
        requests = [state.request for state in map(self._states.get, batch.sequences) if state is not None]
        if any(batch.exact) or not self.policy.rests.all_rest(requests) or not all(self.policy.resting(requests)):
            return 0
        self._sleep = Sleep.of(batch.sequences, requests, self.policy)
        self._round = self._sleep.round(batch.sequences, self._widths(self.hidden_layers), self.policy)
        return self.idle_rounds()

    def watch(self, batch: Batch) -> Callable[[list[int]], bool] | None:
        """Find copies that pay while the row rests."""
        state = self._states.get(batch.sequences[0])
        free = [drafter for drafter, is_free in zip(self.drafters, self.free, strict=False) if is_free]
        self._followed = None if state is None else Followed.of(batch, state.request, self.policy, free)
        return None if self._followed is None else self._followed.calls

    def _over_alone(self, now: Round) -> None:
        """End a round of rest that had one pass: grammars and traces have no others, so that nothing is followed."""
        if now.is_rest and len(now.sequences) == 1 and len(now.sequences[0].output) > 1:  # every first round is alone
            self._leave_alone(now.sequences[0])

    def observe_return(self, seconds: float | None) -> None:
        """Learn what it costs to return to plain passes."""
        alone = self._round is not None and len(self._round.sequences) == 1
        if seconds is not None and alone and not self.policy.given:
            self.policy.costs.returned(seconds)

    def observe_idle(self, rounds: int, seconds: float) -> None:
        """Count the rounds in which all rows rested."""
        now, self._round = self._round, None
        if now is not None:
            self._sleep.over(now, self.policy, rounds, seconds, self._widths(self.hidden_layers))
            self._end_following(now.sequences)
            self._saved.after(self.policy, rounds)

    def _end_following(self, sequences: AbstractSequence[Sequence]) -> None:
        """Learn from what was followed in a round; a row that was not is asked for at intervals, as others are."""
        followed, self._followed = self._followed, None
        if followed is not None:
            if followed.over():
                self._sleep.end()
        elif len(sequences) == 1:
            self._leave_alone(sequences[0])

    def _leave_alone(self, sequence: Sequence) -> None:
        """Ask for a row that can't be followed at intervals; if it rests to be followed, it wakes."""
        if self._states[sequence].request.copying.leave_alone():
            self._sleep.end()
