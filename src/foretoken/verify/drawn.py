"""The exact distribution of what `decide` draws for a verifier, shortcuts included.

`Verifier.stop_probs` and `Verifier.next_probs` are the definition. `decide` draws from them with two uniforms, and on a
CPU it takes shortcuts that never compute them (`foretoken.verify.fast`). For a given draft and target both
outcomes are step functions of the uniforms, and uniforms are multiples of ``2**-53``. So their exact distribution can
be counted: the steps are found by bisection, to the last of the 53 bits, by calls of `decide` itself. `Drawn` gives
the result the form of a verifier, so that `foretoken.verify.exact.check` proves it lossless as it does any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.verify.base import Verdict, Verifier
from foretoken.verify.decide import decide
from foretoken.verify.residual import rows_at

STEPS = 1 << 53
"""Number of values that a uniform takes: ``k / STEPS`` for k in 0 … STEPS - 1."""

_ROWS = 128  # rows a call while steps are searched for, or about as many: so few cost hardly more than one
_PROBES = 16  # random uniforms a row at which the outcome is compared with the steps found

Decide = Callable[[Verifier, Draft, Tensor, list[list[float]]], Verdict]


class Drawn:
    """A verifier whose distributions are those of what `decide` draws for another verifier.

    Probabilities are exact multiples of ``2**-53``. Where an outcome is not a rising step function of its uniform, or
    the token depends on the node's uniform, the result is NaN, which no proof accepts.

    Args:
        verifier: a rejection-sampling verifier.
        decide: the function that draws: `foretoken.verify.decide`, or another one of the same signature.
        dtype: of the probabilities that it gets; float32 in production.
        alone: call it with one row at a time: shortcuts have a path of their own for single rows.
    """

    lossless = True
    trees = True
    summary = "the distributions of what is drawn for another verifier"
    citation = ""

    def __init__(
        self, verifier: Verifier, decide: Decide = decide, dtype: torch.dtype = torch.float64, alone: bool = False
    ) -> None:
        self.name = f"drawn {verifier.name}"
        self._verifier = verifier
        self._decide = decide
        self._dtype = dtype
        self._alone = alone
        self._steps: tuple[Draft, Tensor, Tensor] | None = None

    def stop_probs(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """The probability that each node is drawn, ``[B, N+1]`` float64."""
        steps = self._node_steps(draft, target_probs)

        def node(rows: Tensor, first: Tensor) -> Tensor:
            return self._outcomes(draft, target_probs, rows, first, torch.zeros_like(first), self._alone)[0]

        return _step_probs(steps, _agrees(node, steps))

    def next_probs(self, draft: Draft, target_probs: Tensor, node: Tensor) -> Tensor:
        """The probability of each token after `node` ``[B]``, ``[B, V]`` float64; p where the node is never drawn."""
        bounds = _with_ends(self._node_steps(draft, target_probs))
        start, end = bounds.gather(1, node[:, None])[:, 0], bounds.gather(1, node[:, None] + 1)[:, 0]
        result = rows_at(target_probs, node).double().clone()
        reached = (end > start).nonzero()[:, 0]
        if len(reached) == 0:
            return result
        start, end = start[reached], end[reached]

        def token(rows: Tensor, second: Tensor, alone: bool) -> Tensor:
            return self._outcomes(draft, target_probs, reached[rows], start[rows], second, alone)[1]

        def anywhere(rows: Tensor, second: Tensor) -> Tensor:
            """The token drawn with a first uniform that is random within the node's step, not at its start."""
            inside = (torch.rand(len(rows), generator=_generator(), dtype=torch.float64) * (end - start)[rows]).long()
            first = start[rows] + inside
            return self._outcomes(draft, target_probs, reached[rows], first, second, self._alone)[1]

        steps = self._search(token, len(reached), target_probs.shape[-1])
        result[reached] = _step_probs(steps, _agrees(anywhere, steps))
        return result

    def _node_steps(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """``[B, N]``: the smallest uniform, in units of 1 / STEPS, for which the node drawn is at least 1, 2, …"""
        if self._steps is None or self._steps[0] is not draft or self._steps[1] is not target_probs:

            def node(rows: Tensor, first: Tensor, alone: bool) -> Tensor:
                return self._outcomes(draft, target_probs, rows, first, torch.zeros_like(first), alone)[0]

            self._steps = draft, target_probs, self._search(node, draft.batch_size, draft.width + 1)
        return self._steps[2]

    def _search(self, outcome: Callable[[Tensor, Tensor, bool], Tensor], size: int, values: int) -> Tensor:
        """`_find_steps` for an outcome that is told whether its rows are drawn alone.

        Each row alone costs a call, so the steps of all rows together are tried first: mostly they are the same.
        """
        steps = _find_steps(lambda rows, uniforms: outcome(rows, uniforms, False), size, values)
        if self._alone:
            steps = _find_steps(lambda rows, uniforms: outcome(rows, uniforms, True), size, values, steps)
        return steps

    def _outcomes(
        self, draft: Draft, target_probs: Tensor, rows: Tensor, first: Tensor, second: Tensor, alone: bool
    ) -> tuple[Tensor, Tensor]:
        """Nodes and tokens ``[R]`` that are drawn for `rows` ``[R]`` with these uniforms, in units of 1 / STEPS."""
        uniforms = torch.stack([first, second], dim=1).double() / STEPS
        part = draft.part(rows.tolist())
        part = replace(part, probs=None if part.probs is None else part.probs.to(self._dtype))
        probs = target_probs[rows].to(self._dtype)
        if not alone:
            return _node_and_token(self._decide(self._verifier, part, probs, uniforms.tolist()))
        singles = [slice(row, row + 1) for row in range(len(rows))]
        found = [
            _node_and_token(self._decide(self._verifier, part.part(row), probs[row], uniforms[row].tolist()))
            for row in singles
        ]
        return torch.cat([node for node, _ in found]), torch.cat([token for _, token in found])


def _node_and_token(verdict: Verdict) -> tuple[Tensor, Tensor]:
    """``[B]`` each: the last accepted node, 0 for none, and the token after it."""
    path = torch.nn.functional.pad(verdict.path, (1, 0))
    return path.gather(1, verdict.counts[:, None])[:, 0], verdict.tokens


Outcome = Callable[[Tensor, Tensor], Tensor]
"""Takes rows ``[R]`` and uniforms ``[R]`` in units of 1 / STEPS; returns the nodes or tokens drawn, ``[R]``."""


def _find_steps(outcome: Outcome, size: int, values: int, guess: Tensor | None = None) -> Tensor:
    """``[size, values - 1]``: where outcomes of at least 1, 2, … begin; STEPS for those that never occur.

    Args:
        outcome: what is drawn; not decreasing in the uniform.
        size: number of rows.
        values: number of outcomes.
        guess: where they may begin, tried first; what is not found there is searched for, in halves. Without it all are
            searched for in more parts at once, for a call takes about as long for `_ROWS` rows as for one.
    """
    wanted = torch.arange(1, values).repeat(size)
    rows = torch.arange(size).repeat_interleave(values - 1)
    low, high = torch.zeros_like(wanted), torch.full_like(wanted, STEPS)

    def narrow(which: Tensor, places: Tensor) -> None:
        """Try `places` ``[R, P]`` of the steps `which` ``[R]``."""
        # An outcome settled at STEPS stays there: STEPS itself is not a uniform that could be tried.
        uniforms = places.clamp(0, STEPS - 1).flatten()
        tried = outcome(rows[which].repeat_interleave(places.shape[1]), uniforms).view_as(places)
        reached = (tried >= wanted[which, None]) | (places == STEPS)
        high[which] = torch.where(reached & (places >= 0), places, high[which, None]).amin(1)
        low[which] = torch.where(reached, low[which, None], places + 1).amax(1)

    if guess is not None:
        narrow(torch.arange(len(wanted)), guess.reshape(-1, 1) - torch.arange(2))
    parts = 2 if guess is not None else max(2, min(32, _ROWS // max(1, len(wanted)) + 1))
    cuts = torch.arange(1, parts)
    while len(which := (low < high).nonzero()[:, 0]):
        start, span = low[which, None], (high - low)[which, None]
        # start + span * cuts // parts, without products beyond 64 bits; the first one of a span of 1 is `start`.
        narrow(which, start + span // parts * cuts + span % parts * cuts // parts)
    return high.view(size, values - 1)


def _agrees(outcome: Outcome, steps: Tensor) -> Tensor:
    """``[B]`` bool: the outcomes at both ends and at random uniforms are those that `steps` predicts."""
    size = len(steps)
    random = (torch.rand(size, _PROBES, generator=_generator(), dtype=torch.float64) * STEPS).long()
    probes = torch.cat([random, torch.zeros(size, 1).long(), torch.full((size, 1), STEPS - 1)], dim=1)
    rows = torch.arange(size).repeat_interleave(probes.shape[1])
    wanted = (steps[:, None] <= probes[..., None]).sum(-1)
    return (outcome(rows, probes.flatten()).view_as(wanted) == wanted).all(1)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _with_ends(steps: Tensor) -> Tensor:
    """``[B, N+2]``: steps between 0 and STEPS; entry i + 1 is where outcome i ends."""
    return torch.nn.functional.pad(torch.nn.functional.pad(steps, (1, 0)), (0, 1), value=STEPS)


def _step_probs(steps: Tensor, sound: Tensor) -> Tensor:
    """The probability of each outcome, ``[B, N+1]``; NaN in rows that are not sound."""
    return (_with_ends(steps).diff(dim=1).double() / STEPS).masked_fill(~sound[:, None], torch.nan)
