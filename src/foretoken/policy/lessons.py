"""What a policy learns from rounds: costs, the accounts of what speculation lost, and the paces of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from foretoken.policy.acceptance import PREDICTION, Kind, chains_in
from foretoken.policy.account import CREDIT, PACE, SHARE, Guard, would_gain
from foretoken.policy.costs import Costs, time_apart
from foretoken.policy.following import change_of
from foretoken.policy.lines import LONGER
from foretoken.policy.request import LARGEST, LENGTHS, Request, Row, fell_behind, miss, planned_alone
from foretoken.policy.rests import Rests
from foretoken.policy.steady import Told

_HEARD = 16
"""Of so many plain rounds in which all rows rest, one refines the costs: learning takes most of the time in them."""

_READING = 2.0
"""Drafts that one reading of a model counts as for other requests, at most: tokens of a passage are alike, and the next
request is another passage. In replays of a model that is right for nine tokens of ten behind one request in which it is
right for none, it had 0.86 of the best fixed length with 1, 0.83 with 2, 0.75 with 4; a useless one lost 2.9, 2.7
and 2.5% of the time."""


def is_heard(number: int) -> bool:
    """Whether `Lessons.learn` wants the round of this number, counted from 1, if all rows rest in it."""
    return number % _HEARD == 0


@dataclass
class Lessons:
    """Learns from rounds of all requests of an engine.

    Args:
        kinds, free, costs, given, rests: those of the policy.
        guards: the accounts of free drafters, and of models.
        asking: the accounts of rounds that ask free drafters: of single rows, and of several.

    Attributes:
        awake: seconds of deciding and learning in a round that is decided; drift left out.
        charged: index of the account of the last drafts, which pays for padding.
    """

    kinds: Sequence[Kind]
    free: Sequence[bool]
    costs: Costs
    given: bool
    guards: tuple[Guard, Guard]
    asking: tuple[Guard, Guard]
    rests: Rests
    awake: float = 0.0
    charged: int = 0

    def __post_init__(self) -> None:
        self._count, self._prompted = 0, False  # rows of the last round, and whether it had prompts
        # The last wide pass had a prompt in it, or drafts of rows that have accounts of their own: padding to it is no
        # loss to `guards`.
        self._widened = False
        self._several = False  # the last round was of several passes
        self._asked = False  # the last round was of a single followed row, and asked: plain passes begin anew

    def rested(self, rounds: int, rows: int) -> None:
        """Count rounds in which all rows rested; padding, if there was any, was charged by `rested_together`."""
        self.rests.now += rounds
        self._prompted, self._count = False, rows
        for guard in self.guards:
            guard.settle(float(rounds), float(rounds))
        self.asking[rows > 1].earn(SHARE * rounds)

    def rested_together(
        self, passes: int, rows: int, seconds: float, *, padding: int = 0, changed: bool = False, within: bool = True
    ) -> None:
        """Learn from a round of several plain passes over so many roots; `rested` counts it later.

        Padding is charged to the account that drafted last, unless a prompt or drafts of rows with accounts of their
        own made the pass wide; and so is a pass that was not as wide as the one before, unless that one had other rows.
        Padding for a row that has left is charged, too, since it can't be distinguished.

        Args:
            passes: of the round.
            rows: of each pass.
            seconds: of the round.
            padding: positions of all its passes, roots left out.
            changed: one of them was not as wide as the pass before it.
            within: `seconds` include the cost of the new width.
        """
        costs = self.costs
        self._settle_return(rows)
        if not self._widened:
            lost = costs.returning if changed and rows == self._count else 0.0
            if padding:
                wider = -(-padding // passes)  # as many passes had so many as make up the padding
                lost += padding / wider * max(costs.target(rows + wider) - costs.target(rows), 0.0)
            self.guards[self.charged].settle(lost / costs.plain(rows), 0.0)
        if costs.anchored and not (self.given or padding or (changed and self._prompted)):
            each = (seconds * exp(-costs.drift.value) - costs.change * (changed and within)) / passes
            costs.together.took(rows, each * exp(costs.drift.value), passes)
            costs.together.record(rows, each / costs.target(rows), passes, costs.drift)
            self._several = True

    def read(self, request: Request, drafter: int, right: Sequence[bool], seconds: float, lag: int) -> None:
        """Learn what a model foresees of tokens that were emitted without it, before it drafts in a hope or a look.

        They count as the chains that it would have drafted, each of which ends with its first wrong token; each
        further reading of an output counts half as much for other requests. What drafts would have gained is given to
        what hopes may lose, and to the account of models as soon as it is `EARNED`.

        Args:
            request: of a single row.
            drafter: the model's index.
            right: of the last tokens of the output, whether it foresees them.
            seconds: that it took to read these, and all that it had not seen.
            lag: how many tokens it had not seen.
        """
        costs, acceptance, begin = self.costs, request.acceptance[drafter], request.emitted - len(right)
        took, guard = min(seconds * exp(-costs.drift.value), LONGER * costs.draft(drafter, 1, 1, lag)), self.guards[1]
        looked = request.looking and guard.spare >= guard.hopes  # hopes pay where looks can't
        guard.settle(took / costs.plain(1), 0.0, looked=looked, hoped=not looked)
        chains = chains_in(right)
        weight = min(_READING * 0.5**acceptance.readings / max(len(chains), 1), 1.0)
        for first, tried, accepted in chains:
            acceptance.record(tried, accepted, 0, begin + first, weight)
        if right:
            acceptance.readings += 1
            table = costs.table(1, LARGEST)
            each, calls = table.plain + table.apart, table.calls[drafter]
            rounds = ((length, (each + table.extra[length] + calls[length]) / table.plain) for length in LENGTHS)
            gain = max(would_gain(right, *one) for one in rounds)
            guard.miss(gain)
            guard.hopes = min(guard.hopes + max(gain, 0.0), CREDIT)
        if request.looking:
            request.looks[drafter].found(False, request.rounds)
        request.looking = request.hoping = False

    def learn(
        self,
        rows: Sequence[Row],
        emitted: Sequence[int],
        positions: int,
        calls: Sequence[tuple[int, int, int, int, float]],
        seconds: float | None,
        copied: float = 0.0,
        *,
        changed: bool = False,
        beside: int = 0,
        deciding: float = 0.0,
    ) -> None:
        """Learn from a round.

        Args:
            rows: as in `Policy.choose`.
            emitted: tokens of each row.
            positions: of the target's pass, over all rows, padding included.
            calls: of drafters that are not free: index, most tokens, rows, sum of the rows' lags, seconds.
            seconds: of the round without these calls and `copied`; None where it did something else, too (prefill).
            copied: seconds that free drafters took.
            changed: the pass was not as wide as the one before, and took longer for that.
            beside: further rows of the pass, which were plain.
            deciding: seconds of the decision, and of learning from the round before.
        """
        costs, count = self.costs, len(rows) + beside
        costs.together.unseen += count == 1
        if not rows and seconds is not None and positions == count and not changed and not is_heard(self.rests.now + 1):
            return self.rested(1, count)
        self.rests.now += 1
        scale = exp(-costs.drift.value)
        if rows and deciding:
            self.awake += (deciding * scale - self.awake) / PACE
        own_rows = [row for row in rows if row.request.costs is costs]
        drafting = [row for row in rows if row.chosen.tokens]
        asked, offered = sum([row.request.asked for row in rows]), sum([one.size for row in rows for one in row.offers])
        looked = any([row.request.looking for row in own_rows])
        drafted = any([row.chosen.tokens > 0 and not row.request.looking for row in own_rows])
        total = None if seconds is None or self.given else seconds + copied + sum([call[4] for call in calls])
        # After a prompt's pass, or one over other rows, a plain pass would have another width than the last one, too.
        prompted = changed and (seconds is None or self._prompted)
        given = prompted or (changed and count != self._count)
        self._prompted, self._count = seconds is None, count
        if self._prompted or drafting:  # prompts and drafts of one round are one pass
            self._widened = self._prompted or not any([row.request.costs is costs for row in drafting])
        planned = costs.round(positions, asked + offered, calls, changed=changed)
        if costs.is_first(positions, calls) and total is not None and (not costs.anchored or total * scale > planned):
            total = None
        several, self._several = self._several, False
        heard = rows or self.rests.now % _HEARD == 0
        behind = prompted or (several and positions == count and not calls)
        if total is not None and seconds is not None and (positions > count or changed or calls or heard):
            costs.record(positions, seconds, calls, (asked, offered, copied), changed=changed, behind=behind)
        # Rounds with drafts are charged against plain rounds of several passes, plain rounds of one pass are not.
        drafts = calls or changed or positions > count
        plain = costs.plain(count) if drafts else costs.target(count)
        changing = given * costs.change
        took = planned = (planned - changing) / plain
        if total is not None:
            took = min((total * exp(-costs.drift.value) - changing) / plain, LONGER * planned)
        alone = len(own_rows) == count == asked == 1 and not (calls or rows[0].request.fixed)
        if not (alone or calls):
            self._settle_return(count)
        self._asked = alone and not self._prompted and rows[0].request.copying.is_followed
        asks = not calls and any([row.request.asked and not row.request.fixed for row in own_rows])
        self._settle_asking(took * plain if asks else None, count, sum(emitted) + beside, prompted=self._prompted)
        if alone and not (self._prompted or given):
            self._lead(rows[0].request, took * plain, emitted[0])
        shared: list[tuple[Row, int]] = []
        for row, tokens in zip(rows, emitted, strict=True):
            request, own = row.request, row.request.costs is costs
            each, among = (planned, count) if own else (planned_alone(row, self.free), 1)
            if request.asked:
                source = row.chosen.source if row.chosen.copied else row.chosen.drafter
                # Rates of copies are measured; those of a prediction are assumed until a draft of it is right.
                used = row.chosen.tokens and self.free[source] and (tokens > 1 or self.kinds[source] is not PREDICTION)
                # Drafts of another drafter, or of another row, also take a round in which no further plain passes fit.
                others = not used and own and (positions > count or bool(calls))
                right = min(tokens - 1, row.chosen.copied or row.chosen.tokens)
                gain, real = (row.gain, row.weight * right - row.price) if used else (0.0, 0.0)
                request.copying.gained(gain, request.rounds, real=real, spared=others)
                if own:
                    miss(self.guards[0], row, count, plain)
            if not own:
                self._settle(request.guards, [row], each, tokens, request.looking, padded=False)
            elif not request.rounds:
                self.guards[1].begin(count)
            request.rounds += 1
            request.pace.add(tokens, each)
            request.above[0].add(tokens / among, each / among)
            if request.foreseen:
                request.runs.add(request.foreseen)
                request.above[1].add(request.foreseen, 4 * PACE * among)
            looking, request.foreseen, request.looking = request.looking, (), False
            if own:
                shared.append((row, tokens))
            else:
                self.rests.let_alone(row, looked=looking)
                request.drafted = row.chosen.tokens > 0
        if shared or beside:
            lost = fell_behind(shared, took, chance=self._models_drafted(own_rows))
            if beside:  # rows that rest fall behind by as much
                lost = max(lost, took - 1.0)
            padded = not self._widened and (positions > count or (changed and not given))
            self._settle(self.guards, own_rows, took, took - lost, looked, padded)
        begun = seconds is not None and positions == count and not calls and not changed
        self.rests.let(own_rows, count, drafted, deciding, looked=looked, begun=begun)

    def learn_together(self, request: Request, rounds: Sequence[Told], model: int = 0) -> None:
        """Learn from rounds of a single row that were decided by `Policy.prices`.

        Args:
            request: of the row.
            rounds: in order.
            model: index of the model that drafted in them, where free drafters were not asked.
        """
        costs, count, models, planned = self.costs, len(rounds), not request.asked, 0.0
        for one in rounds:
            # After a prompt's pass, a plain one has another width than the last one, too.
            changing = costs.change if one.changed and self._prompted else 0.0
            calls = [(model, one.tokens, 1, 0, one.call)] if models else []
            copied = (0, 0, 0.0) if models else (1, one.offered, one.copied)
            whole = costs.round(one.positions, copied[0] + copied[1], calls, changed=one.changed)
            first, scale = costs.is_first(one.positions, calls), exp(-costs.drift.value)
            padded = one.positions > 1 or one.changed
            drafted = bool(calls) or one.tokens > 0 or (padded and not self._widened)
            plain = costs.plain(1) if calls or padded else costs.target(1)
            took = each = (whole - changing) / plain
            if one.seconds is not None:
                lasted = (one.seconds + one.copied + one.call) * scale
                if not first or lasted <= whole:
                    behind = one.changed and self._prompted
                    costs.record(one.positions, one.seconds, calls, copied, changed=one.changed, behind=behind)
                    took = min((lasted - changing) / plain, LONGER * each)
            emitted = float(one.emitted)
            self.guards[models].settle(took if drafted else emitted, emitted, hoped=request.hoping)
            self.guards[not models].settle(emitted, emitted)
            self._settle_asking(None if models else took * plain, 1, one.emitted, prompted=one.seconds is None)
            if not (models or self._prompted or one.seconds is None):
                self._lead(request, took * plain, one.emitted)
            request.late += took - emitted
            if not models:
                gain, real = (one.gain, one.emitted - 1 - one.price) if one.tokens else (0.0, 0.0)
                request.copying.gained(gain, request.rounds, real=real)
            request.rounds += 1
            planned += each
            self._prompted = one.seconds is None
            self._widened = self._prompted or (self._widened and not one.tokens)
        self.rests.now += count
        costs.together.unseen += count
        self._count, self.charged = 1, int(models)
        self._asked = not (models or self._prompted) and request.copying.is_followed
        if not models:  # rounds of a model's draft length decide nothing
            deciding = sum(one.deciding for one in rounds) / count * exp(-costs.drift.value)
            self.awake += (deciding - self.awake) * (1.0 - (1.0 - 1.0 / PACE) ** count)
        tokens = sum(one.emitted for one in rounds)
        for pace in (request.pace, request.above[0]):
            pace.add(tokens / count, planned / count, count)

    def _settle_asking(self, seconds: float | None, rows: int, emitted: int, *, prompted: bool) -> None:
        """Charge the `seconds` of a round that asked free drafters, and no model; None for other rounds.

        Such a round has one pass whether they draft or not, where a plain round may have several; a round with a prompt
        has one pass in any case, which is not charged.

        Args:
            seconds: of the round, less what is charged to nobody.
            rows: of its pass.
            emitted: tokens of all of them.
            prompted: it had a prompt.
        """
        account = self.asking[rows > 1]
        if seconds is None:
            return account.earn(SHARE)
        apart = time_apart(self.costs, rows) if prompted else 0.0
        account.settle(max(seconds - apart, 0.0) / self.costs.plain(rows), emitted / rows)

    def _settle_return(self, rows: int) -> None:
        """Charge a return to plain passes: those before were broken off, and a round of passes begins once more.

        Only of a row that is followed: others ask at intervals so long that this is next to nothing.
        """
        if self._asked and rows == 1:
            self.asking[0].settle(max(time_apart(self.costs, 1), 0.0) / self.costs.plain(1), 0.0)
        self._asked = False

    def _lead(self, request: Request, seconds: float, emitted: int) -> None:
        """Learn from a round of a single row that asked free drafters what such rounds gain over plain decoding."""
        if request.copying.is_followed:
            request.copying.lead.drafted(emitted - seconds / self.costs.plain(1), change_of(self.costs))

    def _models_drafted(self, rows: Sequence[Row]) -> bool:
        return any([row.chosen.tokens > 0 and not self.free[row.chosen.drafter] for row in rows])

    def _settle(
        self, guards: tuple[Guard, Guard], rows: list[Row], took: float, emitted: float, looked: bool, padded: bool
    ) -> None:
        """Charge a round to models if one of them drafted, else to free drafters; padding to who drafted last."""
        drafted, models = any([row.chosen.tokens > 0 for row in rows]), self._models_drafted(rows)
        if guards is self.guards and drafted:
            self.charged = int(models)
        elif padded:
            models = bool(self.charged)
        hoped = any([row.request.hoping and row.chosen.tokens > 0 for row in rows])
        guards[models].settle(took if drafted or padded else emitted, emitted, looked=looked, hoped=hoped)
        guards[not models].settle(emitted, emitted)
