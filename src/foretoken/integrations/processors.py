"""transformers' logits processors at every drafted position: a sampler that runs them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from functools import partial
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.errors import ParameterError
from foretoken.randomness import gumbel
from foretoken.sampling import Sampler, SamplingParams
from foretoken.sampling.penalties import node_depths
from foretoken.sampling.vocabulary import zeros_for_none
from foretoken.sequence import Sequence


@dataclass(frozen=True)
class RowSteps:
    """The logits processors of a row.

    Attributes:
        given: the row of ``input_ids``, its padding included: the processors get it, and the output after it.
        processors: as they would be for a batch of this row alone.
        dead_ends: the outputs, among those that the round's draft could lead to, behind which the processors leave no
            token. That is no error until one of them is reached: a draft token may still be rejected.
    """

    given: list[int]
    processors: Any
    dead_ends: dict[tuple[int, ...], ParameterError] = field(default_factory=dict)


class ProcessorSampler(Sampler):
    """A sampler that runs transformers' logits processors instead of Foretoken's own steps.

    They take whole sequences, so that each node of each row is a call of its own. They are not called for nodes below a
    token that they forbid, nor for an end token's and those below it: those are never reached, and a grammar may be
    undefined there.
    """

    def __init__(
        self,
        params: AbstractSequence[SamplingParams],
        seeds: AbstractSequence[int],
        steps: Mapping[int, RowSteps],
        *,
        alters: bool,
        ends: frozenset[int] = frozenset(),
        vocab_size: int,
        device: torch.device | str,
    ) -> None:
        """Take `steps` by sequence id; `alters`: there are processors; `ends`: tokens that end every output."""
        super().__init__(params, seeds, vocab_size=vocab_size, device=device)
        self.alters = alters
        self._altered = frozenset(range(len(self.params)) if alters else ())
        self._steps = steps
        self._ends = ends

    def select(self, rows: AbstractSequence[int] | Tensor) -> ProcessorSampler:
        """A sampler of some of the rows, with their processors."""
        params, seeds = self._of_rows(rows)
        return ProcessorSampler(
            params,
            seeds,
            self._steps,
            alters=self.alters,
            ends=self._ends,
            vocab_size=self.vocab_size,
            device=self.device,
        )

    def scores(
        self, logits: Tensor, sequences: AbstractSequence[Sequence], draft: Draft, nodes: Tensor | None = None
    ) -> Tensor:
        """``[B, M, V]`` float32, all processors applied, warpers too: only a softmax remains to be done.

        Raises:
            ParameterError: `nodes` is None, as for the target's logits, and no token is left at a row's root.
        """
        # A copy: processors may write to their argument, and these logits are the model's output.
        scores = logits.to(torch.float32, copy=True)
        above = draft.ancestors()
        tokens = torch.cat([torch.zeros_like(draft.counts[:, None]), draft.tokens], dim=1)
        for row, sequence in enumerate(sequences):
            steps = self._steps[sequence.id]
            prefix = steps.given + sequence.output
            parents = [0, *draft.parents[row].tolist()]
            unreachable: set[int] = set()
            if nodes is None:
                steps.dead_ends.clear()
            for column in range(scores.shape[1]):
                node = column if nodes is None else int(nodes[row, column])
                if nodes is None and node > 0:
                    parent = parents[node]
                    if parent in unreachable or scores[row, parent, tokens[row, node]] == -torch.inf:
                        unreachable.add(node)
                        continue
                on_path = above[row, node].clone()
                on_path[0] = False
                drafted = tokens[row][on_path].tolist()
                if not self._ends.isdisjoint(drafted):
                    continue
                path = torch.tensor([prefix + drafted], device=scores.device)
                scores[row, column] = steps.processors(path, scores[row, column : column + 1])[0]
                if nodes is not None:  # of a drafter, which may not have the tokens that are left
                    continue
                error = _nothing_left(scores[row, column], path.shape[1], self.params[row].greedy)
                if error is not None and node == 0:
                    raise error
                if error is not None:
                    steps.dead_ends[tuple(sequence.output + drafted)] = error
        return scores

    def probabilities(
        self, logits: Tensor, sequences: AbstractSequence[Sequence], draft: Draft, nodes: Tensor | None = None
    ) -> Tensor:
        """``[B, M, V]`` float32: softmax of the scores, or all mass on the best token."""
        scores = self.scores(logits, sequences, draft, nodes)
        if self.all_greedy:
            return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype)
        return zeros_for_none(scores.softmax(-1))

    def picks(
        self,
        logits: Tensor,
        sequences: AbstractSequence[Sequence],
        draft: Draft,
        nodes: Tensor | None = None,
        noise: bool = True,
    ) -> Tensor:
        """``[B, M]``: argmax of the scores, with the shared noise added where rows are sampled."""
        scores = self.scores(logits, sequences, draft, nodes)
        if noise and not self.all_greedy:
            positions = self.positions(sequences)[:, None] + node_depths(draft, nodes)
            scores = scores + gumbel(self.seeds, positions, scores.shape[-1])
        return scores.argmax(-1)


def _nothing_left(scores: Tensor, length: int, greedy: bool) -> ParameterError | None:
    """Why no token can be chosen by scores ``[V]`` after so many tokens; None if one can."""
    best = float(scores.amax())
    if isfinite(best) or (greedy and best != -inf):  # the best token is what ``generate`` itself takes
        return None
    if best == -inf:
        return ParameterError(f"the logits processors forbid every token after {length:,} tokens: allow at least one")
    return ParameterError(
        f"the logits processors gave a score of {best} after {length:,} tokens, and nothing can be sampled from that: "
        "have them give numbers, or -inf for what they forbid"
    )


def for_row(processors: Any, row: int, batch_size: int) -> Any:
    """The processors as they would be for this row alone: their per-row attributes are cut to one row."""
    result = []
    for processor in processors:
        one = copy.copy(processor)
        kept = vars(one)
        if isinstance(kept.get("prompt_ignore_length"), Tensor) and len(one.prompt_ignore_length) == batch_size:
            one.prompt_ignore_length = one.prompt_ignore_length[row : row + 1]
        if isinstance(kept.get("encoder_input_ids"), Tensor):
            # There may be several rows for each source.
            source = row * len(one.encoder_input_ids) // batch_size
            one.encoder_input_ids = one.encoder_input_ids[source : source + 1]
        if isinstance(kept.get("generated_ngrams"), list):
            one.generated_ngrams = [one.generated_ngrams[row * one.batch_size // batch_size]]
            one.batch_size = 1
        if "_prefix_allowed_tokens_fn" in kept:
            one._prefix_allowed_tokens_fn = partial(_allowed_in_row, one._prefix_allowed_tokens_fn, row)
        result.append(one)
    return type(processors)(result)


def _allowed_in_row(allowed: Callable[[int, Tensor], list[int]], row: int, _: int, tokens: Tensor) -> list[int]:
    """The tokens that a function of row and sequence allows in `row`; a batch of this row alone asks for row 0."""
    return allowed(row, tokens)
