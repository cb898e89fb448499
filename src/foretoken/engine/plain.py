"""Plain rounds of several passes: one after another, with nothing but the choice of their tokens between them.

What a round does besides its pass takes as long as a third of a small model's pass: it asks drafters and lets them
observe, commits the KV cache, and hands events over. A round in which nothing is drafted may do that once for several
tokens. They are the tokens that rounds of one pass would have given, with the same uniforms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from time import perf_counter

import torch
from torch import Tensor

from foretoken.draft import Draft, int_tensor, no_draft
from foretoken.drafters.base import Batch, Drafter
from foretoken.drafters.cascade_costs import passes_together
from foretoken.engine.membership import Membership
from foretoken.engine.pass_times import PassTimes
from foretoken.engine.recording import RoundClock, emit, emit_plain
from foretoken.engine.verification import Verified, verify_round
from foretoken.limits import Limits, current_limits
from foretoken.models.base import Cache, LanguageModel
from foretoken.randomness import Stream, uniforms_ahead
from foretoken.sampling.vocabulary import RowBest, RowDraws, best_tokens, draw_rows
from foretoken.verify import is_coupled
from foretoken.verify.base import Verdict

_STRIDE = 4
"""Passes behind which a drafter that watches a round is called, besides the last: what is done between two passes takes
several times as long as elsewhere."""


def passes_of(target: LanguageModel, members: Membership, idle: int, limits: Limits, *, told: bool = True) -> int:
    """How many passes a round has in which nothing is drafted.

    Nothing here depends on a clock. A row's first token is emitted at once, in a round of one pass.

    Args:
        target: the model.
        members: the rows of the round.
        idle: rounds that may pass before the drafter is asked again, the present one included.
        limits: of the engine.
        told: as in `DecodeLoop.step`.
    """
    waits = len(members.slots) < members.num_slots  # for the next chunk of its prompt
    most = passes_together(target, len(members.rows), limits.plain_passes)
    most = min(most if told or most == 1 else most * limits.untold_times, idle)
    if most == 1 or waits:
        return 1
    for row, length in zip(members.rows, members.fixed_lengths, strict=True):
        forces = row.matcher is not None and length != 0  # what its grammar forces is drafted
        if forces or row.trace or not row.stats.emitted:
            return 1
    return max(1, min(most, *(row.max_accepted + 1 for row in members.rows)))


def decode_plainly(taking: Taking, target: LanguageModel, cache: Cache, members: Membership, clock: RoundClock) -> None:
    """Run passes, and choose each row's token after each of them.

    The round ends early with a row that finishes, or whose logits are unusable.

    Args:
        taking: chooses the tokens; has the results afterwards.
        target: the model.
        cache: its KV cache, without tentative nodes.
        members: the rows of the round.
        clock: of the round.
    """
    rows = members.rows
    clock.turn_to("target")
    # The pass before may have left these passes wide: one of several rows, or one that no drafter has planned.
    changed = False
    if (widths := target.pass_widths(())) is not None:
        changed = widths.last not in (0, max(len(rows), widths.least))
        widths.leave(len(rows), taking.most)
    taking.times.begin(perf_counter(), changed=changed)
    try:
        if members.num_slots == 1:
            target.decode_row(rows[0].sequence.tokens[-1], taking.most, cache, taking.next_of_row)
        else:
            counts = members.to_slots(int_tensor([1] * len(rows)))
            for done in range(taking.most):
                roots = int_tensor([[token] for token in taking.roots()])
                above = int_tensor([[done - 1]] * len(rows))
                logits = target.forward(members.to_slots(roots), members.to_slots(above), counts, cache).logits
                if not taking.take(logits):
                    break
    finally:  # after an error of the target, too, the rows get the tokens before it
        taking.hand_over()
        taking.times.end()
    clock.turn_to("target")
    path = int_tensor([list(range(taking.done))] * len(rows))
    cache.commit(members.to_slots(path), members.to_slots(int_tensor([taking.done] * len(rows))))
    clock.turn_to("other")


class Taking:
    """Chooses the tokens after each of a round's passes, and hands them to the rows.

    Rows that end by their tokens alone get them at the end of the round: work between two passes finds its data
    evicted from the processor's caches, and takes two to three times as long as the same work done at once.

    Args:
        target: the model.
        members: the rows of the round.
        most: passes.
        clock: of the round; it counts the target's part while no token is chosen.
        times: of the loop's plain rounds.

    Attributes:
        most: most passes.
        after_first: only where `by_token` is True: called with the first pass's logits ``[1, 1, V]`` and token, which
            the row has not got yet; returns how many passes may follow. None where all may. Its time counts as the
            first pass's.
        watch: likewise; called behind each `_STRIDE` passes, and behind the last, with the tokens so far: whether no
            pass may follow.
        done: passes whose tokens were chosen.
        verified: the last pass's result where it went through `verify_round`, else None.
    """

    def __init__(
        self, target: LanguageModel, members: Membership, most: int, clock: RoundClock, times: PassTimes
    ) -> None:
        self._target, self._members, self.most, self._clock, self.times = target, members, most, clock, times
        self._choose = _chooser(members, most)
        self._nothing = no_draft(len(members.rows), members.sampler.device)
        self._later: list[list[int]] = [[] for _ in members.rows]  # tokens that the rows did not get yet
        self._by_token = all(row.ends_by_token for row in members.rows)
        chosen_on_cpu, self._moves = members.sampler.device.type == "cpu", target.device.type != "cpu"
        alone = members.num_slots == 1 and chosen_on_cpu and self._by_token
        self._choose_one = self._choose.of_row if alone and self._choose is not None else None
        self.after_first: Callable[[Tensor, int], int] | None = None
        self.watch: Callable[[list[int]], bool] | None = None
        self.done = 0
        self.verified: Verified | None = None

    @property
    def by_token(self) -> bool:
        """Whether there is a single row, whose tokens are chosen without a verdict and may be added later."""
        return self._choose_one is not None

    def seconds_of(self, passes: int, spent: float) -> float:
        """Seconds that so many passes take in plain decoding (`PassTimes.seconds_of`)."""
        together = passes_together(self._target, len(self._members.rows), current_limits().plain_passes)
        return self.times.seconds_of(passes, spent, together)

    def roots(self) -> list[int]:
        """Each row's last token, handed over or not."""
        return [
            later[-1] if later else sequence.tokens[-1]
            for later, sequence in zip(self._later, self._members.sequences, strict=True)
        ]

    def next_of_row(self, scores: Tensor) -> int | None:
        """`take` for a single row: the root of its next pass, None if there is none."""
        row = self._members.rows[0]
        if self._choose_one is None:
            return self.roots()[0] if self.take(scores) else None
        self._clock.turn_to("verification")
        if self._moves:
            scores = self._members.logits(scores)
        token = self._choose_one(scores, self.done)
        if token is None:
            self._verify(scores)
            return None
        self._later[0].append(token)
        if not self.done and self.after_first is not None:
            self.most = min(self.most, 1 + self.after_first(scores, token))
        self._count()
        ends = row.stops_at(token) or row.finished
        if self.watch is not None and not ends and (self.done % _STRIDE == 0 or self.done >= self.most):
            self._clock.turn_to("drafter")
            if self.watch(self._later[0]):
                self.most = min(self.most, self.done)
            self.times.leave_out(perf_counter())
        self._clock.turn_to("target")
        return None if self.done >= self.most or ends else token

    def take(self, scores: Tensor | None) -> bool:
        """Choose the tokens after a pass with logits ``[B, 1, V]`` of all slots; returns whether passes may follow."""
        clock, rows = self._clock, self._members.rows
        clock.turn_to("verification")
        logits = self._members.logits(scores)
        tokens = self._choose(logits, self.done) if self._choose is not None else None
        if tokens is None:
            goes_on = self._verify(logits)
        else:
            clock.turn_to("other")
            for later, token in zip(self._later, tokens, strict=True):
                later.append(token)
            self._count()
            goes_on = not any(row.stops_at(token) for row, token in zip(rows, tokens, strict=True))
            if not self._by_token:
                self.hand_over()
        clock.turn_to("target")
        return goes_on and self.done < self.most and not any(row.finished for row in rows)

    def _count(self) -> None:
        """Count one more pass, whose tokens were chosen."""
        self.done += 1
        self.times.add(perf_counter())

    def _verify(self, logits: Tensor) -> bool:
        """Choose the tokens of a pass by a verdict; returns whether all of its logits are usable."""
        self.hand_over()
        self._clock.turn_to("verification")
        members = self._members
        matchers = [row.matcher for row in members.rows]
        verified = verify_round(members.groups, members.sequences, self._nothing, logits, matchers)
        self._clock.turn_to("other")
        emit(members.rows, self._nothing, verified, logits, more=self.done > 0)
        self.verified = verified
        self._count()
        return all(verified.usable)

    def hand_over(self) -> None:
        """Give the rows the tokens that they have not got yet."""
        self._clock.turn_to("other")
        for at, row in enumerate(self._members.rows):
            tokens, self._later[at] = self._later[at], []  # first, so that a row that fails does not get them twice
            if tokens:
                emit_plain(row, tokens, more=self.done > len(tokens))


@dataclass(frozen=True)
class EmptyProposal:
    """A drafter's empty proposal for a single row, with the arguments that it was asked with."""

    drafter: Drafter
    batch: Batch
    draft: Draft
    limits: list[int]

    def observe(self, logits: Tensor, token: int) -> None:
        """Let the drafter observe the round's token; the next pass overwrites the logits."""
        self.drafter.observe(self.batch, self.draft, Verdict.from_lists([[]], [token]), logits.clone())

    def rest(self) -> int:
        """See `Drafter.rest`."""
        return self.drafter.rest(self.batch, self.limits)

    def watch(self) -> Callable[[list[int]], bool] | None:
        """See `Drafter.watch`."""
        return self.drafter.watch(self.batch)


def _chooser(members: Membership, most: int) -> _Best | _Draws | None:
    """What chooses the same tokens as `verify_round` from the logits of a pass, in a fraction of the time.

    None where rows need more than that. In greedy rows all lossless verifiers take the best tokens, coupled ones too.

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
        return _Best()
    entries = len(members.rows) * sampler.vocab_size
    if any(map(is_coupled, verifiers)) or not sampler.scales_alone or entries > current_limits().verify_entries:
        return None
    return _Draws(members, most)


class _Best:
    """Chooses the most probable tokens."""

    def __init__(self) -> None:
        self._row = RowBest()

    def __call__(self, logits: Tensor, done: int) -> list[int] | None:
        """Each row's token, from the logits ``[B, 1, V]`` of pass number `done`; None where some are unusable."""
        return best_tokens(logits)

    def of_row(self, logits: Tensor, done: int) -> int | None:
        """The same for a single row, ``[1, 1, V]`` on the CPU."""
        return self._row.best(logits)


class _Draws:
    """Draws the tokens of a round's passes.

    Args:
        members: rows whose distributions are softmaxes at one temperature.
        most: passes.
    """

    def __init__(self, members: Membership, most: int) -> None:
        self._sampler, size, self._most = members.sampler, len(members.rows), most
        self._seeds = members.sampler.seeds.tolist()
        self._lengths = [len(sequence.tokens) for sequence in members.sequences]
        self._uniforms: list[list[float]] = []  # of each row
        on_cpu = members.sampler.device.type == "cpu"
        self._row = RowDraws(members.sampler.vocab_size) if size == 1 and on_cpu else None
        self._as_they_are = members.sampler.leaves_scores

    def __call__(self, logits: Tensor, done: int) -> list[int] | None:
        """See `_Best`."""
        if self._row is not None:
            token = self.of_row(logits, done)
            return None if token is None else [token]
        probs = self._sampler.scaled(logits).softmax(-1)
        usable = all(map(isfinite, probs[:, 0, 0].tolist()))
        return draw_rows(probs, self._uniforms_of(done)) if usable else None

    def of_row(self, logits: Tensor, done: int) -> int | None:
        """See `_Best`."""
        assert self._row is not None
        as_it_is = self._as_they_are and logits.dtype is torch.float32
        return self._row.draw(logits if as_it_is else self._sampler.scaled(logits), self._uniforms_of(done)[0])

    def _uniforms_of(self, done: int) -> list[float]:
        """Each row's uniform for the token after this pass: that of `verdict_uniforms` for a round without drafts."""
        if done < 2:  # one for the first pass, which may be the only one, then those of all others at once
            count = self._most - done if done else 1
            positions = [length + done for length in self._lengths]
            self._uniforms = uniforms_ahead(self._seeds, positions, count, int(Stream.NEXT))
        return [own[max(done - 1, 0)] for own in self._uniforms]
