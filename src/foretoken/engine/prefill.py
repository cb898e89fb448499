"""Prefill: bring the target's KV cache up to each row's root, a chunk of the prompt a pass."""

from __future__ import annotations

from foretoken.drafters.base import Drafter
from foretoken.engine.prefix_cache import PrefixCache
from foretoken.models.base import LanguageModel
from foretoken.models.feed import feed, prompt_part


class Prefill:
    """Computes the KV cache of prompts.

    Args:
        model: the target.
        drafter: gets the hidden states of the prompts' tokens if it has `hidden_layers`.
        prefixes: its KV cache, and the running rows.
        chunk: most tokens of a row in one pass.
    """

    def __init__(self, model: LanguageModel, drafter: Drafter, prefixes: PrefixCache, chunk: int) -> None:
        self._model, self._drafter, self._prefixes, self._chunk = model, drafter, prefixes, chunk
        self._joins_decode = model.prefills_with_decode and not drafter.hidden_layers
        self._ready = -1  # the version of `prefixes` in which all rows were ready; decoding rows stay ready

    def run(self) -> tuple[list[int], bool]:
        """Prefill until at least one row is ready: one chunk a round while others decode.

        Returns:
            The rows that are ready, whose KV cache lacks nothing but the root, which the round itself scores; and
            whether there was anything to prefill.
        """
        if self._ready == self._prefixes.version:
            return list(range(len(self._prefixes.rows))), False
        worked = False
        while True:
            self._prefixes.copy()
            lengths = self._prefixes.cache.lengths.tolist()
            rows = self._prefixes.rows
            missing = [row.sequence.tokens[length:-1] for row, length in zip(rows, lengths, strict=True)]
            ready = [index for index, tokens in enumerate(missing) if not tokens]
            if len(ready) == len(rows):
                self._ready = self._prefixes.version
            if len(ready) == len(rows) or (worked and ready):
                return ready, worked
            waiting = self._prefixes.waiting()
            chunks = [
                [] if waits else tokens[: prompt_part(len(tokens) + 1, self._chunk)]
                for tokens, waits in zip(missing, waiting, strict=True)
            ]
            assert any(chunks), "every row that misses tokens waits for another one"
            self._compute(chunks, missing)
            worked = True

    def _compute(self, chunks: list[list[int]], missing: list[list[int]]) -> None:
        """One pass over parts of prompts; the last parts wait for the round's own pass where the target can do that.

        A prefix that other rows wait for is computed at once, since a row may finish with its first round.
        """
        cache = self._prefixes.cache
        if self._joins_decode:
            deferred = [
                len(chunk) == len(tokens) and not awaited
                for chunk, tokens, awaited in zip(chunks, missing, self._prefixes.awaited(), strict=True)
            ]
            cache.defer_prefill([chunk if later else [] for chunk, later in zip(chunks, deferred, strict=True)])
            chunks = [[] if later else chunk for chunk, later in zip(chunks, deferred, strict=True)]
        drafter = self._drafter
        if not drafter.hidden_layers:
            feed(self._model, cache, chunks)
            return
        sequences = [row.sequence for row in self._prefixes.rows]
        feed(
            self._model,
            cache,
            chunks,
            hidden_layers=drafter.hidden_layers,
            on_hidden=lambda starts, counts, hidden: drafter.observe_hidden(sequences, starts, counts, hidden),
        )
