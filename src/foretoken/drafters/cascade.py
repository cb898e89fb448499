"""Cascade: drafters under one speculation policy, which decides which one drafts how many tokens in each row."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from weakref import WeakKeyDictionary

from torch import Tensor

from foretoken.draft import Draft, no_draft
from foretoken.drafters.base import Batch, Drafter, NoDrafter, proposal
from foretoken.drafters.cascade_costs import Assumed
from foretoken.drafters.cascade_rests import CascadeRests
from foretoken.drafters.cascade_rounds import (
    Round,
    Saved,
    Sleep,
    State,
    barred_in,
    kinds_of,
    offers_of,
    read_before,
)
from foretoken.drafters.cascade_steady import SteadyRounds
from foretoken.drafters.chains import extended, in_one_call, joined
from foretoken.drafters.given_length import of_length
from foretoken.drafters.judging import judge_row, verdict_of
from foretoken.drafters.prediction import Prediction
from foretoken.drafters.row_rounds import RowRounds, leaves_as_is
from foretoken.errors import ParameterError
from foretoken.models.base import LanguageModel
from foretoken.models.widths import PassWidths
from foretoken.policy import store
from foretoken.policy.costs import Costs
from foretoken.policy.policy import Policy
from foretoken.policy.request import LARGEST, LONGEST, Offer
from foretoken.sequence import Sequence
from foretoken.verify.base import Verdict


class Cascade(CascadeRests):
    """Drafts with the drafter and the draft length with the largest expected gain; see `foretoken.policy`.

    Drafters that copy or look up tokens (`Drafter.matches`, `Drafter.estimates`) are free, they cost next to nothing:
    they draft first, and the policy decides how many of their tokens are verified. For the others, "models", the policy
    decides which one to ask, and for how many tokens, before it is asked: a draft that was drawn is verified as it is,
    since to choose among drawn drafts by their tokens would change the distribution.

    For reproducible requests (`Batch.reproducible`) no measured times are used: there costs are the bytes of the
    weights, and acceptance is the request's own.

    A request's prediction (`Sequence.prediction`) is a further free drafter, the last one, in its own row.

    Args:
        drafters: one, or several; several draft chains.
        costs: time that each drafter takes for a token, in passes of the target, for all requests; None to measure it.
        clock: returns seconds, for measuring.

    Raises:
        ParameterError: no drafter, or a negative cost.
    """

    name = "cascade"

    def __init__(
        self,
        drafters: AbstractSequence[Drafter],
        costs: AbstractSequence[float] | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        if not drafters:
            raise ParameterError("a cascade of no drafters: give one or more")
        if costs is not None and (len(costs) != len(drafters) or not all(cost >= 0.0 for cost in costs)):
            raise ParameterError(
                f"costs={list(costs)}: give 0 or more target passes for each of {len(drafters)} drafters"
            )
        self.drafters = tuple(drafter for drafter in drafters if not isinstance(drafter, NoDrafter))
        self._sources = (*self.drafters, Prediction())
        self.clock = clock
        self.models = tuple(model for drafter in drafters for model in drafter.models)
        self.own_threads = all(drafter.own_threads for drafter in drafters)
        self.hidden_layers = tuple(sorted({layer for drafter in drafters for layer in drafter.hidden_layers}))
        self.reads_cache = any(drafter.reads_cache for drafter in drafters)
        self.free = [drafter.matches is not None or drafter.estimates is not None for drafter in self._sources]
        # Whether a drafter may miss rounds: the others need the target's hidden states or KV cache of each.
        self._independent = [
            free or bool(drafter.models and not drafter.hidden_layers and not drafter.reads_cache)
            for free, drafter in zip(self.free, self.drafters, strict=False)
        ]
        self._left_alone = all(self._independent)
        self._in_calls = any(drafter.call_sizes for drafter in self.drafters)
        self._copies, self._models = any(self.free[:-1]), not all(self.free)
        self._given, self.measured = costs, costs is not None
        self._target: LanguageModel | None = None
        self._widths: Callable[[AbstractSequence[int]], PassWidths | None] = lambda _: None
        self._states: WeakKeyDictionary[Sequence, State] = WeakKeyDictionary()
        self._round: Round | None = None
        self._steady: SteadyRounds | None = None
        self._followed = None
        self._sleep, self._saved, self._learning = Sleep(), Saved(), 0.0  # the last: seconds of learning from a round
        self._assumed = Assumed.of(self.drafters, costs, None, together=self._left_alone)
        self.policy = self._new_policy(None)

    @property
    def trees(self) -> bool:
        """Whether a single drafter's drafts may branch; several draft chains."""
        return len(self.drafters) == 1 and self.drafters[0].trees

    def warm_up(self, drawn: bool) -> None:
        """Have each drafter compile what it needs."""
        for drafter in self.drafters:
            drafter.warm_up(drawn)

    def check_target(self, target: LanguageModel) -> None:
        """Have each drafter check the target, and compare the sizes of their weights."""
        for drafter in self.drafters:
            drafter.check_target(target)
        if self._target is target:
            return  # the policy may know something of it by now
        self._target, self._widths = target, target.pass_widths
        self.measured, self._saved = self._given is not None, Saved()
        self._assumed = Assumed.of(self.drafters, self._given, target, together=self._left_alone)
        self.policy = self._new_policy(None)

    def keep_costs(self, key: str) -> None:
        """Begin with what earlier processes stored under this key, as a prior."""
        if key != self._saved.key and self._given is None:
            self._saved = Saved(key)
            saved = store.read(key)
            try:
                costs = Costs.read(saved["costs"])
                if len(costs.drafters) == len(self.drafters):
                    self.policy = self._new_policy(costs, saved.get("rates"))
            except (KeyError, TypeError, ValueError, AttributeError):  # nothing there, or another version's
                self.policy = self._new_policy(None)

    def measure(
        self,
        target: AbstractSequence[tuple[int, float]],
        drafters: AbstractSequence[AbstractSequence[tuple[int, float]]],
        change: float = 0.0,
        together: float | None = None,
    ) -> None:
        """Take over costs that were measured before the first token.

        Args:
            target: pairs of positions of a pass, and seconds of a round with it, drafters left out.
            drafters: of each drafter, pairs of a draft length and seconds of its call.
            change: seconds that a pass takes longer if it is not as wide as the one before; 0 if not measured.
            together: what a pass of a plain round of several passes takes, as a share of a plain round of one; None if
                not measured.
        """
        self.measured = True
        self.policy.costs.measure(target, drafters, change, together)

    def in_row(self, batch: Batch, limit: int) -> RowRounds | None:
        """Rounds that are decided like an earlier one."""
        if self._steady is None or not leaves_as_is(self, Cascade):
            return None
        self._followed, ended = None, partial(self._saved.after, self.policy)
        return self._steady.in_row(batch, limit, self._widths(self.hidden_layers), ended)

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """The drafts that the policy decides on."""
        size, self._followed = len(limits), None  # what a round that failed has left behind
        if self._steady is not None:
            if self._steady.holds(batch, limits[0]):
                return self._steady.propose(batch, limits[0], self._widths(self.hidden_layers))
            self._steady.tell()
            self._steady = None
        if self._sleep.holds(batch.sequences, self.policy):
            self._sleep.begin()
            self._round = self._sleep.round(batch.sequences, self._widths(self.hidden_layers), self.policy)
            return no_draft(size, batch.device)
        self._sleep.tell(self.policy)
        if len(self.drafters) > 1 and any(batch.trees):
            batch = replace(batch, trees=(False,) * size)
        states, last = [self._state(batch, row) for row in range(size)], len(self.drafters)
        exact = batch.exact or (False,) * size
        requests = [state.request for state in states]
        rest = self.policy.resting(requests, exact)
        # A row that may draft nothing, as beside the end of its prompt, is not decided on, as it is not by itself.
        awake = [row for row in range(size) if not rest[row] and (limits[row] > 0 or exact[row])]
        if all(rest) and self._left_alone:
            self._sleep = Sleep.of(batch.sequences, requests, self.policy)
            self._round = self._sleep.round(batch.sequences, self._widths(self.hidden_layers), self.policy)
            return no_draft(size, batch.device)
        widths = self._widths(self.hidden_layers)
        drafts = [no_draft(size, batch.device)] * len(self._sources)
        offered: list[list[tuple[Offer, list[int], list[int]]]] = [[] for _ in limits]
        begun = start = self.clock()
        guided = any([sequence.prediction for sequence in batch.sequences])
        wanted, batch = self._wanted(batch, limits, states, awake) if self._copies or guided else (limits, batch)
        asked = any(wanted)
        for at, drafter in enumerate(self._sources):
            if asked and self.free[at] and (at < last or guided):
                drafts[at] = self._offers(at, drafter, batch, wanted, offered)
        copied = self.clock() - start
        rows = [state.resting for state in states]
        for index in awake:
            rows[index] = states[index].row(batch, index, limits[index], offered[index], self.drafters)
        if self._models:
            self.policy.extends = [drafter.extends for drafter in self._sources]
        free = [rows[index] for index in awake if rows[index].room > 0]
        passes = (widths.last, widths.least) if widths is not None else None
        self.policy.costs.runs_alone_at(widths.narrow if widths is not None else ())
        if self._in_calls and self._given is None:
            whole = in_one_call(batch)
            sizes, by_step = [drafter.call_sizes for drafter in self.drafters], [()] * len(self.drafters)
            for index in awake:
                rows[index].calls = sizes if whole[index] else by_step
            self.policy.drafts_in(sizes if all(whole) else by_step)
        width, reading = self.policy.choose(free, passes, size - len(free)), 0.0
        if size == 1 and rows[0].reading:
            model = self.drafters[rows[0].chosen.drafter]
            reading = read_before(model, self.policy, batch, states[0], rows[0], self.clock)
            rows[0] = states[0].row(batch, 0, limits[0], offered[0], self.drafters)
            width = self.policy.choose(rows, passes)
        if len(self.drafters) < 2 and any(exact):
            for row, is_exact, limit in zip(rows, exact, limits, strict=True):
                if is_exact:
                    row.chosen, width = of_length(row, limit, self.policy.kinds, self.free), 0
        turns, used = [[False] * size for _ in self._sources], [0] * size
        for index, row in enumerate(rows):
            if row.chosen.drafter >= 0:
                turns[row.chosen.drafter][index] = True
        current = self._round = Round(list(batch.sequences), rows, awake, offered, turns, asked, copied=copied)
        current.deciding, current.reading = self.clock() - begun - copied - reading + self._learning, reading
        for at, drafter in enumerate(self.drafters):
            if not self.free[at]:
                drafts[at] = self._ask(at, drafter, batch, current, states)
        for index, row in enumerate(rows):
            if row.chosen.tokens:
                used[index] = min(row.chosen.total, drafts[row.chosen.drafter].listed.counts[index])
        current.positions = size + sum(used)
        if widths is not None:
            current.positions, current.changed = widths.plan(current.positions, width, alone=size == 1)
        if awake == [0] == [size - 1] and (len(self.drafters) == 1 or self._left_alone):
            lengths = states[0].lengths
            self._steady = SteadyRounds.after(self.policy, self.drafters, batch, lengths, rows[0], self.clock)
        draft = joined(list(zip(turns, drafts, strict=True)), batch.vocab_size, used)
        predicted = current.used_of(last, used) if guided else ()
        return replace(draft, predicted=predicted) if any(predicted) else draft

    def _wanted(
        self, batch: Batch, limits: AbstractSequence[int], states: list[State], awake: list[int]
    ) -> tuple[list[int], Batch]:
        """Most tokens that free drafters may draft in each row, and the batch with `Batch.least`."""
        wanted, least = [0] * len(limits), [0.0] * len(limits)
        asked = self.policy.ask([states[row].request for row in awake], len(limits) - len(awake))
        for row, worth in zip(awake, asked, strict=True):
            if batch.exact and batch.exact[row]:
                states[row].request.asked, worth = True, 0.0
            if worth is not None:
                wanted[row], least[row] = limits[row], worth
        return wanted, batch.with_least(tuple(least)) if any(wanted) else batch

    def _offers(
        self,
        at: int,
        drafter: Drafter,
        batch: Batch,
        limits: AbstractSequence[int],
        offered: list[list[tuple[Offer, list[int], list[int]]]],
    ) -> Draft:
        most = LONGEST if at < len(self.drafters) else LARGEST
        wanted = [limit if batch.exact and batch.exact[row] else min(limit, most) for row, limit in enumerate(limits)]
        if batch.drafters and at < len(self.drafters):
            wanted = [0 if at in barred_in(batch, row, self.drafters) else limit for row, limit in enumerate(wanted)]
        if at == len(self.drafters) and batch.depths:  # in rows that take trees, limits are numbers of nodes
            wanted = list(map(min, wanted, batch.depths))
        draft = proposal(drafter, batch, wanted)
        if draft.width:
            for row, made in enumerate(offers_of(drafter, at, draft.listed, batch.sequences)):
                offered[row] += made
        return draft

    def _ask(self, at: int, drafter: Drafter, batch: Batch, current: Round, states: list[State]) -> Draft:
        """Ask a model for its draft. Those that must not miss a round are asked with limits of 0, too."""
        limits = [row.chosen.tokens if row.chosen.drafter == at else 0 for row in current.rows]
        for state, sequence, limit in zip(states, current.sequences, limits, strict=True):
            state.asked[at] = limit > 0
            if limit:
                state.lengths[at] = len(sequence.tokens)
        if self._independent[at] and not any(limits):
            return no_draft(len(limits), batch.device)
        begun = tuple(
            next((tuple(tokens[: chosen.copied]) for offer, tokens, _ in offered if offer.drafter == chosen.source), ())
            if (chosen := row.chosen).drafter == at and chosen.copied
            else ()
            for row, offered in zip(current.rows, current.offered, strict=True)
        )
        start = self.clock()
        draft = proposal(drafter, replace(batch, begun=begun) if any(begun) else batch, limits)
        asked = [index for index, limit in enumerate(limits) if limit]
        if asked:
            lag = sum(current.rows[index].lags[at] for index in asked)
            current.calls.append((at, max(limits), len(asked), lag, self.clock() - start))
        if len(self.drafters) > 1 and not draft.is_chain:
            raise ParameterError(f"drafter {drafter.name!r} drafts trees: a cascade takes drafters of chains")
        return extended(draft, begun, batch.vocab_size) if any(begun) else draft

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        """Record which tokens of every draft the target emitted, and pass the verdict to the drafters."""
        if self._steady is not None and self._steady.goes_on(batch):
            return self._steady.observe(batch, draft, verdict, logits)
        current = self._round
        if current is not None and not current.turns and current.sequences == batch.sequences:
            return
        if current is None or current.sequences != batch.sequences:  # a round without a proposal, or one that failed
            current = self._round = None
        if current is not None:
            tokens, _, sizes = draft.listed
            for index in current.awake:
                row, path = current.rows[index], verdict.accepted[index]
                current.emitted.append(len(path) + 1)
                if row.request.asked or row.chosen.tokens:
                    emitted = [*[tokens[index][node - 1] for node in path], verdict.following[index]]
                    judge_row(self.policy, row, current.offered[index], emitted, sizes[index], len(path))
        for at, drafter in enumerate(self.drafters):
            if current is not None and ((self.free[at] and not current.asked) or not current.turns):
                continue
            turns = [False] * len(verdict.following) if current is None else current.turns[at]
            # What a free drafter keeps of a draft are tokens, whoever drafted them.
            whole = self.free[at] or (len(self.drafters) == 1 and not any(draft.predicted))
            part = verdict if whole else verdict_of(verdict, draft, turns)
            start = self.clock()
            drafter.observe(batch, draft, part, logits)
            spent = self.clock() - start
            if current is not None and self.free[at]:
                current.copied += spent
            elif current is not None and any(turns):
                current.calls = [(*call[:4], call[4] + spent) if call[0] == at else call for call in current.calls]
            if current is not None and drafter.foreseen is not None:
                for index, count in zip(current.awake, current.emitted, strict=True):
                    request = current.rows[index].request
                    if request.asked:
                        # A drafter that has not read the sequence foresees nothing; a prediction may have.
                        others = request.foreseen if any(request.foreseen) else [False] * count
                        request.foreseen = drafter.foreseen[current.sequences[index]] or others

    def observe_hidden(
        self,
        sequences: AbstractSequence[Sequence],
        starts: AbstractSequence[int],
        counts: AbstractSequence[int],
        hidden: AbstractSequence[Tensor],
    ) -> None:
        """Give each drafter the layers that it needs."""
        layers = dict(zip(self.hidden_layers, hidden, strict=True))
        for drafter in self.drafters:
            if drafter.hidden_layers:
                drafter.observe_hidden(sequences, starts, counts, [layers[layer] for layer in drafter.hidden_layers])

    def observe_seconds(self, seconds: float | None) -> None:
        """Give the policy the round's seconds."""
        if self._steady is not None and self._steady.open:
            self._steady.end(seconds)
            return self._saved.after(self.policy)
        now, self._round = self._round, None
        if now is None or len(now.emitted) < len(now.awake):  # a round that failed
            return
        if seconds is not None and self._sleep.counts(now, self.policy):
            return self._over_alone(now)
        self._sleep.tell(self.policy)
        if seconds is not None:
            seconds = max(seconds - sum([call[4] for call in now.calls]) - now.copied - now.reading, 0.0)
        rows, start = [now.rows[row] for row in now.awake], self.clock()
        beside, measured = len(now.sequences) - len(rows), (now.calls, seconds, now.copied)
        self.policy.lessons.learn(
            rows, now.emitted, now.positions, *measured, changed=now.changed, beside=beside, deciding=now.deciding
        )
        if rows:
            self._learning = self.clock() - start
        if seconds is not None:  # a round that prefills has one pass in every row
            self._over_alone(now)
        self._saved.after(self.policy)

    def _state(self, batch: Batch, row: int) -> State:
        sequence = batch.sequences[row]
        state = self._states.get(sequence)
        if state is None:
            copied = bool(sequence.prediction) or self._copies
            state = self._states[sequence] = State.of(batch, row, self.policy, copied, len(self.drafters))
        return state

    def _new_policy(self, costs: Costs | None, rates: dict[str, list[list[float]]] | None = None) -> Policy:
        kinds, assumed = kinds_of(self.drafters, self.free, self.trees), self._assumed
        costs, given, saved = costs or assumed.first(), self._given is not None, {"rates": rates or {}}
        policy = Policy(kinds, self.free, costs, assumed.fixed(), saved, given=given, passes=assumed.passes)
        policy.names = [drafter.name for drafter in self._sources]
        self._states.clear()
        self._sleep, self._steady = Sleep(), None
        return policy
