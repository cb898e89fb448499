"""Traversal verification: decides from the leaves of a tree to its root; on a chain it is block verification."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.verify.base import Verifier
from foretoken.verify.block import BlockVerifier
from foretoken.verify.residual import normalise_or, rows_at, safe_ratio, spare_mass, value_at, without
from foretoken.verify.tree import draft_probs_at
from foretoken.verify.trees import child_table, child_tokens, post_order, select_nodes

_block = BlockVerifier()


class TraversalVerifier(Verifier):
    """Weng et al. 2025, algorithm 1: depth first, each path is accepted or rejected at its leaf.

    A node has a weight a (root: 1; child c of u: ``min(1, a_u p_u(c)/q_u(c))``) and its own copies of p and q, updated
    as its children are rejected. A leaf is accepted, with its whole path, with probability a. If it is rejected, it is
    deleted and its parent u is updated with ``D = (a_u p_u - q_u)+``, ``S = ΣD``: ``p_u = norm(D)``,
    ``a_u = S/(S + 1 - a_u)``, and for children drawn without replacement q_u loses the token. A node whose children
    are all deleted is a leaf.

    These updates do not depend on the random outcomes in other branches. So all weights are computed from the root
    down, level by level, and the probability of stopping at a node is a product over the nodes in post-order.
    """

    name = "traversal"
    lossless = True
    trees = True
    summary = "decides at the leaves of a tree; accepts at least as much as tree, and equals block on chains"
    citation = "Weng et al. 2025, arXiv 2505.12398"

    def stop_probs(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """``a_v Π (1 - a_u)`` over the nodes u that precede v in post-order, ``[B, N+1]``."""
        if draft.is_chain:
            return _block.stop_probs(draft, target_probs)
        order = post_order(draft)
        accept = self._leaf_weights(draft, target_probs).gather(1, order)
        all_rejected = torch.nn.functional.pad((1 - accept).cumprod(1)[:, :-1], (1, 0), value=1.0)
        return torch.zeros_like(accept).scatter_(1, order, accept * all_rejected)

    def next_probs(self, draft: Draft, target_probs: Tensor, node: Tensor) -> Tensor:
        """The node's p after all its children are deleted, ``[B, V]``; only the path to the node is computed."""
        if draft.is_chain:
            return _block.next_probs(draft, target_probs, node)
        children = child_table(draft)
        path, counts = draft.path(node)
        weight = target_probs.new_ones(draft.batch_size)
        here = torch.zeros_like(node)
        for step in range(path.shape[1]):
            onward = path[:, step]
            tried = rows_at(children, here)
            rank = (tried == onward[:, None]).to(torch.int8).argmax(1)
            tried = tried[:, : int(rank.max()) + 1]
            p, q = rows_at(target_probs, here), draft_probs_at(draft, here)
            tokens = child_tokens(draft, tried)
            below, _, _ = _delete_children(weight, p, q, tokens, tried > 0, draft.replacement, last=False)
            inside = step < counts
            weight = torch.where(inside, below.gather(1, rank[:, None])[:, 0], weight)
            here = torch.where(inside, onward, here)
        tried = rows_at(children, here)
        p, q = rows_at(target_probs, here), draft_probs_at(draft, here)
        return _delete_children(weight, p, q, child_tokens(draft, tried), tried > 0, draft.replacement, last=True)[2]

    def _leaf_weights(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """Each node's weight once its children are deleted, ``[B, N+1]``; 0 on padding, 1 at the root."""
        children = child_table(draft)
        depths = draft.depths()
        size, nodes_in_all = depths.shape
        # One extra column takes the values of absent children and is cut off at the end.
        weights = target_probs.new_zeros((size, nodes_in_all + 1))
        weights[:, 0] = 1
        leaf_weights = weights.clone()
        used = torch.nn.functional.pad(draft.used(), (1, 0), value=True)
        levels = int(torch.where(used, depths, 0).max()) if size else 0
        for level in range(levels + 1):
            on_level = used & (depths == level)
            leaf_weights[:, :-1] = torch.where(on_level, weights[:, :-1], leaf_weights[:, :-1])
            nodes, valid = select_nodes(on_level & (children[..., 0] > 0))
            if nodes.shape[1] == 0:
                continue
            tried = torch.where(valid[..., None], rows_at(children, nodes), 0)
            p, q = rows_at(target_probs, nodes), draft_probs_at(draft, nodes)
            tokens = child_tokens(draft, tried)
            own = weights.gather(1, nodes)
            below, left, _ = _delete_children(own, p, q, tokens, tried > 0, draft.replacement, last=True)
            weights.scatter_(1, torch.where(tried > 0, tried, nodes_in_all).flatten(1), below.flatten(1))
            leaf_weights.scatter_(1, torch.where(valid, nodes, nodes_in_all), left)
        leaf_weights[:, 0] = 1  # the root is always accepted
        return leaf_weights[:, :-1]


def _delete_children(
    weight: Tensor, p: Tensor, q: Tensor | None, tokens: Tensor, present: Tensor, replacement: bool, last: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Delete a node's children one after another.

    Args:
        weight: ``[...]``, the node's own weight a.
        p: ``[..., V]``, the target's distribution at the node.
        q: ``[..., W]``, the distribution that its children were drawn from, or None for chosen ones.
        tokens: ``[..., R]`` int64, the children in order.
        present: ``[..., R]`` bool.
        replacement: whether they were drawn with replacement.
        last: whether the last child is to be deleted, too.

    Returns:
        The weight that each child starts with, ``[..., R]``; the node's weight ``[...]`` and p ``[..., V]`` after the
        deletions.
    """
    below, ranks = [], tokens.shape[-1]
    for r in range(ranks):
        token, here = tokens[..., r], present[..., r]
        ratio = value_at(p, token[..., None])[..., 0]
        if q is not None:
            ratio = safe_ratio(ratio, value_at(q, token[..., None])[..., 0])
        child = (weight * ratio).nan_to_num(nan=0.0).clamp(max=1)
        below.append(torch.where(here, child, 0))
        if r + 1 == ranks and not last:
            break
        if q is None:
            # q is one-hot at the token, and a p - 1 is never positive there: the rest of p stays as it is.
            mass = without(p, torch.where(here, token, p.shape[-1]))
            left = weight * mass.sum(-1)
        else:
            mass = spare_mass(p, q, here, weight)
            left = mass.sum(-1)
        p = normalise_or(mass, p)
        # Added in this order, S + (1 - a) never rounds below S, however small 1 - a is; 0/0 counts as 1.
        weight = torch.where(here, (left / (left + (1 - weight))).nan_to_num(nan=1.0), weight)
        if q is not None and not replacement and r + 1 < ranks:
            q = normalise_or(without(q, token), q)
    return torch.stack(below, dim=-1), weight, p
