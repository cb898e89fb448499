"""Fixed draft lengths in a cascade of one drafter: each row takes its draft, or the one from the prediction."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.policy.acceptance import Kind
from foretoken.policy.request import PLAIN, Choice, Row


def of_length(row: Row, tokens: int, kinds: Sequence[Kind], free: Sequence[bool]) -> Choice:
    """Draft so many tokens by the only drafter or by the prediction, whichever is expected to get more accepted.

    Args:
        row: of the round.
        tokens: of the draft, or nodes.
        kinds: of the drafters, the prediction last.
        free: of each, whether it makes its drafts before the choice.
    """
    last = len(kinds) - 1
    predicted = next((offer for offer in row.offers if offer.drafter == last), None)
    may_draft = last > 0 and 0 not in row.barred
    if not tokens or (predicted is None and not may_draft):
        return PLAIN
    if predicted is None:
        return Choice(0, tokens)
    size = min(predicted.size, tokens)
    expected = sum(row.request.acceptance[last].reach(size, predicted.match))
    return Choice(0, tokens) if may_draft and _expected(row, tokens, kinds, free) > expected else Choice(last, tokens)


def _expected(row: Row, tokens: int, kinds: Sequence[Kind], free: Sequence[bool]) -> float:
    """Accepted tokens that are expected of the only drafter's draft of a given length."""
    acceptance = row.request.acceptance[0]
    if not free[0]:
        return acceptance.tree(tokens) if kinds[0].trees and row.trees else sum(acceptance.reach(tokens))
    offer = next((offer for offer in row.offers if offer.drafter == 0), None)
    if offer is None:
        return 0.0
    size = min(offer.size, tokens)
    return sum(offer.reach[:size] or acceptance.reach(size, offer.match))
