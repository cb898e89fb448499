"""Tokens that grammars force: a draft that needs no drafter, put before the drafter's own tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.engine.membership import Membership
from foretoken.models.widths import MOST_ALIKE
from foretoken.verify import Verdict


@dataclass(frozen=True)
class Forced:
    """The tokens of a round that are the only ones their rows' grammars allow, one after another.

    They are verified as all drafts are, with a one-hot q, and the masked p accepts them. A drafter that knows nothing
    but tokens drafts what follows them: for it they are part of the sequence already (`ahead`). One that needs the
    target's hidden states or KV cache of every token can't; it drafts nothing in such rows.

    Attributes:
        members: the rows of the round.
        tokens: of each row; empty where nothing is forced.
        followed: the drafter drafts what follows them.
        most: tokens of a row where some are forced, those and the drafter's.
    """

    members: Membership
    tokens: tuple[list[int], ...]
    followed: bool
    most: int

    @classmethod
    def of(cls, members: Membership, followed: bool, limits: Sequence[int], *, alike: bool) -> Forced:
        """Up to `limits` tokens of each row; none in rows that decode plainly.

        Args:
            members: the rows of the round.
            followed: see the class.
            limits: of each row.
            alike: the target rounds alike (`LanguageModel.rounds_alike`).
        """
        most = MOST_ALIKE - 1 if alike else sys.maxsize  # one is the root
        tokens: list[list[int]] = []
        for row, length, limit in zip(members.rows, members.fixed_lengths, limits, strict=True):
            speculates = row.matcher is not None and length != 0 and limit > 0
            limit = min(limit, row.max_accepted, most)
            tokens.append(row.matcher.forced(limit) if row.matcher and speculates else [])
        return cls(members, tuple(tokens), followed, most)

    def __bool__(self) -> bool:
        return any(self.tokens)

    def ahead(self) -> AbstractContextManager[None]:
        """The sequences as the drafter sees them: with the forced tokens, if it follows them."""
        return self._extended() if self and self.followed else nullcontext()

    @contextmanager
    def _extended(self) -> Iterator[None]:
        pairs = list(zip(self.members.sequences, self.tokens, strict=True))
        for sequence, tokens in pairs:
            sequence.tokens.extend(tokens)
        try:
            yield
        finally:
            for sequence, tokens in pairs:
                if tokens:
                    del sequence.tokens[-len(tokens) :]

    def limits(self, limits: list[int]) -> list[int]:
        """How many tokens the drafter may draft in each row."""
        if not self:
            return limits
        if self.followed:
            both = zip(limits, self.tokens, strict=True)
            return [min(limit, self.most - len(tokens)) if tokens else limit for limit, tokens in both]
        return [0 if tokens else limit for limit, tokens in zip(limits, self.tokens, strict=True)]

    def before(self, draft: Draft) -> Draft:
        """The round's draft: the forced tokens, and below the last of them the drafter's."""
        if not self:
            return draft
        rows, links = [], []
        for own, parents, count, forced in zip(*draft.listed, self.tokens, strict=True):
            rows.append(forced + own[:count])
            links.append([*range(len(forced)), *(parent + len(forced) for parent in parents[:count])])
        joined = Draft.from_lists(rows, draft.tokens.device, links)
        joined = replace(joined, predicted=draft.predicted)
        if draft.probs is None:
            return joined
        return replace(joined, probs=self._probs(draft, joined.width), replacement=draft.replacement)

    def _probs(self, draft: Draft, width: int) -> Tensor:
        """``[B, M, V]``: q of the drafter's tokens, moved down; one-hot at the forced ones."""
        assert draft.probs is not None
        size = max(draft.probs.shape[-1], *(token + 1 for tokens in self.tokens for token in tokens))
        nodes = draft.probs.shape[1]
        longest = max(map(len, self.tokens))
        probs = draft.probs.new_zeros((len(self.tokens), max(longest + nodes, width), size))
        for row, tokens in enumerate(self.tokens):
            probs[row, torch.arange(len(tokens)), tokens] = 1.0
            probs[row, len(tokens) : len(tokens) + nodes, : draft.probs.shape[-1]] = draft.probs[row]
        return probs

    def verdict(self, verdict: Verdict) -> Verdict:
        """The verdict on the drafter's own draft."""
        if not self:
            return verdict
        paths, following = [], []
        for path, token, forced in zip(verdict.accepted, verdict.following, self.tokens, strict=True):
            own = path if not forced else [node - len(forced) for node in path[len(forced) :]]
            if forced and not self.followed:  # it drafted nothing, and the first forced token followed
                own, token = [], forced[0]
            paths.append(own)
            following.append(token)
        return Verdict.from_lists(paths, following, verdict.tokens.device)

    def logits(self, logits: Tensor, width: int) -> Tensor:
        """The logits ``[B, N+1, V]`` at the nodes of the drafter's own draft of `width` tokens."""
        if not self:
            return logits
        first = torch.tensor([len(tokens) if self.followed else 0 for tokens in self.tokens], device=logits.device)
        nodes = (first[:, None] + torch.arange(width + 1, device=logits.device)).clamp(max=logits.shape[1] - 1)
        return logits[torch.arange(len(first), device=logits.device)[:, None], nodes]
