"""The contract of a verifier: a pure function of a draft and the target's distributions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.draft import Draft, int_tensor
from foretoken.errors import ParameterError
from foretoken.verify.residual import safe_ratio

if TYPE_CHECKING:
    from typing_extensions import TypeIs


class Verdict:
    """The outcome of a round's verification, as tensors and as lists.

    It is made from either form; the other one is computed on first use. On a CPU a round reads the lists alone, and to
    make a tensor would take as long as the decision itself.
    """

    _device: torch.device | str

    def __init__(self, path: Tensor, counts: Tensor, tokens: Tensor) -> None:
        self.path, self.counts, self.tokens = path, counts, tokens

    @classmethod
    def from_lists(cls, accepted: list[list[int]], following: list[int], device: torch.device | str = "cpu") -> Verdict:
        """A verdict of `accepted` and `following`; its tensors are on the device."""
        made = cls.__new__(cls)
        made.accepted, made.following, made._device = accepted, following, device
        return made

    @cached_property
    def accepted(self) -> list[list[int]]:
        """Of each row, the nodes of its accepted tokens in order; callers must not change the lists."""
        return [path[:count] for path, count in zip(self.path.tolist(), self.counts.tolist(), strict=True)]

    @cached_property
    def following(self) -> list[int]:
        """`tokens` as a list."""
        found: list[int] = self.tokens.tolist()
        return found

    @cached_property
    def path(self) -> Tensor:
        """``[B, D]`` int64, node numbers of the accepted tokens in order; entries past a row's count are 0."""
        depth = max(map(len, self.accepted), default=0)
        padded = [path + [0] * (depth - len(path)) for path in self.accepted]
        return int_tensor(padded, self._device).reshape(len(padded), depth)

    @cached_property
    def counts(self) -> Tensor:
        """``[B]`` int64, accepted draft tokens of each row."""
        return int_tensor([len(path) for path in self.accepted], self._device)

    @cached_property
    def tokens(self) -> Tensor:
        """``[B]`` int64, the token after the accepted ones.

        The replacement of a rejected token (drawn from the residual), or the bonus token when a whole path was
        accepted.
        """
        return int_tensor(self.following, self._device)


class BaseVerifier:
    """Metadata of verifiers of both kinds. Each attribute is a class attribute with a default.

    Attributes:
        name: used in messages and reports; the class's name where a class defines none.
        lossless: the output is distributed exactly as the target's. Say so only where it can be proven: `verify.exact`
            checks it. The default, False, keeps the engine from shortcuts that are only valid for lossless verifiers.
        trees: drafts may branch. Where False, drafters are asked for chains.
        drawn_only: siblings have to be drawn independently, with replacement: trees of chosen tokens are refused.
        summary: one line for people: the acceptance criterion and the guarantee.
        citation: the paper.
    """

    name: str = ""
    lossless: bool = False
    trees: bool = False
    drawn_only: bool = False
    summary: str = ""
    citation: str = ""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.name in ("", *(base.__name__ for base in cls.__mro__[1:])):  # the class body sets none
            cls.name = cls.__name__

    def __repr__(self) -> str:
        return f"<verifier {self.name}>"


class Verifier(BaseVerifier, ABC):
    """A rejection-sampling verifier: two distributions, from which a round draws one node and one token.

    Both functions are pure, batched, work in the dtype they are given (float64 in proofs) and never return NaN on a
    legal input: rows of `target_probs` that sum to 1, and draft tokens with a positive probability under their q.
    """

    @abstractmethod
    def stop_probs(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """The probability of stopping at each node.

        Args:
            draft: ``N`` tokens a row.
            target_probs: ``[B, N+1, V]``, the target's distribution p after each node's path, sampling parameters
                applied.

        Returns:
            ``[B, N+1]``, rows sum to 1.
        """

    @abstractmethod
    def next_probs(self, draft: Draft, target_probs: Tensor, node: Tensor) -> Tensor:
        """The distribution ``[B, V]`` of the token that follows when the round stops at `node`, ``[B]`` int64."""


class CoupledVerifier(BaseVerifier, ABC):
    """A verifier that accepts the draft tokens which the target itself samples, with noise shared by the drafter.

    For a given seed the output is, token by token, what the target alone would have sampled.
    """

    @abstractmethod
    def follow(self, draft: Draft, picks: Tensor) -> Verdict:
        """Walk from the root along children whose token equals the target's pick.

        Args:
            draft: ``N`` tokens a row.
            picks: ``[B, N+1]`` int64, the token that the target samples after each node.
        """


def is_coupled(verifier: Verifier | CoupledVerifier) -> TypeIs[CoupledVerifier]:
    """Whether it is a `CoupledVerifier`."""
    return isinstance(verifier, CoupledVerifier)


AnyVerifier = Verifier | CoupledVerifier


def require_chain(name: str, draft: Draft) -> None:
    """Raise a ParameterError for drafts that may branch, on behalf of a verifier that takes chains only."""
    if not draft.is_chain:
        raise ParameterError(
            f"verifier {name!r} takes chains, and this draft may branch: build it with Draft.chain, or verify it with "
            "tree, traversal or coupled"
        )


def acceptance_ratios(draft: Draft, target_probs: Tensor) -> Tensor:
    """``p(x) / q(x)`` of each draft token, p and q at its parent, ``[B, N]``; ``p(x)`` for chosen tokens; 0 on padding.

    A token with ``q(x) = 0`` can't have been drawn; its ratio is 0 where ``p(x) = 0`` too, infinite otherwise.
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
