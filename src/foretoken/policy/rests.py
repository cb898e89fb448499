"""Which rows rest: they are plain in some of the next rounds, without a decision in each.

Plain rounds tell nothing of drafts, so that decisions in them would be the same, and decisions take time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import exp

from foretoken.policy.account import SHARE, Guard
from foretoken.policy.costs import Costs, time_apart
from foretoken.policy.request import Request, Row

_REST = 8
"""Most plain rounds of a request that are decided together, where decisions are cheap beside rounds; requests that rest
so long wake together, in rounds that are multiples of it. A decision takes a hundredth to a tenth of a round, for
several rows little more than for one."""

_LONG_REST = 4 * _REST
"""The same where decisions are dear beside rounds: one on 32 rows takes a fifth of a round of the shipped pair, and one
on a single row a quarter on a fast processor."""

_HOPELESS_REST = 4 * _LONG_REST
"""The same for single rows and reproducible requests where no model would pay even if it drafted in every round, and
where there is no model."""

_TOGETHER = 2 * _REST
"""In batches of more than `_REST` rows, rests end in multiples of so many rounds. In a batch of 32 rows of the shipped
pair, one row that wakes takes a tenth of a round, and all together twice to three times as much."""

_UNSEEN = 128
"""Rounds of single rows without a measured plain pass after which such a row gets some plain rounds: where all rounds
draft, nothing shows what plain decoding takes, and drafts may seem to pay that don't."""

_PLAIN_ROUNDS = 4
"""How many plain rounds it gets: a pass is measured after another one."""

_DOUBTFUL = 2.0
"""The pace from which on it gets none: where drafts gained next to nothing, plain rounds were estimated at up to 1.65
times their time. At this pace the four rounds cost 1.5% of the time, and more at higher ones."""


class Rests:
    """Which rows rest, over the rounds of a policy.

    Args:
        costs: shared by all rows but those of reproducible requests, which are decided each by itself.
        models: indices of the drafters that are not free.
        guard: the account of models.
        passes: how many plain passes of a single row go together in one round: its rests end where such rounds do.

    Attributes:
        now: number of the policy's round.
        considers: whether models are considered in it.
        sharing: rows of the round that share costs.
        too_many: the number of such rows at the last decision, if no model could pay in so many (`Decision.beyond`);
            else 0.
    """

    def __init__(self, costs: Costs, models: Sequence[int], guard: Guard, passes: int = 1) -> None:
        self._costs, self._models, self._guard, self._passes = costs, models, guard, passes
        self.now, self.considers, self.too_many, self.sharing = 0, True, 0, 0
        self._considered, self._considered_rows = -1, 0  # the last round in which models were considered, and its rows
        self._rest_of_models = 0  # the round before which they are not, unless most requests are new or have left
        self._idle = 0  # decisions since one by which a row drafted

    def resting(self, requests: Sequence[Request], fixed: Sequence[bool] = ()) -> list[bool]:
        """Of each row of a round, whether it rests.

        Resting rows are not given to `Policy.ask`, `Policy.choose` and `Lessons.learn`.

        Args:
            requests: of the rows.
            fixed: of each row, whether its draft length is fixed, so that it never rests. Empty for none.
        """
        now = self.now
        decides = self._considers(requests) if self._models else False
        if len(requests) == 1 and not self._models:
            self._wait_for_copies(requests[0])
        rest = [request.rests(now) and not decides for request in requests]
        if len(requests) > _REST and not all(rest):
            rest = self._with_new(requests, rest)
        for at, request in enumerate(requests):
            if fixed and fixed[at]:
                rest[at] = False
            elif request.rests_alone > 0:
                rest[at] = True
                request.rest_alone()
            if not rest[at]:
                request.wake(now, len(requests))
        return rest

    def _wait_for_copies(self, request: Request) -> None:
        """Let a single request rest from its first round on, if it is followed then and copies did not pay lately."""
        new = not (request.rounds or request.rests_until or request.fixed) and request.costs is self._costs
        if new and request.copied and request.copying.is_followed and not request.copying.lead.drafts:
            request.rest(self.now, self._until(_HOPELESS_REST, 1, begun=False))

    def _considers(self, requests: Sequence[Request]) -> bool:
        """Whether models are considered in this round; rows share their calls, so for all rows together."""
        shared = [request for request in requests if request.costs is self._costs]
        self.sharing = len(shared)
        known = sum(request.considered == self._considered for request in shared)
        few = 2 * known <= max(len(shared), self._considered_rows)
        too_many = 0 < self.too_many <= len(shared)  # new requests don't change that
        self.considers = self.now >= self._models_due(len(shared)) or (few and not too_many)
        return self.considers

    def _models_due(self, count: int) -> int:
        """The round before which models are not considered for `count` rows, unless most are new or have left."""
        if 4 * count < 3 * self.too_many:
            return min(self._rest_of_models, self._considered + _LONG_REST)
        return self._rest_of_models

    def _with_new(self, requests: Sequence[Request], rest: list[bool]) -> list[bool]:
        """`rest`, with new requests of a large batch resting, too, if all of its other rows rest: until those wake."""
        awake = [request for request, rests in zip(requests, rest, strict=True) if not rests]
        new = all(one.waits and not (one.rounds or one.rests_until) and one.costs is self._costs for one in awake)
        if 2 * len(awake) > len(requests) or not new:
            return rest
        until = self._until(1, len(requests), begun=False)
        for request in awake:
            request.rest(self.now, until)
        return [request.rests(self.now) for request in requests]

    def all_rest(self, requests: Sequence[Request]) -> bool:
        """Whether `resting` will find that these requests all rest in the present round; none may be fixed."""
        decides = self._considers(requests) if self._models else False
        return all(
            request.rests_alone > 0 or (request.costs is self._costs and request.rests(self.now) and not decides)
            for request in requests
        )

    def asleep_until(self, requests: Sequence[Request]) -> int:
        """The policy's round until which these requests, which rest now, all rest if no others join."""
        shared = [request.rests_until for request in requests if request.costs is self._costs]
        if shared and self._models:
            shared.append(self._models_due(len(shared)))
        next_round = self.now + 1
        return min([*shared, *(next_round + request.rests_alone for request in self.alone(requests))])

    def alone(self, requests: Sequence[Request]) -> list[Request]:
        """The reproducible requests, whose rounds of rest are counted one by one (`Request.rest_alone`)."""
        return [request for request in requests if request.costs is not self._costs]

    def let(
        self,
        rows: Sequence[Row],
        count: int,
        drafted: bool,
        deciding: float,
        *,
        looked: bool = False,
        begun: bool = False,
    ) -> None:
        """Let rows rest in the next rounds if nothing has to be decided in them.

        In a large batch rests end together, since rows that wake together cost much less than one after another.

        A single row rests only where decisions, and what a round of one pass takes longer than plain passes that go
        together (`time_apart`), are more than 2 `SHARE` of the time: for one round, then for three, and so on, up to
        where they are not, or until a draft is made. Where no model would pay even in every round, the longest rest
        comes at once.

        Args:
            rows: of the round that is over and was decided, those that share costs.
            count: rows of its pass.
            drafted: whether it had a draft that was no look.
            deciding: seconds of the decision.
            looked: whether it had a look.
            begun: the round was plain and of one pass, so that the first passes of a rest go together with it.
        """
        now = self.now
        if rows and self.considers and self._models:
            self._considered, self._considered_rows, waits = now, len(rows), []
            self._idle = 0 if drafted else self._idle + 1  # after copies, a model may be next
            # What a model is worth depends on a row's last tokens, too; in a single row more than in many.
            costs = self._costs
            dear = deciding * exp(-costs.drift.value) / costs.target(len(rows))
            worth = (dear + time_apart(costs, count) / costs.target(count)) / (2.0 * SHARE)
            # Where no model pays, none will after plain rounds either: these change no estimate.
            hopeless = self.too_many > 0 or (count == 1 and rows[0].hopeless == sys.maxsize)
            most = min(_HOPELESS_REST if hopeless else _LONG_REST, round(worth) - 1)
            least = min(_REST, len(rows) - 1)
            for row in rows:
                row.request.considered = now
                longest = max(least, min(most, row.hopeless or 2**self._idle - 1))
                since = 0 if looked and row.chosen.tokens else row.request.rounds
                left = () if self.too_many else self._looks_left(row.request, self._guard, since)
                waits.append(min([longest, *left]))
            wanted = any(row.request.copied and not row.request.copying.rounds_left(row.request.rounds) for row in rows)
            next_too = drafted and (wanted or not all(row.hopeless == sys.maxsize for row in rows))
            self._rest_of_models = 0 if next_too else self._until(round(sum(waits) / len(waits)), count, begun)
        for row in rows:
            request = row.request
            if request.missed is not None:
                continue
            # After a draft models are considered at once, if at all.
            if request.copied and (not row.chosen.tokens or not self._models or self._rest_of_models > now):
                most = max(_REST, self._rest_of_models - now) if self._models else _HOPELESS_REST
                request.rest(now, self._until(min(request.copying.rounds_left(request.rounds), most), count, begun))
            elif not request.copied and self._rest_of_models > now:
                request.rest(now, self._rest_of_models)
        if len(rows) == count == 1 and self._lacks_plain(rows[0].request):
            self._costs.together.unseen = 0  # even if these passes turn out not to be measurable
            rows[0].request.rest(now, max(rows[0].request.rests_until, now + _PLAIN_ROUNDS))
            self._rest_of_models = max(self._rest_of_models, now + _PLAIN_ROUNDS)
        self.considers = True

    def _lacks_plain(self, request: Request) -> bool:
        """Whether a single request gets some plain rounds, since none were measured for long."""
        together = self._costs.together
        # Not where costs are given, nor before any plain pass was measured: nothing is compared with such passes then.
        due = self._passes > 1 and together.is_measured and together.unseen >= _UNSEEN
        free = request.missed is None and not request.fixed
        return due and free and request.pace.of(request.above[0]) < _DOUBTFUL

    def let_alone(self, row: Row, *, looked: bool = False) -> None:
        """The same for a row of a reproducible request: its rests are counted in rounds of its own.

        With models a rest has up to `_REST` rounds, or up to `_LONG_REST` where the assumed time of decisions, and of
        rounds of one pass beside plain passes that go together, makes that worth it. The first rest is an eighth of
        that length, and at least one round. Where no model pays, the first rest has the full length already, up to
        `_HOPELESS_REST`, after a draft, too. Without models rests last until free drafters are due.
        """
        request = row.request
        drafted, hopeless = row.chosen.tokens > 0, row.hopeless == sys.maxsize
        if drafted:
            request.idle = 0
            wanted = request.copied and not request.copying.rounds_left(request.rounds)
            if wanted or not hopeless:  # copies are wanted now, or a model may soon pay
                return
        request.idle += 1
        most = sys.maxsize
        if self._models:
            # A decision is assumed to take as long as asking free drafters does.
            costs = request.costs
            worth = int((costs.copy(1) + time_apart(costs, 1)) / (2.0 * SHARE))
            first = max(1, worth // _REST)
            longer = row.hopeless or first * (2**request.idle - 1)
            longest = _HOPELESS_REST if hopeless else _LONG_REST
            left = self._looks_left(request, request.guards[1], request.rounds - looked)
            most = min([max(_REST, min(longest, worth)), longer, *left])
        rounds = min(most, request.copying.rounds_left(request.rounds)) if request.copied else most
        request.rests_alone = self._whole(rounds, not drafted and not request.drafted)

    def _looks_left(self, request: Request, guard: Guard, since: int) -> list[int]:
        """Rounds before the next look at each model, if looks can be paid for.

        Looks that were due before round `since` are left out: they were not taken when they were due.
        """
        looks = [request.looks[at] for at in self._models] if guard.spare > 0.0 else []
        return [max(look.due - request.rounds, 0) for look in looks if look.due >= since]

    def _whole(self, rounds: int, begun: bool) -> int:
        """Length of a rest of a single row: at least `rounds`, and such that it ends with a round of several passes.

        With `begun`, its first passes go together with the pass of this round.
        """
        total = rounds + begun
        return rounds + -total % self._passes if self._passes <= total < sys.maxsize else rounds

    def _until(self, rounds: int, count: int, begun: bool) -> int:
        """The round that ends a rest of so many rounds in a batch of `count` rows, `begun` as for `let`."""
        if count == 1 and self._passes > 1:
            return self.now + self._whole(rounds, begun)
        until = self.now + rounds
        if rounds and count > _REST:
            return until + -until % _TOGETHER
        return until - until % _REST if rounds == _REST else until
