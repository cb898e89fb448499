"""What may follow in a sequence, and how likely: copies of earlier tokens, and the target's most probable successors.

`Continuations` is the state that `Lookup` keeps of one sequence. After any context it names candidate tokens from two
sources:

- *copies*: what followed the longest suffix of the context that occurred before, by a suffix automaton. While a draft
  grows, the context grows with it, so that a copy may overlap its source, as in LZ77: output of period p is drafted
  without end, not just to the end of the last period.
- *successors*: the target's most probable tokens the last time that it scored the same token (token recycling).

A candidate belongs to a class: its source, the length of the match, its rank, and whether the other source agrees. How
often candidates of a class are accepted is measured (`AcceptanceRates`), which makes a draft's expected length known
before it is verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from foretoken.drafters.automaton import ROOT, SuffixAutomaton
from foretoken.drafters.other_requests import OtherRequests, SharedPosition

SUCCESSORS = 8
"""Successors that are kept of each token."""

_BUCKETS = (0, 1, 2, 3, 4, 4, 5, 5, 5, 5)  # class of a match by its length; longer ones are of the last class
_LONGEST = 6
_COPIES = 3  # continuations of one context that are candidates

# Shares of candidates that were right, over outputs of the shipped target (maths, code, summarising, retrieval, chat;
# greedy and at temperature 1). Rows: match classes 1 to 6. Columns: the copy is the target's first successor,
# its second, or neither. First where the context had one continuation only, then where it had several.
_ONLY = (
    (0.36, 0.22, 0.21),
    (0.67, 0.38, 0.29),
    (0.74, 0.61, 0.40),
    (0.81, 0.68, 0.40),
    (0.89, 0.74, 0.45),
    (0.98, 0.87, 0.93),
)
_SEVERAL = (
    (0.29, 0.23, 0.10),
    (0.43, 0.38, 0.20),
    (0.49, 0.45, 0.31),
    (0.47, 0.45, 0.17),
    (0.60, 0.50, 0.30),
    (0.93, 0.80, 0.70),
)
_LATER_COPIES = (0.25, 0.13, 0.06)  # of the second and third continuation
_LATER_SUCCESSORS = (0.10, 0.07, 0.04, 0.03, 0.02, 0.015, 0.01, 0.008)
_SUCCESSORS_BESIDE_LONG_MATCH = 0.2  # of the above, beside a match of the last class
_SUCCESSOR_ALONE = 0.3  # the first one, where nothing can be copied

_COPY, _SUCCESSOR = 0, 1

_WEIGHT = 8.0  # candidates that a prior rate counts as
_REUSED = 16  # calls of `shortest_with` of which one computes, where nothing else has changed
_KEEP = 1.0 - 1.0 / 200.0  # what is left of a candidate's weight after each further one of its class


def _class_prior(key: int) -> float:
    """The acceptance rate of a class before anything was measured in this process."""
    source, bucket, rank, several, agreement = _unpack(key)
    if source == _COPY:
        if rank:
            return _LATER_COPIES[agreement]
        return (_SEVERAL if several else _ONLY)[bucket - 1][agreement]
    if bucket == 0:
        return _SUCCESSOR_ALONE / (1 + rank) ** 1.5
    return _LATER_SUCCESSORS[rank] * (_SUCCESSORS_BESIDE_LONG_MATCH if bucket == _LONGEST else 1.0)


def _pack(source: int, bucket: int, rank: int, several: bool, agreement: int) -> int:
    return (((bucket * 8 + rank) * 2 + several) * 3 + agreement) * 2 + source


def _unpack(key: int) -> tuple[int, int, int, bool, int]:
    key, source = divmod(key, 2)
    key, agreement = divmod(key, 3)
    key, several = divmod(key, 2)
    bucket, rank = divmod(key, 8)
    return source, bucket, rank, bool(several), agreement


_CLASSES = _pack(1, _LONGEST, 7, True, 2) + 1
_PRIOR = tuple(
    min(max(_class_prior(key), 0.001), 0.99) if _unpack(key)[0] or _unpack(key)[1] else 0.0 for key in range(_CLASSES)
)

_SUCCESSOR_CLASSES = tuple(
    tuple(_pack(_SUCCESSOR, bucket, rank, False, 0) for rank in range(SUCCESSORS)) for bucket in range(_LONGEST + 1)
)

_KEYS = tuple(
    (
        *_SUCCESSOR_CLASSES[bucket],
        *(
            _pack(_COPY, bucket, rank, several, agreement)
            for rank in range(_COPIES if bucket else 0)
            for several in (False, True)
            for agreement in range(3)
        ),
    )
    for bucket in range(_LONGEST)
)
"""Classes by that of the match, all but the last."""

_LONGEST_KEYS = tuple(
    _pack(_COPY, _LONGEST, 0, several, agreement) for several in (False, True) for agreement in range(3)
)


class AcceptanceRates:
    """How often candidates of each class were right, discounted: the past weighs less the longer ago it is.

    Args:
        parent: rates that these start from, and that learn with them; None for those that come with the package.
    """

    def __init__(self, parent: AcceptanceRates | None = None) -> None:
        own = [0.0] * _CLASSES, [0.0] * _CLASSES
        self._levels: list[tuple[list[float], list[float]]] = [*(parent._levels if parent else ()), own]
        """From the first parent down to these rates: by class, how many candidates were right, and how many there were.
        A loop takes half the time of calls from one to the next."""
        self._shortest: tuple[int, list[float]] | None = None  # of the last calls of `shortest_with`
        self._needed, self._used = (0, 0), 0

    def rate(self, key: int) -> float:
        """The chance that a candidate of this class is the next token, between 0 and 1."""
        rate = _PRIOR[key]
        for right, seen in self._levels:
            rate = (right[key] + _WEIGHT * rate) / (seen[key] + _WEIGHT)
        return rate

    def shortest(self, least: float) -> int:
        """Length of the shortest match after which a candidate may have a rate of `least`.

        The longest class always counts as having one, so that rates that have become low can rise again.
        """
        for bucket, keys in enumerate(_KEYS):
            if any(self.rate(key) >= least for key in keys):
                return _BUCKETS.index(bucket)
        return len(_BUCKETS)

    def shortest_with(self, needs: float, limit: int) -> tuple[int, list[float]]:
        """What at best is expected of drafts of `limit` tokens, by the match that they begin with.

        Args:
            needs: expected right tokens of a draft.
            limit: most tokens.

        Returns:
            Length of the shortest match whose best draft has `needs` right tokens; the longest class always counts as
            one. And by class of a match, the right tokens of its best draft for each first one that is right.
        """
        self._used += 1
        if self._shortest is not None and self._used % _REUSED and self._needed == (round(2.0 * needs), limit):
            return self._shortest
        best = [0.0, *(max(map(self.rate, keys)) for keys in (*_KEYS[1:], _LONGEST_KEYS))]
        behind, shortest = [0.0] * len(best), len(_BUCKETS)
        for kind in range(1, len(best)):
            match = _BUCKETS.index(kind) if kind < _LONGEST else len(_BUCKETS)
            later = [best[match_class(length)] for length in range(match + 1, match + limit)]
            behind[kind] = 1.0 + sum(accumulate(later, mul))
            if best[kind] * behind[kind] >= needs:
                shortest = min(shortest, match)
        self._shortest, self._needed = (shortest, behind), (round(2.0 * needs), limit)
        return self._shortest

    def judge(self, candidates: Sequence[Candidate], token: int) -> int:
        """Learn from the next token, which makes each of the candidates right or wrong.

        Returns:
            The likeliest candidate, of equal ones the highest id; -1 if there was none.
        """
        likeliest = max([(self.rate(key), one) for one, key in candidates], default=(0.0, -1))[1]
        for right, seen in self._levels:
            for one, key in candidates:
                right[key] = right[key] * _KEEP + (one == token)
                seen[key] = seen[key] * _KEEP + 1.0
        return likeliest


def match_class(match: int) -> int:
    """The class of a match of so many tokens, which rates depend on."""
    return _BUCKETS[match] if match < len(_BUCKETS) else _LONGEST


def ends_as_before(tokens: Sequence[int], count: int) -> bool:
    """Whether the last `count` tokens occurred before in the same order, overlaps included."""
    if not count or count >= len(tokens):
        return not count
    end, at, last = tokens[-1], count - 1, tokens[len(tokens) - count :]
    with suppress(ValueError):
        while (at := tokens.index(end, at, len(tokens) - 1)) >= 0:
            if tokens[at + 1 - count : at + 1] == last:
                return True
            at += 1
    return False


Candidate = tuple[int, int]
"""A token that may come next, and its class. Hundreds are made in a round: a plain tuple takes a third of the time."""


class Context(NamedTuple):
    """A position: the end of the sequence, or of some draft tokens after it.

    Attributes:
        automaton: where the copies come from.
        state: in the automaton, of the longest suffix that has a continuation there.
        match: length of that suffix in tokens, 0 if there is none.
        last: the last token.
    """

    automaton: SuffixAutomaton
    state: int
    match: int
    last: int


class Continuations:
    """The tokens of one sequence as a source of drafts for itself.

    Takes some 100 to 200 bytes a token for copies, and 100 for each different token for successors.

    Args:
        rates: acceptance rates that are used and updated.
        others: tokens of other requests, in which longer matches are searched; the sequence's tokens are added to them.
    """

    def __init__(self, rates: AcceptanceRates, others: OtherRequests | None = None) -> None:
        self.rates = rates
        self._others, self._shared = others, SharedPosition()
        self.automaton = SuffixAutomaton()
        self.end = ROOT
        self._last = -1
        self._successors: dict[int, Sequence[int]] = {}

    def __len__(self) -> int:
        return self.automaton.size

    def read(self, tokens: Iterable[int]) -> None:
        """Append tokens, such as a prompt, without judging candidates by them."""
        for token in tokens:
            if self._last >= 0:
                known = [token, *(one for one in self._successors.get(self._last, ()) if one != token)]
                self._successors[self._last] = known[:SUCCESSORS]
            self._append(token)

    def extend(self, tokens: Iterable[int]) -> list[bool]:
        """Append emitted tokens, and judge by each of them the candidates that there were for it.

        Returns:
            Of each token, whether it was the likeliest candidate.
        """
        foreseen = []
        for token in tokens:
            foreseen.append(self.rates.judge(self.candidates(self.here()), token) == token)
            self._append(token)
        return foreseen

    def scored(self, token: int, likeliest: Sequence[int]) -> None:
        """Keep the target's most probable tokens after a token, `SUCCESSORS` of them in order."""
        self._successors[token] = likeliest

    def here(self) -> Context:
        """The context at the end of the sequence: the longest match, of equal ones the sequence's own."""
        automaton = self.automaton
        state, match = automaton.context(self.end)
        if self._others is not None:
            for other, context, length in self._others.contexts(self._shared):
                if length > match:
                    automaton, state, match = other, context, length
        return Context(automaton, state, match, self._last)

    def behind(self, context: Context, token: int) -> Context:
        """The context after one further draft token."""
        automaton = context.automaton
        state, match = automaton.follow(context.state, context.match, token)
        state, length = automaton.context(state)
        return Context(automaton, state, min(match, length), token)

    def candidates(self, context: Context) -> list[Candidate]:
        """What may come next, every token once; the copies first."""
        automaton, state, match, last = context
        successors = self._successors.get(last, ())
        first = successors[0] if successors else -1
        second = successors[1] if len(successors) > 1 else -1
        found: list[Candidate] = []
        copied: list[int] = []
        bucket = match_class(match)
        if bucket:
            copies = automaton.continuations(state)
            several = len(copies) > 1
            for rank, (token, _) in enumerate(copies[:_COPIES]):
                agreement = 0 if token == first else 1 if token == second else 2
                found.append((token, _pack(_COPY, bucket, rank, several, agreement)))
                copied.append(token)
        fresh = zip(successors, _SUCCESSOR_CLASSES[bucket], strict=False)
        found += [each for each in fresh if each[0] not in copied] if copied else fresh
        return found

    def _append(self, token: int) -> None:
        self.end = self.automaton.append(self.end, token)
        if self._others is not None:
            self._others.append(self._shared, token)
        self._last = token

    def chain(self, context: Context, limit: int, least: float = 0.0) -> tuple[list[int], list[float]]:
        """The most probable candidate, the most probable one after it, and so on.

        Args:
            context: where to begin.
            limit: most tokens.
            least: the chain ends before a token that is accepted, with all before it, with a smaller probability.

        Returns:
            Tokens, and of each the probability that it and all before it are accepted.
        """
        tokens: list[int] = []
        reached: list[float] = []
        probability, known = 1.0, dict[int, float]()  # rates of classes
        while len(tokens) < limit:
            share, token = -1.0, -1
            for one, key in self.candidates(context):
                rate = known.get(key)
                if rate is None:
                    rate = known[key] = self.rates.rate(key)
                if rate > share or (rate == share and one > token):
                    share, token = rate, one
            probability *= share
            if token < 0 or probability < least:
                break
            tokens.append(token)
            reached.append(probability)
            context = self.behind(context, token)
        return tokens, reached

    def tree(self, context: Context, limit: int, least: float = 0.0) -> tuple[list[int], list[int], list[float]]:
        """The nodes that are most likely to be accepted, best first: the tree of its size that emits most tokens.

        Args:
            context: where to begin.
            limit: most nodes.
            least: no node that is accepted with a smaller probability.

        Returns:
            Tokens, the node number of each one's parent (0 is the root), parents first, and the probability that each
            is accepted. Siblings are in falling order of it.
        """
        tokens: list[int] = []
        parents: list[int] = []
        reached: list[float] = []
        waiting: list[tuple[float, int, int, int, Context]] = []  # minus the probability, order of arrival, …
        arrivals, known = 0, dict[int, float]()  # rates of classes

        def wait_for(parent: int, context: Context, probability: float) -> None:
            nonlocal arrivals
            for token, key in self.candidates(context):
                arrivals += 1
                rate = known.get(key)
                if rate is None:
                    rate = known[key] = self.rates.rate(key)
                share = probability * rate
                if share >= least:
                    heappush(waiting, (-share, arrivals, parent, token, context))

        wait_for(0, context, 1.0)
        while waiting and len(tokens) < limit:
            negative, _, parent, token, before = heappop(waiting)
            tokens.append(token)
            parents.append(parent)
            reached.append(-negative)
            if len(tokens) < limit:
                wait_for(len(tokens), self.behind(before, token), -negative)
        return tokens, parents, reached
