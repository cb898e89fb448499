"""Shortcuts through the rules for chains: only the numbers that a round turns on, and arithmetic outside tensors.

`Verifier.stop_probs` gives a whole law of nodes, from which one is drawn: that is the definition, and what is proven.
A round needs the node alone, and finds it from a handful of probabilities, for which a tensor operation costs a
thousand times the arithmetic in it. Both ways come to the same node for the same uniform number, rounding aside: tests
hold them equal. Shortcuts go by a verifier's exact class, so that a subclass which changes a rule is never passed by.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.verify.block import BlockVerifier
from foretoken.verify.residual import match_vocabulary
from foretoken.verify.token import TokenVerifier, replacement_law

Shortcut = Callable[[Draft, Tensor, list[float]], tuple[list[int], Tensor]]
"""Takes a draft of chains with N > 0, the target's law ``[B, N+1, V]`` and a uniform number a row; gives the node where
each row stops, and the law of what follows up to a factor a row, ``[B, V]``. On the CPU."""


def shortcut(verifier: object, draft: Draft, target_probs: Tensor) -> Shortcut | None:
    """The way for this verifier and draft, if there is one."""
    if draft.width == 0 or not draft.is_chain or target_probs.device.type != "cpu":
        return None
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
    return nodes, _what_follows(draft, target_probs, nodes, None)


def _block(draft: Draft, target_probs: Tensor, uniforms: list[float]) -> tuple[list[int], Tensor]:
    """The last node from which on the chances that all coins fail, ``Π_{m ≥ n} (1 - h_m)``, multiply to ``u`` at most.

    From the end backwards a coin's ``S``, which takes a look at the whole vocabulary, is worked out only where no later
    coin has settled the matter.
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
                left = weight * max(0.0, 1.0 - ratios[row][node])
            elif spare is not None:
                left = spare[row][node - 1]
            else:
                left = _spare_at(draft.probs[row, node], target_probs[row, node], weight)
            total = left + (1.0 - weight)
            none_succeeds *= 1.0 - (left / total if total else 1.0)
        nodes.append(node)
    return nodes, _what_follows(draft, target_probs, nodes, [weights[row][node] for row, node in enumerate(nodes)])


def _weights(ratios: list[float]) -> list[float]:
    """``w_0 = 1``, ``w_i = min(1, w_{i-1} r_i)``."""
    weights = [1.0]
    for ratio in ratios:
        # What is spent is spent, however lucky the next token (0 times infinity).
        weights.append(min(1.0, weights[-1] * ratio) if weights[-1] else 0.0)
    return weights


def _ratios(draft: Draft, target_probs: Tensor) -> list[list[float]]:
    """``p/q`` of each row's drafted tokens, in float64."""
    size, width = target_probs.shape[-1], draft.width
    tokens = draft.tokens
    beyond = draft.probs is None or draft.probs.shape[-1] > size
    if beyond:
        tokens = tokens.clamp(max=size - 1)
    p = target_probs[:, :width].gather(-1, tokens[..., None]).squeeze(-1)
    if beyond:
        p = torch.where(draft.tokens < size, p, 0)
    counts = draft.counts.tolist()
    rows: list[list[float]] = [row[:count] for row, count in zip(p.tolist(), counts, strict=True)]
    if draft.probs is None:
        return rows
    q = draft.probs[:, :width].gather(-1, draft.tokens[..., None]).squeeze(-1).tolist()
    infinity = float("inf")
    return [
        [(x / y if y else infinity) if x else 0.0 for x, y in zip(row, below, strict=False)]
        for row, below in zip(rows, q, strict=True)
    ]


def _spare(draft: Draft, target_probs: Tensor, weights: list[list[float]]) -> list[list[float]]:
    """``S_i = Σ_x (w_i p(x) - q(x))+`` of every node that a chain may have inside, ``[B, N-1]``."""
    assert draft.probs is not None
    inner = slice(1, draft.width)
    p = target_probs[:, inner]
    q = match_vocabulary(draft.probs[:, inner], p.shape[-1]).to(p.dtype)
    padded = [(line + [0.0] * draft.width)[inner] for line in weights]
    scale = torch.tensor(padded, dtype=p.dtype).reshape(*p.shape[:2], 1)
    result: list[list[float]] = (-torch.addcmul(q, scale, p, value=-1).clamp_(max=0).sum(-1)).tolist()
    return result


def _spare_at(q: Tensor, p: Tensor, weight: float) -> float:
    """``Σ_x (w p(x) - q(x))+`` for laws ``[V]``."""
    return -float(torch.sub(match_vocabulary(q, p.shape[-1]), p, alpha=weight).clamp_(max=0).sum())


def _what_follows(draft: Draft, target_probs: Tensor, nodes: list[int], weights: list[float] | None) -> Tensor:
    if draft.batch_size > 1:
        chosen = torch.tensor(nodes)
        p = target_probs[torch.arange(len(nodes)), chosen]
        return replacement_law(draft, p, chosen, None if weights is None else torch.tensor(weights, dtype=p.dtype))
    node = nodes[0]
    p = target_probs[:, node]
    if node == int(draft.counts[0]):
        return p
    if draft.probs is None:
        mass = p.clone()
        token = int(draft.tokens[0, node])
        mass[:, token : token + 1] = 0  # an empty slice where the token lies beyond the vocabulary
    else:
        q = match_vocabulary(draft.probs[:, node], p.shape[-1])
        mass = torch.sub(q, p, alpha=1.0 if weights is None else weights[0]).clamp_(max=0).neg_()
    return mass if bool(mass.any()) else p


_SHORTCUTS: dict[type, Shortcut] = {TokenVerifier: _token, BlockVerifier: _block}
