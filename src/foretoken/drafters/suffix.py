"""Suffix decoding: go on as the text, or others before it, went on after the longest suffix that occurred before."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

from foretoken.draft import Draft
from foretoken.drafters.automaton import ROOT, SuffixAutomaton
from foretoken.drafters.base import Batch, Drafter, Seen
from foretoken.drafters.per_sequence import PerSequence
from foretoken.drafters.sharing import Participants
from foretoken.sampling.params import check_integer, check_number
from foretoken.sequence import Sequence


class Suffix(Drafter):
    """Drafts what most often followed the longest suffix of the text that occurred before.

    A suffix automaton of each request's prompt and output (SAM decoding, arXiv 2411.10666) finds that suffix and counts
    what followed it, in constant time a token whatever the text's length. Where trees are taken, the draft is the tree
    of the likeliest continuations by those counts (SuffixDecoding, arXiv 2411.04975), else the likeliest one. It has at
    most `growth` times as many tokens as the suffix: a longer match is right for longer. The tokens are chosen, not
    drawn. An encoder-decoder model's source counts as the beginning of the text.

    Takes some 100 to 200 bytes a token of text.

    Args:
        global_tokens: also look in other requests' texts, finished and running ones, up to so many tokens of them, the
            oldest forgotten first, half of it at a time. 0 keeps requests apart. Which tokens a request drafts, and
            with a rejection verifier which tokens it samples, then depends on the requests before it and beside it
            (their law does not). Requests that share a seed share their coins, so that what one said would tell
            another's drafts of them: where coins decide, only the first request of each seed takes part.
        growth: tokens drafted at most for each token of the suffix.
    """

    name = "suffix"
    trees = True
    own_threads = True

    def __init__(self, global_tokens: int = 0, *, growth: float = 6.0) -> None:
        self.global_tokens = check_integer("global_tokens", global_tokens, 0, cure="use 0 to keep requests apart")
        self.growth = check_number("growth", growth, 0.0, above=True, cure="use 6, or 1 for shorter drafts")
        self.matches: PerSequence[int] = PerSequence(int)
        """Of each sequence: tokens of the suffix that its last proposal continued, 0 where there was none."""
        self.foreseen: PerSequence[list[Seen]] = PerSequence(list)
        """Of each sequence, its latest tokens, as chains made just before them would have foreseen them; by its own
        text, whatever others said."""
        self._histories = PerSequence(_History)
        self._others = _OtherRequests(global_tokens)
        self._participants = Participants()

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """The likeliest continuation, or a tree of them; nothing where no suffix of the text occurred before."""
        rows, parents = [], []
        for row, (sequence, limit) in enumerate(zip(batch.sequences, limits, strict=True)):
            history = self._histories[sequence]
            new = history.update(sequence)
            self.foreseen[sequence] = history.foreseen
            state, match = history.automaton.context(history.end)
            automaton = history.automaton
            if self.global_tokens and self._participants.takes_part(sequence, batch.shared_noise[row]):
                for other, place, length in self._others.update(history, new):
                    if length > match:
                        automaton, state, match = other, place, length
            self.matches[sequence] = match
            limit = min(limit, max(1, int(self.growth * match))) if match else 0
            if batch.takes_chosen_trees(row):
                tokens, links = automaton.tree(state, match, limit)
            else:
                tokens = automaton.chain(state, limit)
                links = list(range(len(tokens)))
            usable = next((n for n, token in enumerate(tokens) if token >= batch.vocab_size), len(tokens))
            rows.append(tokens[:usable])
            parents.append(links[:usable])
        return Draft.from_lists(rows, batch.device, parents)


class _History:
    """One request's text, and where it stands.

    Attributes:
        automaton: of this text alone.
        end: where the text ends in it.
        foreseen: of the tokens that were read last, as in `Suffix.foreseen`; none of a prompt's.
        next: what a chain that was right so far would have gone on with.
        place: where it stands in what is shared.
    """

    def __init__(self) -> None:
        self.foreseen: list[Seen] = []
        self.next = [-1]
        self.automaton = SuffixAutomaton()
        self.end = ROOT
        self.place = _SharedPosition()

    def update(self, sequence: Sequence) -> list[int]:
        """Catch up with the text; the tokens that were new."""
        known = self.automaton.size
        new = sequence.context if not known else sequence.tokens[known - len(sequence.source or ()) :]
        self.foreseen = []
        for token in new:
            if known:
                state, match = self.automaton.context(self.end)
                chain = self.automaton.chain(state, 2)
                right = chain[:1] == [token]
                # Chains that agree about the next token are taken to agree.
                self.foreseen.append(Seen(match, right, chain[:1] == self.next))
                self.next = chain[1:] if right else [-1]
            self.end = self.automaton.append(self.end, token)
        return new


@dataclass
class _SharedPosition:
    """Where a text stands in the two shared automata.

    Attributes:
        generation: number of the younger one at that time.
        young: the end of what the text has contributed to it.
        old, match: the longest suffix that is in the older one, and its length.
    """

    generation: int = 0
    young: int = ROOT
    old: int = ROOT
    match: int = 0


class _OtherRequests:
    """The texts of all requests, in two automata: one that grows, and one that is full and goes when the other is.

    Args:
        limit: most tokens in both.
    """

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._generation = 0
        self._young, self._old = SuffixAutomaton(), SuffixAutomaton()

    def update(self, history: _History, new: list[int]) -> list[tuple[SuffixAutomaton, int, int]]:
        """Add tokens of a text; the contexts that it now ends with, each with its automaton and its length."""
        place = history.place
        self._settle(place)
        for token in new:
            if self._young.size >= self._half:
                self._young, self._old = SuffixAutomaton(), self._young
                self._generation += 1
                self._settle(place)
            place.young = self._young.append(place.young, token)
            place.old, place.match = self._old.follow(place.old, place.match, token)
        young, length = self._young.context(place.young)
        old, longest = self._old.context(place.old)
        return [(self._young, young, length), (self._old, old, min(longest, place.match))]

    def _settle(self, place: _SharedPosition) -> None:
        """Where a text stands now that automata may have changed since it was read last."""
        if place.generation == self._generation:
            return
        # What it contributed to the younger one is in the older one now, which changes no more.
        place.old = place.young if place.generation + 1 == self._generation else ROOT
        place.old, place.match = self._old.context(place.old)
        place.young, place.generation = ROOT, self._generation
