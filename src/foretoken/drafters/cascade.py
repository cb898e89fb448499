"""Cascade: several drafters in order of cost; the first that promises enough proposes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import ceil
from statistics import median
from time import perf_counter
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.drafters.base import Batch, Drafter, FeatureReader, TargetChecker
from foretoken.errors import ParameterError
from foretoken.models.base import LanguageModel
from foretoken.sequence import Sequence
from foretoken.verify.base import Verdict

_EXPECTED = 2.5  # tokens that a draft is taken to get accepted before there were any
_EXPECTED_OF_ONE, _EXPECTED_MORE = 1.35, 0.6  # the same of one that a match of one token led to; of each token more
_LONGEST = 6  # longer matches are counted with those of this length
_WEIGHT = 2.0  # drafts that this assumption counts as
_MEMORY = 0.97  # what a draft counts for when there was another one
_COUNTED = 5  # accepted tokens of a draft that are counted: longer drafts must not speak for whole drafters
_SURE, _SURE_TO_PAY = 2.5, 4.0  # expected right tokens from which on a draft has the whole limit: copies, and others
_BEYOND = 2  # tokens that are drafted beyond those that are expected to be right
_TIMED = 15  # calls that a median of seconds is taken of
_ENOUGH = 3  # calls from which on it is relied on
_PROBE = 32  # rounds of a text after which a drafter that does not pay is asked again; for each pass that this costs


@dataclass
class _Record:
    """How many tokens of a kind of drafts were right, lately."""

    expected: float = _EXPECTED
    drafts: float = 0.0
    right: float = 0.0

    def add(self, right: int) -> None:
        self.drafts = self.drafts * _MEMORY + 1.0
        self.right = self.right * _MEMORY + min(right, _COUNTED)

    @property
    def value(self) -> float:
        """Tokens that the next draft may be expected to get right."""
        return (self.right + _WEIGHT * self.expected) / (self.drafts + _WEIGHT)


Kind = tuple[int, int]
"""A drafter's place, and how sure it said it was: the length of its match, 0 where it tells none, or `_ANY`."""
_ANY = -1  # whatever it said, and no draft at all counted as well: what asking it may be expected to bring


@dataclass
class _Text:
    """What is known of one sequence.

    Attributes:
        free: which drafts are taken has no influence on what a seed that the request names gives.
        records: by kind of draft.
        proposals: of the round: for each drafter that was asked, the kind and the tokens.
        waited: of each drafter, rounds since it was asked.
        met: the drafters that were asked before, and so have read the text.
    """

    free: bool
    records: dict[Kind, _Record] = field(default_factory=dict)
    proposals: list[tuple[Kind, list[int]]] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)
    met: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Costs:
    """In target passes: a call of each drafter, and each token of a text that it has to read first."""

    calls: list[float]
    reading: list[float]


class _Seconds:
    """What each drafter's call takes, and the target's pass with verification: medians of the last ones."""

    def __init__(self, count: int) -> None:
        self._calls = [deque[float](maxlen=_TIMED) for _ in range(count)]
        self._reading = [deque[float](maxlen=_TIMED) for _ in range(count)]
        self._target = deque[float](maxlen=_TIMED)
        self._began = 0.0

    def asked(self, place: int, seconds: float, unread: int) -> None:
        """A call that took so long, and read so many tokens of texts that the drafter had not met."""
        calls = self._calls[place]
        if not unread:
            calls.append(seconds)
        elif calls:
            self._reading[place].append(max(0.0, seconds - median(calls)) / unread)

    def pass_begins(self) -> None:
        """The draft is made."""
        self._began = perf_counter()

    def pass_ended(self) -> None:
        """It is judged."""
        self._target.append(perf_counter() - self._began)

    def costs(self) -> _Costs | None:
        """None before all were measured."""
        if min(map(len, (self._target, *self._calls))) < _ENOUGH:
            return None
        unit = median(self._target)
        reading = [median(seconds) / unit if seconds else 0.0 for seconds in self._reading]
        return _Costs([median(calls) / unit for calls in self._calls], reading)


class Cascade:
    """Asks drafters one after another, until a draft promises more tokens a second than going on would.

    What a draft promises is what drafts of that drafter, found with as long a match, had accepted in the same text so
    far: of a drafter that tells the length of its match (`PromptLookup.matches`), drafts of each length are counted
    apart. A drafter that was not taken is judged too, by what the target said instead. Drafts are about two tokens
    longer than what is expected to be accepted: a high limit serves those that are nearly always right to the end.

    With v tokens promised and calls made so far that cost s target passes, a round gives ``(1 + v) / (1 + s)`` tokens a
    pass; the next drafter is asked where it would raise that, and now and then where not, to see if it still holds.
    What calls cost is measured, and what drafts are worth is remembered from text to text, for requests whose text does
    not depend on it: greedy ones, those of coupled verifiers, and those that name no seed. For the others there are
    `costs` where they are given, or else `margin`; and each text begins with fixed expectations: so the choice depends
    on the text's past alone, and a seed gives one text.

    Args:
        drafters: the cheapest first; each must draft chains.
        margin: tokens that a cheaper draft may promise less than the next drafter and be taken all the same: what the
            next drafter's time is worth where its cost is not known.
        costs: of a call of each drafter, in target passes; for all requests. None: measured where that may be.

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
        self._costs = None if costs is None else _Costs(list(costs), [0.0] * len(costs))
        self.models = tuple(model for drafter in drafters for model in getattr(drafter, "models", ()))
        self.own_threads: bool = all(getattr(drafter, "own_threads", True) for drafter in drafters)
        self._readers = [drafter for drafter in drafters if isinstance(drafter, FeatureReader)]
        self.hidden_layers = tuple(sorted({layer for reader in self._readers for layer in reader.hidden_layers}))
        self._texts: WeakKeyDictionary[Sequence, _Text] = WeakKeyDictionary()
        self._overall: dict[Kind, _Record] = {}  # of all free texts
        self._seconds = _Seconds(len(drafters))
        self._turns: list[list[bool]] = []  # of each drafter, the rows that took its draft in this round

    def check_target(self, target: LanguageModel) -> None:
        """Have each drafter that has something to say about the target see to it."""
        for drafter in self.drafters:
            if isinstance(drafter, TargetChecker):
                drafter.check_target(target)

    def read(
        self,
        sequences: AbstractSequence[Sequence],
        starts: AbstractSequence[int],
        counts: AbstractSequence[int],
        hidden: AbstractSequence[Tensor],
    ) -> None:
        """Give the drafters that ask for hidden states the layers that they want."""
        layers = dict(zip(self.hidden_layers, hidden, strict=True))
        for reader in self._readers:
            reader.read(sequences, starts, counts, [layers[layer] for layer in reader.hidden_layers])

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """For each row the draft of the first drafter that promises enough, an empty one where none has any."""
        texts = [self._text(batch, row) for row in range(len(limits))]
        size = len(limits)
        batch = replace(batch, trees=(False,) * size)
        open_rows = [limit > 0 for limit in limits]
        measured = self._seconds.costs()
        taken: list[tuple[list[bool], Draft]] = []
        spare: dict[int, int] = {}  # of a row: the last drafter that had chosen tokens for it
        for place, drafter in enumerate(self.drafters):
            if not any(open_rows):
                break
            asked = [
                self._limit(text, place, limit) if is_open else 0
                for text, limit, is_open in zip(texts, limits, open_rows, strict=True)
            ]
            start = perf_counter()
            draft = drafter.propose(batch, asked)
            tokens, counts = draft.tokens.tolist(), draft.counts.tolist()
            unread = self._meet(place, texts, batch.sequences, asked)
            self._seconds.asked(place, perf_counter() - start, unread)
            if not draft.is_chain:
                raise ParameterError(f"drafter {drafter.name!r} drafts trees: a cascade takes drafters of chains")
            takes = [False] * size
            for row, text in enumerate(texts):
                if not open_rows[row]:
                    continue
                kind = place, self._length(place, batch.sequences[row])
                proposal = tokens[row][: counts[row]]
                text.proposals.append((kind, proposal))
                text.waited[place] = 0
                promised = self._record(text, kind).value if proposal else None
                if promised is not None and draft.probs is None:
                    counts[row] = min(counts[row], _reach(promised, limits[row], _SURE))
                costs = self._costs or (measured if text.free else None)
                open_rows[row] = self._goes_on(batch.sequences[row], text, place, promised, costs)
                takes[row] = bool(proposal) and not open_rows[row]
                if proposal and draft.probs is None:
                    spare[row] = place
            if draft.probs is None:  # each position that is scored costs, and what was chosen may be left out
                kept = [row_tokens[:count] for row_tokens, count in zip(tokens, counts, strict=True)]
                draft = Draft.from_lists(kept, batch.device)
            taken.append((takes, draft))
        # A guess is better than nothing. Not one that was drawn: which of those are used must not depend on others.
        drafted = {row for takes, _ in taken for row, takes_it in enumerate(takes) if takes_it}
        for row, place in spare.items():
            taken[place][0][row] |= row not in drafted
        self._turns = [takes for takes, _ in taken]
        joined = _joined(taken, batch, size)
        self._seconds.pass_begins()
        return joined

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        """Judge every proposal by what the target said, and tell the drafters."""
        paths, counts, following = verdict.path.tolist(), verdict.counts.tolist(), verdict.tokens.tolist()
        if self._turns:
            self._seconds.pass_ended()
        tokens = draft.tokens.tolist()
        for row, sequence in enumerate(batch.sequences):
            text = self._texts.get(sequence)
            if text is None:
                continue
            said = [*(tokens[row][node - 1] for node in paths[row][: counts[row]]), following[row]]
            for kind, proposal in text.proposals:
                self._judge(text, kind, proposal, _agreeing(proposal, said))
            text.proposals.clear()
        for drafter, takes in zip(self.drafters, self._turns, strict=False):
            mine = torch.tensor(takes, device=verdict.counts.device)
            # Nor the path of other rows: it may go further than any draft of this drafter's.
            path, kept = torch.where(mine[:, None], verdict.path, 0), torch.where(mine, verdict.counts, 0)
            drafter.observe(batch, draft, replace(verdict, path=path, counts=kept), logits)
        self._turns = []  # a round without a proposal is told of too

    def _text(self, batch: Batch, row: int) -> _Text:
        sequence = batch.sequences[row]
        text = self._texts.get(sequence)
        if text is None:
            free = batch.shared_noise[row] or sequence.params.greedy or sequence.params.seed is None
            text = self._texts[sequence] = _Text(free, waited=[0] * len(self.drafters))
        text.proposals.clear()
        text.waited = [rounds + 1 for rounds in text.waited]
        return text

    def _meet(self, place: int, texts: list[_Text], sequences: list[Sequence], asked: list[int]) -> int:
        """Tokens of the texts that are drafted for, and that the drafter is asked about for the first time."""
        unread = 0
        for text, sequence, limit in zip(texts, sequences, asked, strict=True):
            if limit and place not in text.met:
                text.met.add(place)
                unread += len(sequence.context)
        return unread

    def _limit(self, text: _Text, place: int, limit: int) -> int:
        """How many tokens to ask for: of a drafter that copies all, of others about as many as will be of use."""
        if hasattr(self.drafters[place], "matches"):
            return limit
        return _reach(self._record(text, (place, _ANY)).value, limit, _SURE_TO_PAY)

    def _length(self, place: int, sequence: Sequence) -> int:
        matches = getattr(self.drafters[place], "matches", None)
        return 0 if matches is None else min(matches.get(sequence, 0), _LONGEST)

    def _record(self, text: _Text, kind: Kind) -> _Record:
        record = text.records.get(kind)
        if record is None:
            length = kind[1]
            expected = _EXPECTED if length <= 0 else _EXPECTED_OF_ONE + _EXPECTED_MORE * (length - 1)
            if text.free:
                expected = self._overall.setdefault(kind, _Record(expected)).value
            record = text.records[kind] = _Record(expected)
        return record

    def _judge(self, text: _Text, kind: Kind, proposal: list[int], right: int) -> None:
        for one in (kind, (kind[0], _ANY)) if proposal else ((kind[0], _ANY),):
            self._record(text, one).add(right)
            if text.free:
                self._overall[one].add(right)

    def _goes_on(
        self, sequence: Sequence, text: _Text, place: int, promised: float | None, costs: _Costs | None
    ) -> bool:
        """Whether a row asks further drafters after the one at `place`, which promises so many tokens, or has none."""
        later = range(place + 1, len(self.drafters))
        values = [self._record(text, (other, _ANY)).value for other in later]
        if not values:
            return False
        if costs is None:
            return promised is None or promised + self.margin < max(values)
        spent = 1.0 + sum(costs.calls[: place + 1])
        rate = (1.0 + (promised or 0.0)) / spent
        left = sequence.params.max_new_tokens - len(sequence.output)
        for other, value in zip(later, values, strict=True):
            reading = 0.0 if other in text.met else costs.reading[other] * len(sequence.context)
            # What it has to read first is spread over the rounds that may be left.
            spent += costs.calls[other] + reading * (1.0 + value) / left
            overdue = text.waited[other] >= _PROBE * max(1.0, costs.calls[other] + reading)
            if overdue or (1.0 + value) / spent > rate:
                return True
        return False


def _reach(value: float, limit: int, sure: float) -> int:
    """How many tokens to draft where so many are expected to be right."""
    return limit if value > sure else min(limit, ceil(value) + _BEYOND)


def _agreeing(ours: list[int], theirs: list[int]) -> int:
    """How many tokens two texts have in common before the first that differs."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))


def _joined(taken: list[tuple[list[bool], Draft]], batch: Batch, size: int) -> Draft:
    """One draft of all rows, each row's from the drafter that it took."""
    drafts = [(rows, draft) for rows, draft in taken if any(rows)]
    if not drafts:
        return Draft.empty(size, batch.device)
    if len(drafts) == 1:
        rows, draft = drafts[0]
        mine = torch.tensor(rows, device=batch.device)
        return replace(draft, counts=torch.where(mine, draft.counts, 0))
    width = max(draft.width for _, draft in drafts)
    tokens = torch.zeros((size, width), dtype=torch.int64, device=batch.device)
    counts = torch.zeros(size, dtype=torch.int64, device=batch.device)
    laws = [draft.probs for _, draft in drafts if draft.probs is not None]
    # Laws of a drafter that is padded less than the target are narrower than what others choose from.
    entries = max([batch.vocab_size, *(law.shape[-1] for law in laws)])
    probs = laws[0].new_zeros((size, width, entries)) if laws else None
    for rows, draft in drafts:
        mine = torch.tensor(rows, device=batch.device)
        tokens[mine, : draft.width] = draft.tokens[mine]
        counts[mine] = draft.counts[mine]
        if probs is None:
            continue
        if draft.probs is not None:
            probs[mine, : draft.width, : draft.probs.shape[-1]] = draft.probs[mine]
        else:  # a chosen token is one drawn from a law that is sure of it
            probs[mine] = probs[mine].scatter(-1, tokens[mine][..., None], 1.0)
    return Draft.chain(tokens, counts, probs)
