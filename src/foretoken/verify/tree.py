"""Trees from the root down: at each node try the children in turn, each against the residual of those before it."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.verify.base import Verifier, acceptance_ratios
from foretoken.verify.residual import (
    adjusted_without,
    normalise_or,
    rows_at,
    safe_ratio,
    spare_mass,
    value_at,
    without,
)
from foretoken.verify.token import TokenVerifier
from foretoken.verify.trees import child_table, child_tokens, select_nodes

_token_level = TokenVerifier()


class TopDownVerifier(Verifier):
    """Applies one acceptance step to the children of a node, from the root down until no child is accepted.

    Subclasses define that step. Drafts without siblings are verified token by token instead.
    """

    lossless = True
    trees = True
    citation: str

    def stop_probs(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """The probability of reaching each node and accepting none of its children, ``[B, N+1]``."""
        if draft.is_chain:
            return _token_level.stop_probs(draft, target_probs)
        children = child_table(draft)  # [B, N+1, R]
        # By node; the root's entry stands for "no child" and is never accepted.
        accept = torch.nn.functional.pad(acceptance_ratios(draft, target_probs).clamp(max=1), (1, 0))
        if children.shape[-1] > 1:
            nodes, _ = select_nodes(children[..., 1] > 0)
            tried = rows_at(children, nodes)  # [B, U, R]
            p, q = rows_at(target_probs, nodes), draft_probs_at(draft, nodes)
            tokens = child_tokens(draft, tried)
            tries = self._accept(p, q, tokens, tried > 0, draft.replacement)
            accept.scatter_(1, tried.flatten(1), tries.flatten(1))
            accept[:, 0] = 0
        failed = 1 - accept.gather(1, children.flatten(1)).reshape(children.shape)
        missed = failed.cumprod(-1)
        before = torch.nn.functional.pad(missed[..., :-1], (1, 0), value=1.0)
        step = torch.zeros_like(accept).scatter_(1, children.flatten(1), ((1 - failed) * before).flatten(1))
        reach = step.clone()
        reach[:, 0] = 1
        for i in range(draft.width):
            reach[:, i + 1] *= reach.gather(1, draft.parents[:, i : i + 1])[:, 0]
        return reach * missed[..., -1]

    def next_probs(self, draft: Draft, target_probs: Tensor, node: Tensor) -> Tensor:
        """The residual after all children of the node are rejected; p where it has none; ``[B, V]``."""
        if draft.is_chain:
            return _token_level.next_probs(draft, target_probs, node)
        tried = rows_at(child_table(draft), node)  # [B, R]
        p, q, tokens = rows_at(target_probs, node), draft_probs_at(draft, node), child_tokens(draft, tried)
        if tried.shape[-1] == 1:
            return _reject(p, q, tokens[:, 0], tried[:, 0] > 0)
        return self._residual(p, q, tokens, tried > 0, draft.replacement)

    @abstractmethod
    def _accept(self, p: Tensor, q: Tensor | None, tokens: Tensor, present: Tensor, replacement: bool) -> Tensor:
        """The probability of accepting each child when its turn comes, ``[..., R]``; 0 where none is present.

        Args:
            p: ``[..., V]``, the target's distribution at the node.
            q: ``[..., W]``, the distribution that the children were drawn from, or None for chosen ones.
            tokens: ``[..., R]`` int64, the children in order.
            present: ``[..., R]`` bool; children that are present come first.
            replacement: whether they were drawn with replacement.
        """

    @abstractmethod
    def _residual(self, p: Tensor, q: Tensor | None, tokens: Tensor, present: Tensor, replacement: bool) -> Tensor:
        """The distribution of the next token when none is accepted, ``[..., V]``; p where none is present."""


class TreeVerifier(TopDownVerifier):
    """Recursive rejection at each node (SpecInfer; without replacement: Sequoia, RSD).

    Children are tried in order against ``p^1 = p``, ``q^1 = q``: accept with ``min(1, p^j(c_j)/q^j(c_j))``, else
    ``p^{j+1} = norm((p^j - q^j)+)``, and without replacement ``q^{j+1} = norm(q^j without c_j)``. Chosen children
    have a one-hot q each: accept with ``p^j(c_j)``, else remove it from p.
    """

    name = "tree"
    summary = (
        "tries siblings in turn, each against the residual of those before it; siblings drawn either way, or chosen"
    )
    citation = (
        "Miao et al. 2023, arXiv 2305.09781; Chen et al. 2024, arXiv 2402.12374; Jeon et al. 2024, arXiv 2402.14160"
    )

    def _accept(self, p: Tensor, q: Tensor | None, tokens: Tensor, present: Tensor, replacement: bool) -> Tensor:
        return self._try(p, q, tokens, present, replacement, last=False)[0]

    def _residual(self, p: Tensor, q: Tensor | None, tokens: Tensor, present: Tensor, replacement: bool) -> Tensor:
        return self._try(p, q, tokens, present, replacement, last=True)[1]

    def _try(
        self, p: Tensor, q: Tensor | None, tokens: Tensor, present: Tensor, replacement: bool, last: bool
    ) -> tuple[Tensor, Tensor]:
        """Each child's acceptance probability, and p after all; `last`: compute the last child's rejection too."""
        accept, ranks = [], tokens.shape[-1]
        for r in range(ranks):
            token, here = tokens[..., r], present[..., r]
            ratio = value_at(p, token[..., None])[..., 0]
            if q is not None:
                ratio = safe_ratio(ratio, value_at(q, token[..., None])[..., 0])
            accept.append(torch.where(here, ratio.clamp(max=1), 0))
            if r + 1 == ranks and not last:
                break
            p = _reject(p, q, token, here)
            if q is not None and not replacement and r + 1 < ranks:
                q = normalise_or(without(q, token), q)
        return torch.stack(accept, dim=-1), p


def draft_probs_at(draft: Draft, nodes: Tensor) -> Tensor | None:
    """q at each node, which its children were drawn from, ``[B, …, W]``; None for chosen tokens.

    Nodes that have no q in the draft get an arbitrary one.
    """
    if draft.probs is None:
        return None
    if draft.probs.shape[1] == 0:
        return draft.probs.new_zeros((*nodes.shape, draft.probs.shape[-1]))
    return rows_at(draft.probs, nodes.clamp(max=draft.probs.shape[1] - 1))


def _reject(p: Tensor, q: Tensor | None, token: Tensor, tried: Tensor) -> Tensor:
    """The residual of p after a token, drawn from q or chosen, was rejected, ``[..., V]``; p where none was tried."""
    if q is None:
        return adjusted_without(p, torch.where(tried, token, p.shape[-1]))
    return normalise_or(spare_mass(p, q, tried), p)
