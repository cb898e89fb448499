"""Plain rounds of several passes: one after another, with nothing but the choice of their tokens between them.

What a round does besides takes as long as a third of a small model's pass: drafters are asked and told, the KV cache is
committed, events are handed over. A round in which nothing is drafted may do that once for several tokens. They are the
tokens that rounds of one pass would have given, with the same uniforms.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

from torch import Tensor

from foretoken.draft import int_tensor, no_draft
from foretoken.engine.membership import Membership
from foretoken.engine.recording import RoundClock, emit, emit_plain
from foretoken.engine.verification import Verified, verdict_uniforms, verify_round
from foretoken.limits import current_limits
from foretoken.models.base import Cache, LanguageModel
from foretoken.policy.costs import plain_passes
from foretoken.sampling.vocabulary import RowDraws, best_tokens, draw_rows
from foretoken.verify import is_coupled


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
    if most == 1 or not target.commits_late:
        return 1
    return plain_passes(target.assumed_seconds, target.position_share, rows, most)


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
        The last pass's result, None where it had nothing to tell but tokens; and how many passes there were.
    """
    rows, choose = members.rows, _chooser(members, most)
    nothing, matchers = no_draft(len(rows), members.sampler.device), [row.matcher for row in rows]
    counts, sequences = members.to_slots(int_tensor([1] * len(rows))), members.sequences
    alone = rows[0].sequence if members.num_slots == 1 else None
    for done in range(most):
        clock.turn_to("target")
        if alone is not None:
            scores = target.next_scores(alone.tokens[-1], done - 1, cache)
        else:
            roots = int_tensor([[sequence.tokens[-1]] for sequence in sequences])
            above = int_tensor([[done - 1]] * len(rows))
            scores = target.forward(members.to_slots(roots), members.to_slots(above), counts, cache)
        logits = members.logits(scores)
        clock.turn_to("verification")
        tokens = choose(logits, done) if choose is not None else None
        verified: Verified | None = None
        if tokens is None:
            verified = verify_round(members.groups, sequences, nothing, logits, matchers)
        clock.turn_to("other")
        if tokens is not None:
            emit_plain(rows, tokens, more=done > 0)
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


def _chooser(members: Membership, most: int) -> Callable[[Tensor, int], list[int] | None] | None:
    """Gives each row's token for the logits ``[B, 1, V]`` of a pass and its number, None where some are of no use.

    The tokens are those of `verify_round`, but it takes a fraction of the time. None where more is wanted of the
    logits. Of greedy rows all lossless verifiers take the best tokens, coupled ones too.

    Args:
        members: the rows of the round.
        most: passes.
    """
    sampler, verifiers = members.sampler, [group.verifier for group in members.groups]
    if any(row.matcher is not None or row.logprobs is not None for row in members.rows):
        return None
    if not all(verifier.lossless for verifier in verifiers):
        return None
    if sampler.all_greedy and not sampler.alters:
        return lambda logits, _: best_tokens(logits)
    entries = len(members.rows) * sampler.vocab_size
    if any(map(is_coupled, verifiers)) or not sampler.scales_alone or entries > current_limits().verify_entries:
        return None
    return _Draws(members, most)


class _Draws:
    """Draws the tokens of a round's passes.

    Args:
        members: rows whose distributions are softmaxes at one temperature.
        most: passes.
    """

    def __init__(self, members: Membership, most: int) -> None:
        self._sampler, size = members.sampler, len(members.rows)
        uniforms = (verdict_uniforms(members.sampler, members.sequences, stop=False, later=at) for at in range(most))
        self._uniforms = [[own for (own,) in each] for each in uniforms]
        on_cpu = members.sampler.device.type == "cpu"
        self._alone = RowDraws(members.sampler.vocab_size) if size == 1 and on_cpu else None

    def __call__(self, logits: Tensor, done: int) -> list[int] | None:
        """See `_chooser`."""
        scores = self._sampler.scaled(logits)
        if self._alone is not None:
            token = self._alone.draw(scores, self._uniforms[done][0])
            return None if token is None else [token]
        probs = scores.softmax(-1)
        usable = all(map(isfinite, probs[:, 0, 0].tolist()))
        return draw_rows(probs, self._uniforms[done]) if usable else None
