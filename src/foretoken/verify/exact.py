"""Is a verifier lossless? The exact law of one round, from the verifier's own functions: no sampling, no tolerance.

Over a tiny vocabulary every draft that a drafter can make is enumerated with its probability. The verifier's
`stop_probs` and `next_probs`, in float64 and batched over all those drafts, then give the law of the tokens that one
round emits. Continued by the target to a fixed length it must be the target's own joint law, to rounding:

    >>> report = check(get("token"), shape=[0, 1], target=target, drafter=drafter, mode="with replacement")
    >>> report.error < 1e-12
    True

A *table* of laws holds one law for each path: ``table[d]`` has shape ``[V] * d + [V]``, and
``table[2][x, y]`` is the law of the token after x, y. A *shape* lists each node's parent, 0 being the root: a chain
of three is ``[0, 1, 2]``, two branches of one token ``[0, 0]``, an empty draft ``[]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, get_args

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.errors import ParameterError
from foretoken.limits import current_limits
from foretoken.verify.base import CoupledVerifier, Verifier

Mode = Literal["chosen", "with replacement", "without replacement"]
"""How siblings come about: by rule (the likeliest of the drafter's table, in order), or drawn one after another."""

Table = Sequence[Tensor]

MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class Drafts:
    """Every draft that a drafter can make, one a row.

    Attributes:
        draft: B drafts, all of one shape, ragged where a law's support is too small for that many siblings.
        weights: ``[B]`` float64, the probability of each, all positive; they sum to 1.
    """

    draft: Draft
    weights: Tensor


@dataclass(frozen=True)
class ExactReport:
    """What one round does, exactly.

    Attributes:
        error: largest deviation from the target's joint law, or from being a law at all (NaN where NaN appeared).
        total_variation: total variation distance between the two joint laws.
        acceptance: the probability that at least 1, 2, … draft tokens are accepted.
    """

    error: float
    total_variation: float
    acceptance: tuple[float, ...]

    @property
    def expected_accepted(self) -> float:
        """Expected number of accepted draft tokens; the mean acceptance length is one more."""
        return sum(self.acceptance)


def check(
    verifier: Verifier,
    shape: Sequence[int],
    target: Table,
    drafter: Table,
    mode: Mode = "with replacement",
    *,
    alter: Callable[[Draft], Draft] | None = None,
    padding: int = 0,
) -> ExactReport:
    """Compare one round, continued by the target, with the target alone.

    Args:
        verifier: any verifier by rejection.
        shape: the parent of each node.
        target: the target's laws; as many levels as the shape is deep, and at least one more.
        drafter: the drafter's laws; at least as many levels as the shape is deep. Its vocabulary may be larger or
            smaller than the target's.
        mode: how siblings come about.
        alter: applied to the drafts before the target sees them: a fault to be caught, say.
        padding: columns of padding to append to the drafts.
    """
    drafts = all_drafts(shape, drafter, mode, padding=padding)
    if alter is not None:
        drafts = replace(drafts, draft=alter(drafts.draft))
    law, acceptance, malformed = _run(verifier, drafts, target)
    difference = law - target_law(target)
    error = torch.stack([difference.abs().max(), malformed]).max()  # Tensor.max hands NaN on
    return ExactReport(float(error), float(difference.abs().sum() / 2), acceptance)


def target_law(target: Table) -> Tensor:
    """The joint law of the first L tokens that the target emits alone, ``[V] * L`` for a table of L levels."""
    law = target[0].double()
    for level in target[1:]:
        law = law[..., None] * level.double()
    return law


def round_law(verifier: Verifier, drafts: Drafts, target: Table) -> Tensor:
    """The joint law of the first L tokens when a round runs first and the target goes on alone: ``[V] * L``."""
    return _run(verifier, drafts, target)[0]


def all_drafts(shape: Sequence[int], drafter: Table, mode: Mode = "with replacement", padding: int = 0) -> Drafts:
    """Every draft of that shape that the drafter can make, with its probability.

    Siblings without replacement follow the law left when the earlier ones are removed; a law whose support is used up
    yields no further children. Chosen siblings are the likeliest tokens in order; there is one such draft.

    Args:
        shape: the parent of each node.
        drafter: at least as many levels as the shape is deep.
        mode: how siblings come about.
        padding: columns of padding to append.
    """
    if mode not in MODES:
        raise ParameterError(f"unknown mode {mode!r}: choose one of {', '.join(MODES)}")
    for i, parent in enumerate(shape):
        if not 0 <= parent <= i:
            raise ParameterError(f"node {i + 1} has parent {parent}: parents come first, so choose 0 to {i}")
    depths = _depths(shape)
    if len(drafter) < max(depths):
        raise ParameterError(f"a draft {max(depths)} deep needs as many levels of drafter laws: got {len(drafter)}")
    laws = _Laws(drafter) if len(drafter) else _Laws([torch.ones(1)])
    vocab_size = laws.vocab_size

    # One row a draft so far. A node of the shape that a row could not fill has number -1 in it.
    weights = torch.ones(1, dtype=torch.float64)
    tokens = torch.zeros((1, 0), dtype=torch.int64)
    numbers = torch.zeros((1, 1), dtype=torch.int64)
    contexts = torch.zeros((1, 1), dtype=torch.int64)
    for i, parent in enumerate(shape):
        law = laws.flat[contexts[:, parent]]
        siblings = [j for j in range(i) if shape[j] == parent]
        if mode != "with replacement" and siblings:
            law = law.scatter(1, tokens[:, siblings], -1.0)
        if mode == "chosen":
            best = law.argmax(1, keepdim=True)
            law = torch.zeros_like(law).scatter(1, best, (law.gather(1, best) >= 0).double())
        mass = law.clamp(min=0).sum(1, keepdim=True)
        alive = (numbers[:, parent] >= 0) & (mass[:, 0] > 0)
        nothing = torch.eye(1, vocab_size, dtype=law.dtype)  # dead rows go on unsplit, with a token 0 nobody sees
        law = torch.where(alive[:, None], law.clamp(min=0) / torch.where(mass > 0, mass, 1), nothing)
        rows, picks = (law > 0).nonzero(as_tuple=True)
        weights = weights[rows] * law[rows, picks]
        tokens = torch.cat([tokens[rows], picks[:, None]], 1)
        next_number = numbers.max(1).values + 1
        number = torch.where(alive, next_number, -1)[rows]
        numbers = torch.cat([numbers[rows], number[:, None]], 1)
        context = laws.child(contexts[rows, parent], depths[parent], picks)
        contexts = torch.cat([contexts[rows], context[:, None]], 1)

    size, width = len(weights), len(shape) + padding
    counts = (numbers[:, 1:] >= 0).sum(1)
    is_chain = list(shape) == list(range(len(shape)))
    columns = torch.where(numbers[:, 1:] >= 0, numbers[:, 1:] - 1, width)  # what is not there goes past the end
    packed = torch.zeros((size, width + 1), dtype=torch.int64)
    packed_tokens = packed.scatter(1, columns, tokens)[:, :width]
    if is_chain:
        parents = torch.arange(width).expand(size, width)
    else:
        parents = packed.scatter(1, columns, numbers[:, list(shape)])[:, :width]
    probs = None
    if mode != "chosen":
        # Nodes without children hold a law that a verifier must not look at.
        probs = torch.arange(vocab_size, 0, -1.0, dtype=torch.float64).expand(size, width, vocab_size)
        probs = (probs / probs.sum(-1, keepdim=True)).contiguous()
        for j in sorted(set(shape)):
            there = (numbers[:, j] >= 0).nonzero()[:, 0]
            probs[there, numbers[there, j]] = laws.flat[contexts[there, j]]
    draft = Draft(packed_tokens, parents, counts, probs, mode == "with replacement", is_chain)
    return Drafts(draft, weights)


def target_probs_of(draft: Draft, target: Table) -> Tensor:
    """What a target with those laws says at every node: ``[B, N+1, V]`` float64.

    Padding, and nodes below a token that the target does not know, get an arbitrary law.
    """
    return _Laws(target).flat[_contexts(draft, _Laws(target))]


def check_coupled(verifier: CoupledVerifier, shape: Sequence[int], vocab_size: int) -> int:
    """Count violations of what a coupled verifier promises, over all drafts and all texts that the target may pick.

    Whatever the draft, the accepted tokens and the token after them must be the beginning of the target's own text,
    and no deeper node of the draft may hold a longer beginning. Picks at nodes off the text are filled with every
    token in turn: they must make no difference. The law of the text is then the target's, as it has no other source.

    Returns:
        The number of (draft, text, filling) triples, out of all, for which this fails; 0 for a lossless verifier.
    """
    depths = torch.tensor(_depths(shape))
    depth, width = int(depths.max()), len(shape)
    texts = torch.tensor(list(product(range(vocab_size), repeat=depth + 1)))
    tokens = torch.tensor(list(product(range(vocab_size), repeat=width)), dtype=torch.int64)
    tokens = tokens.reshape(vocab_size**width, width)
    is_chain = list(shape) == list(range(width))
    violations = 0
    for filling in range(vocab_size):
        text = texts.repeat(len(tokens), 1)
        drafted = tokens.repeat_interleave(len(texts), 0)
        size = len(text)
        draft = Draft(
            drafted,
            torch.tensor(list(shape), dtype=torch.int64).expand(size, width),
            torch.full((size,), width),
            is_chain=is_chain,
        )
        on_text = torch.ones((size, width + 1), dtype=torch.bool)
        for i, parent in enumerate(shape):
            on_text[:, i + 1] = on_text[:, parent] & (drafted[:, i] == text[:, depths[parent]])
        picks = torch.where(on_text, text[:, depths], filling)
        verdict = verifier.follow(draft, picks)
        best = torch.where(on_text, depths, 0).max(1).values
        good = verdict.counts == best
        for step in range(verdict.path.shape[1]):
            inside = step < verdict.counts
            token = drafted.gather(1, (verdict.path[:, step : step + 1] - 1).clamp(min=0))[:, 0]
            good &= ~inside | ((token == text[:, min(step, depth)]) & (verdict.path[:, step] > 0))
        good &= verdict.tokens == text.gather(1, verdict.counts.clamp(max=depth)[:, None])[:, 0]
        violations += int((~good).sum())
    return violations


class _Laws:
    """A table laid out flat: row ``offsets[d] + code`` is the law after the path of d tokens with that code."""

    def __init__(self, table: Table) -> None:
        self.vocab_size = table[0].shape[-1]
        for d, level in enumerate(table):
            if level.shape != (self.vocab_size,) * (d + 1):
                raise ParameterError(
                    f"level {d} of the table has shape {list(level.shape)}: it must be {[self.vocab_size] * (d + 1)}"
                )
        rows = [level.double().reshape(-1, self.vocab_size) for level in table]
        arbitrary = torch.arange(1, self.vocab_size + 1, dtype=torch.float64)
        self.nowhere = sum(len(level) for level in rows)
        """The row after all paths, for nodes that are on none."""
        self.flat = torch.cat([*rows, (arbitrary / arbitrary.sum())[None]])
        self.offsets = [0]
        for d in range(len(table) + 1):
            self.offsets.append(self.offsets[-1] + self.vocab_size**d)

    def child(self, context: Tensor, depth: int | Tensor, token: Tensor) -> Tensor:
        """The row of a path that is one token longer; both nowhere and beyond the last level lead nowhere."""
        offsets = torch.tensor(self.offsets)
        row = offsets[depth + 1] + (context - offsets[depth]) * self.vocab_size + token
        gone = (context == self.nowhere) | (token >= self.vocab_size) | (row > self.nowhere)
        return torch.where(gone, self.nowhere, row)


def _contexts(draft: Draft, laws: _Laws) -> Tensor:
    """The row of each node's law, ``[B, N+1]``."""
    contexts = torch.full((draft.batch_size, draft.width + 1), laws.nowhere)
    contexts[:, 0] = 0
    depths = torch.zeros_like(contexts)
    used = draft.used()
    rows = torch.arange(draft.batch_size)
    for i in range(draft.width):
        parent = draft.parents[:, i]
        depth = depths[rows, parent].clamp(max=len(laws.offsets) - 2)
        child = laws.child(contexts[rows, parent], depth, draft.tokens[:, i])
        contexts[:, i + 1] = torch.where(used[:, i], child, laws.nowhere)
        depths[:, i + 1] = depths[rows, parent] + 1
    return contexts


def _run(verifier: Verifier, drafts: Drafts, target: Table) -> tuple[Tensor, tuple[float, ...], Tensor]:
    """The round's joint law, its acceptance, and how far its parts are from being laws."""
    laws = _Laws(target)
    levels, vocab_size, deepest = len(target), laws.vocab_size, 0
    emitted = torch.zeros_like(laws.flat)  # probability of "the round ends after this path, with this token"
    accepted = torch.zeros(drafts.draft.width + 1, dtype=torch.float64)
    malformed = torch.zeros((), dtype=torch.float64)
    nodes = drafts.draft.width + 1
    size = max(1, current_limits().proof_entries // (nodes * vocab_size))
    for start in range(0, len(drafts.weights), size):
        draft, weights = _rows(drafts.draft, start, start + size), drafts.weights[start : start + size]
        depths = draft.depths()
        if draft.width:
            deepest = max(deepest, int(torch.where(draft.used(), depths[:, 1:], 0).max()))
        if deepest >= levels:
            raise ParameterError(f"the target's table has {levels} levels: it must be deeper than the draft")
        contexts = _contexts(draft, laws)
        target_probs = laws.flat[contexts]
        stop = verifier.stop_probs(draft, target_probs).double()
        problems = [(stop.sum(1) - 1).abs().max(), -stop.min()]
        for node in range(nodes):
            law = verifier.next_probs(draft, target_probs, torch.full_like(draft.counts, node)).double()
            reach = stop[:, node]
            off = (law.sum(1) - 1).abs() + law.min(1).values.clamp(max=0).abs()
            # Where a round can't stop, any finite answer will do.
            problems.append(torch.where((reach != 0) | off.isnan(), off, 0).max())
            emitted.index_add_(0, contexts[:, node], (weights * reach)[:, None] * law)
            accepted.index_add_(0, depths[:, node], weights * reach)
        malformed = torch.stack([malformed, *problems]).max()
    law = emitted[0]
    for d in range(1, levels):
        ended = emitted[laws.offsets[d] : laws.offsets[d + 1]].reshape([vocab_size] * (d + 1))
        law = law[..., None] * target[d].double() + ended
    at_least = accepted.flip(0).cumsum(0).flip(0)[1 : deepest + 1]
    return law, tuple(at_least.tolist()), malformed


def _rows(draft: Draft, start: int, stop: int) -> Draft:
    probs = None if draft.probs is None else draft.probs[start:stop]
    return replace(
        draft,
        tokens=draft.tokens[start:stop],
        parents=draft.parents[start:stop],
        counts=draft.counts[start:stop],
        probs=probs,
    )


def _depths(shape: Sequence[int]) -> list[int]:
    depths = [0]
    for parent in shape:
        depths.append(depths[parent] + 1)
    return depths
