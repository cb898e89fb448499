"""Traces: how a round of one request was verified, for people to look at; made for requests that ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.engine.detokenizer import token_text
from foretoken.engine.membership import Membership
from foretoken.engine.outputs import Candidate, DraftedToken, RoundTrace
from foretoken.engine.row import Row
from foretoken.engine.verification import Verified, verdict_uniforms
from foretoken.verify import is_coupled

MOST_CANDIDATES = 5
"""Tokens of a distribution that a trace shows."""

MOST_NODES = 33
"""Nodes whose distributions a trace shows."""


def trace_round(
    members: Membership, traced: AbstractSequence[int], draft: Draft, verified: Verified, tokenizer: Any
) -> None:
    """Fill `Row.drafted` and `Row.traced` of some rows, before the round's tokens are appended to their sequences.

    The target's distributions are computed again, by the functions that verification used: so traces cost nothing in
    rounds without traced rows, and change nothing for the other rows.

    Args:
        members: the rows of the round.
        traced: which of them.
        draft: what was verified.
        verified: the result.
        tokenizer: for the tokens' text; None for none.
    """
    for at in traced:
        row = members.rows[at]
        if verified.usable[at]:
            nodes, following = verified.accepted[at], verified.following[at]
            part = draft.part([at])
            if not part.is_chain and part.has_chains():
                part = part.chains()
            part_logits = verified.scores[at : at + 1, : part.width + 1]
            row.drafted, row.traced = _Trace(members, at, part, part_logits, tokenizer).of(nodes, following)
        else:
            row.drafted, row.traced = (), None


def trace_seconds(rows: AbstractSequence[Row], seconds: Mapping[str, float]) -> None:
    """Add a round's seconds, by part, to the traces of these rows."""
    for row in rows:
        if row.traced is not None:
            row.traced = replace(row.traced, seconds=dict(seconds))


class _Trace:
    """Makes the trace of one row.

    Args:
        members: the rows of the round.
        at: which of them.
        draft: of this row alone.
        logits: ``[1, N+1, V]``.
        tokenizer: or None.
    """

    def __init__(self, members: Membership, at: int, draft: Draft, logits: Tensor, tokenizer: Any) -> None:
        self._row, self._draft, self._tokenizer = members.rows[at], draft, tokenizer
        sequences = [members.sequences[at]]
        sampler = members.sampler.select([at])
        self._probs = sampler.probabilities(logits, sequences, draft)  # [1, N+1, V]
        self._greedy = self._row.sequence.params.greedy
        shown = logits.float().softmax(-1) if self._greedy else self._probs
        self._shown = shown[0]  # [N+1, V]
        self._uniforms = verdict_uniforms(sampler, sequences)[0]

    def of(self, accepted: AbstractSequence[int], following: int) -> tuple[tuple[DraftedToken, ...], RoundTrace]:
        """The draft's tokens, and how they were verified.

        Args:
            accepted: nodes.
            following: the token after the last of them.
        """
        node = accepted[-1] if accepted else 0
        rule = self._rule()
        stop_probs: tuple[float, ...] = ()
        verifier = self._row.verifier
        last = self._shown[node]
        if rule == "rejection":
            assert not is_coupled(verifier)
            count = int(self._draft.counts[0])
            stop_probs = tuple(verifier.stop_probs(self._draft, self._probs)[0, : count + 1].tolist())
            last = verifier.next_probs(self._draft, self._probs, torch.tensor([node], device=last.device))[0]
        shown = min(len(self._shown), int(self._draft.counts[0]) + 1, MOST_NODES)
        trace = RoundTrace(
            rule,
            verifier.name,
            stop_probs,
            self._uniforms[0] if rule == "rejection" else None,
            self._uniforms[1] if rule == "rejection" else None,
            node,
            float(self._probs[0, node, following]),
            self._rank(node, following),
            float(last[following]),
            self._candidates(last, None),
            tuple(self._candidates(self._shown[i], self._drawn_from(i)) for i in range(shown)),
        )
        return self._drafted(set(accepted)), trace

    def _rule(self) -> Literal["rejection", "greedy", "coupled"]:
        if is_coupled(self._row.verifier):
            return "coupled"
        return "greedy" if self._greedy and self._row.verifier.lossless else "rejection"

    def _drafted(self, accepted: set[int]) -> tuple[DraftedToken, ...]:
        draft, depths = self._draft, self._draft.depths()[0].tolist()
        links = list(zip(draft.tokens[0].tolist(), draft.parents[0].tolist(), strict=True))[: int(draft.counts[0])]
        return tuple(
            DraftedToken(
                token,
                self._text(token),
                depths[node],
                node in accepted,
                # A drafter's vocabulary may be padded beyond the target's.
                float(self._probs[0, parent, token]) if token < self._probs.shape[-1] else 0.0,
                1.0 if draft.probs is None else float(draft.probs[0, parent, token]),
                parent,
                self._rank(parent, token),
            )
            for node, (token, parent) in enumerate(links, start=1)
        )

    def _drawn_from(self, node: int) -> Tensor | None:
        """The distribution ``[W]`` that a node's children were drawn from; None without any."""
        draft = self._draft
        if draft.probs is None or node not in draft.parents[0, : int(draft.counts[0])].tolist():
            return None
        return draft.probs[0, node]

    def _rank(self, node: int, token: int) -> int:
        row = self._shown[node]
        return 1 + int((row > row[token]).sum()) if token < len(row) else len(row) + 1

    def _candidates(self, probs: Tensor, drawn_from: Tensor | None) -> tuple[Candidate, ...]:
        best = probs.topk(min(MOST_CANDIDATES, len(probs)))
        return tuple(
            Candidate(token, self._text(token), value, None if drawn_from is None else _at(drawn_from, token))
            for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            if value > 0.0
        )

    def _text(self, token: int) -> str:
        try:
            return token_text(self._tokenizer, token)
        except Exception:  # of a tokenizer that does not know all of the model's tokens
            return ""


def _at(probs: Tensor, token: int) -> float:
    return float(probs[token]) if token < len(probs) else 0.0
