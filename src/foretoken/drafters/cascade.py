"""Cascade: several drafters in order of cost; the first that promises enough proposes."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.drafters.base import Batch, Drafter, FeatureReader
from foretoken.errors import ParameterError
from foretoken.sequence import Sequence
from foretoken.verify.base import Verdict

_EXPECTED = 2.5  # tokens that a draft is taken to get accepted before there were any
_EXPECTED_OF_ONE, _EXPECTED_MORE = 1.35, 0.6  # the same of one that a match of one token led to; of each token more
_LONGEST = 6  # longer matches are counted with those of this length
_WEIGHT = 2.0  # drafts that this assumption counts as
_MEMORY = 0.97  # what a draft counts for when there was another one
_COUNTED = 5  # accepted tokens of a draft that are counted: longer drafts must not speak for whole drafters


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


@dataclass
class _Text:
    """What is known of one sequence.

    Attributes:
        records: of each drafter, by how sure it said it was.
        proposals: of the round: for each drafter that was asked, its record and its tokens.
    """

    records: dict[tuple[int, int], _Record] = field(default_factory=dict)
    proposals: list[tuple[_Record, list[int]]] = field(default_factory=list)


class Cascade:
    """Asks drafters one after another, and takes the first draft that promises about as much as the next one's would.

    What a draft promises is what drafts of that drafter, found with as long a match, had accepted in the same text so
    far: of a drafter that tells the length of its match (`PromptLookup.matches`), drafts of each length are counted
    apart. A drafter that was not taken is judged too, by what the target said instead. So the choice depends on the
    text's past alone, and a seed gives one text.

    Args:
        drafters: the cheapest first; each must draft chains.
        margin: tokens that a cheaper draft may promise less than the next drafter and be taken all the same: what the
            next drafter's time is worth.

    Raises:
        ParameterError: fewer than two drafters, or a negative margin.
    """

    name = "cascade"

    def __init__(self, drafters: AbstractSequence[Drafter], margin: float = 0.3) -> None:
        if len(drafters) < 2:
            raise ParameterError(f"a cascade of {len(drafters)} drafters: give two or more, the cheapest first")
        if not margin >= 0.0:
            raise ParameterError(f"margin={margin}: use 0 or more tokens")
        self.drafters = tuple(drafters)
        self.margin = margin
        self.models = tuple(model for drafter in drafters for model in getattr(drafter, "models", ()))
        self.own_threads: bool = all(getattr(drafter, "own_threads", True) for drafter in drafters)
        self._readers = [drafter for drafter in drafters if isinstance(drafter, FeatureReader)]
        self.hidden_layers = tuple(sorted({layer for reader in self._readers for layer in reader.hidden_layers}))
        self._texts: WeakKeyDictionary[Sequence, _Text] = WeakKeyDictionary()
        self._turns: list[list[bool]] = []  # of each drafter, the rows that took its draft in this round

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
        texts = [self._texts.setdefault(sequence, _Text()) for sequence in batch.sequences]
        for text in texts:
            text.proposals.clear()
        size = len(limits)
        batch = replace(batch, trees=(False,) * size)
        open_rows = [limit > 0 for limit in limits]
        taken: list[tuple[list[bool], Draft]] = []
        spare: dict[int, int] = {}  # of a row: the last drafter that had chosen tokens for it
        for place, drafter in enumerate(self.drafters):
            if not any(open_rows):
                break
            asked = [limit if is_open else 0 for limit, is_open in zip(limits, open_rows, strict=True)]
            draft = drafter.propose(batch, asked)
            if not draft.is_chain:
                raise ParameterError(f"drafter {drafter.name!r} drafts trees: a cascade takes drafters of chains")
            takes = [False] * size
            tokens, counts = draft.tokens.tolist(), draft.counts.tolist()
            for row, text in enumerate(texts):
                if not open_rows[row]:
                    continue
                record = self._record(text, place, batch.sequences[row])
                proposal = tokens[row][: counts[row]]
                if proposal:
                    text.proposals.append((record, proposal))
                    takes[row] = self._is_enough(text, record, place)
                    open_rows[row] = not takes[row]
                    if draft.probs is None:
                        spare[row] = place
            taken.append((takes, draft))
        # A guess is better than nothing. Not one that was drawn: which of those are used must not depend on others.
        for row, place in spare.items():
            taken[place][0][row] |= open_rows[row]
        self._turns = [takes for takes, _ in taken]
        return _joined(taken, batch, size)

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        """Judge every proposal by what the target said, and tell the drafters."""
        paths, counts, following = verdict.path.tolist(), verdict.counts.tolist(), verdict.tokens.tolist()
        tokens = draft.tokens.tolist()
        for row, sequence in enumerate(batch.sequences):
            text = self._texts.get(sequence)
            if text is None:
                continue
            said = [*(tokens[row][node - 1] for node in paths[row][: counts[row]]), following[row]]
            for record, proposal in text.proposals:
                record.add(_agreeing(proposal, said))
            text.proposals.clear()
        for drafter, takes in zip(self.drafters, self._turns, strict=False):
            mine = torch.tensor(takes, device=verdict.counts.device)
            drafter.observe(batch, draft, replace(verdict, counts=torch.where(mine, verdict.counts, 0)), logits)
        self._turns = []  # a round without a proposal is told of too

    def _record(self, text: _Text, place: int, sequence: Sequence) -> _Record:
        matches = getattr(self.drafters[place], "matches", None)
        length = 0 if matches is None else min(matches.get(sequence, 0), _LONGEST)
        expected = _EXPECTED if matches is None else _EXPECTED_OF_ONE + _EXPECTED_MORE * (length - 1)
        return text.records.setdefault((place, length), _Record(expected))

    def _is_enough(self, text: _Text, record: _Record, place: int) -> bool:
        later = range(place + 1, len(self.drafters))
        best = max((text.records.get((other, 0), _Record()).value for other in later), default=0.0)
        return place + 1 == len(self.drafters) or record.value + self.margin >= best


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
    probs = laws[0].new_zeros((size, width, max(law.shape[-1] for law in laws))) if laws else None
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
