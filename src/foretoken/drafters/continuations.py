"""What may follow in a sequence, and how likely: copies of earlier tokens, and the target's own runners-up.

`Continuations` is the state that `Lookup` keeps of one sequence. After any context it names candidate tokens from two
sources:

- *copies*: what followed the longest suffix of the context that occurred before, by a suffix automaton. While a draft
  grows, the context grows with it, so that a copy may overlap its source, as in LZ77: output of period p is drafted on
  and on, not just to the end of the last period.
- *successors*: the target's most probable tokens the last time that it scored the same token (token recycling).

A candidate belongs to a class: its source, the length of the match, its rank, and whether the other source agrees. How
often candidates of a class are accepted is measured (`AcceptanceRates`), which makes a draft's expected length known
before it is verified.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import inf, nextafter

from foretoken.drafters.acceptance_rates import (
    BUCKETS,
    COPY_CLASSES,
    LONGEST,
    SUCCESSOR_CLASSES,
    SUCCESSORS,
    AcceptanceRates,
    Candidate,
)
from foretoken.drafters.automaton import ROOT, SuffixAutomaton
from foretoken.drafters.other_requests import OtherRequests, SharedPosition


def ends_as_before(tokens: Sequence[int], count: int) -> bool:
    """Whether the last `count` tokens stand next to each other somewhere before, overlaps included."""
    if not count or count >= len(tokens):
        return not count
    end, at, last = tokens[-1], count - 1, tokens[len(tokens) - count :]
    with suppress(ValueError):
        while (at := tokens.index(end, at, len(tokens) - 1)) >= 0:
            if tokens[at + 1 - count : at + 1] == last:
                return True
            at += 1
    return False


Context = tuple[SuffixAutomaton, int, int, int]
"""A position in the sequence, or after some draft tokens: the automaton that copies come from; its state of the longest
suffix that something followed; the length of that in tokens, 0 if there is none; the last token."""


class Continuations:
    """The tokens of one sequence as a source of drafts for itself.

    Takes some 100 to 200 bytes a token for copies, and 100 for each different token for successors.

    Args:
        rates: acceptance rates that are used and kept up to date.
        others: tokens of other requests, where longer matches are looked for; these tokens are added to them.
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
        """Append tokens by which no candidates are judged, such as a prompt: only what followed what is learnt."""
        for token in tokens:
            if self._last >= 0:
                known = [token, *(one for one in self._successors.get(self._last, ()) if one != token)]
                self._successors[self._last] = known[:SUCCESSORS]
            self._append(token)

    def extend(self, tokens: Iterable[int]) -> list[bool]:
        """Append tokens that were emitted: candidates that had been there for each are judged by it.

        Returns:
            Of each, whether it was the likeliest candidate.
        """
        foreseen = []
        for token in tokens:
            foreseen.append(self.rates.judge(self.candidates(self.here()), token) == token)
            self._append(token)
        return foreseen

    def scored(self, token: int, likeliest: Sequence[int]) -> None:
        """The target scored a token: `likeliest` are its `SUCCESSORS` most probable next ones, in order."""
        self._successors[token] = likeliest

    def scored_in_order(self, tokens: Iterable[int], likeliest: Iterable[Sequence[int]]) -> None:
        """`scored` for one token after another, up to the end of the shorter argument."""
        self._successors.update(zip(tokens, likeliest, strict=False))

    def here(self) -> Context:
        """Behind the last token: the longest match, of equal ones the sequence's own."""
        automaton = self.automaton
        state, match = automaton.context(self.end)
        if self._others is not None:
            for other, context, length in self._others.contexts(self._shared):
                if length > match:
                    automaton, state, match = other, context, length
        return automaton, state, match, self._last

    def candidates(self, context: Context) -> list[Candidate]:
        """What may come next, every token once; the copies first."""
        automaton, state, match, last = context
        successors = self._successors.get(last, ())
        bucket = BUCKETS[match] if match < len(BUCKETS) else LONGEST
        fresh = zip(successors, SUCCESSOR_CLASSES[bucket], strict=False)
        if not bucket:
            return list(fresh)
        found = [(token, key) for key, token, _ in _copies(automaton, state, bucket, successors)]
        copied = [token for token, _ in found]
        found += [each for each in fresh if each[0] not in copied]
        return found

    def _append(self, token: int) -> None:
        self.end = self.automaton.append(self.end, token)
        if self._others is not None:
            self._others.append(self._shared, token)
        self._last = token

    def _shares(self, context: Context, probability: float, above: float) -> list[_Share]:
        """The candidates that are accepted, with all before them, with a probability above a bar.

        Args:
            context: where they may come.
            probability: of its being accepted.
            above: the bar.
        """
        automaton, state, match, last = context
        successors = self._successors.get(last)
        bucket = BUCKETS[match] if match < len(BUCKETS) else LONGEST
        found: list[_Share] = []
        copied: list[int] = []
        if bucket:
            known = self.rates.known(bucket)
            for key, token, target in _copies(automaton, state, bucket, successors or ()):
                rate = known[key]
                if rate < 0.0:
                    rate = known[key] = self.rates.rate(key)
                copied.append(token)
                if (share := probability * rate) > above:
                    found.append((share, token, target))
        if successors:
            for token, rate in zip(successors, self.rates.of_successors(bucket), strict=False):
                if (share := probability * rate) > above and token not in copied:
                    found.append((share, token, -1))
        return found

    def chain(self, context: Context, limit: int, least: float = 0.0) -> tuple[list[int], list[float]]:
        """The most probable candidate, the most probable one behind it, and so on.

        Args:
            context: where to begin.
            limit: most tokens.
            least: the chain ends before a token that is accepted, with all before it, with a smaller probability.

        Returns:
            Tokens, and of each the probability that it and all before it are accepted.
        """
        tokens: list[int] = []
        reached: list[float] = []
        automaton, state, match, last = context
        probability = 1.0
        while len(tokens) < limit:
            shares = self._shares((automaton, state, match, last), 1.0, -1.0)
            if not shares:
                break
            share, last, target = max(shares)
            probability *= share
            if probability < least:
                break
            tokens.append(last)
            reached.append(probability)
            state, match = automaton.behind(state, match, last, target)
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
        automaton, state, match, last = context
        # Minus the probability, order of arrival, parent, token, its state if known, and the parent's state and match.
        waiting: list[tuple[float, int, int, int, int, int, int]] = []
        probability, arrivals = 1.0, 0
        above = nextafter(least, -inf)
        while (room := limit - len(tokens)) > 0:
            # No more wait than there is room for: most candidates cost a comparison, not a place in a queue.
            for share, token, target in self._shares((automaton, state, match, last), probability, above):
                if share > above:
                    arrivals += 1
                    insort(waiting, (-share, arrivals, len(tokens), token, target, state, match))
                    if len(waiting) >= room:
                        del waiting[room:]
                        above = max(above, -waiting[-1][0])  # of equal ones, the first to arrive
            if not waiting:
                break
            negative, _, parent, last, target, state, match = waiting.pop(0)
            probability = -negative
            tokens.append(last)
            parents.append(parent)
            reached.append(probability)
            if len(tokens) < limit:
                state, match = automaton.behind(state, match, last, target)
        return tokens, parents, reached


_Share = tuple[float, int, int]
"""A candidate: the probability that it is accepted, its token, and its state in the automaton, -1 if not known."""


def _copies(
    automaton: SuffixAutomaton, state: int, bucket: int, successors: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Of what may be copied behind a context: class, token, and its state. All that match something have some."""
    copies = automaton.continuations(state)
    first = successors[0] if successors else -1
    second = successors[1] if len(successors) > 1 else -1
    if len(copies) == 1:  # most have one
        token, target = copies[0]
        return [(COPY_CLASSES[bucket][0][0][0 if token == first else 1 if token == second else 2], token, target)]
    return [
        (classes[0 if token == first else 1 if token == second else 2], token, target)
        for classes, (token, target) in zip(COPY_CLASSES[bucket][1], copies, strict=False)
    ]
