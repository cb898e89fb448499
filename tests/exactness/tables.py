"""Tables of distributions for the proofs: how target and drafter relate, and Hypothesis strategies that make them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

KINDS = ("independent", "equal", "near", "disjoint", "narrow", "one-hot target", "one-hot drafter")

# Shapes by parents, and the vocabulary that keeps their enumeration small.
CHAINS: tuple[tuple[int, ...], ...] = ((), (0,), (0, 1), (0, 1, 2))
SINGLE, FORK, THREE = (0,), (0, 0), (0, 0, 0)
RAGGED = (0, 0, 1, 1, 3)  # a deep branch beside a leaf
CROSSED = (0, 0, 2, 1, 2)  # nodes not in depth-first order
SPINE = (0, 1, 0, 2, 1)  # late siblings at every level
BINARY_2 = (0, 0, 1, 1, 2, 2)
BINARY_3 = (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6)
TREES = (SINGLE, FORK, THREE, RAGGED, CROSSED, SPINE)


@dataclass(frozen=True)
class Pair:
    """A target's and a drafter's tables."""

    target: list[Tensor]
    drafter: list[Tensor]


def depth_of(shape: tuple[int, ...]) -> int:
    depths = [0]
    for parent in shape:
        depths.append(depths[parent] + 1)
    return max(depths)


def table(pool: Tensor, levels: int) -> list[Tensor]:
    """A table whose distributions are taken from the pool ``[n, V]``, in a fixed order that mixes them."""
    vocab_size = pool.shape[1]
    out, used = [], 0
    for level in range(levels):
        size = vocab_size**level
        index = torch.arange(used, used + size)
        out.append(pool[(index + index // len(pool)) % len(pool)].reshape([vocab_size] * (level + 1)))
        used += size
    return out


def relate(p: Tensor, q: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Change two pools of weights ``[n, V]`` so that they are related as `kind` says; returns distributions."""
    vocab_size = p.shape[1]
    p, q = p.double(), q.double()
    tokens = torch.arange(vocab_size)
    if kind == "equal":
        q = p.clone()
    elif kind == "near":
        # q is tiny where p is 0: a token that the drafter may draw and the target never samples.
        q = p / p.sum(1, keepdim=True) + 1e-7 * (q / q.sum(1, keepdim=True))
    elif kind == "disjoint":
        if vocab_size > 1:  # with one token there are no two disjoint distributions
            even = (tokens % 2 == 0).double()
            p = p * even + even * 0.25
            q = q * (1 - even) + (1 - even) * 0.25
    elif kind == "narrow":
        # Support of one or two tokens: too small for many siblings.
        start = torch.arange(len(q))[:, None] % vocab_size
        inside = (tokens == start) | ((tokens == (start + 1) % vocab_size) & (start % 2 == 0))
        q = (q + 0.5) * inside
    elif kind == "one-hot target":
        p = torch.nn.functional.one_hot(p.argmax(1), vocab_size).double()
    elif kind == "one-hot drafter":
        q = torch.nn.functional.one_hot(q.argmax(1), vocab_size).double()
    elif kind != "independent":
        raise ValueError(kind)
    return p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)


def pair(kind: str, vocab_size: int, depth: int, seed: int, zeros: bool = True) -> Pair:
    """Random tables, a new distribution for every path; with `zeros` about a third of the numbers are 0."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(vocab_size**d for d in range(depth + 1))
    shape = (2, size, vocab_size)
    weights = torch.rand(shape, generator=generator, dtype=torch.float64)
    if zeros:
        weights = weights * (torch.rand(shape, generator=generator) > 0.35)
        keep = torch.randint(vocab_size, (2, size, 1), generator=generator)
        weights = weights.scatter(2, keep, 0.5)
    p, q = relate(weights[0], weights[1], kind)
    return Pair(table(p, depth + 1), table(q, max(depth, 1)))


@st.composite
def pairs(draw: st.DrawFn, vocab_size: int, depth: int) -> Pair:
    """Tables of small whole-number weights, which make zeros, ties and equal ratios common."""
    weights = st.lists(st.integers(0, 6), min_size=vocab_size, max_size=vocab_size).filter(any)
    pool = st.lists(weights, min_size=1, max_size=7)
    p, q = torch.tensor(draw(pool)), torch.tensor(draw(pool))
    n = max(len(p), len(q))
    p, q = p[torch.arange(n) % len(p)], q[torch.arange(n) % len(q)]
    p, q = relate(p, q, draw(st.sampled_from(KINDS)))
    return Pair(table(p, depth + 1), table(q, max(depth, 1)))
