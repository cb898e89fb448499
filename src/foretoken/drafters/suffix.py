"""Suffix decoding: draft what most often followed the longest suffix that occurred before."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence

from foretoken.draft import Draft
from foretoken.drafters.automaton import ROOT, SuffixAutomaton
from foretoken.drafters.base import Batch
from foretoken.drafters.other_requests import OtherRequests, SharedPosition
from foretoken.drafters.per_sequence import PerSequence
from foretoken.drafters.row_rounds import RowCopies, RowRounds, leaves_as_is
from foretoken.drafters.sharing import Participants, SharingDrafter
from foretoken.sampling.params import check_integer, check_number
from foretoken.sequence import Sequence


class Suffix(SharingDrafter):
    """Drafts what most often followed the longest suffix of the sequence that occurred before.

    A suffix automaton of each request's prompt and output (SAM decoding, arXiv 2411.10666) finds that suffix and counts
    what followed it, in constant time a token at any length. Where trees are taken, the draft is the tree
    of the most probable continuations by those counts (SuffixDecoding, arXiv 2411.04975), else the most probable one.
    It has at most `growth` times as many tokens as the suffix: a longer match is right for longer. The tokens are
    chosen, not drawn. An encoder-decoder model's source counts as the beginning of the sequence.

    Takes some 100 to 200 bytes a token.

    Args:
        global_tokens: also look in other requests, finished and running ones, up to this many tokens of them, the
            oldest dropped first, half of them at a time. 0 keeps requests apart. Otherwise a request's drafts, and with
            a rejection verifier its samples, depend on the requests before it and beside it (their distribution does
            not). Requests with one seed have the same uniforms: of these only the first takes part, see
            `foretoken.drafters.sharing`.
        growth: tokens drafted at most for each token of the suffix.
    """

    name = "suffix"
    trees = True
    own_threads = True

    def __init__(self, global_tokens: int = 0, *, growth: float = 6.0) -> None:
        self.global_tokens = check_integer("global_tokens", global_tokens, 0, cure="use 0 to keep requests apart")
        self.keeps = self.global_tokens > 0
        self.growth = check_number("growth", growth, 0.0, above=True, cure="use 6, or 1 for shorter drafts")
        self.matches: PerSequence[int] = PerSequence(int)
        """See `Drafter.matches`."""
        self._histories = PerSequence(_History)
        self._others = OtherRequests(self.global_tokens)
        self._participants = Participants()

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """The most probable continuation, or a tree of them; nothing where no suffix occurred before."""
        drafts = [self._draft(batch, row, limit) for row, limit in enumerate(limits)]
        return Draft.from_lists([tokens for tokens, _ in drafts], batch.device, [links for _, links in drafts])

    def in_row(self, batch: Batch, limit: int) -> RowRounds | None:
        """Chains; None where drafts branch."""
        if not leaves_as_is(self, Suffix) or batch.takes_chosen_trees(0):
            return None
        return RowCopies(limit, lambda most: self._draft(batch, 0, most)[0])

    def _draft(self, batch: Batch, row: int, limit: int) -> tuple[list[int], list[int]]:
        """The tokens of a row's draft, and their parents."""
        sequence = batch.sequences[row]
        history = self._histories[sequence]
        new = history.update(sequence)
        state, match = history.automaton.context(history.end)
        automaton = history.automaton
        if self.global_tokens and self._participants.takes_part(batch, row):
            for token in new:
                self._others.append(history.shared, token)
            for other, context, length in self._others.contexts(history.shared):
                if length > match:
                    automaton, state, match = other, context, length
        self.matches[sequence] = match
        limit = min(limit, max(1, int(self.growth * match))) if match else 0
        if batch.takes_chosen_trees(row):
            tokens, links = automaton.tree(state, match, limit)
        else:
            tokens = automaton.chain(state, limit)
            links = list(range(len(tokens)))
        usable = next((n for n, token in enumerate(tokens) if token >= batch.vocab_size), len(tokens))
        return tokens[:usable], links[:usable]

    def forget(self) -> None:
        """See `SharingDrafter`."""
        self._others.clear()
        self._participants = Participants()


class _History:
    """One request's tokens.

    Attributes:
        automaton: of these tokens alone.
        end: the state of the whole sequence in it.
        shared: its position in the automata that requests share.
    """

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self.end = ROOT
        self.shared = SharedPosition()

    def update(self, sequence: Sequence) -> list[int]:
        """Enter the new tokens of the sequence, and return them."""
        known = self.automaton.size
        new = sequence.context if not known else sequence.tokens[known - len(sequence.source or ()) :]
        for token in new:
            self.end = self.automaton.append(self.end, token)
        return new
