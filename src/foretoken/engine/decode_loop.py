"""The decode loop: rounds of prefill, propose, score, verify, commit and emit, for the rows that `Scheduler` admits."""

from __future__ import annotations

import sys
from collections.abc import Sequence as AbstractSequence
from operator import and_
from typing import Literal

import torch
from torch import Tensor

from foretoken.draft import Draft, int_tensor, no_draft
from foretoken.drafters.base import Batch, Drafter, proposal
from foretoken.drafters.cascade import Cascade
from foretoken.drafters.sharing import sharing_parts
from foretoken.engine.draft_length import DraftLengths
from foretoken.engine.drafted import DraftedRounds, InRow, rounds_in_row
from foretoken.engine.forced import Forced
from foretoken.engine.membership import MakeSampler, Membership
from foretoken.engine.memory_guard import MemoryGuard
from foretoken.engine.pass_times import PassTimes
from foretoken.engine.plain import EmptyProposal, Taking, decode_plainly, passes_of
from foretoken.engine.prefill import Prefill
from foretoken.engine.prefix_cache import PrefixCache
from foretoken.engine.recording import RoundClock, emit
from foretoken.engine.row import Row
from foretoken.engine.tracing import trace_round, trace_seconds
from foretoken.engine.verification import Verified, check_draft, verify_round
from foretoken.errors import NumericalError, ParameterError, PromptError
from foretoken.limits import DEFAULT_LIMITS, Limits, use_limits
from foretoken.models.base import Cache, LanguageModel, Scores
from foretoken.models.threads import one_thread, taking_turns
from foretoken.models.widths import own_widths
from foretoken.sequence import Sequence

_CPU = torch.device("cpu")
_USUAL_WIDTH = 6  # positions of a row's pass, to tell about how many logits a round has


class DecodeLoop:
    """The rows that are decoded together, and their rounds.

    Rows join and leave between rounds. A prompt is prefilled in chunks, one a round while other rows decode; until it
    is cached, its row takes no part. Prefixes that are cached already are copied, see `PrefixCache`.

    Args:
        target: the model whose distribution the output has.
        drafter: what proposes; it follows rows that come and go by itself.
        num_speculative_tokens: most tokens that are drafted a round, or "auto" for what the policy chooses.
        cascade: the drafter under the policy, which chooses the draft lengths that are not fixed.
        make_sampler: makes the sampler of the rows of some sequences; None takes their sampling parameters.
        limits: sizes at which work is split.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        num_speculative_tokens: int | Literal["auto"],
        cascade: Cascade,
        *,
        make_sampler: MakeSampler | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.target = target
        self.limits = limits
        self.drafter = drafter
        self.cascade = cascade
        self.lengths = DraftLengths(drafter, num_speculative_tokens, alike=target.rounds_alike)
        # A drafter that needs the target's hidden states of every token gets none of tokens that are copied.
        shortest, reproducible = limits.shortest_shared_prefix, self.lengths.matters
        self._prefixes = PrefixCache(target, not drafter.hidden_layers, shortest, reproducible)
        self._prefill = Prefill(target, drafter, self._prefixes, limits.prefill_tokens)
        self._make_sampler = make_sampler
        self._members: Membership | None = None
        self._times = PassTimes()
        self._learning = 0.0  # seconds that drafters took after the last round
        self._turns = taking_turns([target, *drafter.models, *sharing_parts(drafter)])

    @property
    def rows(self) -> list[Row]:
        """The requests that are being decoded."""
        return self._prefixes.rows

    def join(self, rows: AbstractSequence[Row]) -> None:
        """Let requests take part from the next round on; one whose source the target can't encode fails instead."""
        if not rows:
            return
        with taking_turns([self.target]), self._memory_guard(self.target.name):
            self._prefixes.join(rows)
            for slot, row in enumerate(self.rows):
                if row in rows and row.sequence.source is not None:
                    try:
                        self._prefixes.cache.encode(slot, row.sequence.source)
                    except PromptError as error:
                        row.fail(error)
            self._remove_finished()

    def clear(self) -> None:
        """Drop all rows and the target's KV cache: after an error its contents are unknown."""
        self._prefixes.clear()
        self._members = None

    def step(self, *, told: bool = True) -> None:
        """One round for every row whose prompt is cached; rows that finished with it, or were ended before, leave.

        Args:
            told: False where nobody reads the tokens of a round, or ends a request, before all requests are over: then
                a plain round may have more passes (`Limits.untold_times`).
        """
        with self._turns:
            self._remove_finished()
            if self.rows:
                logits = len(self.rows) * _USUAL_WIDTH * self.target.vocab_size
                others = self.target.own_threads and self.drafter.own_threads
                few = logits <= self.limits.one_thread_logits
                rows = len(self.rows) if any(map(self.lengths.matters, self.rows)) else 0
                threads, limits = one_thread(others and few), use_limits(self.limits)
                with torch.inference_mode(), threads, limits, own_widths(rows):
                    self._round(told)
                self._remove_finished()

    def _remove_finished(self) -> None:
        if self._prefixes.remove_finished():
            self._members = None

    def _round(self, told: bool) -> None:
        learning = self._learning
        clock = RoundClock(learning)
        clock.turn_to("target")
        with self._memory_guard(self.target.name):
            slots, prefilled = self._prefill.run()
        clock.turn_to("other")
        members = self._members = self._membership(slots)
        drafter = self.cascade if members.chooses else self.drafter
        follows = not (drafter.hidden_layers or drafter.reads_cache)
        held = self._prefill.held_back(members.rows)
        bounds = [0 if holds else self.limits.forced_tokens for holds in held]
        forced = Forced.of(members, follows, bounds, alike=self.target.rounds_alike)
        clock.turn_to("drafter")
        with forced.ahead(), self._memory_guard(f"the drafter {self.drafter.name}"):
            batch = members.batch(self._prefixes.cache, self.target.vocab_size)
            room = self.lengths.limits(members.rows, members.fixed_lengths)
            limits = forced.limits([0 if holds else most for holds, most in zip(held, room, strict=True)])
            # What a drafter learns of a prompt must not depend on the rows beside it where a seed gives one output.
            asked = any(limits) or any(map(and_, held, members.reproducible))
            in_row = None
            if asked and not prefilled and not forced:
                in_row = rounds_in_row(self.target, members, drafter, batch, limits[0], self.limits, told=told)
            asked = asked and in_row is None
            drafted = self._propose(drafter, members, batch, limits) if asked else no_draft(len(limits), batch.device)
        if in_row is not None:
            return self._rounds_in_row(in_row, members, batch, clock)
        draft = forced.before(drafted)
        if not draft.width and not prefilled:
            never = follows and not any(length != 0 for length in members.fixed_lengths)
            idle = sys.maxsize if never else drafter.idle_rounds() if any(limits) else 1
            passes = passes_of(self.target, members, idle, self.limits, told=told)
            if passes > 1:
                return self._plain_round(members, passes, clock, None if never else drafter, batch)
            if any(limits) and drafter.may_rest:
                most = passes_of(self.target, members, sys.maxsize, self.limits, told=told)
                taking = Taking(self.target, members, most, clock, self._times)
                if most > 1 and taking.by_token:
                    proposed = EmptyProposal(drafter, batch, drafted, limits)
                    return self._plain_round_and_rest(taking, members, clock, proposed)
        clock.turn_to("target")
        with self._memory_guard(self.target.name):
            logits, hidden = self._score(members, draft)
        clock.turn_to("verification")
        matchers = [row.matcher for row in members.rows]
        with self._memory_guard("the verification"):
            verified = verify_round(members.groups, batch.sequences, draft, logits, matchers)
        clock.turn_to("drafter")
        with forced.ahead(), self._memory_guard(f"the drafter {self.drafter.name}"):
            own_logits = forced.logits(logits, drafted.width)
            drafter.observe(batch, drafted, forced.verdict(verified.verdict), own_logits)
        clock.turn_to("target")
        with self._memory_guard(self.target.name):
            path = _commit(self._prefixes.cache, members, verified)
        clock.turn_to("other")
        lengths = [len(sequence.tokens) for sequence in batch.sequences]
        traced = [at for at, row in enumerate(members.rows) if row.trace]
        if traced:
            trace_round(members, traced, draft, verified, self.target.tokenizer)
        with self._memory_guard("the verification"):
            emit(members.rows, draft, verified, logits, forced.tokens)
        if hidden:
            clock.turn_to("drafter")
            with self._memory_guard(f"the drafter {self.drafter.name}"):
                _pass_hidden_states(self.drafter, batch, lengths, verified, path, hidden)
            clock.turn_to("other")
        self._handle_bad_logits(members, verified)
        seconds = _stop(clock, members)
        trace_seconds([members.rows[at] for at in traced], seconds)
        drafter.observe_seconds(None if prefilled or forced else sum(seconds.values()) - learning)
        self._learning = clock.since_stop()

    def _rounds_in_row(self, in_row: InRow, members: Membership, batch: Batch, clock: RoundClock) -> None:
        """The rest of a round that is several rounds of a single row with drafts."""
        rounds = DraftedRounds(self.target, self._prefixes.cache, members, batch, clock)
        rounds.run(*in_row, self._learning, self.drafter.name, self._memory_guard)
        if rounds.verified is not None:
            self._handle_bad_logits(members, rounds.verified)
        _stop(clock, members)
        self._learning = clock.since_stop()

    def _plain_round(
        self, members: Membership, passes: int, clock: RoundClock, drafter: Drafter | None, batch: Batch
    ) -> None:
        """The rest of a round of several passes, in which nothing is drafted; no drafter for rows that never draft."""
        taking = Taking(self.target, members, passes, clock, self._times)
        if drafter is not None and taking.by_token:
            taking.watch = drafter.watch(batch)
        seconds = self._run_passes(taking, members, clock)
        if drafter is not None:
            drafter.observe_return(self._times.returning)
            drafter.observe_idle(taking.done, taking.seconds_of(taking.done, seconds - self._learning))
        self._learning = clock.since_stop()

    def _plain_round_and_rest(
        self, taking: Taking, members: Membership, clock: RoundClock, proposed: EmptyProposal
    ) -> None:
        """The rest of a round of a single row in which nothing is drafted, and the idle rounds that follow it.

        The drafter observes the first pass as soon as its token is known, and says then how many idle rounds follow.
        """
        observed_at: float | None = None  # seconds of the round

        def after_first(logits: Tensor, token: int) -> int:
            nonlocal observed_at
            clock.turn_to("drafter")
            with self._memory_guard(f"the drafter {self.drafter.name}"):
                proposed.observe(logits, token)
                proposed.drafter.observe_seconds(clock.so_far() - self._learning)
                idle = 0 if members.rows[0].stops_at(token) else proposed.rest()
                if idle:
                    taking.watch = proposed.watch()
            observed_at = clock.so_far()
            return idle

        taking.after_first = after_first
        seconds = self._run_passes(taking, members, clock)
        if observed_at is None:  # there was no token
            proposed.drafter.observe_seconds(seconds - self._learning)
        elif taking.done > 1:
            idle = taking.done - 1
            proposed.drafter.observe_return(self._times.returning)
            proposed.drafter.observe_idle(idle, taking.seconds_of(idle, seconds - observed_at))
        self._learning = clock.since_stop()

    def _run_passes(self, taking: Taking, members: Membership, clock: RoundClock) -> float:
        """Run the passes of a plain round, and end the round; returns its seconds."""
        with self._memory_guard(self.target.name):
            decode_plainly(taking, self.target, self._prefixes.cache, members, clock)
        if taking.verified is not None:
            self._handle_bad_logits(members, taking.verified)
        return sum(_stop(clock, members).values())

    def _membership(self, slots: list[int]) -> Membership:
        """The rows in these slots: the last round's value if nothing has changed."""
        rows = [self.rows[slot] for slot in slots]
        members = self._members
        if members is not None and members.holds(rows, slots, len(self.rows)):
            return members
        logits = len(rows) * _USUAL_WIDTH * self.target.vocab_size
        device = _CPU if logits <= self.limits.host_logits else self.target.device
        return Membership.of(rows, slots, len(self.rows), self.target, self.lengths, self._make_sampler, device)

    def _propose(self, drafter: Drafter, members: Membership, batch: Batch, limits: list[int]) -> Draft:
        draft = proposal(drafter, batch, limits).to(batch.device)
        if not draft.is_chain:
            if not self.target.supports_trees and not draft.has_chains():
                raise ParameterError(
                    f"{self.target.name} scores chains alone, and {self.drafter.name!r} drafts trees: use another "
                    "drafter"
                )
            check_draft(draft, members.groups, self.drafter.name)
        return draft

    def _score(self, members: Membership, draft: Draft) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The target's logits ``[B, N+1, V]`` and hidden states at the roots and all draft tokens: one pass."""
        tokens, parents, counts = _with_roots([row.sequence.tokens[-1] for row in members.rows], draft)
        scores: Scores = self.target.forward(
            members.to_slots(tokens),
            members.to_slots(parents),
            members.to_slots(counts),
            self._prefixes.cache,
            hidden_layers=self.drafter.hidden_layers,
        )
        return members.logits(scores.logits), tuple(map(members.from_slots, scores.hidden))

    def _handle_bad_logits(self, members: Membership, verified: Verified) -> None:
        """Recompute copied prefixes that gave unusable logits; fail other rows with such logits."""
        recompute = []
        for at, row in enumerate(members.rows):
            if verified.usable[at] or row.finished:  # logits after the end of an output do not matter
                continue
            if verified.stuck[at]:
                row.fail(row.stuck_error(), emitted=True)
            elif self._prefixes.is_fresh_copy(row):  # NaN in the donor's KV cache may have come with the copy
                old = row.sequence
                # A new identity: the drafter's state for the old one is ahead of its tokens.
                row.sequence = Sequence(old.tokens, old.prompt_length, old.params, old.seed, old.source, old.prediction)
                recompute.append(row)
            else:
                row.fail(
                    NumericalError(
                        f"{self.target.name} gave scores with NaN or infinity (or nothing but -inf) after "
                        f"{len(row.sequence.tokens):,} tokens: nothing can be sampled from them; load the model with "
                        "dtype='float32', or check its weights"
                    ),
                    emitted=True,
                )
        self._prefixes.confirm(members.rows)
        if recompute:
            self._prefixes.recompute(recompute)

    def _memory_guard(self, name: str) -> MemoryGuard:
        return MemoryGuard(name, self.rows)


def _stop(clock: RoundClock, members: Membership) -> dict[str, float]:
    """Stop a round's clock, and add its seconds by part, which are returned, to the statistics of its rows."""
    seconds = clock.stop()
    for row in members.rows:
        row.stats.add_seconds(seconds)
    return seconds


def _commit(cache: Cache, members: Membership, verified: Verified) -> Tensor:
    """Commit root and accepted nodes to the target's KV cache; returns these nodes of each row, ``[B, D+1]``."""
    depth = max(map(len, verified.accepted), default=0)
    path = int_tensor([[0, *nodes, *[0] * (depth - len(nodes))] for nodes in verified.accepted])
    counts = int_tensor([len(nodes) + 1 for nodes in verified.accepted])
    cache.commit(members.to_slots(path), members.to_slots(counts))
    return path


def _with_roots(roots: list[int], draft: Draft) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of `LanguageModel.forward` for roots and draft: tokens and parents ``[B, N+1]``, counts ``[B]``."""
    tokens, parents, counts = draft.tokens, draft.parents, draft.counts
    if tokens.device.type == "cpu":  # a call of torch's takes several times as long as all this
        listed = draft.listed
        tokens = int_tensor([[root, *row] for root, row in zip(roots, listed.tokens, strict=True)])
        parents = int_tensor([[-1, *row] for row in listed.parents])
        return tokens, parents, int_tensor([count + 1 for count in listed.counts])
    first = int_tensor(roots, tokens.device)[:, None]
    tokens, parents = torch.cat([first, tokens], dim=1), torch.cat([torch.full_like(first, -1), parents], dim=1)
    return tokens, parents, counts + 1


def _pass_hidden_states(
    drafter: Drafter,
    batch: Batch,
    lengths: list[int],
    verified: Verified,
    path: Tensor,
    hidden: AbstractSequence[Tensor],
) -> None:
    """Give a drafter the hidden states of the root and of the accepted nodes that became part of the sequence.

    Args:
        drafter: of the loop.
        batch: of the round; its sequences are extended by now.
        lengths: tokens of each sequence before that.
        verified: the round's result.
        path: ``[B, D+1]``, those nodes of each row.
        hidden: of each of the drafter's layers, ``[B, N+1, H]``.
    """
    counts = [
        min(len(nodes) + 1, len(sequence.tokens) - length + 1)
        for nodes, sequence, length in zip(verified.accepted, batch.sequences, lengths, strict=True)
    ]
    nodes = path.to(hidden[0].device)[..., None]
    states = [layer.gather(1, nodes.expand(-1, -1, layer.shape[-1])) for layer in hidden]
    drafter.observe_hidden(batch.sequences, [length - 1 for length in lengths], counts, states)
