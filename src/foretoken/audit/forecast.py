"""The forecast before an audit: how many samples it needs, and whether there is anything to test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.audit.errors import AuditError
from foretoken.audit.pair import View
from foretoken.audit.sequential import Ledger
from foretoken.audit.statistics import Floats, detectable_tv
from foretoken.audit.tokens import BINS, Tokens
from foretoken.audit.worlds import World, describe
from foretoken.sampling.params import SamplingParams

LONG = 24
"""Tokens of the longer samples of a small world."""

LEAST_RANDOM = 1e-4
"""Probability of all outputs but the most probable one below which there is nothing to test: 100,000 samples have some
ten others then."""

_CURE = "nothing is drawn at random there, so there is nothing to test: raise the temperature, or loosen the filters"


@dataclass(frozen=True)
class Wanted:
    """About how much reaches the wanted power.

    Attributes:
        short: samples of a world's depth.
        long: samples of `LONG` tokens.
    """

    short: int
    long: int


def wanted(world: World, ledger: Ledger) -> Wanted:
    """How many samples of a world reach the wanted power.

    Raises:
        AuditError: none do, for there is one possible output.
    """
    if max(1.0 - float(probs.max()) for probs in world.joint_probs) < LEAST_RANDOM:
        raise AuditError(f"at {describe(world.params)} each prompt of a small world has one possible output: {_CURE}")
    return Wanted(
        max(500, _needed(world.joint_probs, ledger, ledger.plan.max_samples)), wanted_tokens(ledger) // LONG + 1
    )


def wanted_tokens(ledger: Ledger) -> int:
    """How many tokens reach the wanted power, each judged under its own context."""
    return _needed([np.full(BINS, 1 / BINS)], ledger, 1 << 40)


def check_drawn(tokens: Tokens, name: str, params: SamplingParams) -> None:
    """See to it that tokens were drawn, and not merely taken.

    Args:
        tokens: what was seen.
        name: of the target.
        params: the claim.

    Raises:
        AuditError: each of them was the only possible one.
    """
    seen = tokens.possible.tokens
    if seen and tokens.largest_rest < LEAST_RANDOM and not tokens.possible.impossible:
        raise AuditError(
            f"at {describe(params)} each of the first {seen:,} tokens of {name} was the only possible one: {_CURE}, or "
            "give other prompts"
        )


def check_open(first: View, name: str, params: SamplingParams) -> None:
    """See to it that two systems had a choice.

    Args:
        first: what both wrote first.
        name: of the reference.
        params: of both.

    Raises:
        AuditError: all outputs after a prompt, of both, begin with the same token.
    """
    prompts = {key[0] for key, _, _ in first.shares()}
    if len(first.shares()) == len(prompts):
        raise AuditError(
            f"at {describe(params)} all {2 * first.pairs:,} outputs, of the subject and of {name}, begin with the same "
            f"token after each prompt: {_CURE}, or give prompts that go on in more than one way"
        )


def _needed(probs: Sequence[Floats], ledger: Ledger, most: int) -> int:
    """Samples, evenly of these distributions, that reach the wanted power; `most` if they are more.

    Distances fall with the root of the number: from a number that is a little less than that says, it is raised until
    it is enough.
    """
    plan, count = ledger.plan, 4000

    def reach() -> float:
        return detectable_tv([(p, count // len(probs)) for p in probs], ledger.threshold, plan.power)

    count = int(0.85 * count * (reach() / plan.tv) ** 2)
    while count < most and (distance := reach()) > plan.tv:
        count = int(count * max(1.04, min((distance / plan.tv) ** 2, 2.0))) + 1
    return min(count, most)
