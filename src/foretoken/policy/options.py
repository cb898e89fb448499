"""What a decision chooses among: a model's drafts of one row (`Option`), and choices of all rows together (`Joint`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

from foretoken.policy.acceptance import BEGINNING, Acceptance, Kind
from foretoken.policy.costs import Costs
from foretoken.policy.request import LARGEST, LENGTHS, NODES, Choice


class Option(NamedTuple):
    """A draft length of one model in one row.

    Attributes:
        tokens: of the model's draft.
        accepted: expected accepted tokens.
        foreseen: what these are worth, in average tokens, where the next token is foreseen: a copy has it right
            (`foretoken.policy.account.Runs`).
        value: what they are worth where it is not.
        behind: what they are worth after a copy that was right up to the token before.
    """

    tokens: int
    accepted: float
    foreseen: float
    value: float
    behind: float


class Joint(NamedTuple):
    """A choice for all rows.

    Attributes:
        total: draft tokens of all rows.
        worth: expected accepted tokens, of copies until they end (`Copies.worths`), less the drafters' costs.
        rho: what a further second of the pass costs, in tokens.
        spent: seconds of drafters.
        choices: of each row.
    """

    total: int
    worth: float
    rho: float
    spent: float
    choices: list[Choice]


def may_pay(costs: Costs, drafter: int, kind: Kind, rows: int, rho: float, token: float, apart: float) -> bool:
    """Whether any draft of a model could pay in a batch of several rows, if all tokens of all rows were accepted.

    A position counts with the least average cost of one; after a copy, or in a pass that is padded anyway, it may cost
    less.

    Args:
        costs: of the rows.
        drafter: index of the model.
        kind: of the model.
        rows: of the batch.
        rho: the least that a second costs, in tokens.
        token: the most that a draft's token is worth in a row.
        apart: seconds that a round with a draft takes besides its pass and calls.
    """
    table, share = costs.table(rows, LARGEST), min((1.0 + costs.drafters[drafter].row * (rows - 1)) / rows, 1.0)
    return any(
        token * tokens > rho * (tokens * table.token + table.calls[drafter][tokens] * share + apart / rows)
        for tokens in ((*LENGTHS, *NODES) if kind.trees else LENGTHS)
    )


Worths = tuple[list[float], list[float], list[float]]
"""What further tokens of a row are worth: by `foretoken.policy.account.Runs.worth`, with the limit of `of_rounds`."""


def of_rounds(
    worths: Sequence[tuple[list[float], list[float], list[float], float]], rounds: Sequence[float]
) -> list[Worths]:
    """Limit what tokens are worth: one that is not foreseen is worth no more than the plain round that would emit it.

    To verify the foreseen tokens after it takes time, too, on some machines more than that plain round. The round
    counts as one of several passes, whether or not free drafters are asked now: counted as one of a single pass, a 10M
    target has 1.40 times plain decoding in replays, and 1.41 this way.

    Args:
        worths: of each row, as `foretoken.policy.account.Runs.worth` gives them.
        rounds: of each row, what its plain round is worth, in tokens.

    Returns:
        Of each row; rows that are alike share their lists (`Chains`).
    """
    made: dict[tuple[int, int, float], Worths] = {}
    limited = []
    for (*worth, each), most in zip(worths, rounds, strict=True):
        share = min(most / each, 1.0)
        key = id(worth[0]), id(worth[1]), share
        if key not in made:
            foreseen, here, behind = ([share * one for one in tokens] for tokens in worth)
            made[key] = foreseen, here, behind
        limited.append(made[key])
    return limited


class Chains:
    """Makes the options of models that draft chains; in a decision, rows that a model has not drafted in share them."""

    def __init__(self) -> None:
        self._of_new: dict[tuple[Any, ...], list[Option]] = {}

    def __call__(
        self,
        acceptance: Acceptance,
        longest: int,
        emitted: int,
        worths: Sequence[Sequence[float]] | None,
        *,
        hoping: bool = False,
    ) -> list[Option]:
        """The options of a model in a row.

        Args:
            acceptance: of the model in the row.
            longest: most tokens of a draft.
            emitted: tokens of the output.
            worths: what tokens are worth (`foretoken.policy.account.Runs.worth`); None for 1.
            hoping: as for `Acceptance.reach`.
        """
        key = acceptance.engine, longest, min(emitted, BEGINNING), None if worths is None else tuple(map(id, worths))
        new = not (acceptance.judged or hoping)
        if new and key in self._of_new:
            return self._of_new[key]
        reach = acceptance.reach(longest, emitted=emitted, hoping=hoping)
        foreseen = here = behind = expected = [0.0, *accumulate(reach)]
        if worths is not None:
            foreseen, here, behind = ([0.0, *accumulate(map(mul, reach, each))] for each in worths)
        made = [Option(at, expected[at], foreseen[at], here[at], behind[at]) for at in LENGTHS if at <= longest]
        if new:
            self._of_new[key] = made
        return made
