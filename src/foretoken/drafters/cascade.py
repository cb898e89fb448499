"""Cascade: several drafters in order of cost; the first that promises enough proposes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import ceil
from statistics import median
from time import perf_counter
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.drafters.base import Batch, Drafter
from foretoken.drafters.chains import joined
from foretoken.drafters.rules import Paces, Rule, Times, Trial, learn
from foretoken.errors import ParameterError
from foretoken.models.base import LanguageModel
from foretoken.policy import store as learnt
from foretoken.policy.costs import Acceptance, Costs, Part
from foretoken.sequence import Sequence
from foretoken.verify.base import Verdict

_EXPECTED = 2.5  # tokens that a draft is taken to get accepted before there were any
_EXPECTED_OF_ONE, _EXPECTED_MORE = 1.35, 0.6  # the same of one that a match of one token led to; of each token more
_LONGEST = 6  # longer matches are counted with those of this length
_WEIGHT = 4.0  # drafts that this assumption counts as
_CAUTION = 12.0  # the same where it is to say how often still deeper tokens will be right
_MEMORY = 33.0  # drafts after which what one taught has faded to 1/e
_COUNTED = 5  # accepted tokens that are counted where costs are not known: long drafts must not speak for drafters
_SURE, _SURE_TO_PAY = 2.5, 4.0  # expected right tokens from which on a draft has the whole limit: copies, and others
_BEYOND = 2  # tokens that are drafted beyond those that are expected to be right
_FARTHEST = 32  # depths that are told apart; deeper ones are as good as this one
_ENOUGH = 4  # measurements from which on they are relied on
_WARM = 6  # first calls, which are not measured: things are compiled then, and who looks dear is seldom asked again
_ASKED = (3, 5, 10, 15)
"""Tokens that drafters which pay by the token are asked for, or else as many as may be.

What few numbers cost is known sooner, and passes keep their width. Fewer than three cost hardly less than three: a call
has its price, and so has the pass that another drafter could have filled.
"""
_GOOD_FOR = 8  # passes after which costs are looked at anew: that takes some tenths of a millisecond
_NEAR = 12  # tokens that came since a drafter was asked: reading so many along costs nothing to speak of
_POSITION = 0.04  # target passes that a further position costs, where the costs of drafters are given
_PACE = 16.0  # rounds over which it is seen what a text's time is worth
_PLAIN = 2.0  # plain rounds that this begins with
_PASSED_ON = 12.0  # drafts that what an earlier process saw counts for at most
_TRIED = 4  # rounds after which it is looked anew which rule is best
_COPIED = 8.0  # tokens of a lookup's draft that are used, before any were; and drafts over which that is averaged
_PROBE = 48  # rounds of a text after which a drafter that does not pay is asked again; for each pass that this costs


class _Record:
    """How often the tokens of a kind of drafts were right, by depth, lately.

    Args:
        prior: what is expected before there were any, at the first depths; deeper ones are as good as the last.
    """

    def __init__(self, prior: AbstractSequence[float]) -> None:
        self._prior = list(prior)
        self._seen = Acceptance(_MEMORY)
        self._rates: list[float] = []  # as far as they were asked for since the last `add`
        self._expected = [0.0]

    @classmethod
    def of(cls, expected: float) -> _Record:
        """One that expects so many right tokens of a long draft, each as likely as the one before."""
        return cls([expected / (1.0 + expected)] * _FARTHEST)

    def as_json(self) -> list[list[float]]:
        """What `read` takes."""
        seen = self._seen
        shares = [min(1.0, _PASSED_ON / tried) if tried else 0.0 for tried in seen.tried[:_FARTHEST]]
        return [
            [round(value * share, 3) for value, share in zip(values, shares, strict=False)]
            for values in (seen.tried, seen.kept)
        ]

    def read(self, saved: AbstractSequence[AbstractSequence[float]]) -> None:
        """Begin with what an earlier process saw."""
        pairs = [(float(tried), float(kept)) for tried, kept in zip(*saved, strict=True)]
        self._seen.tried, self._seen.kept = [tried for tried, _ in pairs], [kept for _, kept in pairs]

    def add(self, told: int, right: int) -> None:
        """Of `told` tokens that the target had something to say about, the first `right` were right."""
        self._seen.record(told, right)
        self._rates, self._expected = [], [0.0]

    def rates(self, depth: int) -> list[float]:
        """The chance of each token to be right once those before it are."""
        self._know(depth)
        return (self._rates + self._rates[-1:] * (depth - _FARTHEST))[:depth]

    def expected(self, most: int) -> list[float]:
        """Right tokens of drafts of 0 … `most`."""
        self._know(most)
        return (self._expected + self._expected[-1:] * (most - _FARTHEST))[: most + 1]

    def _know(self, depth: int) -> None:
        """Work out what is asked for at depths that are told apart: every round has some new ones."""
        depth = min(depth, _FARTHEST)
        if len(self._rates) >= depth:
            return
        tried, kept = self._seen.tried, self._seen.kept
        met, last = len(tried), len(self._prior) - 1
        rates, expected = list[float](), [0.0]
        above, reach, right = 0.0, 1.0, 0.0
        for place in range(depth):
            # Who was right so far is likely to stay so, if that has been seen often enough.
            rate = max(self._prior[min(place, last)], above)
            above = rate
            if place < met:
                above = (kept[place] + _CAUTION * rate) / (tried[place] + _CAUTION)
                rate = (kept[place] + _WEIGHT * rate) / (tried[place] + _WEIGHT)
            rates.append(rate)
            reach *= rate
            right += reach
            expected.append(right)
        self._rates, self._expected = rates, expected

    @property
    def value(self) -> float:
        """Right tokens of a draft of `_COUNTED`."""
        self._know(_COUNTED)
        return self._expected[_COUNTED]


Kind = tuple[int, int]
"""A drafter's place, and how sure it said it was: the length of its match, 0 where it tells none, or `_ANY`."""
_ANY = -1  # whatever it said, and no draft at all counted as well: what asking it may be expected to bring


class _Pace:
    """Tokens and time of a text's rounds of late."""

    def __init__(self) -> None:
        self._tokens = self._time = self._planned = 0.0

    def plans(self, time: float) -> None:
        """What the round that begins takes, by the costs that it is chosen with."""
        self._planned = time

    def went(self, tokens: int) -> None:
        """How many tokens it gave."""
        if self._planned:
            self._tokens += tokens - self._tokens / _PACE
            self._time += self._planned - self._time / _PACE
        self._planned = 0.0

    def worth(self, costs: _Costs) -> float:
        """Tokens that a unit of time gives; those of plain rounds where nothing is known."""
        return (_PLAIN + self._tokens) / (_PLAIN * costs.target(0) + self._time)


@dataclass
class _Text:
    """What is known of one sequence.

    Attributes:
        free: which drafts are taken has no influence on what a seed that the request names gives.
        greedy: the request is; drafts are right more often then.
        records: by kind of draft.
        proposals: of the round: for each drafter that was asked, the kind and the tokens.
        offers: of the round: those of them that may be taken.
        best: of these, once it was asked for.
        trial: of rules on its tokens.
        rule: that it is continued with, once one was looked for.
        rounds: that it had.
        most: tokens that a round may have drafted at most.
        copied: tokens of a lookup's draft that are used, lately.
        pace: tokens and time of its rounds, lately.
        waited: of each drafter, rounds since it was asked.
        known: of each drafter, the length of the text when it was asked last; less than 0 by its source's before.
    """

    free: bool
    greedy: bool
    records: dict[Kind, _Record] = field(default_factory=dict)
    proposals: list[tuple[Kind, list[int]]] = field(default_factory=list)
    offers: list[_Offer] = field(default_factory=list)
    best: _Best | None = None
    trial: Trial = field(default_factory=Trial)
    rule: Rule | None = None
    rounds: int = 0
    most: int = 0
    copied: float = _COPIED
    pace: _Pace = field(default_factory=_Pace)
    waited: list[int] = field(default_factory=list)
    known: list[int] = field(default_factory=list)

    def unread(self, place: int, length: int) -> int:
        """Tokens that a drafter has to catch up with before it drafts; those of one round, or a few, don't count."""
        behind = length - self.known[place]
        return behind if behind > _NEAR and (self.known[place] <= 0 or self.waited[place] > 1) else 0


def _gain(right: float, time: float, worth: float) -> float:
    """In tokens, of a round with so many right ones that takes so long, where a unit of time is worth so many."""
    return 1.0 + right - worth * time


@dataclass(frozen=True)
class _Best:
    """The best that a row can do with what it has been offered.

    Attributes:
        place: of the drafter whose offer it takes, -1 for none.
        count: of its tokens.
        gain: in tokens.
    """

    place: int
    count: int
    gain: float


@dataclass(frozen=True)
class _Offer:
    """A drafter's draft for a row.

    Attributes:
        place: of the drafter.
        count: its tokens, as far as they may be used.
        asked: tokens that were asked for, where they were drawn from a law; 0 where they were chosen by rule.
        expected: right tokens of its first 0 … n; n is `asked`, or else `count`.
    """

    place: int
    count: int
    asked: int
    expected: list[float]

    def used(self, costs: _Costs, worth: float) -> tuple[int, float]:
        """How many of its tokens to use, and what the round then gains, where a unit of time is worth so many.

        What was drawn is used as a whole or not at all, whatever it is: that a draft is shorter than was asked for can
        be due to the very tokens that were drawn, and their law would be another one if some of them were preferred.
        """
        if self.asked:
            return self.count, _gain(self.expected[-1], costs.target(self.asked), worth)
        times = costs.targets(len(self.expected))
        gains = [_gain(right, time, worth) for right, time in zip(self.expected, times, strict=True)]
        most = max(gains)
        return gains.index(most), most


class _Costs(Protocol):
    """What the parts of a round take, in any unit of time."""

    def target(self, count: int) -> float:
        """The target's pass and the verification of drafts of so many tokens."""

    def targets(self, number: int) -> list[float]:
        """`target` of 0, 1 … tokens, so many."""

    def call(self, place: int, count: int) -> float:
        """A call of a drafter that is asked for so many tokens."""

    def reading(self, place: int) -> float:
        """Each token of a text that the drafter has to read first."""


@dataclass(frozen=True)
class _Given:
    """Costs of calls that somebody told, in target passes."""

    calls: list[float]

    def target(self, count: int) -> float:
        return 1.0 + _POSITION * count

    def targets(self, number: int) -> list[float]:
        return [1.0 + _POSITION * count for count in range(number)]

    def call(self, place: int, count: int) -> float:
        return self.calls[place]

    def reading(self, place: int) -> float:
        return 0.0


class _Seconds:
    """What was measured: medians, by batch size and tokens."""

    def __init__(self, count: int) -> None:
        self._calls = [Costs() for _ in range(count)]
        self._reading = [deque[float](maxlen=15) for _ in range(count)]
        self._target = Costs()
        self._met: set[tuple[int, int, int]] = set()
        self._done, self._measured = [0] * (count + 1), [0] * (count + 1)
        self._began: float | None = None
        self._latest: dict[int, tuple[int, _Measured]] = {}  # by rows, what `costs` said, and how long that is good

    def asked(self, place: int, rows: int, count: int, seconds: float, unread: int) -> None:
        """A call for so many tokens at most that took so long, and caught up with so much of texts."""
        usual = self._calls[place].estimate("drafter", rows, count) if unread else None
        if usual is not None:
            self._reading[place].append(max(0.0, seconds - usual) / unread)
        if not unread or (usual is not None and seconds < usual):  # without the reading it would have been less yet
            self._record(self._calls[place], place, rows, count, seconds)

    def pass_begins(self, clean: bool) -> None:
        """The draft is made, and nothing but its scoring and judging follows, or `clean` is false."""
        self._began = perf_counter() if clean else None

    def pass_ended(self, rows: int, width: int) -> None:
        """It is judged."""
        if self._began is not None:
            self._record(self._target, -1, rows, width + 1, perf_counter() - self._began)

    def _record(self, costs: Costs, place: int, rows: int, size: int, seconds: float) -> None:
        self._done[place] += 1
        if self._done[place] > _WARM and (place, rows, size) in self._met:
            costs.record("target" if place < 0 else "drafter", rows, size, seconds)
            self._measured[place] += 1
        self._met.add((place, rows, size))

    def as_json(self) -> dict[str, Any]:
        """What `read` takes."""
        return {
            "calls": [calls.as_json(_ENOUGH) for calls in self._calls],
            "reading": [median(all_) if all_ else None for all_ in self._reading],
            "target": self._target.as_json(_ENOUGH),
        }

    def read(self, saved: Mapping[str, Any]) -> None:
        """Begin with what an earlier process measured."""
        for place, (calls, reading) in enumerate(zip(saved["calls"], saved["reading"], strict=True)):
            self._calls[place].read(calls)
            self._measured[place] = _ENOUGH * (self._calls[place].estimate("drafter", 1, 1) is not None)
            if reading is not None:
                self._reading[place].append(float(reading))
        self._target.read(saved["target"])
        self._measured[-1] = _ENOUGH * (self._target.estimate("target", 1, 1) is not None)

    def lacks(self, place: int) -> bool:
        """Whether a drafter's calls are not known yet."""
        return self._measured[place] < _ENOUGH

    def lacks_plain(self, rows: int) -> bool:
        """Whether passes without a draft are not known yet, without which nobody knows what longer drafts cost."""
        return self._target.known("target", rows, 1) < _ENOUGH

    def costs(self, rows: int) -> _Measured | None:
        """Of a batch of so many rows. None before all were measured."""
        if min(self._measured) < _ENOUGH:
            return None
        until, measured = self._latest.get(rows, (0, None))
        if measured is not None and self._done[-1] < until:
            return measured
        measured = _Measured(rows, self._target, self._calls, [median(all_) if all_ else 0.0 for all_ in self._reading])
        self._latest[rows] = self._done[-1] + _GOOD_FOR, measured
        return measured


@dataclass(frozen=True)
class _Measured:
    """Costs of a batch of so many rows; drafters by their places, the target's passes as -1."""

    rows: int
    passes: Costs
    calls: list[Costs]
    reads: list[float]
    found: dict[tuple[int, int], float] = field(default_factory=dict)
    of_targets: list[float] = field(default_factory=list)

    def target(self, count: int) -> float:
        return self._at(-1, count + 1)

    def targets(self, number: int) -> list[float]:
        self.of_targets.extend(map(self.target, range(len(self.of_targets), number)))
        return self.of_targets[:number]

    def call(self, place: int, count: int) -> float:
        return self._at(place, count)

    def reading(self, place: int) -> float:
        return self.reads[place]

    def _at(self, place: int, size: int) -> float:
        found = self.found.get((place, size))
        if found is None:
            part: Part = "target" if place < 0 else "drafter"
            costs = self.passes if place < 0 else self.calls[place]
            line = costs.line(part, self.rows)
            found = costs.estimate(part, self.rows, size) if line is None else line(size)
            assert found is not None
            found = self.found[place, size] = max(found, 1e-9)
        return found


class Cascade(Drafter):
    """Asks drafters one after another, until a draft promises more than going on would.

    What a draft promises is what drafts of that drafter, found with as long a match, had accepted in the same text so
    far, depth by depth: of a drafter that tells the length of its match (`PromptLookup.matches`), drafts of each length
    are counted apart. A drafter that was not taken is judged too, by what the target said instead.

    Time is worth the tokens that the text's rounds gave for it of late, w in a second. With E(n) right tokens expected
    of a draft's first n, and a pass over n tokens that costs t(n), a round gains ``1 + E(n) - w t(n)``: the best n of a
    draft is used, which may be none, and the next drafter is asked where what it promises is worth its own time too;
    and now and then where not, to see if it still holds. (The best tokens a second in each round by itself would not
    do: copies would end too early.)

    Where the drafters before the last one tell what they would have gone on with (`PromptLookup.foreseen`), the last
    one is not judged round by round. What it gets right may be what the others would have copied in the next round
    anyway, or not, and the text itself tells: rules such as "ask it for five tokens where no match is longer than one"
    are tried on the text's last tokens, and the rule that takes least time for a token is followed (`rules.Trial`).
    Time is worth what that rule makes of it.

    What calls and passes cost is measured, what drafts are worth is remembered from text to text, and both are kept for
    the next process (`keep_costs`); for requests whose text does not depend on it: greedy ones, those of coupled
    verifiers, and those that name no seed. For the others there are `costs` where they are given, or else `margin` and
    drafts of about two tokens more than are expected to be right; and each text begins with fixed expectations: so the
    choice depends on the text's past alone, and a seed gives one text.

    Args:
        drafters: the cheapest first; each must draft chains.
        margin: tokens that a cheaper draft may promise less than the next drafter and be taken all the same: what the
            next drafter's time is worth where its cost is not known.
        costs: of a call of each drafter, in target passes; for all requests. A further token to score then counts as
            a twenty-fifth of a pass. None: measured where that may be.

    Raises:
        ParameterError: fewer than two drafters, or a negative margin or cost.
    """

    name = "cascade"

    def __init__(
        self,
        drafters: AbstractSequence[Drafter],
        margin: float = 0.3,
        costs: AbstractSequence[float] | None = None,
    ) -> None:
        if len(drafters) < 2:
            raise ParameterError(f"a cascade of {len(drafters)} drafters: give two or more, the cheapest first")
        if not margin >= 0.0:
            raise ParameterError(f"margin={margin}: use 0 or more tokens")
        if costs is not None and (len(costs) != len(drafters) or not all(cost >= 0.0 for cost in costs)):
            raise ParameterError(
                f"costs={list(costs)}: give 0 or more target passes for each of {len(drafters)} drafters"
            )
        self.drafters = tuple(drafters)
        self.margin = margin
        self._given = None if costs is None else _Given(list(costs))
        self.models = tuple(model for drafter in drafters for model in drafter.models)
        self.own_threads = all(drafter.own_threads for drafter in drafters)
        self._readers = [drafter for drafter in drafters if drafter.hidden_layers]
        self.hidden_layers = tuple(sorted({layer for reader in self._readers for layer in reader.hidden_layers}))
        self._texts: WeakKeyDictionary[Sequence, _Text] = WeakKeyDictionary()
        self._overall: dict[tuple[bool, Kind], _Record] = {}  # of all free texts, greedy ones apart
        self._paces: dict[bool, Paces] = {False: {}, True: {}}  # of rules, likewise
        self._matches = [drafter.matches for drafter in drafters]
        self._foresighted = all(drafter.foreseen is not None for drafter in drafters[:-1])
        self._seconds = _Seconds(len(drafters))
        self._turns: list[list[bool]] = []  # of each drafter, the rows that took its draft in this round
        self._proposed: list[Sequence] = []  # the rows of this round
        self._key: str | None = None
        self._rounds = 0

    def check_target(self, target: LanguageModel) -> None:
        """Have each drafter that has something to say about the target see to it."""
        for drafter in self.drafters:
            drafter.check_target(target)

    def observe_hidden(
        self,
        sequences: AbstractSequence[Sequence],
        starts: AbstractSequence[int],
        counts: AbstractSequence[int],
        hidden: AbstractSequence[Tensor],
    ) -> None:
        """Give the drafters that ask for hidden states the layers that they want."""
        layers = dict(zip(self.hidden_layers, hidden, strict=True))
        for reader in self._readers:
            reader.observe_hidden(sequences, starts, counts, [layers[layer] for layer in reader.hidden_layers])

    def keep_costs(self, key: str) -> None:
        """See `Drafter.keep_costs`; what drafts are worth is kept too, and counts for little beside new texts."""
        key = f"{key} | costs of drafters"
        if key == self._key:
            return
        self._key, self._rounds, self._seconds = key, 0, _Seconds(len(self.drafters))
        self._overall, self._paces = {}, {False: {}, True: {}}
        saved = learnt.read().get(key)
        if saved is not None:
            seconds = _Seconds(len(self.drafters))
            overall: dict[tuple[bool, Kind], _Record] = {}
            paces: dict[bool, Paces] = {False: {}, True: {}}
            with suppress(AttributeError, IndexError, KeyError, TypeError, ValueError):  # another version's, or damaged
                seconds.read(saved)
                for greedy, place, length, record in saved["records"]:
                    overall[greedy, (place, length)] = self._new_record((place, length))
                    overall[greedy, (place, length)].read(record)
                for greedy, least, asked, pace in saved["rules"]:
                    paces[greedy][Rule(int(least), int(asked))] = float(pace)
                self._seconds, self._overall, self._paces = seconds, overall, paces

    def _keep(self) -> None:
        self._rounds += 1
        if (
            self._key is not None
            and self._given is None
            and self._rounds >= 64
            and self._rounds & (self._rounds - 1) == 0
        ):
            worth = {
                "records": [[greedy, *kind, record.as_json()] for (greedy, kind), record in self._overall.items()],
                "rules": [[greedy, *rule, pace] for greedy, of in self._paces.items() for rule, pace in of.items()],
            }
            learnt.write({**learnt.read(), self._key: {**self._seconds.as_json(), **worth}})

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """For each row the draft that promises most, of the drafters that it pays to ask."""
        # A text's first pass may read the rest of its prompt.
        clean = all(sequence in self._texts for sequence in batch.sequences)
        texts = [self._text(batch, row) for row in range(len(limits))]
        size = len(limits)
        if any(batch.trees):
            batch = replace(batch, trees=(False,) * size)
        open_rows = [limit > 0 for limit in limits]
        measured = self._seconds.costs(size) if self._given is None else None
        costs: list[_Costs | None] = [self._given or (measured if text.free else None) for text in texts]
        spent = [0.0] * size
        drafts: list[Draft] = []
        # All drafters are called, if only for no tokens: some learn by it, and what they know of a row must not depend
        # on whether another row has use for them.
        for place, drafter in enumerate(self.drafters):
            if self._ruled(place):
                for text, sequence in zip(texts, batch.sequences, strict=True):
                    self._see(text, sequence)
            asked = [
                self._limit(text, sequence, place, limit, cost) if is_open else 0
                for text, sequence, limit, cost, is_open in zip(
                    texts, batch.sequences, limits, costs, open_rows, strict=True
                )
            ]
            start = perf_counter()
            draft = drafter.propose(batch, asked)
            if not any(asked):
                drafts.append(draft)
                continue
            tokens, counts = draft.tokens.tolist(), draft.counts.tolist()
            unread = self._meet(place, texts, batch.sequences, asked)
            self._seconds.asked(place, size, max(asked), perf_counter() - start, unread)
            if not draft.is_chain:
                raise ParameterError(f"drafter {drafter.name!r} drafts trees: a cascade takes drafters of chains")
            drafts.append(draft)
            for row, (text, cost) in enumerate(zip(texts, costs, strict=True)):
                if not asked[row]:
                    continue
                kind = place, self._length(place, batch.sequences[row])
                proposal = tokens[row][: counts[row]]
                text.proposals.append((kind, proposal))
                text.waited[place] = 0
                if cost is not None:
                    spent[row] += cost.call(place, asked[row])
                if proposal:
                    picked = text.greedy or batch.shared_noise[row]
                    drawn = asked[row] if draft.probs is not None and not picked else 0
                    text.offers.append(self._offer(text, kind, len(proposal), drawn, limits[row], cost))
                    text.best = None
                open_rows[row] = self._goes_on(batch.sequences[row], text, place, limits[row], cost)
        if measured is not None and clean and self._seconds.lacks_plain(size) and all(text.free for text in texts):
            chosen = [(-1, 0)] * size
        else:
            chosen = [self._chosen(text, cost) for text, cost in zip(texts, costs, strict=True)]
        for text, cost, so_far, (_, count) in zip(texts, costs, spent, chosen, strict=True):
            if cost is not None:
                text.pace.plans(so_far + cost.target(count))
        self._turns = [[place == one for one, _ in chosen] for place in range(len(drafts))]
        draft = joined(list(zip(self._turns, drafts, strict=True)), batch.vocab_size, [count for _, count in chosen])
        self._proposed = list(batch.sequences)
        self._seconds.pass_begins(clean)
        return draft

    def _ruled(self, place: int) -> bool:
        """Whether rules say when a drafter is asked: the last one, where the others tell what they foresee."""
        return self._foresighted and place == len(self.drafters) - 1

    def _see(self, text: _Text, sequence: Sequence) -> None:
        """What the drafters before the last one, which have read them, foresaw of the tokens that came."""
        each = [drafter.foreseen[sequence] for drafter in self.drafters[:-1] if drafter.foreseen is not None]
        # Of several, the one with the longest match proposes.
        text.trial.read(each[0] if len(each) == 1 else list(map(max, zip(*each, strict=True))))

    def _rule(self, text: _Text, limit: int, costs: _Costs) -> Rule:
        """The rule that a text is continued with."""
        text.most = max(text.most, limit)
        if text.rule is None or text.rounds % _TRIED == 0:
            last, plain = len(self.drafters) - 1, costs.target(0)
            counts = [count for count in _ASKED if count <= text.most] or [text.most]
            expected = self._record(text, (last, _ANY)).expected(counts[-1])
            times = Times(
                copying=costs.target(round(min(text.copied, text.most))) / plain,
                plain=1.0,
                asking={count: (costs.call(last, count) + costs.target(count)) / plain for count in counts},
                right={count: expected[count] for count in counts},
                most=text.most,
            )
            paces = self._paces[text.greedy] if text.free else {}
            text.rule = text.trial.choose(times, paces)
            if text.free:
                learn(paces, text.trial.found)
        return text.rule

    def _asks(self, text: _Text, sequence: Sequence, limit: int, costs: _Costs) -> int:
        """How many tokens to ask the last drafter for: by the rule, or to see if it still does not pay."""
        last, plain = len(self.drafters) - 1, costs.target(0)
        rule = self._rule(text, limit, costs)
        unread = text.unread(last, len(sequence.tokens))
        reading = costs.reading(last) * unread
        if rule.asked and max((kind[1] for kind, proposal in text.proposals if proposal), default=0) < rule.least:
            left = sequence.params.max_new_tokens - len(sequence.output)
            if not unread or reading < left * plain * text.trial.saved(rule):
                return min(rule.asked, limit)
        count = min(_ASKED[0], limit)
        overdue = text.waited[last] * plain >= _PROBE * max(plain, costs.call(last, count) + reading)
        return count if overdue else 0

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        """Judge every proposal by what the target said, and tell the drafters."""
        paths, counts, following = verdict.path.tolist(), verdict.counts.tolist(), verdict.tokens.tolist()
        if self._proposed == batch.sequences:
            self._seconds.pass_ended(len(batch.sequences), draft.width)
            self._keep()
        else:  # a round without a proposal is told of too, and one that failed is not
            self._turns = [[False] * len(batch.sequences) for _ in self.drafters]
            for known in filter(None, map(self._texts.get, batch.sequences)):
                known.waited = [rounds + 1 for rounds in known.waited]
        self._proposed = []
        tokens = draft.tokens.tolist()
        for row, sequence in enumerate(batch.sequences):
            text = self._texts.get(sequence)
            if text is None:
                continue
            said = [*(tokens[row][node - 1] for node in paths[row][: counts[row]]), following[row]]
            for kind, proposal in text.proposals:
                self._judge(text, kind, proposal, said)
            text.proposals.clear()
            text.pace.went(len(said))
        nothing = _nothing_of(verdict)
        for drafter, takes in zip(self.drafters, self._turns, strict=True):
            drafter.observe(batch, draft, _part(verdict, takes) if any(takes) else nothing, logits)

    def _text(self, batch: Batch, row: int) -> _Text:
        sequence = batch.sequences[row]
        text = self._texts.get(sequence)
        if text is None:
            free = not (batch.reproducible and batch.reproducible[row])
            count, source = len(self.drafters), len(sequence.source or ())
            text = _Text(free, sequence.params.greedy, waited=[0] * count, known=[-source] * count)
            self._texts[sequence] = text
        text.proposals.clear()
        text.offers.clear()
        text.best = None
        text.waited = [rounds + 1 for rounds in text.waited]
        text.rounds += 1
        return text

    def _meet(self, place: int, texts: list[_Text], sequences: list[Sequence], asked: list[int]) -> int:
        """Tokens of the texts that are drafted for, and that the drafter has to read first."""
        unread = 0
        for text, sequence, limit in zip(texts, sequences, asked, strict=True):
            if limit:
                length = len(sequence.tokens)
                unread += text.unread(place, length)
                text.known[place] = length
        return unread

    def _limit(self, text: _Text, sequence: Sequence, place: int, limit: int, costs: _Costs | None) -> int:
        """How many tokens to ask for: of a drafter that copies all, of others those that will be of use."""
        if costs is not None and self._ruled(place):
            return self._asks(text, sequence, limit, costs)
        if self._matches[place] is not None:
            return limit
        record = self._record(text, (place, _ANY))
        if costs is None:
            return _reach(record.value, limit, _SURE_TO_PAY)
        return _best(record, limit, costs, text.pace.worth(costs), place)[0]

    def _length(self, place: int, sequence: Sequence) -> int:
        matches = self._matches[place]
        return 0 if matches is None else min(matches[sequence], _LONGEST)

    def _record(self, text: _Text, kind: Kind) -> _Record:
        record = text.records.get(kind)
        if record is None:
            record = self._new_record(kind)
            if text.free:
                record = _Record(self._overall.setdefault((text.greedy, kind), record).rates(_FARTHEST))
            text.records[kind] = record
        return record

    def _new_record(self, kind: Kind) -> _Record:
        length = kind[1]
        return _Record.of(_EXPECTED if length <= 0 else _EXPECTED_OF_ONE + _EXPECTED_MORE * (length - 1))

    def _judge(self, text: _Text, kind: Kind, proposal: list[int], said: list[int]) -> None:
        told, right = min(len(proposal), len(said)), _agreeing(proposal, said)
        for one in (kind, (kind[0], _ANY)) if proposal else ((kind[0], _ANY),):
            self._record(text, one).add(max(told, 1), right)
            if text.free:
                self._overall[text.greedy, one].add(max(told, 1), right)

    def _offer(self, text: _Text, kind: Kind, length: int, drawn: int, limit: int, costs: _Costs | None) -> _Offer:
        """What may be used of a draft of so many tokens, drawn where that many were asked for."""
        record = self._record(text, kind)
        if costs is None and not drawn:
            length = min(length, _reach(record.value, limit, _SURE))
        return _Offer(kind[0], length, drawn, record.expected(drawn or length))

    def _goes_on(self, sequence: Sequence, text: _Text, place: int, limit: int, costs: _Costs | None) -> bool:
        """Whether a row asks further drafters after the one at `place`."""
        later = range(place + 1, len(self.drafters))
        if not later:
            return False
        records = [self._record(text, (other, _ANY)) for other in later]
        if costs is None:
            if text.free and any(map(self._seconds.lacks, later)):
                return True  # to find out
            offered = text.offers and text.offers[-1].place == place
            promised = self._record(text, text.proposals[-1][0]).value
            return not offered or promised + self.margin < max(record.value for record in records)
        if self._foresighted:
            return True  # lookups cost next to nothing, and rules say when the last one is asked
        worth = text.pace.worth(costs)
        so_far = self._best_so_far(text, costs)
        left = sequence.params.max_new_tokens - len(sequence.output)
        spent = 0.0  # what was spent so far is gone either way
        for other, record in zip(later, records, strict=True):
            reading = costs.reading(other) * text.unread(other, len(sequence.tokens))
            # What it has to read first is spread over the rounds that may be left.
            spent += reading * (1.0 + record.value) / left
            count, promised = _best(record, limit, costs, worth, other)
            call = costs.call(other, count)
            overdue = text.waited[other] * costs.target(0) >= _PROBE * max(costs.target(0), call + reading)
            if overdue or promised - worth * spent > so_far.gain:
                return True
            spent += call
        return False

    def _worth(self, text: _Text, costs: _Costs) -> float:
        """Tokens that a unit of a text's time is worth."""
        pace = text.trial.pace
        return text.pace.worth(costs) if pace is None else 1.0 / (pace * costs.target(0))

    def _best_so_far(self, text: _Text, costs: _Costs) -> _Best:
        """The best of the offers, and of none; without that of a drafter that rules are for."""
        if text.best is not None:
            return text.best
        worth = self._worth(text, costs)
        uses = [(_gain(0.0, costs.target(0), worth), -1, 0)]
        for offer in text.offers:
            if not self._ruled(offer.place):
                count, gain = offer.used(costs, worth)
                uses.append((gain, offer.place, count))
        gain, place, count = max(uses, key=lambda use: use[0])
        text.best = _Best(place if count else -1, count, gain)
        return text.best

    def _chosen(self, text: _Text, costs: _Costs | None) -> tuple[int, int]:
        """The drafter whose draft a row takes, and how many tokens of it; -1 and 0 for none."""
        if not text.offers:
            return -1, 0
        if costs is not None:
            last = text.offers[-1]
            if self._ruled(last.place):
                return last.place, last.count
            best = self._best_so_far(text, costs)
            if best.count:
                text.copied += (best.count - text.copied) / _COPIED
            return best.place, best.count
        if text.free:  # all are asked, whatever they promise
            most = max(text.offers, key=lambda offer: offer.expected[-1])
            return most.place, most.count
        last = text.offers[-1]
        if last.place == text.proposals[-1][0][0]:
            return last.place, last.count
        # A guess is better than nothing. Not one that was drawn: which of those are used must not depend on others.
        guesses = ((offer.place, offer.count) for offer in reversed(text.offers) if not offer.asked)
        return next(guesses, (-1, 0))


def _part(verdict: Verdict, takes: AbstractSequence[bool]) -> Verdict:
    """What some rows keep, as if the others kept nothing."""
    if all(takes):
        return verdict
    mine = torch.tensor(takes, device=verdict.counts.device)
    # Nor the path of other rows: it may go further than any draft of this drafter's.
    return replace(
        verdict, path=torch.where(mine[:, None], verdict.path, 0), counts=torch.where(mine, verdict.counts, 0)
    )


def _nothing_of(verdict: Verdict) -> Verdict:
    """As if no row kept anything."""
    return Verdict(torch.zeros_like(verdict.path), torch.zeros_like(verdict.counts), verdict.tokens)


def _best(record: _Record, most: int, costs: _Costs, worth: float, place: int) -> tuple[int, float]:
    """How many tokens to ask a drafter for, one at least, and what the round gains.

    Args:
        record: what to expect of it.
        most: that it may be asked for.
        costs: of drafters and passes.
        worth: tokens that a unit of time is worth.
        place: of the drafter.
    """
    expected = record.expected(most)
    gains = {
        count: _gain(expected[count], costs.call(place, count) + costs.target(count), worth)
        for count in (*(count for count in _ASKED if count < most), most)
    }
    best = max(gains, key=gains.__getitem__)
    return best, gains[best]


def _reach(value: float, limit: int, sure: float) -> int:
    """How many tokens to draft where so many are expected to be right."""
    return limit if value > sure else min(limit, ceil(value) + _BEYOND)


def _agreeing(ours: list[int], theirs: list[int]) -> int:
    """How many tokens two texts have in common before the first that differs."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
