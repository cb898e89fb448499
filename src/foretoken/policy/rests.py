"""Which rows rest: plain rounds that are decided at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import exp

from foretoken.policy.account import SHARE, Guard
from foretoken.policy.costs import Costs, time_apart
from foretoken.policy.request import Request, Row

_REST = 8
"""Plain rounds of a request that are decided at once, at most, where decisions are cheap beside rounds; requests that
rest so long wake together, in rounds that are multiples of it. A decision takes a hundredth to a tenth of a round: for
several rows little more than for one."""

_LONG_REST = 4 * _REST
"""The same where decisions take long beside rounds; one on 32 rows takes a fifth of a round of the shipped pair,
and one on a row by itself a quarter on a fast processor."""

_HOPELESS_REST = 4 * _LONG_REST
"""The same where no model would pay even if it drafted in every round: of a row by itself, or of one with a seed. Also
where there is no model."""

_TOGETHER = 2 * _REST
"""Rounds of whose multiples rests end in batches of more than `_REST` rows. That one row wakes takes a tenth of a round
of 32 rows of the shipped pair, and that all do twice to three times as much."""

_UNSEEN = 128
"""Rounds of rows by themselves since plain passes of one were last measured, behind which such a row has some: where
all rounds draft, nothing tells what plain decoding takes, and drafts may seem to pay that don't."""

_PLAIN_ROUNDS = 4
"""How many: what one pass takes is measured behind another one."""

_DOUBTFUL = 2.0
"""Tokens in a plain round's time from which on it has none: where drafts gained next to nothing, plain rounds were
believed to take up to 1.65 times as long as they did. At this pace the four rounds cost 1.5% of the time; the more
drafts gain, the more."""


class Rests:
    """Which rows rest, over the rounds of a policy.

    Args:
        costs: of rows that share them: others are decided each by itself.
        models: indices of the drafters that are not free.
        guard: the account of models.
        passes: how many plain passes of a row by itself go together in one round: its rests end where such rounds do.

    Attributes:
        now: the policy's round.
        considers: models are considered in it.
        sharing: rows of the round that share costs.
        too_many: as many of them as no draft of a model can pay in (`Decision.beyond`), by the last decision; else 0.
    """

    def __init__(self, costs: Costs, models: Sequence[int], guard: Guard, passes: int = 1) -> None:
        self._costs, self._models, self._guard, self._passes = costs, models, guard, passes
        self.now, self.considers, self.too_many, self.sharing = 0, True, 0, 0
        self._considered, self._considered_rows = -1, 0  # the round in which they last were, and its rows
        self._rest_of_models = 0  # before which they are not considered, unless most requests are new, or have left
        self._idle = 0  # decisions in a row by which no row drafted

    def resting(self, requests: Sequence[Request], fixed: Sequence[bool] = ()) -> list[bool]:
        """Of each row of a round: whether it was decided before that it is plain.

        Such rows are none of those of `Policy.ask`, `Policy.choose` and `Lessons.learn`.

        Args:
            requests: of the rows.
            fixed: of each row, whether its draft length is not the policy's to choose: it never rests. Empty for none.
        """
        now = self.now
        decides = self._considers(requests) if self._models else False
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

    def _considers(self, requests: Sequence[Request]) -> bool:
        """Whether models are considered in this round; rows share their calls, so for all rows together."""
        shared = [request for request in requests if request.costs is self._costs]
        self.sharing = len(shared)
        known = sum(request.considered == self._considered for request in shared)
        few = 2 * known <= max(len(shared), self._considered_rows)
        too_many = 0 < self.too_many <= len(shared)  # whoever they are
        self.considers = self.now >= self._models_due(len(shared)) or (few and not too_many)
        return self.considers

    def _models_due(self, count: int) -> int:
        """The round before which models are not considered in so many rows, unless most requests are new, or left."""
        if 4 * count < 3 * self.too_many:
            return min(self._rest_of_models, self._considered + _LONG_REST)
        return self._rest_of_models

    def _with_new(self, requests: Sequence[Request], rest: list[bool]) -> list[bool]:
        """The same where requests that begin in a large batch, of which all others rest, wait until those wake."""
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
        """The policy's round before which these requests all rest, as long as there are no others; they rest now."""
        shared = [request.rests_until for request in requests if request.costs is self._costs]
        if shared and self._models:
            shared.append(self._models_due(len(shared)))
        next_round = self.now + 1
        return min([*shared, *(next_round + request.rests_alone for request in self.alone(requests))])

    def alone(self, requests: Sequence[Request]) -> list[Request]:
        """Those that depend on no other request: each of their rounds of rest is counted by `Request.rest_alone`."""
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
        """Leave rows out of the next rounds if nothing is to be decided: plain rounds teach nothing about drafts.

        With `begun`, the first passes of a rest go together with the pass of this round.

        A row that wakes among many takes a tenth of their round, and little more does if others wake with it: rests in
        such a batch end together.

        A row by itself rests only where decisions, and what a round of one pass takes beside plain passes that go
        together, are more than 2 `SHARE` of the time: for a round, then for three, …, until they aren't or a draft is
        made, and for as long at once where no model would pay in every round.
        """
        now = self.now
        if rows and self.considers and self._models:
            self._considered, self._considered_rows, waits = now, len(rows), []
            self._idle = 0 if drafted else self._idle + 1  # behind copies, a model may be next
            # What a model is worth to a row depends on its last tokens, too, and on those of one row more than of many.
            costs = self._costs
            dear = deciding * exp(-costs.drift.value) / costs.target(len(rows))
            worth = (dear + time_apart(costs, count) / costs.target(count)) / (2.0 * SHARE)
            # Where no model pays, that stays so: plain rounds change nothing of what is expected of them.
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
            # Behind a draft models are considered at once, if at all.
            if request.copied and (not row.chosen.tokens or not self._models or self._rest_of_models > now):
                most = max(_REST, self._rest_of_models - now) if self._models else _HOPELESS_REST
                request.rest(now, self._until(min(request.copying.rounds_left(request.rounds), most), count, begun))
            elif not request.copied and self._rest_of_models > now:
                request.rest(now, self._rest_of_models)
        if len(rows) == count == 1 and self._lacks_plain(rows[0].request):
            self._costs.together.unseen = 0  # whether these passes can be measured or not
            rows[0].request.rest(now, max(rows[0].request.rests_until, now + _PLAIN_ROUNDS))
            self._rest_of_models = max(self._rest_of_models, now + _PLAIN_ROUNDS)
        self.considers = True

    def _lacks_plain(self, request: Request) -> bool:
        """Whether a request that is by itself has some plain rounds, since none were measured for long."""
        together = self._costs.together
        # Never where costs are given, or before any plain pass was measured: then nothing is compared with such passes.
        due = self._passes > 1 and together.is_measured and together.unseen >= _UNSEEN
        free = request.missed is None and not request.fixed
        return due and free and request.pace.of(request.above[0]) < _DOUBTFUL

    def let_alone(self, row: Row, *, looked: bool = False) -> None:
        """The same for a row that depends on no other request: its rests are counted in rounds of its own.

        Beside models they take up to `_REST` rounds, or up to `_LONG_REST` where decisions are dear, by what they and
        rounds of one pass, which plain passes that go together do without, are assumed to take. The first rest is an
        eighth of what would be worth it, and at least a round. Where no model pays, rests last as long as is worth it
        at once, up to `_HOPELESS_REST`, behind a draft, too. Without models they last until free drafters are due.
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
        """Rounds before each look at a model, if there may be any.

        A look that was useful is due again at once; others, due before round `since`, could not be paid for.
        """
        looks = [request.looks[at] for at in self._models] if guard.spare > 0.0 else []
        return [max(look.due - request.rounds, 0) for look in looks if look.due >= since]

    def _whole(self, rounds: int, begun: bool) -> int:
        """A rest of a row by itself, of `rounds` at least, that ends with a round of several passes if it has one.

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
