"""One decision: for each row of a round, the option with the largest ``E - ρ t``.

Of several rows the harmonic mean H of their paces is maximised, which minimises the time of a token, averaged over
requests. A further token in a row of pace p adds (H / p)² to H, so that is its weight. Rows that emit much are not sped
up at the cost of others: the sum of tokens would grow, but the batch would end later.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import itemgetter

from foretoken.policy.acceptance import BEGINNING, Kind
from foretoken.policy.account import SHARE
from foretoken.policy.copies import Copies, prefixes
from foretoken.policy.costs import Costs, Table
from foretoken.policy.options import Chains, Joint, Option, Worths, may_pay, of_rounds
from foretoken.policy.request import LARGEST, LONGEST, NODES, PLAIN, Choice, Row
from foretoken.policy.trials import hope, look, may_hope, reserve
from foretoken.policy.widths import Widths, widths_from


class Decision:
    """The decision on a round of rows that share their costs and accounts.

    Args:
        rows: of the round; their choices are filled in.
        kinds: of the drafters.
        models: indices of the drafters that are not free.
        extends: of each drafter, whether it can extend a copy.
        widths: the choice of widths, the width of the last pass and of the narrowest one; None if changes of width cost
            nothing.
        beside: further rows of the pass, which draft nothing.
        charged: which account pays for padding where nothing is drafted.
        by_itself: the request is reproducible: it depends on no other request and on no clock.

    Attributes:
        count: rows of the pass.
        table: what passes over so many rows cost.
        apart: seconds that a round of one pass takes longer than plain passes that go together.
        rho: ρ.
        rho_model: likewise, of drafts of models.
        affordable: seconds that each of the two accounts can pay for.
        width: least width of the pass; 0 for any.
        pays: whether a model would pay that drafted in every round.
        beyond: whether the rows are too many for any model to pay (`may_pay`).
    """

    def __init__(
        self,
        rows: Sequence[Row],
        kinds: Sequence[Kind],
        models: Sequence[int],
        extends: Sequence[bool],
        widths: tuple[Widths, int, int] | None = None,
        beside: int = 0,
        charged: int = 0,
        *,
        by_itself: bool = False,
    ) -> None:
        self.rows, self.kinds, self.extends, self.beyond = rows, kinds, extends, False
        self.costs: Costs = rows[0].request.costs
        self.by_itself = by_itself
        count = self.count = len(rows) + beside
        self.table: Table = self.costs.table(count, LARGEST)
        plain, apart = self.table.plain, self.table.apart
        # A round that asks free drafters has one pass whatever is drafted; without asking, having one pass is a cost of
        # drafting. A reproducible request seldom asks them where they gain little, and continues with several plain
        # passes if nothing is drafted: there every draft pays for its round. For others measurements decide.
        asked = any([row.request.asked for row in rows])
        seldom = by_itself and not rows[0].request.copying.earns
        self.apart = 0.0 if asked and not seldom else apart
        alone, paces = 1.0, [row.request.pace.of(row.request.above[0]) for row in rows]
        self.worths: list[Worths] = []  # of each row; none where all tokens are worth 1
        # Foreseen tokens are worth less only where copies are drafted: else they take plain rounds, too.
        if models and not seldom and any(row.request.above[1].known for row in rows):
            worths = [row.request.worths() for row in rows]
            run = min(sum(each for *_, each in worths) / len(rows), LONGEST)
            alone = run / (1.0 + (apart + count * self.table.extra[round(run)]) / plain)
            self.worths = of_rounds(worths, [max(own, alone, 1.0) for own in paces])
        mean = count / (sum([1.0 / own for own in paces]) + beside)  # rows that rest have a pace of 1
        for row, own in zip(rows, paces, strict=True):
            row.weight, row.request.hoping = (mean / own) ** 2, False
        self.base = (sum([row.weight for row in rows]) + beside * mean**2) / count  # what a plain round emits
        if models and count > 1:
            token = max((max(map(max, each)) for each in self.worths), default=1.0) * max(row.weight for row in rows)
            least = count / plain  # the least ρ of so many rows
            bounds = (max(self.base, mean) * least, max(token, 1.0)), (least, 1.0)
            self.beyond = not any(
                may_pay(self.costs, at, kinds[at], count, rho, worth, self.apart)
                for at in models
                for rho, worth in bounds
            )
            models = () if self.beyond else models
        self._chains = Chains()
        self._drafts = {at: self.options(at) for at in models}
        models_pace = self._pace_of_models(self._drafts)
        self.pays = models_pace > 1.0
        if models_pace <= 1.0:
            begins = any(row.request.emitted < BEGINNING for row in rows)
            later = {at: self.options(at, BEGINNING) for at in models if begins}
            hopes = {at: self.options(at, hoping=True) for at in models if may_hope(self, at)}
            pays_later = self._pace_of_models(later) > 1.0 or self._pace_of_models(hopes) > 1.0
            for row in rows:
                row.hopeless = max(BEGINNING - 1 - row.request.emitted, 0) if pays_later else sys.maxsize
        pace = max(self.base, mean, models_pace)
        self.rho = pace * count / plain  # ρ
        # These tokens are emitted in any case: a pace that no choice reaches here would only favour plain rounds.
        self.rho_model = max(pace if count > 1 else self.base, models_pace, alone) * count / plain
        self.affordable = [guard.balance * plain - apart for guard in rows[0].request.guards]
        rows[0].reserved = max((reserve(self, at) for at in self._drafts), default=0.0)
        self._limits = self.affordable[0], self.affordable[1] - rows[0].reserved * plain
        self.decide(widths, charged)

    def decide(self, widths: tuple[Widths, int, int] | None, charged: int) -> None:
        """Decide by the rows' offers; again after new ones, while all else is the same. Arguments as for the class."""
        rows, options, apart, self.width = self.rows, self._drafts, self.table.apart, 0
        fitting = widths if self.costs.change > 0.0 else None
        self.copies = [[Copies.of(row, offer) for offer in row.offers] for row in rows]
        joints = self._copied(fitting=fitting is not None)
        with_models = [joint for drafter, each in options.items() for joint in self.with_model(drafter, each)]
        best = self._fitting(joints, with_models, *fitting, charged) if fitting else self._best(joints, with_models)
        value = best.worth - best.rho * (self.extra(best) + apart - self.apart)
        for row, choice in zip(rows, best.choices, strict=True):
            row.chosen, row.reading = choice, False
            row.price = self.rho * self.table.extra[choice.copied or choice.tokens]
            row.lasts = self.apart == apart or value >= 0.0
        if options and not any(choice.tokens and choice.drafter in options for choice in best.choices):
            for drafter, each in options.items():
                if hope(self, drafter) or look(self, drafter, each):
                    return

    def _best(self, copied: list[Joint], with_models: list[Joint]) -> Joint:
        """The best option where every pass is only as wide as its tokens."""
        best, most = copied[0], 0.0
        for joints, affordable in zip((copied, with_models), self._limits, strict=True):
            for joint in joints:
                extra = self.extra(joint)
                value = joint.worth - joint.rho * extra
                if value > most and extra + joint.spent <= affordable:
                    best, most = joint, value
        return best

    def extra(self, joint: Joint) -> float:
        """Seconds that a pass takes longer than a plain one, without padding."""
        return sum([self.table.extra[choice.tokens + choice.copied] for choice in joint.choices])

    def _fitting(
        self, copied: list[Joint], with_models: list[Joint], widths: Widths, last: int, least: int, charged: int
    ) -> Joint:
        """The best option in the width that is best over the rounds (`Widths`); sets `width`."""
        rows, change, rho, table = self.count, self.costs.change, self.rho, self.table.extra
        narrowest, known, extra = max(rows, least), len(table) if rows == 1 else 0, 0.0
        sets = [sorted(joints, key=itemgetter(0))[::-1] for joints in (copied, with_models) if joints]
        values: dict[int, float] = {}
        serving: dict[int, Joint] = {}
        bests: list[Joint | None] = [none := copied[0], None]
        considered = widths_from(narrowest, rows + max([joints[0].total for joints in sets]), last)
        shortest = self.costs.target(rows) if considered[-1] > known else 0.0
        for width in considered:
            if width > narrowest:
                extra = table[width - 1] if width <= known else max(self.costs.target(width) - shortest, extra)
            padded = extra if width == last else extra + change
            best, value = none, -rho * extra
            for kind, joints in enumerate(sets):
                here = bests[kind]
                while joints and joints[-1].total <= width - rows:
                    joint = joints.pop()  # the next one that fits
                    if here is None or joint.worth > here.worth:
                        bests[kind] = here = joint
                if here is not None and padded + here.spent <= self._limits[kind]:
                    net = here.worth - here.rho * extra
                    if net > value:
                        best, value = here, net
            if best is none and width > narrowest:
                if padded > self.affordable[charged]:
                    continue
                value -= SHARE  # padding alone costs something, even where measurements say that it does not
            values[width], serving[width] = value, best
        self.width = widths.next(values, last, rho * change)
        return serving[self.width]

    def options(self, drafter: int, emitted: int | None = None, *, hoping: bool = False) -> list[list[Option]]:
        """Of each row, the options of a model; with `emitted`, as after so many tokens of output."""
        found: list[list[Option]] = []
        worths: Sequence[Worths | None] = self.worths or [None] * len(self.rows)
        for row, worth in zip(self.rows, worths, strict=True):
            acceptance, room = row.request.acceptance[drafter], row.room
            if room <= 0 or drafter in row.barred:
                found.append([])
            elif self.kinds[drafter].trees and row.trees:
                accepted = [(nodes, min(acceptance.tree(nodes), room)) for nodes in NODES if nodes <= row.most]
                found.append([Option(nodes, right, right, right, right) for nodes, right in accepted])
            else:
                longest, before = min(room, row.most, LONGEST), row.request.emitted if emitted is None else emitted
                found.append(self._chains(acceptance, longest, before, worth, hoping=hoping))
        return found

    def _pace_of_models(self, drafts: dict[int, list[list[Option]]]) -> float:
        """The best pace with one model that drafts the same length in every row, up to the rows' limits; at least 1."""
        count, best, plain, apart = len(self.rows), 1.0, self.table.plain, self.table.apart
        for drafter, options in drafts.items():
            share, calls = 1.0 + self.costs.drafters[drafter].row * (count - 1), self.table.calls[drafter]
            for at in range(max(map(len, options))):
                each = [(row, of[min(at, len(of) - 1)]) for row, of in zip(self.rows, options, strict=True) if of]
                length = max(draft.tokens for _, draft in each)
                right = (row.weight * draft.accepted for row, draft in each)
                took = plain + apart + count * self.table.extra[length] + calls[length] * share
                best = max(best, (self.base + sum(right) / self.count) * plain / took)
        return best

    def _copied(self, *, fitting: bool) -> list[Joint]:
        """Options without a model, the empty one first; fills in each row's best one by itself (`Row.alone`).

        Args:
            fitting: give options for passes of several widths: in a single row each length of `lengths_of`, in several
                rows the best ones with so many tokens a row at most. Else only what pays in each row by itself.
        """
        rows, extra, rho = self.rows, self.table.extra, self.rho
        limit, change = self.affordable[0] / len(rows), self.costs.change / self.count if fitting else 0.0
        alone, one_pass = (self.table.plain + self.table.apart) / self.count, rho * self.apart
        joints = [Joint(0, 0.0, rho, 0.0, [PLAIN] * len(rows))]
        drafted: list[tuple[int, int, float, Choice]] = []  # tokens, row, what they are worth, and the choice
        for index, (row, copies) in enumerate(zip(rows, self.copies, strict=True)):
            drafter, best, gain, accepted, wished, most, highest = -1, 0, 0.0, 0.0, 0, 0.0, 0.0
            for copy in copies:
                source, longest = copy.offer.drafter, min(row.most, LARGEST)
                for tokens, right, value in copy.worths(longest, row.weight, rho, alone, extra, one_pass):
                    if value > most:
                        wished, most = tokens, value
                    if extra[tokens] > limit:
                        continue
                    if value > highest:
                        drafter, best, highest, accepted = source, tokens, value, right
                        gain = row.weight * copy.expected[tokens] - rho * extra[tokens]
                    elif len(rows) > 1:
                        continue
                    if fitting:
                        drafted.append((tokens, index, right, Choice(source, tokens)))
            row.alone, row.gain = Choice(drafter, best) if best else PLAIN, gain
            row.refused_cost = extra[wished] + change + self.table.apart / self.count
            row.refused = wished if extra[wished] + change > limit else 0
            if best and not fitting:
                drafted.append((best, index, accepted, row.alone))
        if len(rows) == 1:
            return joints + [Joint(tokens, right, rho, 0.0, [choice]) for tokens, _, right, choice in drafted]
        choices, each, total, worth = joints[0].choices, [0.0] * len(rows), 0, 0.0
        drafted.sort(key=itemgetter(0))
        for at, (tokens, index, right, choice) in enumerate(drafted):
            total += tokens - choices[index].tokens
            worth += right - each[index]
            choices, each[index] = [*choices], right
            choices[index] = choice
            if at + 1 == len(drafted) or (fitting and drafted[at + 1][0] > tokens):
                joints.append(Joint(total, worth, rho, 0.0, choices))
        return joints

    def with_model(self, drafter: int, options: list[list[Option]]) -> list[Joint]:
        """Options where a model drafts in some rows.

        Rows share its calls, which take as long as the longest draft. So the limit rises for all rows together, and
        each row takes its best length up to the limit. For a single row there is an option for each length.
        """
        rows, table, rho = self.rows, self.table, self.rho_model
        own = [row.alone for row in rows]
        asks = [False] * len(rows)
        gains = [row.gain for row in rows]
        worths = [row.gain + self.rho * table.extra[row.alone.total] for row in rows]
        joints: list[Joint] = []
        read, share = self.costs.drafters[drafter].lag, self.costs.drafters[drafter].row
        # The cost of a model's lag is spread over the tokens that are left.
        entries = [read * row.lags[drafter] / max(row.room, 1) for row in rows]
        before_them = [
            prefixes(copies, each[0].accepted, extends=self.extends[drafter]) if each else []
            for copies, each in zip(self.copies, options, strict=True)
        ]
        for at in range(max(map(len, options))):
            improved, length = False, 0
            for index, (row, each) in enumerate(zip(rows, options, strict=True)):
                if at >= len(each):
                    continue
                length, right, foreseen, value, behind = each[at]
                for copied, source, before, reached, copies_on in before_them[index]:
                    if copied and copied + length > min(row.room, row.most, LARGEST):
                        continue
                    unforeseen = behind if copied else value
                    gained = before + reached * (unforeseen + copies_on * (foreseen - unforeseen))
                    entry = entries[index] * (1.0 + before + reached * right)
                    worth = row.weight * gained - rho * entry
                    choice = Choice(drafter, length, copied, source)
                    if len(rows) == 1:
                        call, lag = table.calls[drafter][length], read * row.lags[drafter]
                        net = worth - rho * (call + self.apart)
                        joints.append(Joint(length + copied, net, rho, call + lag, [choice]))
                        continue
                    net = worth - rho * table.extra[copied + length]
                    if net > gains[index]:
                        gains[index], worths[index], improved = net, worth, True
                        own[index], asks[index] = choice, True
            if len(rows) == 1:
                continue
            if not improved:
                if any(asks):
                    break  # longer drafts gain ever less
                continue
            call = table.calls[drafter][length] * (1.0 + share * (sum(asks) - 1))
            lag = read * sum(row.lags[drafter] for row, asked in zip(rows, asks, strict=True) if asked)
            total = sum(choice.total for choice in own)
            joints.append(Joint(total, sum(worths) - rho * (call + self.apart), rho, call + lag, [*own]))
        return joints
