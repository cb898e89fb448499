"""Beam search with the target alone: the most probable continuations, equal to those of transformers' `generate`."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from foretoken.engine.outputs import FinishReason
from foretoken.engine.prompts import Prompt, is_single, make_sequence
from foretoken.errors import NumericalError, ParameterError
from foretoken.models import Cache, LanguageModel, load
from foretoken.models.feed import feed
from foretoken.models.threads import taking_turns
from foretoken.sampling import SamplingParams, all_finite
from foretoken.sampling.params import check_integer, check_number
from foretoken.sequence import Sequence

MAX_BEAMS = 1024

_NEVER = -1.0e9
"""Score of what must not be chosen. Not -inf, so that there always are enough candidates."""


@dataclass(frozen=True)
class Beam:
    """One continuation.

    Attributes:
        token_ids: generated tokens; the end token, if one was generated, included.
        text: the decoded string without special tokens; empty for a model without a tokenizer.
        score: sum of log-probabilities / length ** length_penalty, natural logarithms.
        finish_reason: ``stop`` (an end token) or ``length``.
    """

    token_ids: list[int]
    text: str
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True)
class BeamParams:
    """How to search; see `beam_search`."""

    num_beams: int
    max_new_tokens: int
    min_length: int
    min_new_tokens: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    num_return_sequences: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int

    def __post_init__(self) -> None:
        check_integer("num_beams", self.num_beams, 1, MAX_BEAMS, cure="4 or so are usual")
        check_integer("max_new_tokens", self.max_new_tokens, 1, cure="ask for at least one token")
        check_integer("min_length", self.min_length, 0, cure="use 0 for none")
        check_integer("min_new_tokens", self.min_new_tokens, 0, cure="use 0 for none")
        check_integer(
            "num_return_sequences", self.num_return_sequences, 1, self.num_beams, cure="raise num_beams for more"
        )
        # Powers of lengths beyond these overflow float32.
        check_number("length_penalty", self.length_penalty, -10, 10, cure="use 0 for none")
        for token in self.eos_token_ids:
            check_integer("eos_token_ids", token, 0, self.vocab_size - 1, cure="give token ids of the vocabulary")
        if self.early_stopping not in (True, False, "never"):
            raise ParameterError(f"early_stopping={self.early_stopping!r}: must be True, False or 'never'")


def beam_search(
    target: Any,
    prompts: Prompt | AbstractSequence[Prompt],
    *,
    num_beams: int = 4,
    max_new_tokens: int = 128,
    min_length: int = 0,
    min_new_tokens: int = 0,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    num_return_sequences: int = 1,
    eos_token_ids: AbstractSequence[int] | None = None,
    max_batch_size: int = 64,
    prediction: None = None,
) -> list[Beam] | list[list[Beam]]:
    """Search for the most probable continuations. Options mean what they mean in transformers' `generate`.

    Args:
        target: a model in any form that `load` takes.
        prompts: a string, token ids or chat messages, or a list of these.
        num_beams: continuations that are followed at once.
        max_new_tokens: most tokens that are generated; the model's context may end a search before.
        min_length: no end token before prompt and output (for encoder-decoder models the output, its start token
            included) have this many tokens together.
        min_new_tokens: no end token before this many were generated.
        length_penalty: scores are divided by length ** length_penalty: above 0 favours long continuations.
        early_stopping: True ends a prompt's search when `num_beams` continuations have ended; False when the best
            open one, at its present length, scores below the ended ones; "never" when it can't overtake them at any
            length.
        num_return_sequences: continuations given back for each prompt, best first.
        eos_token_ids: end tokens; None means the model's.
        max_batch_size: most rows (beams) that are scored at once; further prompts wait.
        prediction: not for beams, which draft nothing.

    Returns:
        For one prompt its best continuations; for a list of prompts a list of these.

    Raises:
        ParameterError: an option is out of its range.
        PromptError: a prompt can't be used.
    """
    if prediction is not None:
        raise ParameterError("prediction is for sampling and greedy decoding: beam search drafts nothing, leave it out")
    model = load(target)
    params = BeamParams(
        num_beams=num_beams,
        max_new_tokens=max_new_tokens,
        min_length=min_length,
        min_new_tokens=min_new_tokens,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        num_return_sequences=num_return_sequences,
        eos_token_ids=_known_ends(model) if eos_token_ids is None else _given_ends(eos_token_ids),
        vocab_size=model.vocab_size,
    )
    check_integer("max_batch_size", max_batch_size, 1, cure="lower it if memory runs out")
    single = is_single(prompts)
    batch: AbstractSequence[Prompt] = [prompts] if single else prompts  # type: ignore[list-item, assignment]
    sequences = [make_sequence(model, prompt, SamplingParams(seed=0)) for prompt in batch]
    size = max(1, max_batch_size // num_beams)
    results: list[list[Beam]] = []
    for first in range(0, len(sequences), size):
        with taking_turns([model]):
            results += _search(model, sequences[first : first + size], params)
    return results[0] if single else results


def _known_ends(model: LanguageModel) -> tuple[int, ...]:
    """The model's end tokens; a config may name some that the output layer does not have."""
    return tuple(token for token in model.eos_token_ids if token < model.vocab_size)


def _given_ends(tokens: Any) -> tuple[int, ...]:
    if isinstance(tokens, str) or not isinstance(tokens, Iterable):
        raise ParameterError(f"eos_token_ids is {tokens!r}: give a list of token ids")
    return tuple(tokens)


@torch.inference_mode()
def _search(model: LanguageModel, sequences: list[Sequence], params: BeamParams) -> list[list[Beam]]:
    """Search for several prompts at once, each with its own rows of one cache."""
    cache = model.open(len(sequences))
    for row, sequence in enumerate(sequences):
        if sequence.source is not None:
            cache.encode(row, sequence.source)
    logits = feed(model, cache, [sequence.tokens for sequence in sequences], keep="last")
    assert logits is not None
    searches = [_Search(model, sequence, params) for sequence in sequences]
    logits = logits.repeat_interleave(params.num_beams, dim=0)
    rows = [row for row in range(len(sequences)) for _ in range(params.num_beams)]
    active = searches
    while True:
        if not all_finite(logits):
            raise NumericalError(
                f"{model.name} gave scores with NaN or infinity (or nothing but -inf): no beam can be continued with "
                "them; load the model with dtype='float32', or check its weights"
            )
        parts = logits.float().split(params.num_beams)
        chosen = [search.step(part) for search, part in zip(active, parts, strict=True)]
        # Beams were chosen among each prompt's own rows; `rows` maps these to rows of the cache.
        kept = [i for i, search in enumerate(active) if not search.done]
        if not kept:
            return [search.result() for search in searches]
        rows = [rows[i * params.num_beams + beam] for i in kept for beam in chosen[i]]
        active = [active[i] for i in kept]
        cache.select(rows)
        logits = _append(model, cache, [token for search in active for token in search.last_tokens()])
        rows = list(range(len(rows)))


def _append(model: LanguageModel, cache: Cache, tokens: list[int]) -> Tensor:
    """Commit one token in each row; returns the logits ``[B, V]`` after it."""
    ids = torch.tensor(tokens, device=model.device)[:, None]
    ones = torch.ones(len(tokens), dtype=torch.int64)
    logits = model.forward(ids, torch.full((len(tokens), 1), -1), ones, cache).logits
    assert logits is not None
    cache.commit(torch.zeros((len(tokens), 1), dtype=torch.int64), ones)
    return logits[:, 0]


class _Search:
    """One prompt's beams, open and ended. The arithmetic is that of transformers, in float32, so that ties fall alike.

    Args:
        model: whose tokenizer decodes the results.
        sequence: the prompt.
        params: how to search.
    """

    def __init__(self, model: LanguageModel, sequence: Sequence, params: BeamParams) -> None:
        self._model, self._params = model, params
        self._start = len(sequence.tokens)
        self._limit = min(params.max_new_tokens, model.max_length - self._start)
        self._length = 0
        beams = params.num_beams
        self._open: list[list[int]] = [[] for _ in range(beams)]
        # At first all beams are the prompt itself: only one of them may be continued.
        self._open_scores = torch.full((beams,), _NEVER, dtype=torch.float32)
        self._open_scores[0] = 0
        self._ended: list[list[int]] = [[] for _ in range(beams)]
        self._ended_scores = torch.full((beams,), _NEVER, dtype=torch.float32)
        self._is_ended = torch.zeros(beams, dtype=torch.bool)
        self._improvable = True
        self.done = False

    def step(self, logits: Tensor) -> list[int]:
        """Continue every open beam by one token.

        Args:
            logits: ``[num_beams, V]`` float32, after each open beam.

        Returns:
            For each new open beam the index of the old one that it continues.
        """
        params, beams, vocab_size = self._params, self._params.num_beams, logits.shape[-1]
        scores = torch.log_softmax(logits, dim=-1).cpu()
        if self._start + self._length < params.min_length or self._length < params.min_new_tokens:
            scores[:, list(params.eos_token_ids)] = -torch.inf
        scores = (scores + self._open_scores[:, None]).flatten()
        # Enough candidates for `num_beams` to stay open even if all end tokens of all beams are among them.
        wanted = min(max(2, 1 + len(params.eos_token_ids)) * beams, scores.shape[0])
        top, indices = torch.topk(scores, wanted)
        sources, tokens = (indices // vocab_size).tolist(), (indices % vocab_size).tolist()
        outputs = [[*self._open[source], token] for source, token in zip(sources, tokens, strict=True)]
        self._length += 1
        ends = torch.tensor([self._length >= self._limit or token in params.eos_token_ids for token in tokens])

        staying = top + ends.to(torch.float32) * _NEVER
        kept = torch.topk(staying, beams)[1]
        self._open_scores = staying[kept]
        self._open = [outputs[i] for i in kept.tolist()]
        self._end(outputs, top, ends)

        self._improvable = self._improvable and self._can_improve()
        full = params.early_stopping is True and bool(self._is_ended.all())
        self.done = not self._improvable or full or bool(ends.all())
        return [sources[i] for i in kept.tolist()]

    def _end(self, outputs: list[list[int]], scores: Tensor, ends: Tensor) -> None:
        """Keep the best of the ended beams, old and new."""
        params, beams = self._params, self._params.num_beams
        scores = scores / (self._length**params.length_penalty)
        if (params.early_stopping is True and bool(self._is_ended.all())) or not self._improvable:
            scores = scores + _NEVER
        counted = ends & (torch.arange(len(outputs)) < beams)  # Further candidates are only there to stay open.
        scores = scores + (~counted).to(torch.float32) * _NEVER
        merged = torch.cat([self._ended_scores, scores])
        best = torch.topk(merged, beams)[1]
        self._ended = [(self._ended + outputs)[i] for i in best.tolist()]
        self._ended_scores = merged[best]
        self._is_ended = torch.cat([self._is_ended, counted])[best]

    def _can_improve(self) -> bool:
        params = self._params
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self._limit
        else:
            length = self._length
        best = self._open_scores[0] / (length**params.length_penalty)
        worst = torch.where(self._is_ended, self._ended_scores.min(), _NEVER)
        return bool((best > worst).any())

    def last_tokens(self) -> list[int]:
        """The newest token of each open beam."""
        return [beam[-1] for beam in self._open]

    def result(self) -> list[Beam]:
        """The best continuations, best first."""
        count = self._params.num_return_sequences
        return [
            Beam(
                token_ids=tokens,
                text=""
                if self._model.tokenizer is None
                else self._model.tokenizer.decode(tokens, skip_special_tokens=True),
                score=score,
                finish_reason="stop" if tokens and tokens[-1] in self._params.eos_token_ids else "length",
            )
            for tokens, score in zip(self._ended[:count], self._ended_scores[:count].tolist(), strict=True)
        ]
