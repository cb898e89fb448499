"""The speculation policy: which drafter drafts how many tokens in a round, none included.

One objective. An option (drafter i, n tokens; plain decoding is n = 0) with E expected emitted tokens in t expected
seconds is worth ``E - ρ t``, with ρ the tokens a second that the rows get otherwise, and the best option is taken. ρ is
the pace of the last rounds, or what one drafter alone gives with its best n, whichever is more; in a round by itself
that makes the best option the one with the most tokens a second (Dinkelbach's method), over many rounds it makes the
sum of tokens over the sum of seconds largest. Expected seconds come from `costs`, expected tokens from `acceptance`.
Tokens of a copy that a round leaves are copied in the next one, so a copy counts until it ends (`Copies.worths`).
Where rows differ, it is the time of a token, averaged over requests, that is made small (`decision`).

Bounded regret. `Guard` keeps the account of what speculation lost against plain decoding, in plain rounds. Speculation
is affordable if the account covers the loss should every draft token be rejected. The account begins with `CREDIT`,
gains `SHARE` of a round with every round, and holds at most `HELD` of what drafts gained. So, whatever the acceptance
and the estimates are, requests that would take T plain rounds lose at most

    SHARE T + CREDIT + G

plain rounds by each of two accounts from an engine's first request on, and with `HELD` in place of `CREDIT` from any
later one on: one of free drafters, one of models. For models G is `GRANT` for each request, what drafts would have
gained of tokens that a model has read (`Lessons.read`), and what one reading may owe (`Row.reserved`). For free
drafters it is what drafts would have gained that the account could not pay for (`Missed`, `Lead.missed`). What drafts
would have gained is above 0 only where more of them would have been faster. Of a batch the row counts that has fallen
behind plain decoding most (`fell_behind`): drafts that speed one request up slow all others down.

Plain rounds that are padded because of drafts, and passes that get narrower after them, are charged to the account that
drafted last, unless a prompt was in the wide pass. Free drafters take time in every row for which they are asked, and a
round that asks has one pass: they are asked where their drafts gain as much, and else at intervals (`Copying`). A
single row that decodes plainly is followed meanwhile, and called when a copy pays (`Following`, `Lead`). What single
rows lose by rounds that ask, whether they draft or not, and by returns from these to plain passes that are followed, is
charged to a third account, which owes `OWED` at most. What followed tokens show that drafts would have gained counts as
G of this one, too. Batches have such an account of their own, of what their rows lose on average while no model drafts.
While one owes anything, drafts that could not be paid for are not compared with the output. A round's measured time
counts up to `LONGER` times its planned time: beyond that it is other work on the machine. The first pass or call of
about a size prepares kernels and memory, once: it is learnt from only if it takes less than planned, and charged no
more than planned. Else a few would use up the account of models.

Exploration. Models that do not pay by their estimates are tried in hopes and looks (`trials`), which lose
2 `SHARE` T + `HOPES` + `LOOKS` at most, and G. Drafts of free drafters are compared with the output in every round in
which they are made, verified or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foretoken.policy.acceptance import BEGINNING, Acceptance, EngineRates, Kind
from foretoken.policy.account import EARNED, FORESEEN, OWED, PACE, Guard, Pace, Runs
from foretoken.policy.copying import Copying
from foretoken.policy.costs import Costs, time_apart
from foretoken.policy.decision import Decision
from foretoken.policy.following import Following, change_of
from foretoken.policy.lessons import Lessons
from foretoken.policy.request import LARGEST, LONGEST, Request, Row
from foretoken.policy.rests import Rests
from foretoken.policy.steady import KEPT, MOST, Kept, Prices
from foretoken.policy.widths import Widths


@dataclass
class Policy:
    """Decides for one target and its drafters, over all requests of an engine.

    Args:
        kinds: of the drafters.
        free: of each drafter, whether it drafts before the choice (`Row.offers`).
        costs: measured ones, or assumed ones until there are some; refined by `lessons`.
        fixed_costs: of reproducible requests, whose choices must not depend on the clock.
        saved: the result of `as_json` in an earlier process.
        given: `costs` are not refined.
        extends: of each drafter, whether it can draft after a copy (`Choice.copied`); empty for none.
        names: of the drafters, for reports.
        passes: how many plain passes of a single row go together in one round.

    Attributes:
        rests: which rows rest.
        lessons: learns from rounds.
    """

    kinds: Sequence[Kind]
    free: Sequence[bool]
    costs: Costs
    fixed_costs: Costs
    saved: dict[str, Any] = field(default_factory=dict)
    given: bool = False
    extends: Sequence[bool] = ()
    names: Sequence[str] = ()
    passes: int = 1

    def __post_init__(self) -> None:
        self.guards = Guard(), Guard()  # of free drafters, and of models
        self.asking, among = asking = Guard(OWED), Guard(OWED)  # of rounds that ask: of one row, of several
        rates = self.saved.get("rates", {})
        self._engine = {
            sampled: [EngineRates(kind, rates.get(f"{at} {sampled}")) for at, kind in enumerate(self.kinds)]
            for sampled in (False, True)
        }
        self._paces = {sampled: (Pace(4 * PACE, 1.0), Runs(FORESEEN)) for sampled in (False, True)}
        self._copying = {each: Copying(sampled=each, account=self.asking, among=among) for each in (False, True)}
        self._widths = Widths()
        self._models = [at for at, free in enumerate(self.free) if not free]
        self.rests = Rests(self.costs, self._models, self.guards[1], self.passes)
        self.lessons = Lessons(self.kinds, self.free, self.costs, self.given, self.guards, asking, self.rests)
        self._kept: Kept | None = None
        self._decided: tuple[tuple[int, int, int], Decision] | None = None  # the last one on copies alone, and its key
        self.extends = self.extends or [False] * len(self.kinds)

    def drafts_in(self, sizes: Sequence[tuple[int, ...]]) -> None:
        """Set the sizes of each drafter's calls from now on (`DrafterCosts.sizes`).

        Reproducible requests have sizes of their own (`Row.calls`), whatever the other rows are.
        """
        _set_sizes(self.costs, sizes)

    @property
    def speedup(self) -> float:
        """Emitted tokens in the time of a plain round, over the last rounds of all requests; 1 before the first round.

        Requests with fixed draft lengths and reproducible ones do not count.
        """
        paces = [pace for pace, _ in self._paces.values()]
        return sum(pace.tokens for pace in paces) / sum(pace.time for pace in paces)

    def rates(self, drafter: int, *, sampled: bool) -> EngineRates:
        """Acceptance of one drafter over all requests that are sampled, or over all that are greedy."""
        return self._engine[sampled][drafter]

    def open(
        self, *, sampled: bool, reproducible: bool = False, predicted: bool = False, copied: bool = True
    ) -> Request:
        """A new request.

        Args:
            sampled: its temperature is above 0.
            reproducible: its output depends on the choice, and its seed must give one output: so the choice depends on
                nothing but the request's own rounds.
            predicted: it has a prediction.
            copied: free drafters may draft for it.
        """
        if reproducible:
            own = [Acceptance(EngineRates(kind)) for kind in self.kinds]
            request = Request(
                own, self.fixed_costs, (Guard(), Guard()), copying=Copying(sampled=sampled and not predicted)
            )
        else:
            shared = list(map(Acceptance, self._engine[sampled]))
            request = Request(shared, self.costs, self.guards, self._paces[sampled], self._copying[sampled])
            request.waits = not predicted
            if predicted:
                request.copying.followed = False
        request.copied = request.asked = copied and any(self.free)
        return request

    def resting(self, requests: Sequence[Request], fixed: Sequence[bool] = ()) -> list[bool]:
        """Of each row of a round, whether an earlier decision lets it rest (`Rests.resting`)."""
        return self.rests.resting(requests, fixed)

    @property
    def rounds(self) -> int:
        """How many rounds the policy has learnt from."""
        return self.rests.now

    def ask(self, requests: Sequence[Request], beside: int = 0) -> list[float | None]:
        """Of each row of a round, whether free drafters are to be asked for it, before `choose`.

        Args:
            requests: of the rows.
            beside: further rows of the pass.

        Returns:
            None if they are not, else the least probability of being accepted (with all tokens before it) at which a
            token can be worth drafting and verifying.
        """
        shared: list[float] = []  # their paces
        least: list[float | None] = [0.0] * len(requests)
        for row, request in enumerate(requests):
            if request.costs is self.costs:
                shared.append(request.pace.of(request.above[0]))
            else:
                cost, apart = request.costs.copy(1), time_apart(request.costs, 1)
                counted = max(request.pace.of(request.above[0]), 1.0) * apart / request.costs.plain(1)
                wanted = not cost or request.copying.asks(cost + apart, request.rounds, counted)
                request.asked = request.copied and wanted
                least[row] = 0.0 if request.asked else None
        if shared:
            count = len(shared) + beside
            table = self.costs.table(count, LARGEST)
            pace = max(sum(shared) / len(shared), 1.0)
            rho = pace * count / table.plain
            asking, made = table.asking
            apart, alone = rho * table.apart / len(shared), len(requests) + beside == 1
            cost = rho * (asking / count + self.lessons.awake / len(shared)) + apart
            for row, request in enumerate(requests):
                if request.costs is self.costs:
                    wanted = request.copying.asks(cost, request.rounds, apart, alone=alone)
                    if self.lessons.asking[not alone].balance < 0.0:  # to follow a draft takes rounds that ask
                        request.missed = None
                    request.asked = request.copied and (wanted or request.missed is not None)
                    least[row] = rho * (table.token + made) if request.asked else None
        return least

    def following(self, request: Request) -> Following | None:
        """Prices for a single row that rests, and is followed meanwhile; None for rows that are not.

        A reproducible request is not followed: how many passes a round has depends on other rows.
        """
        if request.costs is not self.costs or self.given or not request.copied or request.fixed:
            return None
        table, change = self.costs.table(1, LARGEST), change_of(self.costs)
        rho = max(request.pace.of(request.above[0]), 1.0) / table.plain
        asking, made = table.asking
        each = (table.apart + asking + self.lessons.awake) / table.plain
        return Following(table, rho, rho * (table.token + made), each, change, request.copying.lead.trust)

    def passed(self, request: Request, foreseen: Sequence[bool], by: Following) -> bool:
        """Learn from plain passes of a row that was followed; returns whether it is to be awake.

        Args:
            request: of the row.
            foreseen: of each token, whether a free drafter would have drafted it there.
            by: the prices.
        """
        lead = request.copying.lead
        lead.passed(foreseen, by.costs, by.change)
        changes = 2.0 * by.change
        if missed := lead.missed(EARNED + changes):
            for account in (self.asking, self.guards[0]):
                account.earn(missed - changes)
        # An account that owed something when drafts began to pay may owe nothing by now.
        return lead.drafts and request.copying.may_call

    def choose(self, rows: Sequence[Row], passes: tuple[int, int] | None = None, beside: int = 0) -> int:
        """Fill in the rows' choices, and return how wide the pass is to be (`foretoken.policy.widths`).

        Rows of reproducible requests are decided each by itself.

        Args:
            rows: of the round.
            passes: positions of the last pass, padding included, and of the narrowest one, where a change of width
                costs `Costs.change`; None where it costs nothing.
            beside: further rows of the pass, which draft nothing.

        Returns:
            Positions that the pass is to be padded to; 0 for no padding.
        """
        shared = []
        for row in rows:
            if row.request.costs is self.costs:
                shared.append(row)
                continue
            if row.calls:
                _set_sizes(row.request.costs, row.calls)
            if self._models or row.offers:  # else it is plain
                Decision([row], self.kinds, self._models, self.extends, by_itself=True)
        if not shared:
            return 0
        row, whole = shared[0], len(shared) == len(rows) and not beside
        alone = whole and len(shared) == 1
        widths = None if passes is None or len(shared) < len(rows) else (self._widths, *passes)
        if alone and not self._models:
            if passes is None and not row.offers:
                return 0  # there is nothing to choose
            # Steady rounds of copies decide on the same row until the policy learns from them. The decision holds row
            # and table, so that no other object can have their ids.
            by = id(row), id(self.costs.table(1, LARGEST)), self.rests.now
            if self._decided is not None and self._decided[0] == by:
                self._decided[1].decide(widths, self.lessons.charged)
            else:
                self._decided = by, Decision(shared, self.kinds, (), self.extends, widths, 0, self.lessons.charged)
            return self._decided[1].width
        last, kept = 0 if passes is None else passes[0], self._kept
        if alone and kept is not None and kept.serves(row, self.rests.now, last):
            row.chosen, row.lasts = kept.choice, kept.lasts
            return kept.width
        models = self._models if self.rests.considers else ()
        decision = Decision(shared, self.kinds, models, self.extends, widths, beside, self.lessons.charged)
        if models:
            self.rests.too_many = self.rests.sharing if decision.beyond else 0
        if whole:
            request, chosen = row.request, row.chosen
            serves = alone and chosen.drafter in models and not (chosen.copied or request.looking or request.hoping)
            until = self.rests.now + KEPT
            self._kept = Kept(request, until, chosen, decision.width, row.lasts) if serves else None
        return decision.width

    def prices(self, row: Row, least: float) -> Prices | None:
        """By what the next rounds of a single row may be decided; `Lessons.learn_together` learns from these rounds.

        Rounds of a model are alike until free drafters, if there are any, are asked again.

        Args:
            row: of a round that was decided.
            least: the result of `ask` for it.

        Returns:
            None if each of the next rounds has to be decided.
        """
        request, chosen, tokens = row.request, row.chosen, 0
        model = chosen.tokens > 0 and not chosen.copied and not self.free[chosen.drafter]
        if self.given or request.costs is not self.costs or (self._models and not model):
            return None
        table = self.costs.table(1, LARGEST)
        rho = max(request.pace.of(request.above[0]), 1.0) / table.plain
        if model:
            if request.looking or not row.lasts or (request.hoping and request.emitted < BEGINNING):
                return None
            tokens, guard = chosen.tokens, self.guards[1]
            lost, reserved = table.extra[tokens] + table.calls[chosen.drafter][tokens], row.reserved
            acceptance = request.acceptance[chosen.drafter]
            seen = acceptance.judged + min((acceptance.engine.judged - acceptance.judged) // 2, MOST)
        elif not request.asked or not request.copying.earns or request.missed is not None or row.refused:
            return None
        else:
            guard, seen = self.guards[0], request.rounds
            lost, reserved = table.extra[LONGEST] + table.asking[0], 0.0
        spare = min(guard.balance, guard.hopes if request.hoping else guard.balance) - reserved
        rounds = min(MOST, int(spare * table.plain / max(lost + table.apart, 1e-9)), seen // 2)
        return Prices(table, rho, least, rounds - 1, tokens) if rounds > 1 else None

    def judge(self, request: Request, drafter: int, tried: int, accepted: int, match: int = 0) -> None:
        """Learn from a chain, verified or not: of its first `tried` tokens, the first `accepted` equal the output.

        It ends a look, unless the drafter is free.
        """
        request.acceptance[drafter].record(tried, accepted, match, request.emitted)
        if request.looking and not self.free[drafter]:
            request.looks[drafter].found(accepted == tried, request.rounds)

    def judge_tree(self, request: Request, drafter: int, nodes: int, accepted: int) -> None:
        """Learn from a tree of so many nodes, of which `accepted` were accepted; it ends a look."""
        request.acceptance[drafter].record_tree(nodes, accepted)
        if request.looking:
            request.looks[drafter].found(accepted > 1, request.rounds)

    def as_json(self) -> dict[str, Any]:
        """Costs and rates as JSON values, for the `saved` of another process."""
        rates = {
            f"{at} {sampled}": [round(one.all.observed, 2), round(one.all.expected, 2)]
            for sampled, of in self._engine.items()
            for at, one in enumerate(of)
        }
        return {"costs": self.costs.as_json(), "rates": rates}


def _set_sizes(costs: Costs, sizes: Sequence[tuple[int, ...]]) -> None:
    for drafter, each in zip(costs.drafters, sizes, strict=True):
        drafter.sizes = each
