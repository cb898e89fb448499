"""Draft trees as tensors: the children of each node, and the post-order of the nodes."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.draft import Draft


def child_table(draft: Draft) -> Tensor:
    """``[B, N+1, R]`` int64: node numbers of each node's children in the order they are tried, filled up with 0.

    R is the largest number of siblings, and at least 1.
    """
    size, width = draft.batch_size, draft.width
    if width == 0:
        return draft.parents.new_zeros((size, 1, 1))
    used = draft.used()
    rank = _earlier_siblings(draft).sum(-1)  # [B, N]
    most = int(torch.where(used, rank, 0).max()) + 1
    # Padding goes to a slot past the end that is cut off below.
    slots = torch.where(used, draft.parents * most + rank, (width + 1) * most)
    table = draft.parents.new_zeros((size, (width + 1) * most + 1))
    numbers = torch.arange(1, width + 1, device=table.device).expand(size, width)
    return table.scatter_(1, slots, numbers)[:, :-1].reshape(size, width + 1, most)


def child_tokens(draft: Draft, children: Tensor) -> Tensor:
    """The tokens at node numbers `children`, ``[B, …]`` (0 where a number is 0)."""
    flat = children.flatten(1)
    if draft.width == 0:
        return torch.zeros_like(children)
    tokens = draft.tokens.gather(1, (flat - 1).clamp(min=0))
    return torch.where(flat > 0, tokens, 0).reshape(children.shape)


def select_nodes(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The wanted nodes of each row, packed to the left.

    Args:
        wanted: ``[B, N+1]`` bool.

    Returns:
        nodes: ``[B, U]`` int64, U the largest count of a row; rows with fewer are filled up with other nodes.
        valid: ``[B, U]`` bool, which of them were wanted.
    """
    most = int(wanted.sum(1).max()) if len(wanted) else 0
    nodes = torch.argsort((~wanted).to(torch.int8), dim=1, stable=True)[:, :most]
    return nodes, wanted.gather(1, nodes)


def deepest(draft: Draft, agrees: Tensor) -> Tensor:
    """The deepest node for which all nodes of its path agree, ``[B]`` int64; the first of several equally deep ones.

    Args:
        draft: ``N`` tokens a row.
        agrees: ``[B, N]`` bool, False on padding.
    """
    if draft.is_chain:
        return agrees.to(torch.int64).cumprod(dim=1).sum(dim=1)
    agrees = torch.nn.functional.pad(agrees, (1, 0), value=True)
    on_walk = (agrees[:, None, :] | ~draft.ancestors()).all(-1)
    return torch.where(on_walk, draft.depths(), -1).argmax(dim=1)


def post_order(draft: Draft) -> Tensor:
    """``[B, N+1]`` int64: node numbers in depth-first post-order, children in order; padding comes after the root."""
    used = torch.nn.functional.pad(draft.used(), (1, 0), value=True)
    ancestors = (draft.ancestors() & used[:, :, None]).float()  # padding has no ancestors
    sizes = ancestors.sum(1)  # nodes of each subtree, its root included
    siblings = torch.nn.functional.pad(_earlier_siblings(draft), (1, 0, 1, 0)).float()
    # Nodes in earlier branches, which all come before this one.
    finished = (ancestors @ (siblings @ sizes[..., None]))[..., 0]
    rank = torch.where(used, finished + sizes, draft.width + 2)
    return torch.argsort(rank, dim=1, stable=True)


def _earlier_siblings(draft: Draft) -> Tensor:
    """``[B, N, N]`` bool: entry ``[b, i, j]``: token j comes before token i under the same parent."""
    used = draft.used()
    same = (draft.parents[:, :, None] == draft.parents[:, None, :]) & used[:, :, None] & used[:, None, :]
    return same.tril(-1)
