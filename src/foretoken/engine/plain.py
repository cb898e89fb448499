"""Plain rounds of several passes: one after another, with nothing but the choice of their tokens between them.

What a round does besides takes as long as a third of a small model's pass: drafters are asked and told, the KV cache is
committed, events are handed over. A round in which nothing is drafted may do that once for several tokens. They are the
tokens that rounds of one pass would have given, with the same uniforms.
"""

from __future__ import annotations

from foretoken.draft import int_tensor, no_draft
from foretoken.engine.membership import Membership
from foretoken.engine.recording import RoundClock, emit, emit_plain
from foretoken.engine.verification import Verified, verify_round
from foretoken.models.base import Cache, LanguageModel
from foretoken.policy.costs import BYTES_PER_POSITION
from foretoken.sampling.vocabulary import best_tokens

_SECONDS = 1 / 60
"""Most time of such a round, by what passes are assumed to take: a screen shows no more often what has come, and who
joins or cancels waits no longer for the next round. On a CPU models above some 60 MB have rounds of one pass by it."""


def passes_of(target: LanguageModel, members: Membership, idle: int, most: int) -> int:
    """How many passes a round takes in which nothing is drafted.

    Nothing here depends on a clock. A row's first token is told at once.

    Args:
        target: the model.
        members: the rows of the round.
        idle: rounds that may pass before the drafter is asked again, the present one included.
        most: passes of a round.
    """
    waits = len(members.slots) < members.num_slots  # for the next chunk of its prompt
    most = min(affordable(target, len(members.rows), most), idle)
    if most == 1 or waits:
        return 1
    for row, length in zip(members.rows, members.fixed_lengths, strict=True):
        forces = row.matcher is not None and length != 0  # what its grammar forces is drafted
        if forces or row.trace or not row.stats.emitted:
            return 1
    return max(1, min(most, *(row.max_accepted + 1 for row in members.rows)))


def affordable(target: LanguageModel, rows: int, most: int) -> int:
    """How many passes over so many rows a round may take: up to `most`, as far as target and time allow."""
    if most == 1 or not target.commits_late or not target.assumed_seconds:
        return 1
    share = BYTES_PER_POSITION if target.position_share is None else target.position_share
    seconds = target.assumed_seconds * (1.0 + share * (rows - 1))
    return max(1, min(most, int(_SECONDS / seconds)))


def decode_plainly(
    target: LanguageModel, cache: Cache, members: Membership, most: int, clock: RoundClock
) -> tuple[Verified | None, int]:
    """Up to so many passes, each followed by the token that it gives each row.

    The round ends early with a row that finishes, or whose scores are of no use.

    Args:
        target: the model.
        cache: its KV cache, without tentative nodes.
        members: the rows of the round.
        most: passes.
        clock: of the round.

    Returns:
        The last pass's result, None where all it had to tell are the best tokens; and how many passes there were.
    """
    rows, greedy = members.rows, _is_greedy(members)
    nothing, matchers = no_draft(len(rows), members.sampler.device), [row.matcher for row in rows]
    counts = members.to_slots(int_tensor([1] * len(rows)))
    for done in range(most):
        clock.turn_to("target")
        roots = int_tensor([[row.sequence.tokens[-1]] for row in rows])
        above = int_tensor([[done - 1]] * len(rows))
        scores = target.forward(members.to_slots(roots), members.to_slots(above), counts, cache)
        logits = members.logits(scores)
        clock.turn_to("verification")
        best = best_tokens(logits) if greedy else None
        verified = None
        if best is None:
            verified = verify_round(members.groups, members.sequences, nothing, logits, matchers)
        clock.turn_to("other")
        if best is not None:
            emit_plain(rows, best, more=done > 0)
        if verified is not None:
            emit(rows, nothing, verified, logits, more=done > 0)
            if not all(verified.usable):
                break
        if any(row.finished for row in rows):
            break
    clock.turn_to("target")
    path = int_tensor([list(range(done + 1))] * len(rows))
    cache.commit(members.to_slots(path), members.to_slots(int_tensor([done + 1] * len(rows))))
    clock.turn_to("other")
    return verified, done + 1


def _is_greedy(members: Membership) -> bool:
    """Whether each row gets the token with the best score, and nothing else of the scores is wanted."""
    return (
        members.sampler.all_greedy
        and not members.sampler.alters
        and all(group.verifier.lossless for group in members.groups)
        and all(row.matcher is None and row.logprobs is None for row in members.rows)
    )
