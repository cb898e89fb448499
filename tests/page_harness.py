"""What tests of the page in a browser share; the fixtures `browser` and `visit` are those of tests/serve."""

from __future__ import annotations

import shutil

import torch

from byte_tokenizer import byte_tokenizer
from foretoken.models import Cache, LanguageModel, Scores
from foretoken.models.base import kept_lengths

CHROMIUM = shutil.which("chromium")
LONGEST = 30_000  # ms that nothing here comes near
RUN = "#mode=completion&prompt=the+the&max_tokens=30&seed=1&temperature=2"


def run(page) -> str:
    page.click("[data-run]")
    page.wait_for_selector(".numbers")
    return output(page)


def output(page) -> str:
    """The text of the output's tokens; a line break is shown by a sign, too."""
    return "".join(page.locator("main [data-place*=token]").all_text_contents()).replace("⏎\n", "\n")


class Scripted(LanguageModel):
    """Writes one text, whatever it is asked, by the length of the sequence."""

    def __init__(self, text: str) -> None:
        self.name, self.vocab_size, self.max_length = "scripted", 259, 512
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.tokenizer = byte_tokenizer()
        self.eos_token_ids = (258,)
        self.text = self.tokenizer(text)["input_ids"]

    def open(self, batch_size: int) -> Cache:
        return ScriptedCache(batch_size)

    def cache_bytes(self, lengths: list[int]) -> int:
        return 0

    def forward(self, tokens, parents, counts, cache, keep="all", hidden_layers=()):
        logits = torch.full((*tokens.shape, self.vocab_size), -1.0)
        for row, count in enumerate(counts.tolist()):
            for column in range(count):
                at = cache.counts[row] + cache.pending[row] + column - 1  # the prompt has two tokens
                logits[row, column, self.text[at] if 0 <= at < len(self.text) else 258] = 20.0
            cache.pending[row] += count  # tentative nodes of several calls, until they are committed
        if keep == "last":
            logits = logits[torch.arange(len(counts)), (counts - 1).clamp(min=0)][:, None]
        return Scores(None if keep == "none" else logits)


class ScriptedCache(Cache):
    def __init__(self, batch_size: int) -> None:
        self.counts, self.pending = [0] * batch_size, [0] * batch_size

    @property
    def lengths(self):
        return torch.tensor(self.counts)

    def commit(self, path, counts):
        self.counts = [have + count for have, count in zip(self.counts, counts.tolist(), strict=True)]
        self.pending = [0] * len(self.counts)

    def select(self, rows, keep=None):
        lengths = kept_lengths(self.counts, rows, keep)
        self.counts = [length if row >= 0 else 0 for row, length in zip(rows, lengths, strict=True)]
        self.pending = [0] * len(rows)
