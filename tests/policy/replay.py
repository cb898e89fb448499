"""The policy against simulated machines and given outputs: no models, no clock, seconds are computed.

An output is a list of tokens and, for the draft model, whether it would be right at each position. A greedy output is
the same whatever is drafted, so every setting is replayed on the same outputs, and a setting's seconds are sums of the
machine's true costs; the policy itself sees them with noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from foretoken.models.widths import PassWidths
from foretoken.policy.acceptance import LOOKUP, MODEL, Kind
from foretoken.policy.copies import Copies
from foretoken.policy.costs import Costs, DrafterCosts
from foretoken.policy.lines import Line
from foretoken.policy.policy import Policy
from foretoken.policy.request import LONGEST, READ, Offer, Row
from foretoken.policy.steady import Prices, Told

FIXED = (1, 2, 3, 5, 8, 12, 16)
LOOKUP_AT, MODEL_AT = "lookup", "model"

FIRST, HARD = 8, 0.5
"""Tokens at the beginning of an answer, and how much more seldom draft models are right there. The shipped one is right
for 0.44 to 0.54 of the first eight tokens of greedy outputs, and for 0.72 to 0.90 of all (code, maths, prose, chat);
by output for less."""


@dataclass(frozen=True)
class Machine:
    """True costs in milliseconds.

    Attributes:
        overhead: of a round, whatever is done.
        weights: of a pass, for reading the weights.
        position: of each position of a pass.
        call, step: of a call of the draft model, and of each of its tokens.
        read: of each token that the draft model has not seen.
        kernel: from that many positions on a pass takes a quarter longer.
        arithmetic: of each position, where that takes longer than the weights do: a wide pass of many rows.
        noise: standard deviation of the measured seconds' logarithms.
        load: how much other work slows everything down at times, as a share.
        first: how many times as long the first pass or call of a size takes.
        change: of a pass that is not as wide as the one before.
        patience: of `PassWidths`, which pads passes where a change costs anything.
        free: of making and judging a token of the drafts that cost no model's call, and as much for each row.
        apart: of a round, beside plain passes that go together in one.
        back: of plain passes behind a wider one, besides `change`.
    """

    overhead: float
    weights: float
    position: float
    call: float = 0.3
    step: float = 1.0
    read: float = 0.02
    kernel: int = 1000
    arithmetic: float = 0.0
    noise: float = 0.1
    load: float = 0.0
    first: float = 1.0
    change: float = 0.0
    patience: int = 0
    free: float = 0.0
    apart: float = 0.0
    back: float = 0.0

    def target(self, positions: int) -> float:
        slow = 1.25 if positions >= self.kernel else 1.0
        return self.overhead + max(self.weights + self.position * positions, self.arithmetic * positions) * slow

    def draft(self, tokens: int, rows: int, lag: int) -> float:
        return self.call + tokens * self.step * (1.0 + 0.05 * (rows - 1)) + self.read * lag


class Passes:
    """The target's passes, one after the other: how wide they are.

    Args:
        machine: where they run.

    Attributes:
        tells: the policy is told how wide they are.
        changes: passes so far that were not as wide as the one before.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine, self._widths = machine, PassWidths(machine.patience)
        self.tells, self.changes = machine.change > 0.0, 0

    def prefill(self, batch: list[Output]) -> None:
        """A pass over the prompts."""
        self._widths.fit(sum(len(one.prompt) for one in batch))

    @property
    def last(self) -> int:
        """How wide the last pass was."""
        return self._widths.last

    @property
    def told(self) -> tuple[int, int] | None:
        """What `Policy.choose` is told."""
        return (self._widths.last, 1) if self.tells else None

    def run(self, positions: int, held: int = 0) -> tuple[int, bool, float]:
        """A pass: its width, whether that is another one than before, and its milliseconds."""
        if not self._machine.change:
            return positions, False, self._machine.target(positions)
        last = self._widths.last
        if held:
            self._widths.hold(held)
        width = self._widths.fit(positions)
        changed = width != last
        self.changes += changed
        seconds = self._machine.target(width) + self._machine.change * changed
        seconds += self._machine.back * (width < last)
        return (width, changed, seconds) if self.tells else (positions, False, seconds)


@dataclass
class Output:
    """One request: its prompt, its output, and where the draft model is right."""

    prompt: list[int]
    tokens: list[int]
    right: list[bool]
    lookups: list[tuple[int, int]] = field(default_factory=list)

    def prepare(self, longest: int = 8) -> Output:
        """Work out what a lookup would draft at each position: the match's length, and how many tokens are right."""
        ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest + 1)]
        known: list[int] = []

        def add(token: int) -> None:
            for size in range(1, min(longest, len(known)) + 1):
                ends[size][tuple(known[-size:])] = len(known)
            known.append(token)

        for token in self.prompt:
            add(token)
        whole = self.prompt + self.tokens
        for at, token in enumerate(self.tokens):
            found = (0, 0)
            for size in range(min(longest, len(known)), 0, -1):
                end = ends[size].get(tuple(known[-size:]))
                if end is not None:
                    position, right = len(self.prompt) + at, 0
                    limit = min(LONGEST, len(whole) - position)
                    while right < limit and whole[end + right] == whole[position + right]:
                        right += 1
                    found = size, right
                    break
            self.lookups.append(found)
            add(token)
        return self

    def model(self, at: int) -> int:
        """Tokens from a position on that the draft model gets right."""
        right = 0
        while right < LONGEST and at + right < len(self.right) and self.right[at + right]:
            right += 1
        return right


def outputs(workload: str, rate: float, length: int, count: int, seed: int) -> list[Output]:
    """Requests of a workload; `rate` is how often the draft model is right."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        prompt = random.zipf(1.3, 200) % 900
        tokens: list[int] = []
        source = list(prompt)
        while len(tokens) < length:
            if workload == "copy":  # long copies of the prompt, with changes
                start = random.integers(0, 150)
                tokens += source[start : start + 1 + random.geometric(1 / 20)] + list(random.integers(1000, 2000, 2))
            elif workload == "code":  # lines that repeat with changes, and new ones
                if tokens and random.random() < 0.6:
                    start = random.integers(0, max(len(tokens) - 10, 1))
                    tokens += tokens[start : start + 3 + random.geometric(1 / 6)] + list(random.integers(0, 900, 3))
                else:
                    tokens += list(random.zipf(1.3, 8) % 900)
            elif workload == "period":
                tokens += [5, 6, 7, 8, 9, 10, int(random.integers(0, 900))]
            elif workload in ("chat", "answer"):
                tokens += list(random.zipf(1.3, 16) % 900)
            else:
                tokens += list(random.integers(0, 30_000, 16))
        own = float(np.clip(random.normal(rate, 0.07), 0.0, 0.98)) if rate else 0.0
        easy = np.repeat(random.random(length // 8 + 1) < 0.5, 8)[:length]
        begins = HARD * (np.arange(length) < FIRST) if workload == "answer" else 0.0
        right = random.random(length) < np.clip(own - begins + np.where(easy, 0.1, -0.1) * (rate > 0), 0.0, 0.99)
        found.append(Output(list(map(int, prompt)), list(map(int, tokens[:length])), right.tolist()).prepare())
    return found


def fixed(machine: Machine, batches: list[list[Output]], drafter: str, k: int) -> list[float]:
    """Milliseconds of each batch with k tokens a round; plain decoding with 0."""
    passes = Passes(machine)
    return [_run(machine, passes, batch, lambda rows, k=k: [(drafter, k)] * len(rows)) for batch in batches]


def _run(
    machine: Machine, passes: Passes, batch: list[Output], choose: Callable[[list[int]], list[tuple[str, int]]]
) -> float:
    passes.prefill(batch)
    done, spent, unseen = [1] * len(batch), 0.0, [len(one.prompt) + 1 for one in batch]
    while live := [row for row, one in enumerate(batch) if done[row] < len(one.tokens)]:
        positions, asked, lag, longest, copies = 0, 0, 0, 0, 0
        for row, (drafter, k) in zip(live, choose(live), strict=True):
            one, at = batch[row], done[row]
            k = min(k, len(one.tokens) - at - 1)
            right, drafted = 0, 0
            if k and drafter == MODEL_AT:
                right, drafted = min(one.model(at), k), k
                asked, lag, longest, unseen[row] = asked + 1, lag + unseen[row], max(longest, k), 0
            elif k and one.lookups[at][0]:
                right, drafted = min(one.lookups[at][1], k), k
            copies += (drafter != MODEL_AT and k > 0) * (1 + drafted)
            positions += 1 + drafted
            done[row] += 1 + right
        spent += passes.run(positions)[2] + machine.free * copies + machine.apart * (asked > 0 or copies > 0)
        spent += machine.draft(longest, asked, lag) if asked else 0.0
    return spent


@dataclass
class Engine:
    """An engine with the policy, which keeps its state from batch to batch.

    Args:
        machine: that it runs on.
        drafters: names.
        seed: of the noise.
        error: factor by which calibration errs on what positions cost.
        reproducible: of its requests.
        assumed: what is assumed of costs for these; None for what the bytes alone say.
        reads: the model tells before hopes and looks what it foresees of the output so far, as with greedy requests.
        rehearsed: which tokens of an output that nobody asked for the model foresees; of how often it is right they
            tell as of greedy requests where it `reads`.
    """

    machine: Machine
    drafters: tuple[str, ...]
    seed: int = 0
    error: float = 1.0
    reproducible: bool = False
    assumed: Costs | None = None
    follows: bool = False
    reads: bool = False
    rehearsed: Sequence[bool] = ()
    kinds: dict[str, Kind] = field(default_factory=lambda: {LOOKUP_AT: LOOKUP, MODEL_AT: MODEL})

    def __post_init__(self) -> None:
        machine = self.machine
        self.random = np.random.default_rng(self.seed)
        self.slow = 0.0
        plain = machine.target(1)
        points = [(size, machine.apart + plain + (machine.target(size) - plain) * self.error) for size in (1, 9, 33)]
        costs = Costs(
            Line.through(points),
            [
                DrafterCosts(Line(machine.call, machine.step), lag=machine.read)
                if name == MODEL_AT
                else DrafterCosts(Line(0.0, 0.0))
                for name in self.drafters
            ],
        )
        steps = [machine.step if name == MODEL_AT else 0.0 for name in self.drafters]
        self.policy = Policy(
            [self.kinds[name] for name in self.drafters],
            [name == LOOKUP_AT for name in self.drafters],
            costs,
            self.assumed or Costs.by_bytes(machine.weights, steps),
            extends=[name == MODEL_AT for name in self.drafters],
        )
        if MODEL_AT in self.drafters:
            rates = self.policy.rates(self.drafters.index(MODEL_AT), sampled=False)
            rates.rehearse(self.rehearsed, rates=self.reads)
        if machine.apart:
            self.policy.costs.together.record(1, plain / (plain + machine.apart), 8)
        self.passes = Passes(machine)
        self.lengths: list[int] = []
        self.met: set[tuple[str, int]] = set()  # passes and calls of which sizes were run
        self.choices: list[tuple[int, int, int]] = []

    def measured(self, milliseconds: float) -> float:
        self.slow += 0.02 * (self.random.normal() * 3 * self.machine.load - self.slow)
        spike = 2.0 if self.random.random() < 0.02 else 1.0
        return milliseconds * spike * float(np.exp(self.random.normal(0.0, self.machine.noise) + self.slow))

    def first(self, kind: str, size: int) -> float:
        """How many times as long a pass or call takes now as it does later on."""
        new = (kind, size) not in self.met
        self.met.add((kind, size))
        return self.machine.first if new else 1.0

    def run(self, batch: list[Output]) -> float:
        """Milliseconds of a batch."""
        machine, policy = self.machine, self.policy
        requests = [policy.open(sampled=False, reproducible=self.reproducible) for _ in batch]
        self.passes.prefill(batch)
        done, spent, unseen = [1] * len(batch), 0.0, [len(one.prompt) + 1 for one in batch]
        followed, together, drafted = [False] * len(batch), 0, False
        shadow: list[bool] = []
        told = None
        if self.follows:
            policy.lessons._prompted = policy.lessons._widened = True
        while live := [row for row, one in enumerate(batch) if done[row] < len(one.tokens)]:
            rows = []
            if told is None:
                shadow = []
            if shadow and (requests[0].copying.called or len(shadow) >= 16):
                policy.passed(requests[0], shadow, told) and requests[0].copying.call()
                shadow = []
            rest = policy.resting([requests[row] for row in live])
            if shadow and not all(rest):
                policy.passed(requests[0], shadow, told)
                shadow = []
            resting = [row for row, rests in zip(live, rest, strict=True) if rests]
            live = [row for row, rests in zip(live, rest, strict=True) if not rests]
            policy.ask([requests[row] for row in live], len(resting))
            for row in live:
                one, at = batch[row], done[row]
                room = len(one.tokens) - at - 1
                offers = []
                match, _ = one.lookups[at]
                wanted = LOOKUP_AT in self.drafters and requests[row].asked
                if wanted and match and room:
                    offers.append(Offer(self.drafters.index(LOOKUP_AT), min(LONGEST, room), match))
                requests[row].emitted = at
                lags = [0 if followed[row] else unseen[row]] * len(self.drafters)
                reads = self.reads and len(batch) == 1 and not self.reproducible
                models = frozenset(range(len(self.drafters))) if reads else frozenset()
                rows.append(Row(requests[row], room, lags, offers, reads=models))
            held = policy.choose(rows, self.passes.told, len(resting))
            if rows and rows[0].reading:
                row, at = rows[0], live[0]
                spent, unseen[at] = spent + self._read(batch[at], row), 1
                rows = [Row(row.request, row.room, [1] * len(self.drafters), row.offers)]
                held = policy.choose(rows, self.passes.told, len(resting))
            prices = policy.prices(rows[0], 0.0) if self._is_steady(rows, resting) else None
            positions, asked, lag, longest, emitted = len(resting), 0, 0, 0, []
            if self.follows and len(batch) == 1 and resting and not rows:
                if not shadow:
                    told = policy.following(requests[0])
                if told is not None:
                    requests[0].copying.follow()
                    one, at = batch[0], done[0]
                    shadow.append(one.lookups[at][1] > 0)
                    if policy.asking.balance >= 0.0 and at + 2 < len(one.tokens):
                        match, room = one.lookups[at + 1][0], min(LONGEST, len(one.tokens) - at - 2)
                        if match:
                            reach = requests[0].acceptance[self.drafters.index(LOOKUP_AT)].reach(room, match)
                            gain = told.gain(reach)
                            if told.pays(gain):
                                requests[0].copying.call(gain)
            for row in resting:
                unseen[row], followed[row], done[row] = unseen[row] + 1, False, done[row] + 1
            model = self.drafters.index(MODEL_AT) if MODEL_AT in self.drafters else -2
            for row, state in zip(live, rows, strict=True):
                one, at = batch[row], done[row]
                drafter, k, copied, _ = state.chosen
                assert k + copied <= state.room
                self.choices.append((drafter, k, copied))
                right = min(one.lookups[at][1], copied if copied else k if drafter != model else 0)
                if k and drafter == model:
                    asked, lag, longest = asked + 1, lag + unseen[row], max(longest, k)
                    unseen[row] = 0
                    if right == copied:
                        drafted_right = min(one.model(at + copied), k)
                        right += drafted_right
                        policy.judge(state.request, model, k, drafted_right)
                k += copied
                positions += 1 + k
                emitted.append(1 + right)
                unseen[row] = 0 if drafter == model and k else unseen[row] + 1 + right
                followed[row] = drafter == model and k > 0
                for offer in state.offers:
                    tried = min(offer.size, 1 + right)
                    policy.judge(state.request, offer.drafter, tried, min(one.lookups[at][1], tried), offer.match)
                if LOOKUP_AT in self.drafters and state.request.asked:
                    state.request.foreseen = [ahead > 0 for _, ahead in one.lookups[at : at + 1 + right]]
                done[row] += 1 + right
            before = self.passes.last
            width, changed, passed = self.passes.run(positions, held)
            passed *= self.first(LOOKUP_AT, width)
            goes_on = (
                machine.apart > 0.0 and not rows and (not changed or (self.follows and width < before and done[0] > 2))
            )
            if goes_on and changed:
                policy.costs.returned(self.measured(machine.change + machine.back))
            if goes_on:
                together += 1
            elif together:
                seconds = together * machine.target(len(batch))
                policy.lessons.rested_together(together, len(batch), self.measured(seconds))
                together = 0
            passed += machine.apart * (not goes_on or drafted)
            drafted = positions > len(batch)
            made = sum(state.request.asked + sum(offer.size for offer in state.offers) for state in rows)
            copied = machine.free * made * (LOOKUP_AT in self.drafters)
            seconds = passed + copied
            calls = []
            if asked:
                call = machine.draft(longest, asked, lag) * self.first(MODEL_AT, longest)
                seconds += call
                calls.append((model, longest, asked, lag, self.measured(call)))
            spent += seconds
            took = self.measured(passed)
            copied = self.measured(copied)
            if goes_on:
                policy.lessons.rested(1, len(resting))
                continue
            policy.lessons.learn(rows, emitted, width, calls, took, copied, changed=changed, beside=len(resting))
            if prices is not None:
                spent += self._steadily(batch[live[0]], rows[0], prices, done, live[0])
        if shadow and told is not None:
            policy.passed(requests[0], shadow, told)
        return spent

    def _read(self, one: Output, row: Row) -> float:
        """Milliseconds in which the model of a choice tells what it foresees, as `drafters.cascade_rounds` has it."""
        at, lag = row.request.emitted, row.lags[0]
        took = self.machine.draft(1, 1, lag)
        right = one.right[at - min(lag - 1, at, READ) : at]
        self.policy.lessons.read(row.request, row.chosen.drafter, right, self.measured(took), lag)
        return took

    def _is_steady(self, rows: list[Row], resting: list[int]) -> bool:
        return len(rows) == 1 and not resting

    def _steadily(self, one: Output, state: Row, prices: Prices, done: list[int], row: int) -> float:
        """Milliseconds of rounds that go by prices, as `foretoken.drafters.cascade_steady` has them."""
        told, spent, rounds = [], 0.0, 0
        while rounds < prices.rounds and (room := len(one.tokens) - done[row] - 1) > 0:
            if prices.tokens:
                request, model = state.request, state.chosen.drafter
                due = request.copied and not request.copying.rounds_left(request.rounds + len(told))
                if due or request.rests_until:
                    break
                tokens = min(prices.tokens, room)
                request.emitted, request.asked = done[row], False
                right = min(one.model(done[row]), tokens)
                self.policy.judge(request, model, tokens, right)
                self.choices.append((model, tokens, 0))
                width, changed, passed = self.passes.run(1 + tokens)
                call = self.machine.draft(tokens, 1, 0) * self.first(MODEL_AT, tokens)
                took, asked = self.measured(passed + self.machine.apart), self.measured(call)
                told.append(Told(tokens, 0, 1 + right, 0.0, width, changed, took, 0.0, 0.0, asked))
                done[row] += 1 + right
                rounds += 1
                spent += passed + call + self.machine.apart
                continue
            (match, ahead), tokens, gain, price, held = one.lookups[done[row]], 0, 0.0, 0.0, 0
            state.offers = [Offer(self.drafters.index(LOOKUP_AT), min(LONGEST, room), match)] if match else []
            if self.passes.told is None:
                for offer in state.offers:
                    tokens, gain = prices.best(Copies.of(state, offer), room)
                price = prices.price(tokens)
            else:
                state.room = state.most = room
                held = self.policy.choose([state], self.passes.told)
                tokens, gain = state.chosen.tokens, state.gain if state.chosen.tokens else 0.0
                price = state.price
            right = min(ahead, tokens)
            self.choices.append((0 if tokens else -1, tokens, 0))
            for offer in state.offers:
                tried = min(offer.size, 1 + right)
                self.policy.judge(state.request, offer.drafter, tried, min(ahead, tried), offer.match)
            width, changed, passed = self.passes.run(1 + tokens, held)
            passed *= self.first(LOOKUP_AT, width)
            offered = sum(offer.size for offer in state.offers)
            copied = self.machine.free * (1 + offered)
            took, measured = self.measured(passed + self.machine.apart), self.measured(copied)
            told.append(Told(tokens, offered, 1 + right, gain, width, changed, took, measured, 0.0, price=price))
            done[row] += 1 + right
            spent += passed + copied + self.machine.apart
            rounds += 1
            if len(told) > 1 and not any(one.tokens for one in told[-2:]):
                self.policy.lessons.learn_together(state.request, told)
                told = []
                if not state.request.copying.earns:
                    break
        if told:
            self.policy.lessons.learn_together(state.request, told, max(state.chosen.drafter, 0))
        return spent
