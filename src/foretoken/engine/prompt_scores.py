"""Log-probabilities of a prompt's own tokens: what `echo` with `logprobs` reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from foretoken.engine.outputs import TokenLogprob
from foretoken.engine.recording import token_logprobs
from foretoken.models.base import LanguageModel
from foretoken.models.threads import release_threads, taking_turns

_MOST_LOGITS = 2**23
"""Logits of one pass: 32 MiB of them."""

_MOST_TOKENS = 512
"""Tokens of one pass."""


class PromptScores:
    """Scores a prompt a pass at a time, so that rounds of other requests can go between.

    Log-probabilities are those of the raw logits, as with `SamplingParams.logprobs` for outputs. The first token
    follows nothing, and has none.

    Args:
        model: the target; one that continues its prompt.
        tokens: of the prompt, within the model's vocabulary and context.
        top: how many of the most probable tokens to report at each position.

    Attributes:
        found: one entry for each token but the first, as far as they are scored.
    """

    def __init__(self, model: LanguageModel, tokens: Sequence[int], top: int) -> None:
        self.found: list[TokenLogprob] = []
        self._model = model
        self._tokens = list(tokens)
        self._top = top
        self._chunk = max(min(_MOST_TOKENS, _MOST_LOGITS // model.vocab_size), 1)
        self._cache = model.open(1)

    @property
    def done(self) -> bool:
        """Every token but the first is scored."""
        return len(self.found) >= len(self._tokens) - 1

    def step(self) -> None:
        """One pass."""
        start = len(self.found)
        part = self._tokens[start : min(start + self._chunk, len(self._tokens) - 1)]
        nodes = torch.arange(len(part), device=self._model.device)[None]
        with torch.inference_mode():
            tokens = torch.tensor([part], device=self._model.device)
            scores = self._model.forward(tokens, nodes - 1, torch.tensor([len(part)]), self._cache)
            self._cache.commit(nodes, torch.tensor([len(part)]))
            assert scores.logits is not None
            following = self._tokens[start + 1 : start + 1 + len(part)]
            self.found += token_logprobs(scores.logits[0], list(range(len(part))), following, self._top)


class Scoring:
    """A prompt to be scored by the engine's thread, a pass at a time.

    Args:
        tokens: of the prompt.
        top: see `PromptScores`.
        tell: called with the scores, or with an error, on that thread.

    Attributes:
        wanted: set it to False to have the scoring end early.
        failure: the error that it ended with, None without one. `step` does not `tell` it: it may end the engine.
    """

    def __init__(self, tokens: Sequence[int], top: int, tell: Callable[[list[TokenLogprob] | Exception], None]) -> None:
        self.wanted = True
        self.failure: Exception | None = None
        self.tell = tell
        self._tokens = tokens
        self._top = top
        self._scores: PromptScores | None = None

    def step(self, model: LanguageModel) -> bool:
        """Run one pass, on the engine's thread; returns whether that was the last one, or nobody waits any more."""
        if not self.wanted:
            return True
        try:
            with taking_turns([model]):  # other engines may have the same model
                if self._scores is None:
                    self._scores = PromptScores(model, self._tokens, self._top)
                if not self._scores.done:
                    self._scores.step()
        except Exception as error:
            self.failure = error
            return True
        if self._scores.done:
            release_threads()
            self.tell(self._scores.found)
        return self._scores.done
