"""Shortcuts on a CPU, for chains and for trees of chosen tokens: a round's node from a few probabilities, in Python.

`Verifier.stop_probs` gives the probability of every node, from which one is drawn: that is the definition. A round
needs only the node that is drawn, which depends on a handful of probabilities; for so few a tensor operation costs a
thousand times the arithmetic in it. Both ways find the same node for the same uniform, rounding aside: tests hold them
equal. Shortcuts are looked up by a verifier's exact class, so that a subclass which changes the verifier gets none.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.verify.block import BlockVerifier
from foretoken.verify.residual import match_vocabulary
from foretoken.verify.token import TokenVerifier, replacement_probs
from foretoken.verify.traversal import TraversalVerifier

Shortcut = Callable[[Draft, Tensor, list[float]], tuple[list[int], Tensor]]
"""Takes a draft with N > 0, target probabilities ``[B, N+1, V]`` and a uniform for each row; returns the node where
each row stops, and the distribution of the next token up to a factor a row, ``[B, V]``. On the CPU."""


def shortcut(verifier: object, draft: Draft, target_probs: Tensor) -> Shortcut | None:
    """The shortcut for this verifier and draft, or None."""
    if draft.width == 0 or target_probs.device.type != "cpu":
        return None
    if not draft.is_chain:
        return _chosen_tree if type(verifier) is TraversalVerifier and draft.probs is None else None
    return _SHORTCUTS.get(type(verifier))


def _token(draft: Draft, target_probs: Tensor, uniforms: list[float]) -> tuple[list[int], Tensor]:
    """The first node after which ``a_1 ⋯ a_n`` falls below ``1 - u``."""
    nodes = []
    for ratios, u in zip(_ratios(draft, target_probs), uniforms, strict=True):
        node, reach, limit = 0, 1.0, 1.0 - u
        for ratio in ratios:
            reach *= min(ratio, 1.0)
            if reach < limit or reach == 0.0:
                break
            node += 1
        nodes.append(node)
    return nodes, _next_weights(draft, target_probs, nodes, None)


def _block(draft: Draft, target_probs: Tensor, uniforms: list[float]) -> tuple[list[int], Tensor]:
    """The last node n with ``Π_{m ≥ n} (1 - h_m) ≤ u``, the probability that no node from n on succeeds.

    ``h_m`` needs ``S_m``, a sum over the vocabulary. Going backwards from the chain's end, it is computed only for
    nodes that no later node has ruled out.
    """
    ratios = _ratios(draft, target_probs)
    weights = [_weights(row) for row in ratios]
    spare = _spare(draft, target_probs, weights) if draft.batch_size > 1 and draft.probs is not None else None
    nodes = []
    for row, u in enumerate(uniforms):
        node = len(ratios[row])
        none_succeeds = 1.0 - weights[row][node]
        while none_succeeds > u:
            node -= 1
            if node == 0:
                break
            weight = weights[row][node]
            if draft.probs is None:
                mass = weight * max(0.0, 1.0 - ratios[row][node])
            elif spare is not None:
                mass = spare[row][node - 1]
            else:
                mass = _spare_at(draft.probs[row, node], target_probs[row, node], weight)
            total = mass + (1.0 - weight)
            none_succeeds *= 1.0 - (mass / total if total else 1.0)
        nodes.append(node)
    return nodes, _next_weights(draft, target_probs, nodes, [weights[row][node] for row, node in enumerate(nodes)])


def _weights(ratios: list[float]) -> list[float]:
    """``w_0 = 1``, ``w_i = min(1, w_{i-1} r_i)``."""
    weights = [1.0]
    for ratio in ratios:
        # A weight of 0 stays 0, even if the next ratio is infinite (0 times infinity would be NaN).
        weights.append(min(1.0, weights[-1] * ratio) if weights[-1] else 0.0)
    return weights


def _ratios(draft: Draft, target_probs: Tensor) -> list[list[float]]:
    """``p/q`` of each row's draft tokens, in float64."""
    p, size = _array(target_probs), target_probs.shape[-1]
    tokens, _, counts = draft.listed
    rows = [
        [p.item(row, node, token) if token < size else 0.0 for node, token in enumerate(drafted[:count])]
        for row, (drafted, count) in enumerate(zip(tokens, counts, strict=True))
    ]
    if draft.probs is None:
        return rows
    q, infinity = _array(draft.probs), float("inf")
    return [
        [
            (x / y if (y := q.item(row, node, token)) else infinity) if x else 0.0
            for node, (x, token) in enumerate(zip(above, drafted, strict=False))
        ]
        for row, (above, drafted) in enumerate(zip(rows, tokens, strict=True))
    ]


def _array(probs: Tensor) -> Any:
    """Probabilities as NumPy's array, which has no bfloat16: a number of it takes a tenth of the time of torch's."""
    return (probs if probs.dtype in (torch.float32, torch.float64) else probs.double()).detach().numpy()


def _spare(draft: Draft, target_probs: Tensor, weights: list[list[float]]) -> list[list[float]]:
    """``S_i = Σ_x (w_i p(x) - q(x))+`` of nodes 1 … N-1, ``[B, N-1]``."""
    assert draft.probs is not None
    inner = slice(1, draft.width)
    p = target_probs[:, inner]
    q = match_vocabulary(draft.probs[:, inner], p.shape[-1]).to(p.dtype)
    padded = [(line + [0.0] * draft.width)[inner] for line in weights]
    scale = torch.tensor(padded, dtype=p.dtype).reshape(*p.shape[:2], 1)
    result: list[list[float]] = (-torch.addcmul(q, scale, p, value=-1).clamp_(max=0).sum(-1)).tolist()
    return result


def _spare_at(q: Tensor, p: Tensor, weight: float) -> float:
    """``Σ_x (w p(x) - q(x))+`` for `p` and `q` ``[V]``."""
    return -float(torch.sub(match_vocabulary(q, p.shape[-1]), p, alpha=weight).clamp_(max=0).sum())


def _next_weights(draft: Draft, target_probs: Tensor, nodes: list[int], weights: list[float] | None) -> Tensor:
    """The distribution of the token after each row's node, up to a factor a row, ``[B, V]``."""
    if draft.batch_size > 1:
        chosen = torch.tensor(nodes)
        p = target_probs[torch.arange(len(nodes)), chosen]
        return replacement_probs(draft, p, chosen, None if weights is None else torch.tensor(weights, dtype=p.dtype))
    node = nodes[0]
    p = _array(target_probs)[:, node]
    if node == draft.listed.counts[0]:
        return torch.from_numpy(p)
    if draft.probs is None:
        mass = p.copy()
        token = draft.listed.tokens[0][node]
        mass[:, token : token + 1] = 0  # an empty slice where the token lies beyond the vocabulary
    else:
        q = _array(match_vocabulary(draft.probs[:, node], p.shape[-1]))
        mass = (p if weights is None else weights[0] * p) - q
        np.maximum(mass, 0, out=mass)
    return torch.from_numpy(mass if mass.any() else p)


def _chosen_tree(draft: Draft, target_probs: Tensor, uniforms: list[float]) -> tuple[list[int], Tensor]:
    """`TraversalVerifier` of chosen tokens: p loses tokens and is renormalised, and nothing else happens to it.

    So all weights follow from p of the draft tokens: ``1 - Σ p`` of the deleted ones is left of a node's p.
    """
    size = target_probs.shape[-1]
    rows = torch.arange(draft.batch_size)[:, None]
    p = target_probs[rows, draft.parents, draft.tokens.clamp(max=size - 1)].tolist()
    tokens, parents, counts = draft.listed
    nodes: list[int] = []
    weights = []
    for row, u in enumerate(uniforms):
        children: list[list[int]] = [[] for _ in range(counts[row] + 1)]
        for child in range(1, counts[row] + 1):
            children[parents[row][child - 1]].append(child)
        nodes.append(node := _drawn(_stop_probs(children, tokens[row], p[row], size), u))
        weights.append(_without_all(target_probs[row, node], [tokens[row][child - 1] for child in children[node]]))
    return nodes, weights[0][None] if len(weights) == 1 else torch.stack(weights)


def _stop_probs(children: list[list[int]], tokens: list[int], p: list[float], size: int) -> list[float]:
    """`TraversalVerifier.stop_probs` of one row.

    Args:
        children: of each node, in the order in which they are tried.
        tokens: of nodes 1, 2, …
        p: of these tokens, each at its parent.
        size: of the vocabulary.
    """
    starts, accept = [1.0] * len(children), [1.0] * len(children)
    for node, below in enumerate(children):  # parents come before their children
        weight, left, deleted = starts[node], 1.0, set[int]()
        for child in below:
            token = tokens[child - 1]
            value = p[child - 1] if token < size and token not in deleted else 0.0
            starts[child] = min(1.0, weight * value / left)
            rest = max(left - value, 0.0)
            spare = weight * rest / left
            # In this order the sum never rounds below the spare mass; 0/0 counts as 1.
            total = spare + (1.0 - weight)
            weight = spare / total if total else 1.0
            if rest:  # else p stays as it is
                left = rest
                deleted.add(token)
        accept[node] = weight if node else 1.0
    stop, rejected = [0.0] * len(children), 1.0
    for node in _post_order(children):
        stop[node] = accept[node] * rejected
        rejected *= 1.0 - accept[node]
    return stop


def _post_order(children: list[list[int]]) -> list[int]:
    """Node numbers in depth-first post-order: the reverse of parents first, last children first."""
    order, stack = [], [0]
    while stack:
        order.append(node := stack.pop())
        stack += children[node]
    return order[::-1]


def _drawn(probs: list[float], u: float) -> int:
    """`foretoken.sampling.draw` for one row."""
    cumulative = list(accumulate(probs))
    total = cumulative[-1]
    share = u * total
    return min(bisect_right(cumulative, share), bisect_left(cumulative, total))


def _without_all(p: Tensor, tokens: list[int]) -> Tensor:
    """``[V]``: p without these tokens, one after another; one that has all that is left stays."""
    mass = p.clone()
    for token in tokens:
        kept = mass[token : token + 1].clone()  # an empty slice where the token lies beyond the vocabulary
        mass[token : token + 1] = 0
        if not bool(mass.any()):
            mass[token : token + 1] = kept
    return mass


_SHORTCUTS: dict[type, Shortcut] = {TokenVerifier: _token, BlockVerifier: _block, TraversalVerifier: _block}
"""For chains, on which `TraversalVerifier` is `BlockVerifier`."""
