"""The speculation policy: which drafter drafts how many tokens in a round, none included.

One objective. An option (drafter i, n tokens; plain decoding is n = 0) with E expected emitted tokens in t expected
seconds is worth ``E - ρ t``, with ρ the tokens a second that the rows get otherwise, and the best option is taken. ρ is
the pace of the last rounds, or what one drafter alone gives with its best n, whichever is more; in a round by itself
that makes the best option the one with the most tokens a second (Dinkelbach's method), over many rounds it makes the
sum of tokens over the sum of seconds largest. Expected seconds come from `costs`, expected tokens from `acceptance`.

Bounded regret. `Guard` keeps the account of what speculation lost against plain decoding, in plain rounds. Speculation
is affordable if the account covers the loss should every draft token be rejected. The account begins with `CREDIT`,
gains `SHARE` of a round with every round and `GRANT` with every request, and holds at most `CREDIT`. So, whatever the
acceptance and the estimates are, R requests that would take T plain rounds lose at most

    SHARE T + GRANT R + CREDIT

plain rounds by each of two accounts: one of free drafters, one of models. This counts the measured time of a round only
up to twice its planned time: a longer round is put down to other work on the machine.

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
from foretoken.policy.decision import Decider
from foretoken.policy.request import Request, Row


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
        names: of the drafters, for people.
    """

    kinds: Sequence[Kind]
    free: Sequence[bool]
    costs: Costs
    fixed_costs: Costs
    saved: dict[str, Any] = field(default_factory=dict)
    given: bool = False
    names: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.guards = Guard(), Guard()  # of free drafters, and of models
        rates = self.saved.get("rates", {})
        self._engine = {
            sampled: [EngineRates(kind, rates.get(f"{at} {sampled}")) for at, kind in enumerate(self.kinds)]
            for sampled in (False, True)
        }
        self._pace = {sampled: (Pace(), Pace()) for sampled in (False, True)}
        self._decider = Decider(self.kinds, self.free)
        self._rounds = self._positions = 0

    def calibrate(self, costs: Costs) -> None:
        """Take over costs that were measured just now."""
        self.costs.become(costs)
        self._decider.forget()

    @property
    def speedup(self) -> float:
        """Tokens emitted in a plain round's time, over the last rounds of all requests: 1 where nothing is known.

        Of requests whose draft lengths the policy chooses, those that are reproducible apart.
        """
        paces = [request for request, _ in self._pace.values()]
        return (1.0 + sum(pace.tokens for pace in paces)) / (1.0 + sum(pace.time for pace in paces))

    def rates(self, drafter: int, *, sampled: bool) -> EngineRates:
        """Acceptance of one drafter over all requests that are sampled, or over all that are greedy."""
        return self._engine[sampled][drafter]

    def open(self, *, sampled: bool, reproducible: bool = False) -> Request:
        """A request begins.

        Args:
            sampled: its temperature is above 0.
            reproducible: its output depends on the choice and its seed must give one output: the choice depends on
                nothing but the request's own rounds.
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
                self._decider.decide([row], self._rounds)
        if together:
            self._decider.decide(together, self._rounds)

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
        if self.free[drafter]:
            request.copied = max(request.copied, accepted)
        elif request.looking:
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
            seconds: of the round without these calls; None where it did something else too (prefill).
        """
        self._rounds += 1
        costs, count = self.costs, len(rows)
        if self.given:
            seconds = None
        elif seconds is not None:
            costs.anchor(positions, seconds)
            costs.target.record(positions, seconds, costs.drift, steady=positions == self._positions)
            self._positions = positions
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
        """Plain rounds that a row's round takes by its fixed costs."""
        costs, choice = row.request.costs, row.chosen
        seconds = costs.target(1 + choice.tokens)
        if choice.tokens and not self.free[choice.drafter]:
            seconds += costs.draft(choice.drafter, choice.tokens, 1, row.lags[choice.drafter])
        return seconds / costs.target(1)

    def as_json(self) -> dict[str, Any]:
        """What another process starts from."""
        rates = {f"{at} {sampled}": one.as_json() for sampled, of in self._engine.items() for at, one in enumerate(of)}
        return {"costs": self.costs.as_json(), "rates": rates}
