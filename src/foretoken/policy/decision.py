"""One decision: for each row of a round, the option with the largest ``E - ρ t``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from foretoken.policy.acceptance import Kind
from foretoken.policy.costs import Costs, Table
from foretoken.policy.request import LARGEST, LENGTHS, LONGEST, NODES, PLAIN, Choice, Offer, Row


class Copies(NamedTuple):
    """An offer with what is expected of it.

    Attributes:
        offer: the offer.
        reach: of each of its tokens, the chance that it is accepted.
        expected: accepted tokens of its first 0, 1, 2, … tokens.
    """

    offer: Offer
    reach: Sequence[float]
    expected: list[float]


class Option(NamedTuple):
    """Of one row and one model: drafts of a length.

    Attributes:
        tokens: of the model's draft.
        accepted: tokens that are accepted of it.
        foreseen: what these are worth, in average tokens, where a copy has the next token right
            (`foretoken.policy.account.Runs`).
        value: where it has not.
        behind: where a copy was right up to the token before.
    """

    tokens: int
    accepted: float
    foreseen: float
    value: float
    behind: float


class Decision:
    """The decision on a round of rows that share their costs and accounts.

    Args:
        rows: of the round; their choices are filled in.
        kinds: of the drafters.
        models: indices of those that are not free.
        extends: of each drafter, whether it can extend a copy.
        spare: draft tokens, over all rows, for which the pass needs no other width; None if any number is alike.
        missed: tokens that earlier rounds missed because another width would have cost too much.

    Attributes:
        missed: the same with this round; 0 if its pass gets another width.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        kinds: Sequence[Kind],
        models: Sequence[int],
        extends: Sequence[bool],
        spare: int | None = None,
        missed: float = 0.0,
    ) -> None:
        self.rows, self.kinds, self.extends = rows, kinds, extends
        self.costs: Costs = rows[0].request.costs
        count = len(rows)
        self.table: Table = self.costs.table(count, LARGEST)
        self.copies = [[_copies(row, offer) for offer in row.offers] for row in rows]
        plain = self.table.plain
        run, flat = 1.0, [1.0] * LONGEST
        self.worths = [(flat, flat, flat)] * count  # of each row, see `Runs.worth`
        if models and any(row.request.above[1].known for row in rows):
            worths = [row.request.runs.worth(row.request.above[1], LONGEST) for row in rows]
            self.worths = [each[:3] for each in worths]
            run = min(sum(each for *_, each in worths) / count, LONGEST)
        options = {drafter: [self._options(at, row, drafter) for at, row in enumerate(rows)] for drafter in models}
        pace = max(sum(row.request.pace.of(row.request.above[0]) for row in rows) / count, 1.0)
        for drafter, each in options.items():
            pace = max(pace, self._pace_alone(drafter, each))
        self.rho = pace * count / plain  # ρ
        alone = run / (1.0 + count * self.table.extra[round(run)] / plain)
        self.rho_model = max(pace, alone) * count / plain
        self._affordable = rows[0].request.guards[1].balance * self.table.plain
        value = self._choose(options, LARGEST * count)
        charge = 2.0 * self.rho * self.costs.change  # for this width, and for a narrower one later on
        self.missed = 0.0
        if spare is not None and charge > 0.0 and sum(row.chosen.total for row in rows) > spare:
            wide = [(row.chosen, row.gain) for row in rows]
            self.missed = missed + value - self._choose(options, spare)
            widens = self.missed > charge
            self.missed *= not widens
            for row, (choice, gain) in zip(rows, wide, strict=True):
                row.gain = gain  # what copies are worth, whatever this round's pass has room for
                if widens:
                    row.chosen = choice
        elif spare is not None:
            self.missed = missed
        if not any(row.chosen.tokens and row.chosen.drafter in models for row in rows):
            for drafter, each in options.items():
                if self._look(drafter, each):
                    return

    def _choose(self, options: dict[int, list[list[Option]]], spare: int) -> float:
        """Fill in the best choices with so many draft tokens in all; what they gain."""
        count = len(self.rows)
        self._copy(self.rows[0].request.guards[0].balance / count, spare)
        alone = most = sum(row.gain for row in self.rows)
        for drafter, each in options.items():
            found, value = self._with_model(drafter, each, alone, spare // count)
            if value > most:
                most = value
                for row, choice in zip(self.rows, found, strict=True):
                    row.chosen = choice or row.alone
        return most

    def _options(self, row_at: int, row: Row, drafter: int) -> list[Option]:
        """Draft lengths, and accepted tokens of each."""
        acceptance, room = row.request.acceptance[drafter], row.room
        if room <= 0 or drafter in row.barred:
            return []
        if self.kinds[drafter].trees and row.trees:
            accepted = [(nodes, min(acceptance.tree(nodes), room)) for nodes in NODES if nodes <= row.most]
            return [Option(nodes, right, right, right, right) for nodes, right in accepted]
        longest = min(room, row.most, LONGEST)
        reach = acceptance.reach(longest)
        expected = [0.0, *accumulate(reach)]
        foreseen, here, behind = ([0.0, *accumulate(map(mul, reach, each))] for each in self.worths[row_at])
        return [Option(at, expected[at], foreseen[at], here[at], behind[at]) for at in LENGTHS if at <= longest]

    def _pace_alone(self, drafter: int, options: list[list[Option]]) -> float:
        """The best pace of one model that drafts as many tokens in every row."""
        count, best, plain = len(self.rows), 1.0, self.table.plain
        share = 1.0 + self.costs.drafters[drafter].row * (count - 1)
        for at in range(min(map(len, options))):
            length = options[0][at].tokens
            accepted = sum(each[at].accepted for each in options) / count
            took = plain + count * self.table.extra[length] + self.table.calls[drafter][length] * share
            pace = (1.0 + accepted) * plain / took
            if pace < 0.9 * best:
                break  # longer drafts only lose from here on
            best = max(best, pace)
        return best

    def _copy(self, budget: float, spare: int) -> None:
        """Each row's best use of the drafts that are made already; `budget` is in plain rounds, `spare` in tokens."""
        extra, limit, rho = self.table.extra, budget * self.table.plain, self.rho
        for row, copies in zip(self.rows, self.copies, strict=True):
            row.alone, row.gain = PLAIN, 0.0
            for offer, _, expected in copies:
                for tokens in range(1, min(offer.size, row.most, LARGEST, spare) + 1):
                    if extra[tokens] > limit:
                        break
                    value = expected[tokens] - rho * extra[tokens]
                    if value > row.gain:
                        row.alone, row.gain = Choice(offer.drafter, tokens), value
            row.chosen = row.alone
            spare -= row.alone.total

    def _prefixes(self, row: int, drafter: int, first: float) -> list[tuple[int, int, float, float, float]]:
        """Copies that a model's draft may follow: tokens, whose, how many are accepted, and the chance that all are.

        And the chance that copies have the token behind it right, too. A copy is followed as long as its next token is
        likelier to be right than the model's first one is.
        """
        found = [(0, -1, 0.0, 1.0, max((reach[0] for _, reach, _ in self.copies[row]), default=0.0))]
        if self.extends[drafter]:
            for offer, reach, expected in self.copies[row]:
                size, before, next_right = 0, 1.0, 0.0
                while offer.chain and size < offer.size:
                    next_right = reach[size] / before
                    if next_right <= first:
                        break
                    before, size = reach[size], size + 1
                if size:
                    found.append((size, offer.drafter, expected[size], before, next_right))
        return found

    def _with_model(
        self, drafter: int, options: list[list[Option]], alone: float, longest: int
    ) -> tuple[list[Choice | None], float]:
        """What each row does where a model drafts in some of them, at best, and what that gains.

        Drafts have `longest` tokens at most, copies included.

        Rows share its calls, which take as long as the longest draft does. So all rows get longer drafts together, and
        each takes the length that is best for itself on the way.
        """
        rows, table, rho = self.rows, self.table, self.rho_model
        own: list[Choice | None] = [None] * len(rows)
        gains = [row.gain for row in rows]
        best, most = own, 0.0
        read, share = self.costs.drafters[drafter].lag, self.costs.drafters[drafter].row
        # The cost of a model's lag is spread over the tokens that are left.
        entries = [read * row.lags[drafter] / max(row.room, 1) for row in rows]
        prefixes = [
            self._prefixes(at, drafter, options[at][0].accepted) if options[at] else [] for at in range(len(rows))
        ]
        for at in range(max(map(len, options))):
            improved, length = False, 0
            for index, (row, each) in enumerate(zip(rows, options, strict=True)):
                if at >= len(each):
                    continue
                length, right, foreseen, value, behind = each[at]
                for copied, source, before, reached, copies_on in prefixes[index]:
                    if copied + length > longest or (copied and copied + length > min(row.room, row.most, LARGEST)):
                        continue
                    unforeseen = behind if copied else value
                    gained = before + reached * (unforeseen + copies_on * (foreseen - unforeseen))
                    entry = entries[index] * (1.0 + before + reached * right)
                    net = gained - rho * (table.extra[copied + length] + entry)
                    if net > gains[index]:
                        gains[index] = net
                        if not improved:
                            own, improved = [*own], True
                        own[index] = Choice(drafter, length, copied, source)
            if not improved:
                if any(own):
                    break  # what a further token adds only falls
                continue
            value = sum(gains)
            if value - rho * table.calls[drafter][length] <= max(most, alone):
                continue
            asked = [index for index, choice in enumerate(own) if choice]
            call = table.calls[drafter][length] * (1.0 + share * (len(asked) - 1))
            lag = read * sum(rows[index].lags[drafter] for index in asked)
            spent = sum(_extra(choice or row.alone, table) for choice, row in zip(own, rows, strict=True))
            total = value - rho * call
            if total > max(most, alone) and spent + call + lag <= self._affordable:
                best, most = own, total
        return best, most

    def _look(self, drafter: int, options: list[list[Option]]) -> bool:
        """Have one row draft with a model that does not pay, if that is due; whether one does."""
        due = [
            (row.lags[drafter], at)
            for at, row in enumerate(self.rows)
            if row.request.looks[drafter].due <= row.request.rounds and not row.chosen.tokens and options[at]
        ]
        if not due or self.rows[0].request.guards[1].spare <= 0.0:
            return False
        (lag, at), costs = min(due), self.costs.drafters[drafter]
        share = (1.0 + costs.row * (len(self.rows) - 1)) / len(self.rows)
        best, most = 0, 0.0
        for length, accepted, *_ in options[at][:3]:
            call, extra = self.table.calls[drafter][length], self.table.extra[length]
            # No look where the draft would not pay even if every token were accepted, in all rows.
            hopeful = length > self.rho_model * (extra + call * share)
            value = accepted - self.rho_model * (extra + call)
            if hopeful and extra + call + costs.lag * lag <= self._affordable and (not best or value > most):
                best, most = length, value
        if best:
            self.rows[at].chosen = Choice(drafter, best)
            self.rows[at].request.looking = True
        return best > 0


def _copies(row: Row, offer: Offer) -> Copies:
    reach = offer.reach or row.request.acceptance[offer.drafter].reach(offer.size, offer.match)
    return Copies(offer, reach, [0.0, *accumulate(reach)])


def _extra(choice: Choice, table: Table) -> float:
    return table.extra[choice.total]
