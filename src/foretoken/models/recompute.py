"""RecomputeModel: for models whose state can't be rolled back. It has no KV cache: each pass recomputes all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.models import traits
from foretoken.models.base import Cache, Keep, Scores, kept_lengths

MAX_TOKENS = 8192
"""Most tokens, padding included, of one call of the model; more are split into several calls."""


class TokenCache(Cache):
    """The committed tokens of each row, and its tentative nodes with their parents."""

    def __init__(self, batch_size: int) -> None:
        self.committed: list[list[int]] = [[] for _ in range(batch_size)]
        self._forget()

    def _forget(self) -> None:
        self.nodes: list[list[int]] = [[] for _ in self.committed]
        self.parents: list[list[int]] = [[] for _ in self.committed]
        self._lengths = torch.tensor([len(sequence) for sequence in self.committed], dtype=torch.int64)

    @property
    def lengths(self) -> Tensor:
        """See `Cache`."""
        return self._lengths

    def append(self, tokens: Tensor, parents: Tensor, counts: Tensor) -> list[list[int]]:
        """Add tentative nodes; returns the node numbers that each row got."""
        new = []
        for row, (row_tokens, row_parents, count) in enumerate(
            zip(tokens.tolist(), parents.tolist(), counts.tolist(), strict=True)
        ):
            first = len(self.nodes[row])
            self.nodes[row] += row_tokens[:count]
            self.parents[row] += row_parents[:count]
            new.append(list(range(first, first + count)))
        return new

    def path(self, row: int, node: int) -> list[int]:
        """Node numbers from a top node to `node`."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[row][node]
        return nodes[::-1]

    def commit(self, path: Tensor, counts: Tensor) -> None:
        """See `foretoken.models.Cache`."""
        for row, (nodes, count) in enumerate(zip(path.tolist(), counts.tolist(), strict=True)):
            self.committed[row] += [self.nodes[row][node] for node in nodes[:count]]
        self._forget()

    def select(self, rows: Sequence[int], keep: Sequence[int | None] | None = None) -> None:
        """See `foretoken.models.Cache`."""
        lengths = kept_lengths([len(sequence) for sequence in self.committed], rows, keep)
        self.committed = [
            self.committed[row][:length] if row >= 0 else [] for row, length in zip(rows, lengths, strict=True)
        ]
        self._forget()


class RecomputeModel(traits.Wrapped):
    """A `LanguageModel` that recomputes each row's sequence in every pass; each path of a tree is a row of its own."""

    def __init__(self, module: Any, tokenizer: Any | None = None, name: str | None = None) -> None:
        super().__init__(module, tokenizer, name)
        self._output = traits.OutputLayer(module)
        self._accepts = traits.accepts(module)
        self._switch = traits.switch_length(traits.text_config(module))

    def open(self, batch_size: int) -> Cache:
        """A new cache with `batch_size` empty rows."""
        return TokenCache(batch_size)

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """Zero: only tokens are stored."""
        return 0

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        counts: Tensor,
        cache: Cache,
        keep: Keep = "all",
        hidden_layers: Sequence[int] = (),
    ) -> Scores:
        """See `LanguageModel.forward`."""
        assert isinstance(cache, TokenCache)
        new = cache.append(tokens, parents, counts)
        batch_size, width = tokens.shape
        if keep == "none" and not hidden_layers:
            return Scores(None)
        paths: list[tuple[int, list[int]]] = []  # Row, and the nodes of one of its branches.
        outputs: list[tuple[int, int, int, int]] = []  # Row and column of the result, path, position in its sequence.
        for row, nodes in enumerate(new):
            wanted = nodes[-1:] if keep == "last" and not hidden_layers else nodes
            inner = {cache.parents[row][node] for node in wanted}
            seen: dict[int, tuple[int, int]] = {}
            for leaf in [node for node in wanted if node not in inner]:
                branch = cache.path(row, leaf)
                for depth, node in enumerate(branch):
                    seen.setdefault(node, (len(paths), len(cache.committed[row]) + depth))
                paths.append((row, branch))
            outputs += [(row, node - nodes[0], *seen[node]) for node in wanted]
        sequences = [cache.committed[row] + [cache.nodes[row][node] for node in branch] for row, branch in paths]
        wanted_positions = [(path, position) for _, _, path, position in outputs]
        scores = self._score(sequences, [row for row, _ in paths], wanted_positions, cache, hidden_layers)
        targets = (
            torch.tensor([row for row, *_ in outputs], dtype=torch.int64, device=self.device),
            torch.tensor([column for _, column, *_ in outputs], dtype=torch.int64, device=self.device),
        )
        spread = []
        for values in scores:
            result = values.new_zeros((batch_size, width, values.shape[-1]))
            result[targets] = values
            spread.append(result)
        logits: Tensor | None = spread[0]
        if keep == "last":
            last = (counts - 1).clamp(min=0).to(self.device)
            logits = spread[0][torch.arange(batch_size, device=self.device), last][:, None]
        return Scores(None if keep == "none" else logits, tuple(spread[1:]))

    def _score(
        self,
        sequences: list[list[int]],
        rows: list[int],
        wanted: list[tuple[int, int]],
        cache: TokenCache,
        hidden_layers: Sequence[int],
    ) -> list[Tensor]:
        """Logits ``[W, V]``, then hidden states ``[W, H]``, at the wanted positions, in their order.

        Args:
            sequences: tokens to score.
            rows: of each sequence, its row of the cache.
            wanted: W pairs of a sequence's index and a position in it.
            cache: whose rows these are.
            hidden_layers: whose hidden states are returned.
        """
        switch = self._switch
        if switch is None or len({position < switch for _, position in wanted}) < 2:
            return self._score_alike(sequences, rows, wanted, cache, hidden_layers)
        # transformers picks the rotary frequencies of a call by its longest sequence.
        parts, order = [], []
        for is_long in (False, True):
            chosen = [i for i, (_, position) in enumerate(wanted) if (position >= switch) == is_long]
            used = sorted({wanted[i][0] for i in chosen})
            cut = [sequences[number] if is_long else sequences[number][:switch] for number in used]
            pairs = [(used.index(wanted[i][0]), wanted[i][1]) for i in chosen]
            parts.append(self._score_alike(cut, [rows[number] for number in used], pairs, cache, hidden_layers))
            order += chosen
        return self._in_order(parts, order)

    def _score_alike(
        self,
        sequences: list[list[int]],
        rows: list[int],
        wanted: list[tuple[int, int]],
        cache: TokenCache,
        hidden_layers: Sequence[int],
    ) -> list[Tensor]:
        """The same where all wanted positions have the same rotary frequencies."""
        longest = max((len(sequence) for sequence in sequences), default=1)
        size = max(1, MAX_TOKENS // longest)
        parts: list[list[Tensor]] = []
        order: list[int] = []
        for first in range(0, len(sequences), size) or [0]:
            chosen = [i for i, (sequence, _) in enumerate(wanted) if first <= sequence < first + size]
            order += chosen
            part = sequences[first : first + size] or [[0]]
            pairs = [(wanted[i][0] - first, wanted[i][1]) for i in chosen]
            parts.append(self._pass(part, rows[first : first + size] or [0], pairs, cache, hidden_layers))
        return self._in_order(parts, order)

    def _in_order(self, parts: list[list[Tensor]], order: list[int]) -> list[Tensor]:
        """Values of several calls, each number i of them put in the place ``order[i]``."""
        if order == list(range(len(order))):
            return [torch.cat(values) for values in zip(*parts, strict=True)]
        back = torch.argsort(torch.tensor(order)).to(self.device)
        return [torch.cat(values)[back] for values in zip(*parts, strict=True)]

    def _pass(
        self,
        sequences: list[list[int]],
        sequence_rows: list[int],
        wanted: list[tuple[int, int]],
        cache: TokenCache,
        hidden_layers: Sequence[int],
    ) -> list[Tensor]:
        longest = max(len(sequence) for sequence in sequences)
        # Causal models don't attend to padding on the right.
        padded = [sequence + [0] * (longest - len(sequence)) for sequence in sequences]
        rows = torch.tensor([row for row, _ in wanted], dtype=torch.int64, device=self.device)
        columns = torch.tensor([column for _, column in wanted], dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            arguments = self._arguments(torch.tensor(padded, device=self.device), sequence_rows, cache)
            if hidden_layers:
                arguments["output_hidden_states"] = True
            output, logits = self._output.run(
                arguments, lambda nodes: nodes[rows.to(nodes.device), columns.to(nodes.device)][None]
            )
            states = traits.hidden_states(output) if hidden_layers else ()
            return [logits[0], *(states[layer][rows, columns] for layer in hidden_layers)]

    def _arguments(self, input_ids: Tensor, rows: list[int], cache: TokenCache) -> dict[str, Any]:
        """Keyword arguments of the model for sequences ``[R, L]`` of these rows of the cache."""
        arguments: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
        if "attention_mask" in self._accepts:
            arguments["attention_mask"] = torch.ones_like(input_ids)
        return arguments
