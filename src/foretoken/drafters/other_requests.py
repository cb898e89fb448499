"""Tokens of all requests of an engine, within a limit, for drafters that copy from one request to another."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.drafters.automaton import ROOT, SuffixAutomaton


@dataclass
class SharedPosition:
    """A sequence's position in the two automata that requests share.

    Attributes:
        generation: number of the younger automaton at the last token.
        young: state of the sequence's tokens that are in the younger one.
        old, match: state and length of the longest suffix that is in the older one.
    """

    generation: int = 0
    young: int = ROOT
    old: int = ROOT
    match: int = 0


class OtherRequests:
    """The tokens of all requests, in two automata: one grows, the other is full and is dropped when the first is full.

    Args:
        limit: most tokens in both.
    """

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._generation = 0
        self._young, self._old = SuffixAutomaton(), SuffixAutomaton()

    def __len__(self) -> int:
        """Tokens that are kept."""
        return self._young.size + self._old.size

    def clear(self) -> None:
        """Drop all tokens. Running sequences start with no match in the tokens that follow."""
        self._young, self._old = SuffixAutomaton(), SuffixAutomaton()
        self._generation += 2  # older positions are in neither automaton

    def append(self, position: SharedPosition, token: int) -> None:
        """Add the next token of a sequence; an interruption (Ctrl-C) drops all tokens."""
        try:
            self._refresh(position)
            if self._young.size >= self._half:
                self._young, self._old = SuffixAutomaton(), self._young
                self._generation += 1
                self._refresh(position)
            position.young = self._young.append(position.young, token)
            position.old, position.match = self._old.follow(position.old, position.match, token)
        except BaseException:  # an automaton that is half changed would fail all later requests
            self.clear()
            raise

    def contexts(self, position: SharedPosition) -> list[tuple[SuffixAutomaton, int, int]]:
        """The contexts that a sequence ends with: automaton, state and length."""
        self._refresh(position)
        young, length = self._young.context(position.young)
        old, longest = self._old.context(position.old)
        return [(self._young, young, length), (self._old, old, min(longest, position.match))]

    def _refresh(self, position: SharedPosition) -> None:
        """Bring a position up to date after automata were exchanged."""
        if position.generation == self._generation:
            return
        # What was the younger automaton is the older one now, which no longer changes.
        position.old = position.young if position.generation + 1 == self._generation else ROOT
        position.old, position.match = self._old.context(position.old)
        position.young, position.generation = ROOT, self._generation
