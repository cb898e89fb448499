"""From a batch's logits to its verdicts: applies grammars and sampling parameters, and calls `foretoken.verify`.

Rows with different verifiers are verified group by group. Nodes with unusable logits are found here, too.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.errors import ParameterError
from foretoken.limits import current_limits
from foretoken.randomness import Stream, uniforms_of_rows
from foretoken.sampling import GrammarMatcher, Sampler, all_finite, mask_logits
from foretoken.sequence import Sequence
from foretoken.verify import AnyVerifier, Verdict, decide, is_coupled
from foretoken.verify.coupled import SharedNoiseVerifier

_FOLLOW = SharedNoiseVerifier()


@dataclass(frozen=True)
class VerifierGroup:
    """The rows of a round with the same verifier.

    Attributes:
        verifier: of these rows.
        rows: their indices among the rows of the round.
        sampler: of these rows.
    """

    verifier: AnyVerifier
    rows: list[int]
    sampler: Sampler


@dataclass(frozen=True)
class Verified:
    """A round's result.

    Attributes:
        verdict: the accepted path and the next token of each row, as tensors.
        accepted: of each row, the accepted nodes in order.
        following: of each row, the token after them.
        sound: of each row, how many of its tokens (the accepted ones and the one after them) may be emitted: those
            before the first node of its path with unusable logits. Plain decoding would have emitted these, too.
        usable: of each row, whether all of its tokens are sound.
        stuck: of each row that is not usable, whether its grammar or its parameters left no token at that node; else
            the logits were not finite there.
        scores: ``[B, N+1, V]``, the logits that were verified, grammars applied; may be the model's own memory, which
            its next pass overwrites.
    """

    verdict: Verdict
    accepted: list[list[int]]
    following: list[int]
    sound: list[int]
    usable: list[bool]
    stuck: list[bool]
    scores: Tensor


def group_by_verifier(verifiers: AbstractSequence[AnyVerifier], sampler: Sampler) -> tuple[VerifierGroup, ...]:
    """Group the rows of a round, whose verifiers these are, by verifier."""
    groups: dict[int, list[int]] = {}
    for row, verifier in enumerate(verifiers):
        groups.setdefault(id(verifier), []).append(row)
    return tuple(
        VerifierGroup(verifiers[rows[0]], rows, sampler.select(rows) if len(groups) > 1 else sampler)
        for rows in groups.values()
    )


def check_draft(draft: Draft, groups: AbstractSequence[VerifierGroup], drafter: str) -> None:
    """Check that every verifier takes its rows' drafts.

    Raises:
        ParameterError: one takes chains alone, and a draft branches; the message names the `drafter`.
    """
    for group in groups:
        if not draft.is_chain and not group.verifier.trees and not draft.part(group.rows).has_chains():
            raise ParameterError(
                f"verifier {group.verifier.name!r} takes chains, and {drafter!r} drafts trees: use a verifier for "
                "trees: 'traversal', 'tree' or 'coupled'"
            )


def verify_round(
    groups: AbstractSequence[VerifierGroup],
    sequences: AbstractSequence[Sequence],
    draft: Draft,
    logits: Tensor,
    matchers: AbstractSequence[GrammarMatcher | None] = (),
) -> Verified:
    """Verify a round's draft, each row with its own verifier.

    Grammars are applied to the target's logits, at every node, before all sampling parameters: what the verifiers get
    as p is the masked and renormalised distribution. The draft stays as it is, and so does q.

    Args:
        groups: all rows, by verifier.
        sequences: the rows' tokens.
        draft: ``N`` tokens a row.
        logits: ``[B, N+1, V]``, the target's. Those of nodes with NaN, infinity or nothing but -inf are overwritten
            with 0, so that other rows can be verified.
        matchers: of each row, its position in its grammar; None for rows without one, empty if no row has one.
    """
    bad = _overwrite_bad_nodes(logits)
    dead: list[list[bool]] | None = None
    if any(matcher is not None for matcher in matchers):
        logits, dead = _apply_grammars(groups, sequences, draft, logits, matchers)
    forbidding = _may_forbid_all(groups, sequences, logits, matchers)
    if forbidding:
        found = _overwrite_dead_nodes(groups, sequences, draft, logits, forbidding)
        dead = found if dead is None else [found[row] if row in forbidding else own for row, own in enumerate(dead)]
    verdict = _decide(groups, sequences, draft, logits)
    accepted = verdict.accepted
    whole = [len(path) + 1 for path in accepted]
    spoilt, stopped = (_before(nodes, accepted, whole) for nodes in (bad, dead))
    sound = list(map(min, spoilt, stopped))
    usable = [count == all_ for count, all_ in zip(sound, whole, strict=True)]
    stuck = [count < all_ and count == own for count, all_, own in zip(sound, whole, stopped, strict=True)]
    return Verified(verdict, accepted, verdict.following, sound, usable, stuck, logits)


def _before(nodes: list[list[bool]] | None, accepted: list[list[int]], whole: list[int]) -> list[int]:
    """How many nodes of each row's path, the root included, come before the first of these nodes ``[B, N+1]``."""
    if nodes is None:
        return whole
    paths = ([0, *path] for path in accepted)
    return [
        next((at for at, node in enumerate(path) if row[node]), len(path))
        for row, path in zip(nodes, paths, strict=True)
    ]


def _apply_grammars(
    groups: AbstractSequence[VerifierGroup],
    sequences: AbstractSequence[Sequence],
    draft: Draft,
    logits: Tensor,
    matchers: AbstractSequence[GrammarMatcher | None],
) -> tuple[Tensor, list[list[bool]]]:
    """The masked logits ``[B, N+1, V]``, and the nodes where no token is left, whose logits are overwritten with 0."""
    masked = mask_logits(logits, matchers, draft.tokens, draft.parents, draft.counts)
    rows = {row for row, matcher in enumerate(matchers) if matcher is not None}
    return masked, _overwrite_dead_nodes(groups, sequences, draft, masked, rows)


def _may_forbid_all(
    groups: AbstractSequence[VerifierGroup],
    sequences: AbstractSequence[Sequence],
    logits: Tensor,
    matchers: AbstractSequence[GrammarMatcher | None],
) -> set[int]:
    """Rows without a grammar whose parameters forbid tokens, while the model gives some tokens a logit of -inf.

    Where all logits are finite, a token is left: parameters that forbid every token are refused.
    """
    rows = sorted(
        group.rows[place]
        for group in groups
        if group.sampler.alters
        for place in group.sampler.penalties.banning([sequences[row] for row in group.rows])
        if not matchers or matchers[group.rows[place]] is None
    )
    if not rows:
        return set()
    least = (logits if len(rows) == len(logits) else logits[rows]).amin((1, 2)).tolist()
    return {row for row, score in zip(rows, least, strict=True) if score == -inf}


def _overwrite_dead_nodes(
    groups: AbstractSequence[VerifierGroup],
    sequences: AbstractSequence[Sequence],
    draft: Draft,
    logits: Tensor,
    watched: Collection[int],
) -> list[list[bool]]:
    """Find nodes ``[B, N+1]`` where no token is left, in the `watched` rows, and overwrite their logits with 0."""
    dead = torch.zeros(logits.shape[:2], dtype=torch.bool, device=logits.device)
    for group in groups:
        inside = [(place, row) for place, row in enumerate(group.rows) if row in watched]
        if not inside:
            continue
        places, rows = map(list, zip(*inside, strict=True))
        scores = logits[rows]
        if group.sampler.alters:  # a bias or a minimum length may ban what the grammar leaves
            scores = group.sampler.select(places).scores(scores, [sequences[row] for row in rows], draft.part(rows))
        dead[rows] = scores.amax(-1) == -torch.inf
    logits[dead] = 0
    found: list[list[bool]] = dead.tolist()
    return found


def _overwrite_bad_nodes(logits: Tensor) -> list[list[bool]] | None:
    """Find nodes ``[B, N+1]`` whose logits nothing can be sampled from, and overwrite these with 0; None for none."""
    if all_finite(logits):
        return None
    bad = ~logits.amax(-1).isfinite()
    logits[bad] = 0
    rows: list[list[bool]] = bad.tolist()
    return rows


def _decide(
    groups: AbstractSequence[VerifierGroup],
    sequences: AbstractSequence[Sequence],
    draft: Draft,
    logits: Tensor,
) -> Verdict:
    if len(groups) == 1:
        if not groups[0].verifier.trees:
            draft = _as_chains(draft)
        return decide_batch(groups[0].verifier, groups[0].sampler, sequences, draft, logits[:, : draft.width + 1])
    parts: list[Verdict] = []
    for group in groups:
        part = _as_chains(draft.part(group.rows))
        verdict = decide_batch(
            group.verifier,
            group.sampler,
            [sequences[row] for row in group.rows],
            part,
            logits[group.rows, : part.width + 1],
        )
        parts.append(verdict)
    order = torch.tensor([row for group in groups for row in group.rows], device=logits.device).argsort()
    return join(parts, order)


def _as_chains(draft: Draft) -> Draft:
    """The same draft, marked as one of chains if no row of it branches."""
    return draft.chains() if not draft.is_chain and draft.has_chains() else draft


def decide_batch(
    verifier: AnyVerifier,
    sampler: Sampler,
    sequences: AbstractSequence[Sequence],
    draft: Draft,
    logits: Tensor,
) -> Verdict:
    """Verify a batch's draft with one verifier.

    Args:
        verifier: of all rows.
        sampler: of the B rows.
        sequences: the rows' tokens.
        draft: ``N`` tokens a row.
        logits: ``[B, N+1, V]``, the target's, finite.
    """
    follows = is_coupled(verifier)
    # Where p is one-hot, every lossless verifier accepts what the target itself picks.
    if follows or (sampler.all_greedy and verifier.lossless):
        rule = verifier if is_coupled(verifier) else _FOLLOW
        return rule.follow(draft, sampler.picks(logits, sequences, draft, noise=follows))
    assert not is_coupled(verifier)
    u = verdict_uniforms(sampler, sequences, stop=draft.width > 0 or not verifier.lossless)
    size, entries = len(sequences), logits.shape[1] * logits.shape[2]
    most = current_limits().verify_entries
    at_once = max(1, most // max(1, entries)) if logits.device.type == "cpu" and size else max(1, size)
    if size <= at_once:
        return decide(verifier, draft, sampler.probabilities(logits, sequences, draft), u)
    verdicts = []
    for rows, part in sampler.parts(at_once):
        drafted = draft.part(rows)
        probs = part.probabilities(logits[rows], sequences[rows], drafted)
        verdicts.append(decide(verifier, drafted, probs, u[rows]))
    return join(verdicts)


def verdict_uniforms(
    sampler: Sampler, sequences: AbstractSequence[Sequence], *, stop: bool = True
) -> list[list[float]]:
    """The uniforms of a round, two a row: one draws the node to stop at, one the next token.

    Args:
        sampler: of the rows.
        sequences: of the rows.
        stop: False leaves the first one out, for a round without drafts, where there is one node.
    """
    positions = [len(sequence.tokens) for sequence in sequences]
    streams = [int(Stream.STOP), int(Stream.NEXT)] if stop else [int(Stream.NEXT)]
    return uniforms_of_rows(sampler.seeds.tolist(), positions, streams)


def join(verdicts: AbstractSequence[Verdict], order: Tensor | None = None) -> Verdict:
    """Join the verdicts of several batches into one of all their rows.

    Args:
        verdicts: of B rows in all.
        order: ``[B]`` int64, which of those rows each row of the result is; None for one after another.
    """
    if len(verdicts) == 1 and order is None:
        return verdicts[0]
    depth = max(verdict.path.shape[1] for verdict in verdicts)
    paths = [torch.nn.functional.pad(verdict.path, (0, depth - verdict.path.shape[1])) for verdict in verdicts]
    counts, tokens = [verdict.counts for verdict in verdicts], [verdict.tokens for verdict in verdicts]
    joined = [torch.cat(values) for values in (paths, counts, tokens)]
    return Verdict(*(values if order is None else values[order] for values in joined))
