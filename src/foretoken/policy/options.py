"""What a decision chooses among: drafts of one row, and what all rows of a round do together."""

from __future__ import annotations

from typing import NamedTuple

from foretoken.policy.request import Choice


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


class Joint(NamedTuple):
    """What all rows do.

    Attributes:
        total: draft tokens of all rows.
        worth: accepted tokens that are expected, of copies until they end (`Copies.worth`), less what drafters
            cost.
        rho: what a second more of the pass costs, in tokens.
        spent: seconds of drafters.
        choices: of the rows.
    """

    total: int
    worth: float
    rho: float
    spent: float
    choices: list[Choice]
