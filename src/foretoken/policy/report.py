"""A report of the costs and acceptance rates that a speculation policy has estimated, for people to look at."""

from __future__ import annotations

from math import exp
from typing import Any

from foretoken.policy.policy import Policy
from foretoken.policy.request import LENGTHS, NODES

_POSITIONS = (1, 2, 3, 4, 6, 8, 12, 17, 24, 33)


def report(policy: Policy) -> dict[str, Any]:
    """The costs and acceptance rates that the policy decides by, over all requests of an engine.

    Only reads what the policy replaces as a whole, so that another thread than the policy's may call it.

    Args:
        policy: with names of its drafters.

    Returns:
        JSON. Costs are in rounds without drafts: ``plain_seconds`` is one of these, null before the first was timed;
        ``target`` has pairs of positions of a pass and the cost of the round, drafters left out. Of each drafter,
        ``calls`` has pairs of draft tokens (nodes, if its drafts are trees) and cost; empty if it is free. Its
        ``acceptance``, of greedy and of sampled requests apart, is of chains the rate by level (see
        `foretoken.policy.acceptance`), of trees pairs of nodes and expected accepted tokens.
    """
    costs = policy.costs
    plain = costs.target(1)
    seconds = plain * exp(costs.drift.value) if costs.anchored else None
    drafters = []
    for at, (name, kind, free) in enumerate(zip(policy.names, policy.kinds, policy.free, strict=True)):
        sizes = NODES if kind.trees else LENGTHS
        rates = {"greedy": policy.rates(at, sampled=False), "sampled": policy.rates(at, sampled=True)}
        drafters.append(
            {
                "name": name,
                "trees": kind.trees,
                "calls": [] if free else [[size, _rounded(costs.draft(at, size, 1, 0) / plain)] for size in sizes],
                "acceptance": {
                    which: [[nodes, _rounded(one.tree(nodes))] for nodes in NODES]
                    if kind.trees
                    else [_rounded(rate) for rate in one.rates()]
                    for which, one in rates.items()
                },
            }
        )
    return {
        "plain_seconds": None if seconds is None else _rounded(seconds),
        "speedup": _rounded(policy.speedup),
        "target": [[size, _rounded(costs.target(size) / plain)] for size in _POSITIONS],
        "drafters": drafters,
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
