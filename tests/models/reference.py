"""A random walk over the cache protocol, checked against plain transformers passes."""

from __future__ import annotations

import random
from typing import Any

import torch

from foretoken.models import LanguageModel


def plain_logits(module: Any, text: list[int], source: list[int] | None = None) -> torch.Tensor:
    """`[V]`: what transformers alone says after `text`."""
    with torch.inference_mode():
        if source is None:
            return module(input_ids=torch.tensor([text], device=module.device), use_cache=False).logits[0, -1].cpu()
        ids = torch.tensor([source], device=module.device)
        return (
            module(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                decoder_input_ids=torch.tensor([text], device=module.device),
                use_cache=False,
            )
            .logits[0, -1]
            .cpu()
        )


class Walk:
    """Random prefills, chains, trees, partial commits and rearrangements of rows."""

    def __init__(self, model: LanguageModel, batch_size: int, seed: int) -> None:
        self.model, self.random = model, random.Random(seed)
        self.seq2seq = model.decoder_start_token_id is not None
        self.cache = model.open(batch_size)
        self.texts: list[list[int]] = [[] for _ in range(batch_size)]
        self.sources: list[list[int] | None] = [None] * batch_size
        self.worst = 0.0
        self.fresh(range(batch_size))

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(3, self.model.vocab_size) for _ in range(count)]

    def fresh(self, rows: Any) -> None:
        for row in rows:
            self.texts[row] = []
            if self.seq2seq:
                self.sources[row] = self.tokens(self.random.randint(1, 7))
                self.cache.encode(row, self.sources[row])

    def round(self, first: bool) -> None:
        size = len(self.texts)
        nodes: list[list[int]] = [[] for _ in range(size)]
        parents: list[list[int]] = [[] for _ in range(size)]
        for _ in range(self.random.choice([1, 1, 2])):
            self.forward(nodes, parents, tree=not first and self.random.random() < 0.6, longest=9 if first else 5)
        paths = []
        for row in range(size):
            node = self.random.randrange(-1, len(nodes[row]))
            paths.append(path_to(parents[row], node))
        width = max(map(len, paths))
        padded = torch.tensor([path + [0] * (width - len(path)) for path in paths]).reshape(size, width)
        self.cache.commit(padded, torch.tensor([len(path) for path in paths]))
        for row, path in enumerate(paths):
            self.texts[row] += [nodes[row][node] for node in path]
        assert self.cache.lengths.tolist() == [len(text) for text in self.texts]

    def forward(self, nodes: list[list[int]], parents: list[list[int]], tree: bool, longest: int) -> None:
        size = len(nodes)
        counts = [self.random.randint(0, longest) for _ in range(size)]
        if self.random.random() < 0.3:
            counts = [max(1, counts[0])] * size
        width = max(*counts, 1)
        tokens = torch.zeros(size, width, dtype=torch.int64)
        above = torch.zeros(size, width, dtype=torch.int64)
        before = [len(row) for row in nodes]
        for row, count in enumerate(counts):
            for i, token in enumerate(self.tokens(count)):
                parent = self.random.randrange(-1, len(nodes[row])) if tree else len(nodes[row]) - 1
                nodes[row].append(token)
                parents[row].append(parent)
                tokens[row, i], above[row, i] = token, parent
        keep = self.random.choice(["all", "all", "last", "none"])
        logits = self.model.forward(tokens, above, torch.tensor(counts), self.cache, keep).logits
        if logits is None:
            assert keep == "none"
            return
        logits = logits.cpu()
        assert logits.shape == (size, width if keep == "all" else 1, self.model.vocab_size)
        for row, count in enumerate(counts):
            for i in range(count) if keep == "all" else range(max(0, count - 1), count):
                path = path_to(parents[row], before[row] + i)
                text = self.texts[row] + [nodes[row][node] for node in path]
                expected = plain_logits(self.model.module, text, self.sources[row])  # type: ignore[attr-defined]
                actual = logits[row, i if keep == "all" else 0]
                self.worst = max(self.worst, float((actual - expected).abs().max()))

    def select(self) -> None:
        size = len(self.texts)
        rows = [self.random.randrange(-1, size) for _ in range(self.random.choice([max(1, size - 1), size, size + 1]))]
        self.cache.select(rows)
        self.texts = [list(self.texts[row]) if row >= 0 else [] for row in rows]
        self.sources = [self.sources[row] if row >= 0 else None for row in rows]
        self.fresh([row for row, old in enumerate(rows) if old < 0])


def path_to(parents: list[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def walk(model: LanguageModel, batch_size: int, seed: int, rounds: int = 5) -> float:
    """The largest difference from plain passes that a random walk finds."""
    steps = Walk(model, batch_size, seed)
    for round_number in range(rounds):
        steps.round(first=round_number == 0)
        if steps.random.random() < 0.5:
            steps.select()
    return steps.worst
