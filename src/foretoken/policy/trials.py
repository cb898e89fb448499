"""Trials of a model that does not pay by its estimate: hopes and looks.

A model that was right before, or of which nothing is known behind an output's beginning, is tried in a single plain row
by an upper confidence bound of its acceptance, a hope (`acceptance.HOPE`). All hopes lose `SHARE` T + `HOPES` at most,
besides what they gained before. Where no model pays, models are also tried in looks: once due in each request, and then
at intervals that double. A look costs a round of few tokens in one row, and the model's lag; what looks may lose has to
pay for it. So all looks lose `SHARE` T + `LOOKS` at most, and those of a reproducible request one look more.

A first draft costs as much as four or five plain rounds, most of it for all that the model has not seen, and tells of a
token or two. So a model that can (`Row.reads`) first reads the output, and tells which of its tokens it foresees: of
sixteen, at the price of its lag alone. It is decided anew with what that shows (`Lessons.read`). While it is in doubt
whether the model is of use (`EngineRates.is_doubtful`), hopes pay for a look that reads, too; what its drafts would
have gained there, hopes may lose again. Trials of such a model may also lose what drafts have gained, and all that the
account holds where the model would pay if it drafted in every round: then only the first draft is too dear. Drafts
leave so much in the account as a reading takes (`reserve`), so that a hard beginning is not the last word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.policy.account import CREDIT
from foretoken.policy.request import READ, Choice, Row

if TYPE_CHECKING:
    from foretoken.policy.decision import Decision
    from foretoken.policy.options import Option


def may_hope(decision: Decision, drafter: int) -> bool:
    """Whether a single row may draft by an upper confidence bound of a model's acceptance."""
    request = decision.rows[0].request
    rates = request.acceptance[drafter].engine
    # Of a model of which nothing is known a reproducible request has a look.
    useful = rates.was_useful if rates.judged or decision.by_itself else not request.too_early(drafter)
    payable = hopes_of(decision, drafter) > 0.0
    return decision.count == 1 and useful and not decision.kinds[drafter].trees and payable


def hope(decision: Decision, drafter: int) -> bool:
    """Let a single row draft with a model that would pay by its upper confidence bound; returns whether it does."""
    row, most = decision.rows[0], 0.0
    if row.chosen.tokens or not may_hope(decision, drafter):
        return False
    reading = _reading(decision, drafter, row)
    payable = _payable(decision, hopes_of(decision, drafter), reads=reading is not None)
    for joint in decision.with_model(drafter, decision.options(drafter, hoping=True)):
        extra, change = decision.extra(joint), 2.0 * decision.costs.change  # to another width of passes, and back
        value = joint.worth - joint.rho * extra
        spent = extra + joint.spent + change if reading is None else reading
        if value > most and spent <= payable:
            row.chosen, row.request.hoping, most = joint.choices[0], True, value
            row.reading = reading is not None
            row.price = decision.rho * decision.table.extra[row.chosen.copied or row.chosen.tokens]
    return most > 0.0


def look(decision: Decision, drafter: int, options: list[list[Option]]) -> bool:
    """Let one row draft with a model that does not pay, if a look is due; returns whether one does.

    Args:
        decision: on the round.
        drafter: the model's index.
        options: `Decision.options` of it.
    """
    rows, table, costs = decision.rows, decision.table, decision.costs.drafters[drafter]
    due = [
        (row.lags[drafter], at)
        for at, row in enumerate(rows)
        if row.request.may_look(drafter, by_itself=decision.by_itself) and not row.chosen.tokens and options[at]
    ]
    if not due:
        return False
    (lag, at), guard = min(due), rows[0].request.guards[1]
    reading = _reading(decision, drafter, rows[at])
    doubtful = rows[at].request.acceptance[drafter].engine.is_doubtful
    part = guard.spare
    if reading is not None:
        part = max(part, _gained(decision), guard.hopes if doubtful else 0.0)
    if part <= 0.0:
        return False
    # A reproducible request learns nothing from others: one look may be all that it has, and may owe something.
    payable = decision.affordable[1] if decision.by_itself else _payable(decision, part, reads=reading is not None)
    share, best, most = (1.0 + costs.row * (len(rows) - 1)) / len(rows), 0, 0.0
    for length, accepted, *_ in options[at][:3]:
        call, extra = table.calls[drafter][length], table.extra[length]
        # No look where the draft would not pay even if every token were accepted, in all rows.
        hopeful = length > decision.rho_model * (extra + call * share + decision.apart / decision.count)
        value = accepted - decision.rho_model * (extra + call)
        spent = extra + call + costs.lag * lag if reading is None else reading
        if hopeful and spent <= payable and (not best or value > most):
            best, most = length, value
    if best:
        rows[at].chosen, rows[at].request.looking = Choice(drafter, best), True
        rows[at].reading = reading is not None
    return best > 0


def hopes_of(decision: Decision, drafter: int) -> float:
    """Plain rounds that hopes may lose; those of a model that reads first, also what drafts have gained."""
    row = decision.rows[0]
    hopes = row.request.guards[1].hopes
    return max(hopes, _gained(decision)) if _reads(decision, drafter, row) else hopes


def _gained(decision: Decision) -> float:
    """What the account of models holds beyond its first credit; all that it holds if one pays in every round."""
    balance = decision.rows[0].request.guards[1].balance
    return balance if decision.pays else balance - CREDIT


def reserve(decision: Decision, drafter: int) -> float:
    """Plain rounds that drafts of a model leave in its account, so that it can read where all of them were wrong."""
    row = decision.rows[0]
    if decision.count > 1 or not _reads(decision, drafter, row):
        return 0.0
    costs, table = decision.costs, decision.table  # after drafts passes get another width, and after the reading, too
    return (costs.draft(drafter, 1, 1, 2 * READ) + table.apart + 2.0 * costs.change) / table.plain


def _payable(decision: Decision, part: float, *, reads: bool) -> float:
    """Seconds that a model's draft, or its reading, may cost if this part of its account, in plain rounds, pays.

    Drafts leave the reserve of a reading. What they and the passes after them take is known by estimates alone, so that
    less may be left: where a model would pay in every round, a reading may owe the reserve.
    """
    row, table = decision.rows[0], decision.table
    reserved, part = row.reserved * table.plain, part * table.plain - decision.apart
    if not reads:
        return min(decision.affordable[1] - reserved, part)
    owed = reserved if decision.pays and row.request.guards[1].balance > 0.0 else 0.0
    return min(decision.affordable[1], part) + owed


def _reading(decision: Decision, drafter: int, row: Row) -> float | None:
    """Seconds that a model takes to read before it drafts; None where it doesn't, or has seen too much already."""
    if not _reads(decision, drafter, row) or min(row.lags[drafter] - 1, row.request.emitted) < READ:
        return None
    return decision.costs.draft(drafter, 1, 1, row.lags[drafter])


def _reads(decision: Decision, drafter: int, row: Row) -> bool:
    """Whether a model reads first; not in reproducible requests, whose choices depend on no clock."""
    return drafter in row.reads and not decision.by_itself
