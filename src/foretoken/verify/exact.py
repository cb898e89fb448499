"""Is a verifier lossless? The exact distribution of one round's output, by enumeration, without sampling.

Over a tiny vocabulary every draft that a drafter can make is enumerated with its probability. The verifier's
`stop_probs` and `next_probs`, in float64 and batched over all those drafts, then give the distribution of the tokens
that one round emits. Continued by the target to a fixed length it must equal the target's own joint distribution, up
to rounding:

    >>> report = check(get("token"), shape=[0, 1], target=target, drafter=drafter, mode="with replacement")
    >>> report.error < 1e-12
    True

A *table* holds one next-token distribution for each path: ``table[d]`` has shape ``[V] * d + [V]``, and
``table[2][x, y]`` is the distribution of the token after x, y. A *shape* lists each node's parent, 0 being the root: a
chain of three is ``[0, 1, 2]``, two branches of one token ``[0, 0]``, an empty draft ``[]``.
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
"""How siblings are made: chosen (the most probable tokens under q, in order), or drawn from q one after another."""

Table = Sequence[Tensor]

MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class Drafts:
    """Every draft that a drafter can make, one a row.

    Attributes:
        draft: B drafts, all of one shape, ragged where the support of q is too small for that many siblings.
        weights: ``[B]`` float64, the probability of each, all positive; they sum to 1.
    """

    draft: Draft
    weights: Tensor


@dataclass(frozen=True)
class ExactReport:
    """Exact results for one round.

    Attributes:
        error: largest deviation from the target's joint distribution, or of the verifier's probabilities from summing
            to 1 and being non-negative (NaN where NaN appeared).
        total_variation: total variation distance between the two joint distributions.
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
        verifier: any rejection-sampling verifier.
        shape: the parent of each node.
        target: the target's distributions; as many levels as the shape is deep, and at least one more.
        drafter: the drafter's distributions; at least as many levels as the shape is deep. Its vocabulary may be larger
            or smaller than the target's.
        mode: how siblings are made.
        alter: applied to the drafts before the target scores them: for example a fault that must be found.
        padding: columns of padding to append to the drafts.
    """
    drafts = all_drafts(shape, drafter, mode, padding=padding)
    if alter is not None:
        drafts = replace(drafts, draft=alter(drafts.draft))
    distribution, acceptance, malformed = _run(verifier, drafts, target)
    difference = distribution - target_distribution(target)
    error = torch.stack([difference.abs().max(), malformed]).max()  # Tensor.max propagates NaN
    return ExactReport(float(error), float(difference.abs().sum() / 2), acceptance)


def target_distribution(target: Table) -> Tensor:
    """The joint distribution of the first L tokens of the target alone, ``[V] * L`` for a table of L levels."""
    joint = target[0].double()
    for level in target[1:]:
        joint = joint[..., None] * level.double()
    return joint


def round_distribution(verifier: Verifier, drafts: Drafts, target: Table) -> Tensor:
    """The joint distribution of the first L tokens: one round, then the target alone; ``[V] * L``."""
    return _run(verifier, drafts, target)[0]


def all_drafts(shape: Sequence[int], drafter: Table, mode: Mode = "with replacement", padding: int = 0) -> Drafts:
    """Every draft of that shape that the drafter can make, with its probability.

    Without replacement each sibling is drawn from q with the earlier ones removed, renormalised; when its support is
    used up there are no further children. Chosen siblings are the most probable tokens in order; there is one
    such draft.

    Args:
        shape: the parent of each node.
        drafter: at least as many levels as the shape is deep.
        mode: how siblings are made.
        padding: columns of padding to append.
    """
    if mode not in MODES:
        raise ParameterError(f"unknown mode {mode!r}: choose one of {', '.join(MODES)}")
    for i, parent in enumerate(shape):
        if not 0 <= parent <= i:
            raise ParameterError(f"node {i + 1} has parent {parent}: parents come first, so choose 0 to {i}")
    depths = _depths(shape)
    if len(drafter) < max(depths):
        raise ParameterError(f"a draft {max(depths)} deep needs as many levels of drafter tables: got {len(drafter)}")
    table = _FlatTable(drafter) if len(drafter) else _FlatTable([torch.ones(1)])
    vocab_size = table.vocab_size

    # One row for each draft so far. A node of the shape that does not exist in a row has number -1 there.
    weights = torch.ones(1, dtype=torch.float64)
    tokens = torch.zeros((1, 0), dtype=torch.int64)
    numbers = torch.zeros((1, 1), dtype=torch.int64)
    contexts = torch.zeros((1, 1), dtype=torch.int64)
    for i, parent in enumerate(shape):
        q = table.flat[contexts[:, parent]]
        siblings = [j for j in range(i) if shape[j] == parent]
        if mode != "with replacement" and siblings:
            q = q.scatter(1, tokens[:, siblings], -1.0)
        if mode == "chosen":
            best = q.argmax(1, keepdim=True)
            q = torch.zeros_like(q).scatter(1, best, (q.gather(1, best) >= 0).double())
        mass = q.clamp(min=0).sum(1, keepdim=True)
        exists = (numbers[:, parent] >= 0) & (mass[:, 0] > 0)
        placeholder = torch.eye(1, vocab_size, dtype=q.dtype)  # rows without this node get token 0, dropped below
        q = torch.where(exists[:, None], q.clamp(min=0) / torch.where(mass > 0, mass, 1), placeholder)
        rows, picks = (q > 0).nonzero(as_tuple=True)
        weights = weights[rows] * q[rows, picks]
        tokens = torch.cat([tokens[rows], picks[:, None]], 1)
        next_number = numbers.max(1).values + 1
        number = torch.where(exists, next_number, -1)[rows]
        numbers = torch.cat([numbers[rows], number[:, None]], 1)
        context = table.child(contexts[rows, parent], depths[parent], picks)
        contexts = torch.cat([contexts[rows], context[:, None]], 1)

    size, width = len(weights), len(shape) + padding
    counts = (numbers[:, 1:] >= 0).sum(1)
    is_chain = list(shape) == list(range(len(shape)))
    columns = torch.where(numbers[:, 1:] >= 0, numbers[:, 1:] - 1, width)  # absent nodes go past the end
    packed = torch.zeros((size, width + 1), dtype=torch.int64)
    packed_tokens = packed.scatter(1, columns, tokens)[:, :width]
    if is_chain:
        parents = torch.arange(width).expand(size, width)
    else:
        parents = packed.scatter(1, columns, numbers[:, list(shape)])[:, :width]
    probs = None
    if mode != "chosen":
        # Nodes without children get an arbitrary q, which a verifier must not use.
        probs = torch.arange(vocab_size, 0, -1.0, dtype=torch.float64).expand(size, width, vocab_size)
        probs = (probs / probs.sum(-1, keepdim=True)).contiguous()
        for j in sorted(set(shape)):
            present = (numbers[:, j] >= 0).nonzero()[:, 0]
            probs[present, numbers[present, j]] = table.flat[contexts[present, j]]
    draft = Draft(packed_tokens, parents, counts, probs, mode == "with replacement", is_chain)
    return Drafts(draft, weights)


def target_probs_of(draft: Draft, target: Table) -> Tensor:
    """The target's distribution at every node: ``[B, N+1, V]`` float64.

    Padding, and nodes below a token outside the target's vocabulary, get an arbitrary distribution.
    """
    table = _FlatTable(target)
    return table.flat[_contexts(draft, table)]


def check_coupled(verifier: CoupledVerifier, shape: Sequence[int], vocab_size: int) -> int:
    """Count violations of a coupled verifier's guarantee, over all drafts and all outputs of the target.

    Whatever the draft, the accepted tokens and the token after them must be a prefix of the target's own output, and no
    deeper node of the draft may match a longer prefix. Picks at nodes that are not on the output's path are filled with
    every token in turn: they must make no difference. Every token then comes from the target, so that the output has
    the target's distribution.

    Returns:
        The number of (draft, output, filling) triples, out of all, for which this fails; 0 for a lossless verifier.
    """
    depths = torch.tensor(_depths(shape))
    depth, width = int(depths.max()), len(shape)
    outputs = torch.tensor(list(product(range(vocab_size), repeat=depth + 1)))
    tokens = torch.tensor(list(product(range(vocab_size), repeat=width)), dtype=torch.int64)
    tokens = tokens.reshape(vocab_size**width, width)
    is_chain = list(shape) == list(range(width))
    violations = 0
    for filling in range(vocab_size):
        output = outputs.repeat(len(tokens), 1)
        drafted = tokens.repeat_interleave(len(outputs), 0)
        size = len(output)
        draft = Draft(
            drafted,
            torch.tensor(list(shape), dtype=torch.int64).expand(size, width),
            torch.full((size,), width),
            is_chain=is_chain,
        )
        on_path = torch.ones((size, width + 1), dtype=torch.bool)
        for i, parent in enumerate(shape):
            on_path[:, i + 1] = on_path[:, parent] & (drafted[:, i] == output[:, depths[parent]])
        picks = torch.where(on_path, output[:, depths], filling)
        verdict = verifier.follow(draft, picks)
        best = torch.where(on_path, depths, 0).max(1).values
        good = verdict.counts == best
        for step in range(verdict.path.shape[1]):
            inside = step < verdict.counts
            token = drafted.gather(1, (verdict.path[:, step : step + 1] - 1).clamp(min=0))[:, 0]
            good &= ~inside | ((token == output[:, min(step, depth)]) & (verdict.path[:, step] > 0))
        good &= verdict.tokens == output.gather(1, verdict.counts.clamp(max=depth)[:, None])[:, 0]
        violations += int((~good).sum())
    return violations


class _FlatTable:
    """A table as one ``[rows, V]`` tensor.

    Row ``offsets[d] + code`` is the distribution after the path of d tokens whose digits in base V make that code.
    """

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
        """The row after all paths, an arbitrary distribution, for nodes whose path is not in the table."""
        self.flat = torch.cat([*rows, (arbitrary / arbitrary.sum())[None]])
        self.offsets = [0]
        for d in range(len(table) + 1):
            self.offsets.append(self.offsets[-1] + self.vocab_size**d)

    def child(self, context: Tensor, depth: int | Tensor, token: Tensor) -> Tensor:
        """The row of the path with `token` appended; `nowhere` if the path, or the longer one, is not in the table."""
        offsets = torch.tensor(self.offsets)
        row = offsets[depth + 1] + (context - offsets[depth]) * self.vocab_size + token
        absent = (context == self.nowhere) | (token >= self.vocab_size) | (row > self.nowhere)
        return torch.where(absent, self.nowhere, row)


def _contexts(draft: Draft, table: _FlatTable) -> Tensor:
    """The row of the table for each node, ``[B, N+1]``."""
    contexts = torch.full((draft.batch_size, draft.width + 1), table.nowhere)
    contexts[:, 0] = 0
    depths = torch.zeros_like(contexts)
    used = draft.used()
    rows = torch.arange(draft.batch_size)
    for i in range(draft.width):
        parent = draft.parents[:, i]
        depth = depths[rows, parent].clamp(max=len(table.offsets) - 2)
        child = table.child(contexts[rows, parent], depth, draft.tokens[:, i])
        contexts[:, i + 1] = torch.where(used[:, i], child, table.nowhere)
        depths[:, i + 1] = depths[rows, parent] + 1
    return contexts


def _run(verifier: Verifier, drafts: Drafts, target: Table) -> tuple[Tensor, tuple[float, ...], Tensor]:
    """The round's joint distribution, its acceptance, and the largest deviation of the verifier's probabilities from
    summing to 1 and being non-negative."""
    table = _FlatTable(target)
    levels, vocab_size, deepest = len(target), table.vocab_size, 0
    emitted = torch.zeros_like(table.flat)  # probability of "the round ends after this path, with this token"
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
        contexts = _contexts(draft, table)
        target_probs = table.flat[contexts]
        stop = verifier.stop_probs(draft, target_probs).double()
        problems = [(stop.sum(1) - 1).abs().max(), -stop.min()]
        for node in range(nodes):
            following = verifier.next_probs(draft, target_probs, torch.full_like(draft.counts, node)).double()
            reach = stop[:, node]
            off = (following.sum(1) - 1).abs() + following.min(1).values.clamp(max=0).abs()
            # At nodes where a round can't stop any finite result is valid.
            problems.append(torch.where((reach != 0) | off.isnan(), off, 0).max())
            emitted.index_add_(0, contexts[:, node], (weights * reach)[:, None] * following)
            accepted.index_add_(0, depths[:, node], weights * reach)
        malformed = torch.stack([malformed, *problems]).max()
    joint = emitted[0]
    for d in range(1, levels):
        ended = emitted[table.offsets[d] : table.offsets[d + 1]].reshape([vocab_size] * (d + 1))
        joint = joint[..., None] * target[d].double() + ended
    at_least = accepted.flip(0).cumsum(0).flip(0)[1 : deepest + 1]
    return joint, tuple(at_least.tolist()), malformed


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
