"""What is tried: drafters, and settings of each."""

from __future__ import annotations

import inspect
from dataclasses import asdict, dataclass
from typing import Any, Literal

from foretoken import drafters, verify
from foretoken.policy.request import AUTO

_CHAINS = (3, 6, 10)  # tokens of a chain that are tried besides what the controller chooses
_TREES = (8, 16, 32)  # nodes of a tree, likewise
_GROWN = 12  # nodes of a tree where chains are tried too


@dataclass(frozen=True)
class Candidate:
    """A drafter with settings.

    Attributes:
        drafter: as `foretoken.Engine` takes it, in words.
        verifier: a name.
        num_speculative_tokens: most tokens drafted a round.
        tree: what trees it grows, in the words of `Profile.tree`; None for its own way.
    """

    drafter: str
    verifier: str
    num_speculative_tokens: int | Literal["auto"]
    tree: str | None = None

    def as_json(self) -> dict[str, Any]:
        """For records."""
        return asdict(self)

    def __str__(self) -> str:
        tree = f", {self.tree} tree" if self.tree else ""
        return f"{self.drafter}, {self.verifier}, k = {self.num_speculative_tokens}{tree}"


PLAIN = Candidate("none", verify.usual(trees=False), AUTO)
"""Decoding without speculation: what all others are measured against."""


def registered() -> list[str]:
    """Names of the drafters that need neither a model nor anything else."""
    return [
        name
        for name, known in drafters.known().items()
        if name != PLAIN.drafter and not known.needs_model and not _needs_argument(known)
    ]


def _needs_argument(known: drafters.Known) -> bool:
    """Whether its argument has no default."""
    if not known.argument:
        return False
    parameter = inspect.signature(known.make).parameters.get(known.argument)
    return parameter is not None and parameter.default is parameter.empty


def usual(drafter: str, trees: bool) -> Candidate:
    """A drafter with settings that suit any."""
    return Candidate(drafter, verify.usual(trees), AUTO)


def fixed(drafter: str, trees: bool) -> list[Candidate]:
    """Two fixed draft lengths of a drafter."""
    verifier = usual(drafter, trees).verifier
    return [Candidate(drafter, verifier, k) for k in (_TREES if trees else _CHAINS)[:2]]


def settings(drafter: str, trees: bool, sampled: bool) -> list[Candidate]:
    """The settings of a drafter that are worth a try, the usual ones first.

    Args:
        drafter: its name.
        trees: its drafts may branch.
        sampled: some outputs are sampled, so that it matters which lossless verifier is used; greedy ones are the same.
    """
    usually = usual(drafter, trees)
    found = [usually, *(Candidate(drafter, usually.verifier, k) for k in (_TREES if trees else _CHAINS))]
    if trees or sampled:  # chains of drafters of trees; and token by token, which takes less time and accepts less
        found.append(Candidate(drafter, "block" if trees else "token", AUTO))
    return found


def grown(drafter: str, static: str | None) -> list[Candidate]:
    """Trees of a drafter that drafts chains by itself: dynamic ones, and static ones where outputs are sampled.

    Args:
        drafter: its name.
        static: the word for the static ones; None where all outputs are greedy, for which those are not made.
    """
    kinds = ["dynamic", static] if static else ["dynamic"]
    return [Candidate(drafter, "traversal", k, tree) for tree in kinds for k in (AUTO, _GROWN)]


def cascade(cheap: str, better: str) -> str:
    """Two drafters as one cascade: the second drafts where the first expects fewer tokens."""
    return f"{cheap},{better}"
