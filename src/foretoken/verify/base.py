"""What a verifier is: a pure function from a draft and the target's law to where to stop and what to say next."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.errors import ParameterError
from foretoken.verify.residual import safe_ratio

if TYPE_CHECKING:
    from typing_extensions import TypeIs


@dataclass(frozen=True)
class Verdict:
    """What a round keeps.

    Attributes:
        path: ``[B, D]`` int64, node numbers of the accepted tokens in order; entries past a row's count are 0.
        counts: ``[B]`` int64, accepted draft tokens of each row.
        tokens: ``[B]`` int64, the token after the accepted ones: the replacement of a rejected token (drawn from the
            residual), or the bonus token when a whole path was accepted.
    """

    path: Tensor
    counts: Tensor
    tokens: Tensor


class _Described(Protocol):
    name: str
    lossless: bool
    trees: bool
    """Whether drafts may branch."""
    summary: str
    """One line for people: the rule and its guarantee."""
    citation: str


@runtime_checkable
class Verifier(_Described, Protocol):
    """A verifier by rejection: two laws, from which a round draws one node and one token.

    Both functions are pure, work in the dtype they are given (float64 in proofs) and never return NaN on a legal
    input: rows of `target_probs` that sum to 1, and drafted tokens that their q gives a positive probability.
    """

    def stop_probs(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """The probability of stopping at each node.

        Args:
            draft: ``N`` tokens a row.
            target_probs: ``[B, N+1, V]``, the target's law after each node's path, sampling parameters applied.

        Returns:
            ``[B, N+1]``, rows sum to 1.
        """

    def next_probs(self, draft: Draft, target_probs: Tensor, node: Tensor) -> Tensor:
        """The law of the token that follows when the round stops at `node` (``[B]`` int64): ``[B, V]``."""


@runtime_checkable
class CoupledVerifier(_Described, Protocol):
    """A verifier that follows the token which the target itself picks at each node."""

    def follow(self, draft: Draft, picks: Tensor) -> Verdict:
        """Walk from the root along children that hold the target's pick.

        Args:
            draft: ``N`` tokens a row.
            picks: ``[B, N+1]`` int64, the token that the target picks after each node.
        """


@cache
def _follows(rule: type) -> bool:
    return hasattr(rule, "follow")


def is_coupled(verifier: Verifier | CoupledVerifier) -> TypeIs[CoupledVerifier]:
    """Whether it is a `CoupledVerifier`. Asked in every round, where `isinstance` of a protocol takes too long."""
    return _follows(type(verifier))


AnyVerifier = Verifier | CoupledVerifier


def require_chain(name: str, draft: Draft) -> None:
    """Refuse drafts that may branch, on behalf of a verifier that knows chains alone."""
    if not draft.is_chain:
        raise ParameterError(
            f"verifier {name!r} takes chains, and this draft may branch: build it with Draft.chain, or verify it with "
            "tree, traversal or coupled"
        )


def acceptance_ratios(draft: Draft, target_probs: Tensor) -> Tensor:
    """``p(x) / q(x)`` of each drafted token under its parent, ``[B, N]``; ``p(x)`` for chosen tokens; 0 on padding.

    A token that its q gives no probability can't have been drawn; its ratio is 0 where p is 0 too, infinite otherwise.
    """
    width = target_probs.shape[1] - 1
    inside = draft.tokens < target_probs.shape[-1]
    tokens = torch.where(inside, draft.tokens, 0)
    p = _at_parent(draft, target_probs[:, :width] if draft.is_chain else target_probs, tokens)
    ratios = torch.where(inside & draft.used(), p, 0)
    if draft.probs is None:
        return ratios
    return safe_ratio(ratios, _at_parent(draft, draft.probs, draft.tokens).to(ratios.dtype))


def _at_parent(draft: Draft, probs: Tensor, tokens: Tensor) -> Tensor:
    """``probs[b, parent of token i, token i]``, ``[B, N]``."""
    rows = torch.arange(draft.batch_size, device=probs.device)[:, None]
    return probs[rows, draft.parents, tokens]
