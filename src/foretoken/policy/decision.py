"""One decision: for each row of a round, the option with the largest ``E - ρ t``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from foretoken.policy.acceptance import Kind
from foretoken.policy.costs import Costs
from foretoken.policy.request import LARGEST, LENGTHS, LONGEST, NODES, PLAIN, Choice, Row

_ROUNDS = 8  # for which looked-up costs are reused: looking them up is slow beside a choice


class _Seconds(NamedTuple):
    """Of a batch of so many rows, at the time of looking them up.

    Attributes:
        plain: of a round without drafts.
        extra: what a draft of 0, 1, 2, … tokens in one row adds to it.
        calls: of each drafter, a call in one row for so many tokens.
    """

    plain: float
    extra: list[float]
    calls: list[list[float]]


class Decider:
    """Decides rounds of one target and its drafters.

    Args:
        kinds: of the drafters.
        free: of each, whether it makes its drafts before the choice.
    """

    def __init__(self, kinds: Sequence[Kind], free: Sequence[bool]) -> None:
        self._kinds = kinds
        self._models = [at for at, is_free in enumerate(free) if not is_free]
        self._seconds: dict[tuple[int, int], tuple[int, _Seconds]] = {}

    def forget(self) -> None:
        """Drop looked-up costs: they were measured anew."""
        self._seconds.clear()

    def decide(self, rows: Sequence[Row], now: int) -> None:
        """Fill in the choices of rows that share their costs and accounts.

        Args:
            rows: of the round.
            now: rounds so far.
        """
        costs, count = rows[0].request.costs, len(rows)
        seconds = self._look_up(costs, count, now)
        tables = {drafter: [self._options(row, drafter) for row in rows] for drafter in self._models}
        pace = max(sum(row.request.expected_pace() for row in rows) / count, 1.0)
        for drafter, table in tables.items():
            pace = max(pace, _pace_alone(table, costs, drafter, seconds))
        rho = pace * count / seconds.plain  # ρ
        most = 0.0
        for row in rows:
            row.alone, gain = _best_offer(row, rho, seconds, row.request.guards[0].balance / count)
            row.chosen, row.gain = row.alone, gain
            most += gain
        alone = most
        affordable = rows[0].request.guards[1].balance * seconds.plain
        for drafter, table in tables.items():
            found, value = _with_model(rows, table, drafter, costs, seconds, rho, alone, affordable)
            if value > most:
                most = value
                for row, tokens in zip(rows, found, strict=True):
                    row.chosen = Choice(drafter, tokens) if tokens else row.alone
        if most == alone:
            for drafter, table in tables.items():
                if self._look(rows, table, drafter, costs, seconds, rho, affordable):
                    return

    def _options(self, row: Row, drafter: int) -> list[tuple[int, float]]:
        """Draft lengths, and accepted tokens of each."""
        rates, room = row.request.rates[drafter], row.room
        if room <= 0 or drafter in row.barred:
            return []
        if self._kinds[drafter].trees and row.trees:
            return [(nodes, min(rates.tree(nodes), room)) for nodes in NODES if nodes <= row.most]
        longest = min(room, row.most, LONGEST)
        expected = rates.expected(longest)
        return [(length, expected[length]) for length in LENGTHS if length <= longest]

    def _look_up(self, costs: Costs, rows: int, now: int) -> _Seconds:
        until, found = self._seconds.get((id(costs), rows), (-1, None))
        if found is not None and now < until:
            return found
        plain = costs.target(rows)
        if rows == 1:
            extra = [max(costs.target(1 + tokens) - plain, 0.0) for tokens in range(LARGEST + 1)]
        else:
            each = max((costs.target(4 * rows) - plain) / (3 * rows), 0.0)
            extra = [each * tokens for tokens in range(LARGEST + 1)]
        for at in range(1, len(extra)):  # a longer draft that costs less is noise
            extra[at] = max(extra[at], extra[at - 1])
        calls = [[costs.draft(at, tokens, 1, 0) for tokens in range(LARGEST + 1)] for at in range(len(costs.drafters))]
        found = _Seconds(plain, extra, calls)
        self._seconds[id(costs), rows] = now + _ROUNDS, found
        return found

    def _look(
        self,
        rows: Sequence[Row],
        table: list[list[tuple[int, float]]],
        drafter: int,
        costs: Costs,
        seconds: _Seconds,
        rho: float,
        affordable: float,
    ) -> bool:
        """Have one row draft with a model that does not pay, if that is due; whether one does."""
        due = [
            (row.lags[drafter], at)
            for at, row in enumerate(rows)
            if row.request.looks[drafter].due <= row.request.rounds and not row.chosen.tokens and table[at]
        ]
        if not due:
            return False
        lag, at = min(due)
        share = (1.0 + costs.drafters[drafter].row * (len(rows) - 1)) / len(rows)
        best, most = 0, 0.0
        for length, right in table[at][:3]:
            call, extra = seconds.calls[drafter][length], seconds.extra[length]
            # No look where the draft would not pay even if every token were accepted, in all rows.
            hopeful = length > rho * (extra + call * share)
            value = right - rho * (extra + call)
            if (
                hopeful
                and extra + call + costs.drafters[drafter].lag * lag <= affordable
                and (not best or value > most)
            ):
                best, most = length, value
        if best:
            rows[at].chosen = Choice(drafter, best)
            rows[at].request.looking = True
        return best > 0


def _best_offer(row: Row, rho: float, seconds: _Seconds, budget: float) -> tuple[Choice, float]:
    """A row's best use of the drafts that are made already, and what it gains; `budget` in plain rounds."""
    best, most = PLAIN, 0.0
    extra, limit = seconds.extra, budget * seconds.plain
    for offer in row.offers:
        rates = row.request.rates[offer.drafter]
        expected = rates.given(offer.reach) if offer.reach else rates.expected(offer.size, offer.match)
        for tokens in range(1, min(offer.size, row.most, LARGEST) + 1):
            if extra[tokens] > limit:
                break
            value = expected[tokens] - rho * extra[tokens]
            if value > most:
                best, most = Choice(offer.drafter, tokens), value
            elif value < most - 1.0:
                break  # longer drafts only lose from here on
    return best, most


def _pace_alone(table: list[list[tuple[int, float]]], costs: Costs, drafter: int, seconds: _Seconds) -> float:
    """The best pace of one model that drafts as many tokens in every row."""
    count, best = len(table), 1.0
    share = 1.0 + costs.drafters[drafter].row * (count - 1)
    for at in range(min(map(len, table))):
        length, right = table[0][at]
        if count > 1:
            right = sum(options[at][1] for options in table) / count
        took = seconds.plain + count * seconds.extra[length] + seconds.calls[drafter][length] * share
        pace = (1.0 + right) * seconds.plain / took
        if pace > best:
            best = pace
        elif pace < 0.9 * best:
            break  # longer drafts only lose from here on
    return best


def _with_model(
    rows: Sequence[Row],
    table: list[list[tuple[int, float]]],
    drafter: int,
    costs: Costs,
    seconds: _Seconds,
    rho: float,
    alone: float,
    affordable: float,
) -> tuple[list[int], float]:
    """How many tokens a model drafts in each row, at best, and what that gains; `alone`: the gain without it.

    Rows share its calls, which take as long as the longest draft does. So all rows get longer drafts together, and
    each takes the length that is best for itself on the way.
    """
    own, gains = [0] * len(rows), [row.gain for row in rows]
    best, most = own, 0.0
    read, share = costs.drafters[drafter].lag, costs.drafters[drafter].row
    value, asked, lag = alone, 0, 0
    spent = sum(seconds.extra[row.alone.tokens] for row in rows)
    # The cost of a model's lag is spread over the tokens that are left.
    entries = [read * row.lags[drafter] / max(row.room, 1) for row in rows]
    idle = 0
    for at in range(max(map(len, table))):
        improved, length = False, 0
        for index, options in enumerate(table):
            if at >= len(options):
                continue
            length, right = options[at]
            net = right - rho * (seconds.extra[length] + entries[index] * (1.0 + right))
            if net > gains[index]:
                value += net - gains[index]
                gains[index] = net
                spent += seconds.extra[length] - seconds.extra[own[index] or rows[index].alone.tokens]
                if not own[index]:
                    asked, lag = asked + 1, lag + rows[index].lags[drafter]
                if not improved:
                    own, improved = [*own], True
                own[index] = length
        if not improved:
            idle += 1
            if idle > 1:
                break
            continue
        idle = 0
        call = seconds.calls[drafter][length] * (1.0 + share * (asked - 1))
        total = value - rho * call
        if (not any(best) or total > most) and spent + call + read * lag <= affordable:
            best, most = own, total
    return best, most if any(best) else 0.0
