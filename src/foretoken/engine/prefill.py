"""Prefill: bring the target's KV cache up to each row's root, a chunk of the prompt a pass."""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.drafters.base import Drafter
from foretoken.engine.prefix_cache import PrefixCache
from foretoken.engine.row import Row
from foretoken.limits import current_limits
from foretoken.models.base import LanguageModel
from foretoken.models.feed import feed, prompt_part
from foretoken.models.widths import SHORT_PROMPT


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

    def held_back(self, rows: Sequence[Row]) -> list[bool]:
        """Of each row, whether nothing is drafted beside the end of its prompt: see `LanguageModel.rounds_alike`."""
        most = current_limits().alike_tokens if self._joins_decode and self._model.rounds_alike else 0
        return [SHORT_PROMPT < row.sequence.prompt_length == len(row.sequence.tokens) <= most for row in rows]

    def _compute(self, chunks: list[list[int]], missing: list[list[int]]) -> None:
        """One pass over parts of prompts; the last parts wait for the round's own pass where the target can do that.

        A prefix that other rows wait for is computed at once, since a row may finish with its first round.
        """
        cache = self._prefixes.cache
        drafter = self._drafter
        if self._joins_decode:
            ends = [len(chunk) == len(tokens) for chunk, tokens in zip(chunks, missing, strict=True)]
            awaited = self._prefixes.awaited()
            later = [end and not wanted for end, wanted in zip(ends, awaited, strict=True)]
            cache.defer_prefill([chunk if waits else [] for chunk, waits in zip(chunks, later, strict=True)])
            feed(self._model, cache, [[] if waits else chunk for chunk, waits in zip(chunks, later, strict=True)])
            self._prefixes.leave_last([end and wanted for end, wanted in zip(ends, awaited, strict=True)])
            return
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
