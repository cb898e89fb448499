"""Rehearsal: before an engine's first request, draft models tell what they foresee of an output that nobody asked for.

Whether a model is of use for a target is not known before it has drafted, and a first draft costs as much as four or
five plain rounds, most of it for the prompt. So the target answers a question of its own, in a scratch request, and
the models read the answer (`Drafter.read`). What they foresee of it is a prior for all requests.
"""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence

import torch

from foretoken.draft import Draft, no_draft
from foretoken.drafters.base import Batch, Drafter
from foretoken.drafters.cascade import Cascade
from foretoken.engine.decode_loop import DecodeLoop
from foretoken.engine.prompts import as_message, make_sequence
from foretoken.engine.row import Row
from foretoken.errors import PromptError
from foretoken.limits import Limits
from foretoken.models.base import LanguageModel
from foretoken.policy.request import READ
from foretoken.sampling import SamplingParams
from foretoken.verify import AnyVerifier

TOKENS = 3 * READ
"""Of the answer. In an answer's first sixteen tokens models foresee less than behind them (`acceptance.BEGINNING`)."""

_QUESTION = "Tell me what you know about the sea."


class _Reader(Drafter):
    """Drafts nothing; once an output has so many tokens, drafters read it.

    Args:
        drafters: those that shall read.
        tokens: of the output.

    Attributes:
        right: of each drafter, which of these tokens it foresees; empty for those that can't read.
        done: they have read, or none can.
    """

    name = "rehearsal"

    def __init__(self, drafters: AbstractSequence[Drafter], tokens: int) -> None:
        self._drafters, self._tokens = drafters, tokens
        self.models = tuple(model for drafter in drafters for model in drafter.models)
        self.own_threads = all(drafter.own_threads for drafter in drafters)
        self.right: list[list[bool]] = [[] for _ in drafters]
        self.done = False

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """Nothing."""
        (sequence,) = batch.sequences
        able = [one.reads(batch) for one in self._drafters]
        self.done = self.done or not any(able)
        if not self.done and len(sequence.tokens) - sequence.prompt_length >= self._tokens:
            self.done = True
            self.right = [
                one.read(batch, self._tokens) if reads else [] for one, reads in zip(self._drafters, able, strict=True)
            ]
        return no_draft(len(limits), batch.device)


def rehearse(target: LanguageModel, cascade: Cascade, verifier: AnyVerifier, limits: Limits, most: int) -> None:
    """Have a cascade's draft models read an answer of the target, where nothing is known of them yet.

    Nothing is rehearsed where the answer could not even have `READ` tokens.

    Args:
        target: the model; without a tokenizer nothing is rehearsed.
        cascade: the drafters; it learns what is foreseen.
        verifier: of the requests to come.
        limits: of the loops.
        most: tokens that the answer may have.
    """
    rates, count = cascade.policy.rates, min(TOKENS, most)
    models = [at for at, one in enumerate(cascade.drafters) if one.models and rates(at, sampled=False).is_new]
    if not models or count < READ or target.tokenizer is None:
        return
    params = SamplingParams(temperature=0.0, max_new_tokens=count + 2, ignore_eos=True, seed=0)
    try:
        sequence = make_sequence(target, as_message(target, _QUESTION), params)
    except PromptError:  # a short context, or a template that wants something else
        return
    sequence.scratch = True
    reader, row = _Reader([cascade.drafters[at] for at in models], count), Row(sequence, target, verifier=verifier)
    loop = DecodeLoop(target, reader, 1, Cascade([reader]), limits=limits)
    loop.join([row])
    while not (row.finished or reader.done):
        loop.step()
    row.cancel()
    with torch.inference_mode():
        loop.step()
    for at, right in zip(models, reader.right, strict=True):
        for sampled in (False, True):  # what is drawn is foreseen less often than the likeliest tokens are
            rates(at, sampled=sampled).rehearse(right, rates=not sampled)
