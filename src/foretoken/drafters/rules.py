"""Rules for when a model is asked beside lookups, tried on the text that is there already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as AbstractSequence
from math import inf
from typing import NamedTuple

from foretoken.drafters.base import Seen

_WINDOW = 96  # tokens of a text that rules are tried on
_LEAST = (1, 2, 3, 5, 99)  # lengths of matches; none is as long as the last
_FIRST = 2  # the one of them to begin with
_KEPT = 32.0  # tokens that what other texts taught counts for
_FADING = 1.0 / 24.0  # what a text's trial changes of that


class Rule(NamedTuple):
    """What a text is continued with.

    Attributes:
        least: tokens of the shortest match that is copied from without asking the model.
        asked: tokens that the model is asked for elsewhere; 0 for no model at all.
    """

    least: int
    asked: int


class Times(NamedTuple):
    """What rounds take, in any unit, and what they bring.

    Attributes:
        copying: with a lookup's draft.
        plain: without a draft.
        asking: with so many tokens of the model.
        right: of so many tokens of the model, those that are right.
        most: tokens of a lookup's draft at most.
    """

    copying: float
    plain: float
    asking: Mapping[int, float]
    right: Mapping[int, float]
    most: int


Paces = dict[Rule, float]
"""Time a token, by rule."""


class Trial:
    """A text's tokens of late, for rules to be tried on, and what came of it.

    A rule is tried by going through these tokens as it would have: over a copy, as far as the lookups knew it, and the
    token after it, or over as many tokens as the model is expected to get right there, and one more. So what a rule
    takes for a token is known without following it.

    Attributes:
        found: what rules take for a token of this text; nothing before there were tokens.
        pace: what the chosen rule is taken to need for a token; None where nobody knows.
    """

    def __init__(self) -> None:
        self._seen: list[Seen] = []
        self._paces: Paces = {}
        self.found: Paces = {}
        self.pace: float | None = None

    def read(self, new: AbstractSequence[Seen]) -> None:
        """The tokens that came."""
        self._seen.extend(new)
        del self._seen[:-_WINDOW]

    def choose(self, times: Times, others: Paces) -> Rule:
        """The rule that takes least for a token; where nothing is known, one that is seldom far off.

        Args:
            times: of the text's rounds.
            others: what rules took in other texts.
        """
        rules = [Rule(1, 0), *(Rule(least, count) for count in times.asking for least in _LEAST)]
        size = float(len(self._seen))
        self.found = dict(self._tried(rules, times)) if self._seen else {}
        known = self.found or {rule: others[rule] for rule in rules if rule in others}
        self._paces = {
            rule: (size * pace + _KEPT * others.get(rule, pace)) / (size + _KEPT) for rule, pace in known.items()
        }
        if not self._paces:
            best = min(times.asking, key=lambda count: times.asking[count] / (1.0 + times.right[count]))
            return Rule(_FIRST, best)
        rule = min(self._paces, key=self._paces.__getitem__)
        self.pace = self._paces[rule]
        return rule

    def saved(self, rule: Rule) -> float:
        """What a rule takes less for a token than going without the model; infinite where nobody knows."""
        alone = self._paces.get(Rule(1, 0))
        return inf if alone is None else alone - self._paces[rule]

    def _tried(self, rules: AbstractSequence[Rule], times: Times) -> Iterator[tuple[Rule, float]]:
        seen, size = self._seen, len(self._seen)
        runs, run = [0] * size, 0
        for place in range(size - 1, -1, -1):
            runs[place] = min(run + 1, times.most) if seen[place].right else 0
            run = runs[place] if seen[place].follows else 0
        matches = [one.match for one in seen]
        for rule in rules:
            step, other = (
                (1.0 + times.right[rule.asked], times.asking[rule.asked]) if rule.asked else (1.0, times.plain)
            )
            at = time = 0.0
            while at < size:
                place = int(at)
                if matches[place] >= rule.least:
                    at += runs[place] + 1
                    time += times.copying
                else:
                    at += step
                    time += other
            yield rule, time / at


def learn(paces: Paces, found: Paces) -> None:
    """Let what a text taught change what is known of others."""
    for rule, pace in found.items():
        paces[rule] = paces.get(rule, pace) * (1.0 - _FADING) + pace * _FADING
