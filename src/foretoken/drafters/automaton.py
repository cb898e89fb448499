"""Suffix automaton: all substrings of growing token sequences, how often each occurred, and what followed it."""

from __future__ import annotations

from array import array
from heapq import heappop, heappush

ROOT = 0

_COUNTED = 32  # contexts after which a token is counted, the longest first: bounds the time in periodic texts
_MANY = 16  # continuations of a context from which on only the most probable one is looked at


class SuffixAutomaton:
    """The suffix automaton of one token sequence, or of several that grow in turns (Blumer et al. 1985), with counts.

    A state stands for substrings that end at the same positions; `link` leads to the longest of their suffixes that
    ends at more positions. Every state knows how often its strings occurred, and its favourite: the token that followed
    them most often, of equally many the latest. Both are exact where a sequence's end has at most 32 states above it,
    as in all but highly periodic sequences; there short contexts are undercounted.

    A token takes constant time on average, a drafted one too. States are rows of 32-bit arrays, and most have a single
    continuation, which stands there with them: 100 to 200 bytes a token.
    """

    def __init__(self) -> None:
        self.size = 0
        """Tokens entered."""
        self._links = array("i", [-1])
        self._lengths = array("i", [0])
        self._counts = array("i", [0])
        self._favourites = array("i", [-1])
        self._targets = array("i", [-1])  # the state that the favourite leads to
        self._branches: dict[int, dict[int, int]] = {}  # by state, where it goes with each token, if with several

    def __len__(self) -> int:
        return len(self._links)

    def append(self, end: int, token: int) -> int:
        """Enter one more token of a sequence.

        Args:
            end: what this call returned for the sequence's token before; `ROOT` begins a sequence.
            token: 0 or more.
        """
        links, lengths = self._links, self._lengths
        self.size += 1
        known = self.step(end, token)
        if known >= 0:
            new = known if lengths[known] == lengths[end] + 1 else self._split(end, token, known)
        else:
            new = self._add(lengths[end] + 1)
            state, favourites, targets = end, self._favourites, self._targets
            while state >= 0 and (known := self.step(state, token)) < 0:
                if favourites[state] < 0:
                    favourites[state], targets[state] = token, new
                else:
                    branches = self._branches.get(state)
                    if branches is None:
                        branches = self._branches[state] = {favourites[state]: targets[state]}
                    branches[token] = new
                state = links[state]
            if state < 0:
                links[new] = ROOT
            else:
                links[new] = known if lengths[known] == lengths[state] + 1 else self._split(state, token, known)
        self._count(end, token)
        return new

    def step(self, state: int, token: int) -> int:
        """The state of the same strings with a token behind them, -1 if none of them was followed by it."""
        if self._favourites[state] == token:
            return self._targets[state]
        branches = self._branches.get(state)
        return -1 if branches is None else branches.get(token, -1)

    def follow(self, state: int, match: int, token: int) -> tuple[int, int]:
        """State and length of the longest known suffix of a sequence, `token` included.

        Args:
            state: what this call returned for the sequence's token before, `ROOT` at first.
            match: likewise, 0 at first.
            token: the next one.
        """
        following = self.step(state, token)
        while following < 0 and state != ROOT:
            state = self._links[state]
            match = self._lengths[state]
            following = self.step(state, token)
        return (ROOT, 0) if following < 0 else (following, match + 1)

    def context(self, state: int) -> tuple[int, int]:
        """The longest suffix of a state's strings that something followed: its state and its length."""
        while state != ROOT and self._favourites[state] < 0:
            state = self._links[state]
        return state, self._lengths[state]

    def count(self, state: int) -> int:
        """How often the strings of the state occurred."""
        return self._counts[state]

    def continuations(self, state: int) -> list[tuple[int, int]]:
        """What followed a state's strings: tokens and their states, the favourite alone where they are many."""
        favourite = self._favourites[state]
        if favourite < 0:
            return []
        branches = self._branches.get(state)
        if branches is None or len(branches) > _MANY:
            return [(favourite, self._targets[state])]
        counts = self._counts
        ordered = sorted(branches.items(), key=lambda branch: -counts[branch[1]])
        if ordered[0][0] != favourite:  # of several with the highest count, it is the latest
            best = (favourite, self._targets[state])
            ordered.remove(best)
            ordered.insert(0, best)
        return ordered

    def chain(self, state: int, limit: int) -> list[int]:
        """The favourite after a context, the favourite after that, and so on, shorter contexts at the end."""
        favourites, targets = self._favourites, self._targets
        tokens: list[int] = []
        while len(tokens) < limit:
            if favourites[state] < 0:
                state = self.context(state)[0]
            if state == ROOT:
                break
            tokens.append(favourites[state])
            state = targets[state]
        return tokens

    def tree(self, state: int, match: int, limit: int) -> tuple[list[int], list[int]]:
        """The continuations that are most probable by their counts, as a tree of at most `limit` nodes.

        A context of m tokens is taken to be right about the next one with probability ``m / (m + 1)``, split among its
        continuations by their counts; what is left goes to the next shorter context, below the root alone. The node
        that is most probable by the product along its path comes next.

        Args:
            state: the context.
            match: its length; after none there is no tree.
            limit: nodes.

        Returns:
            Tokens, and the node number of each one's parent, parents first.
        """
        tokens: list[int] = []
        parents: list[int] = []
        # Minus the probability; the order of arrival; parent, token and state, or parent 0, token -1 and a context.
        heap: list[tuple[float, int, int, int, int, int]] = [(-1.0, 0, 0, -1, state, match)] if match else []
        first: set[int] = set()  # tokens below the root
        arrivals = 1
        while heap and len(tokens) < limit:
            negative, _, parent, token, state, match = heappop(heap)
            if token < 0:
                below = self._links[state]
                if below > ROOT:
                    arrivals += 1
                    heappush(heap, (negative / (match + 1), arrivals, 0, -1, below, self._lengths[below]))
            else:
                if parent == 0:
                    if token in first:
                        continue
                    first.add(token)
                # A single continuation is followed at once while nothing else is more probable.
                while True:
                    tokens.append(token)
                    parents.append(parent)
                    parent = len(tokens)
                    if self._favourites[state] < 0:
                        state, length = self.context(state)
                        match = min(match, length)
                    token = self._favourites[state]
                    following = negative * match / (match + 1)
                    if state == ROOT or state in self._branches or (heap and heap[0][0] < following):
                        break
                    if parent == limit:
                        return tokens, parents
                    negative, state, match = following, self._targets[state], match + 1
                if state == ROOT:
                    continue
            share = negative * match / (match + 1)
            choices = self.continuations(state)
            if len(choices) == 1 and state in self._branches:
                total = self._counts[state]  # of many continuations, the favourite alone
            else:
                total = sum(self._counts[target] for _, target in choices)
            for token, target in choices[: limit - len(tokens)]:
                arrivals += 1
                probability = share * self._counts[target] / total
                heappush(heap, (probability, arrivals, parent, token, target, match + 1))
        return tokens, parents

    def _add(self, length: int) -> int:
        self._links.append(ROOT)
        self._lengths.append(length)
        self._counts.append(0)
        self._favourites.append(-1)
        self._targets.append(-1)
        return len(self._links) - 1

    def _split(self, state: int, token: int, whole: int) -> int:
        """Split off those of a state's strings that are a sequence's suffix now, and redirect the edges to them."""
        links = self._links
        part = self._add(self._lengths[state] + 1)
        links[part], links[whole] = links[whole], part
        self._counts[part] = self._counts[whole]
        self._favourites[part], self._targets[part] = self._favourites[whole], self._targets[whole]
        if whole in self._branches:
            self._branches[part] = self._branches[whole].copy()
        while state >= 0 and self.step(state, token) == whole:
            if self._favourites[state] == token:
                self._targets[state] = part
            if state in self._branches:
                self._branches[state][token] = part
            state = links[state]
        return part

    def _count(self, end: int, token: int) -> None:
        """Count a token after every context that it follows here: the sequence before it, and its suffixes."""
        counts, favourites, targets, branches = self._counts, self._favourites, self._targets, self._branches
        links, last = self._links, -1
        for _ in range(_COUNTED):
            # As `step`, without a call: most of a token's time is spent here.
            favourite = targets[end]
            target = favourite if favourites[end] == token else branches[end][token]
            if target != last:
                counts[target] += 1
                last = target
            if favourite != target and counts[target] >= counts[favourite]:
                favourites[end], targets[end] = token, target
            end = links[end]
            if end < 0:
                break
