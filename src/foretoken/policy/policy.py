"""The speculation policy: which drafter drafts how many tokens in a round, none included.

One objective. An option (drafter i, n tokens; plain decoding is n = 0) with E expected emitted tokens in t expected
seconds is worth ``E - ρ t``, with ρ the tokens a second that the rows get otherwise, and the best option is taken. ρ is
the pace of the last rounds, or what one drafter alone gives with its best n, whichever is more; in a round by itself
that makes the best option the one with the most tokens a second (Dinkelbach's method), over many rounds it makes the
sum of tokens over the sum of seconds largest. Expected seconds come from `costs`, expected tokens from `acceptance`.

Bounded regret. `Guard` keeps the account of what speculation lost against plain decoding, in plain rounds. Speculation
is affordable if the account covers the loss should every draft token be rejected. The account begins with `CREDIT`,
gains `SHARE` of a round with every round and `GRANT` with every request, and holds at most `CREDIT`. So, however
acceptance and estimates go, R requests that would take T plain rounds take at most

    T (1 + SHARE) + GRANT R + CREDIT

plain rounds, as far as rounds take what they were planned to, up to twice that: a single round that another process
slowed down is not speculation's fault.

Where no model-based drafter pays, it is looked at again: with the first round of a request, and then at intervals that
double. A look costs a round of few tokens, in one row, and only what the account covers. Drafts that cost nothing to
make are judged in every round, whether they are verified or not, by what the target emits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Any

from foretoken.policy.acceptance import EngineRates, Kind, RequestRates
from foretoken.policy.account import PACE, Guard, Pace
from foretoken.policy.costs import Costs
from foretoken.policy.request import LARGEST, LENGTHS, LONGEST, NODES, PLAIN, Choice, Offer, Request, Row


@dataclass
class Policy:
    """Decides for one target and its drafters, over all requests of an engine.

    Args:
        kinds: of the drafters.
        free: of each drafter, whether it makes its drafts before the choice (`Row.offers`).
        costs: measured; refined by `learn`.
        fixed_costs: of requests whose output depends on the choice, so that it may not depend on the clock.
        saved: what `as_json` gave in an earlier process.
        given: `costs` are not to be refined.
    """

    kinds: Sequence[Kind]
    free: Sequence[bool]
    costs: Costs
    fixed_costs: Costs
    saved: dict[str, Any] = field(default_factory=dict)
    given: bool = False

    def __post_init__(self) -> None:
        self.guards = Guard(), Guard()  # of free drafters, and of models
        rates = self.saved.get("rates", {})
        self._engine = {
            sampled: [EngineRates(kind, rates.get(f"{at} {sampled}")) for at, kind in enumerate(self.kinds)]
            for sampled in (False, True)
        }
        self._pace = {sampled: (Pace(), Pace()) for sampled in (False, True)}
        self._extra: dict[tuple[int, int], tuple[int, list[float]]] = {}
        self._rounds = 0

    def calibrate(self, costs: Costs) -> None:
        """Costs that were measured just now."""
        self.costs.become(costs)
        self._extra.clear()

    def open(self, *, sampled: bool, reproducible: bool = False) -> Request:
        """A request begins.

        Args:
            sampled: its temperature is above 0.
            reproducible: its output depends on the choice and its seed must give one output: nothing but the request's
                own past is looked at.
        """
        if reproducible:
            engine = [EngineRates(kind) for kind in self.kinds]
            return Request([RequestRates(one) for one in engine], engine, self.fixed_costs, (Guard(), Guard()))
        for guard in self.guards:
            guard.begin()
        engine = self._engine[sampled]
        request = Request([RequestRates(one) for one in engine], engine, self.costs, self.guards)
        request.above, request.copies_above = self._pace[sampled]
        return request

    def choose(self, rows: Sequence[Row]) -> None:
        """Fill in the rows' choices. Rows whose requests are reproducible are decided each by itself."""
        together = []
        for row in rows:
            if row.request.costs is self.costs:
                together.append(row)
            else:
                self._decide([row])
        if together:
            self._decide(together)

    def _decide(self, rows: list[Row]) -> None:
        request = rows[0].request
        costs, count = request.costs, len(rows)
        extra = self._extra_seconds(costs, count)
        plain = costs.target(count)
        tables = [self._expectations(row) for row in rows]
        pace = max(self._pace_of(rows), self._best_alone(rows, tables, costs, extra, plain))
        worth = pace * count / plain  # ρ
        # Without a model: each row's best use of what it is offered.
        base = []
        budget = request.guards[0].balance * plain / count
        affordable = request.guards[1].balance * plain
        for row in rows:
            best, gain = PLAIN, 0.0
            for offer in row.offers:
                expected = self._expected(row, offer)
                for tokens in range(1, min(offer.size, row.most, len(extra) - 1) + 1):
                    if extra[tokens] > budget:
                        break
                    value = expected[tokens] - worth * extra[tokens]
                    if value > gain:
                        best, gain = Choice(offer.drafter, tokens), value
            base.append((best, gain))
            row.alone = best
        chosen, most = [best for best, _ in base], sum(gain for _, gain in base)
        for drafter, table in self._models(rows, tables):
            for tokens in NODES if self.kinds[drafter].trees else LENGTHS:
                choices, value, lag, cost, asked = [], 0.0, 0, 0.0, 0
                for row, (alone, gain), options in zip(rows, base, table, strict=True):
                    own = Choice(drafter, 0)
                    best_gain = gain
                    for length, right in options:
                        if length > tokens:
                            break
                        entry = costs.drafters[drafter].lag * row.lags[drafter] * (1.0 + right) / max(row.room, 1)
                        net = right - worth * (extra[length] + entry)
                        if net > best_gain:
                            own, best_gain = Choice(drafter, length), net
                    if own.tokens:
                        asked += 1
                        lag += row.lags[drafter]
                        cost += extra[own.tokens]
                        choices.append(own)
                    else:
                        cost += extra[alone.tokens] if alone.tokens else 0.0
                        choices.append(alone)
                    value += best_gain
                if not asked:
                    continue
                longest = max(one.tokens for one in choices if one.drafter == drafter)
                call = costs.draft(drafter, longest, asked, 0)
                value -= worth * call
                if value > most and cost + call + costs.drafters[drafter].lag * lag <= affordable:
                    chosen, most = choices, value
        for row, choice in zip(rows, chosen, strict=True):
            row.chosen = choice
        if all(self.free) or any(choice.drafter >= 0 and not self.free[choice.drafter] for choice in chosen):
            return
        self._look(rows, tables, extra, worth, affordable)

    def _look(
        self,
        rows: list[Row],
        tables: list[dict[int, list[tuple[int, float]]]],
        extra: list[float],
        worth: float,
        affordable: float,
    ) -> None:
        """Have one row draft with a model that does not pay, if that is due."""
        for drafter, free in enumerate(self.free):
            if free:
                continue
            due = [
                (row.lags[drafter], at)
                for at, row in enumerate(rows)
                if row.request.looks[drafter].due <= row.request.rounds
                and not row.chosen.tokens
                and tables[at].get(drafter)
            ]
            if not due:
                continue
            _, at = min(due)
            row, options = rows[at], tables[at][drafter]
            costs = row.request.costs
            entry = costs.drafters[drafter].lag * row.lags[drafter]
            best = None
            for length, right in options[:3]:
                seconds = extra[length] + costs.draft(drafter, length, 1, 0)
                shared = extra[length] + costs.draft(drafter, length, len(rows), 0) / len(rows)
                value = right - worth * seconds
                # What pays not even with every token right, in all rows, needs no look.
                hopeful = length > worth * shared
                if hopeful and seconds + entry <= affordable and (best is None or value > best[0]):
                    best = value, length
            if best is not None:
                row.chosen = Choice(drafter, best[1])
                row.request.looking = True
                return

    def _models(
        self, rows: list[Row], tables: list[dict[int, list[tuple[int, float]]]]
    ) -> list[tuple[int, list[list[tuple[int, float]]]]]:
        return [
            (drafter, [table.get(drafter, []) for table in tables])
            for drafter, free in enumerate(self.free)
            if not free and any(drafter in table for table in tables)
        ]

    def _expectations(self, row: Row) -> dict[int, list[tuple[int, float]]]:
        """Of each drafter that is yet to draft: draft lengths, and accepted tokens of each."""
        found: dict[int, list[tuple[int, float]]] = {}
        for drafter, kind in enumerate(self.kinds):
            if self.free[drafter] or row.room <= 0:
                continue
            rates = row.request.rates[drafter]
            if kind.trees and row.trees:
                found[drafter] = [(nodes, min(rates.tree(nodes), row.room)) for nodes in NODES if nodes <= row.most]
            else:
                longest = min(row.room, row.most, LONGEST)
                lengths = [length for length in LENGTHS if length <= longest]
                expected = rates.expected(longest)
                found[drafter] = [(length, expected[length]) for length in lengths]
        return found

    def _expected(self, row: Row, offer: Offer) -> list[float]:
        rates = row.request.rates[offer.drafter]
        return rates.given(offer.reach) if offer.reach else rates.expected(offer.size, offer.match)

    def _extra_seconds(self, costs: Costs, rows: int) -> list[float]:
        """What drafts of 0, 1, 2, … tokens in one row add to a pass; looked up anew every eight rounds."""
        key = id(costs), rows
        until, extra = self._extra.get(key, (-1, []))
        if self._rounds < until:
            return extra
        target = costs.target
        if rows == 1:
            plain = target(1)
            extra = [max(target(1 + tokens) - plain, 0.0) for tokens in range(LARGEST + 1)]
        else:
            wide = 4 * rows
            each = max((target(wide) - target(rows)) / (wide - rows), 0.0)
            extra = [each * tokens for tokens in range(LARGEST + 1)]
        for at in range(1, len(extra)):
            extra[at] = max(extra[at], extra[at - 1])
        self._extra[key] = self._rounds + 8, extra
        return extra

    def _pace_of(self, rows: list[Row]) -> float:
        """Tokens a row by plain rounds' time; at least that of plain decoding."""
        total = 0.0
        for row in rows:
            request = row.request
            total += max(request.pace.of(request.above), request.copies.of(request.copies_above))
        return max(total / len(rows), 1.0)

    def _best_alone(
        self,
        rows: list[Row],
        tables: list[dict[int, list[tuple[int, float]]]],
        costs: Costs,
        extra: list[float],
        plain: float,
    ) -> float:
        """The best pace of one model alone, drafting as many tokens in every row."""
        best = 1.0
        count = len(rows)
        for drafter, table in self._models(rows, tables):
            most = min((len(options) for options in table), default=0)
            for at in range(most):
                length = table[0][at][0]
                tokens = 1.0 + sum(options[at][1] for options in table) / count
                seconds = plain + count * extra[length] + costs.draft(drafter, length, count, 0)
                best = max(best, tokens * plain / seconds)
        return best

    def judge(self, request: Request, drafter: int, tried: int, accepted: int, match: int = 0) -> None:
        """A chain was judged by what the target emitted: of its first `tried` tokens, the first `accepted` are right.

        Whether or not it was verified. A look is over with it, unless the drafter is free.
        """
        request.rates[drafter].record(tried, accepted, match)
        request.engine[drafter].record(max(match, 1), tried, accepted)
        if self.free[drafter]:
            request.copied = max(request.copied, accepted)
        elif request.looking:
            request.looks[drafter].found(accepted == tried, request.rounds)

    def judge_tree(self, request: Request, drafter: int, nodes: int, accepted: int, expected: float = 0.0) -> None:
        """A tree had so many tokens accepted; `expected` by its own estimate (`Offer.reach`), if it made one."""
        request.rates[drafter].record_tree(expected or self.kinds[drafter].accepted(nodes), accepted)
        if not expected:
            request.engine[drafter].record_tree(nodes, accepted)
        if request.looking:
            request.looks[drafter].found(accepted > 1, request.rounds)

    def learn(
        self,
        rows: Sequence[Row],
        emitted: Sequence[int],
        positions: int,
        calls: Sequence[tuple[int, int, int, int, float]],
        seconds: float | None,
    ) -> None:
        """A round is over.

        Args:
            rows: as in `choose`.
            emitted: tokens of each row.
            positions: of the target's pass, over all rows.
            calls: of drafters that are not free: index, most tokens, rows, tokens of lag in all, seconds.
            seconds: of the round without these calls; None where it did something else too (a prompt was read).
        """
        self._rounds += 1
        costs, count = self.costs, len(rows)
        if self.given:
            seconds = None
        elif seconds is not None:
            costs.anchor(positions, seconds)
            costs.target.record(positions, seconds, costs.drift)
            for drafter, tokens, asked, lag, took in calls:
                costs.record_draft(drafter, tokens, asked, lag, took)
        now = exp(-costs.drift.value)
        planned = costs.target(positions) + sum(costs.draft(*call[:4]) for call in calls)
        real = planned
        if seconds is not None:
            real = min((seconds + sum(call[4] for call in calls)) * now, 2.0 * planned)
        plain = costs.target(count)
        free = [(row, tokens) for row, tokens in zip(rows, emitted, strict=True) if row.request.costs is costs]
        for row, tokens in zip(rows, emitted, strict=True):
            request = row.request
            request.rounds += 1
            used = row.alone.tokens
            own = request.costs
            copied = 1 + min(request.copied, used), own.target(count + used) / own.target(count)
            request.copies.add(*copied, PACE)
            request.copies_above.add(*copied, 4 * PACE)
            request.copied = 0
            request.looking = False
            if request.costs is costs:
                request.pace.add(tokens, planned / plain, PACE)
                request.above.add(tokens / count, planned / plain / count, 4 * PACE)
            else:
                took = self._planned_alone(row)
                request.pace.add(tokens, took, PACE)
                self._settle(request.guards, [row], took, tokens)
        if free:
            mean = sum(tokens for _, tokens in free) / len(free)
            self._settle(self.guards, [row for row, _ in free], real / plain, mean)

    def _settle(self, guards: tuple[Guard, Guard], rows: list[Row], took: float, emitted: float) -> None:
        """Charge a round to models if one of them drafted, else to free drafters."""
        drafters = [row.chosen.drafter for row in rows if row.chosen.tokens]
        models = any(not self.free[drafter] for drafter in drafters)
        guards[models].settle(took if drafters else emitted, emitted)
        guards[not models].settle(emitted, emitted)

    def _planned_alone(self, row: Row) -> float:
        """Plain rounds that a row's round took, by costs that know no clock."""
        costs, choice = row.request.costs, row.chosen
        seconds = costs.target(1 + choice.tokens)
        if choice.tokens and not self.free[choice.drafter]:
            seconds += costs.draft(choice.drafter, choice.tokens, 1, row.lags[choice.drafter])
        return seconds / costs.target(1)

    def as_json(self) -> dict[str, Any]:
        """What another process starts from."""
        rates = {f"{at} {sampled}": one.as_json() for sampled, of in self._engine.items() for at, one in enumerate(of)}
        return {"costs": self.costs.as_json(), "rates": rates}
