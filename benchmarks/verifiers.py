"""Tokens that a round emits on average, by verifier and draft length: the shipped pair, or any other.

Each round drafts the longest chain; for each verifier and each shorter length what is averaged is not what happened,
but its expectation over the verifier's own random numbers (`Verifier.stop_probs`) for the draft's first tokens. So all
figures are of the same drafts, which begin where rounds ended that were verified token by token, and some hundred
rounds are enough. The results do not depend on the machine's speed.

Run with: python benchmarks/verifiers.py [--temperature 1] [--tokens 128] [--target MODEL --drafter MODEL]
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from foretoken import Engine, SamplingParams, load, tiny_pair, verify
from foretoken.draft import Draft
from foretoken.drafters import DraftModel
from foretoken.verify.base import Verifier
from foretoken.workloads import prompts

VERIFIERS = ("token", "block")
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12)


class Compared(Verifier):
    """Verifies token by token, and notes of each whole draft what each verifier can be expected to accept."""

    name = "compared"
    lossless = True
    trees = False
    summary = "token, and keeps what others would accept"
    citation = "Leviathan et al. 2023, arXiv 2211.17192"

    def __init__(self) -> None:
        self._rule = verify.get("token")
        self.accepted: list[list[list[float]]] = []
        """Of each draft, by verifier and length."""

    def stop_probs(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """See `Verifier`."""
        for row, count in enumerate(draft.counts.tolist()):
            if count == LENGTHS[-1]:  # others were cut by the end of an output
                p = target_probs[row : row + 1].double()
                self.accepted.append([[_expected(name, draft, row, p, n) for n in LENGTHS] for name in VERIFIERS])
        return self._rule.stop_probs(draft, target_probs)

    def next_probs(self, draft: Draft, target_probs: Tensor, node: Tensor) -> Tensor:
        """See `Verifier`."""
        return self._rule.next_probs(draft, target_probs, node)


def _expected(name: str, draft: Draft, row: int, target_probs: Tensor, length: int) -> float:
    """Tokens that a verifier accepts of a draft's first `length` tokens, over its own random numbers."""
    assert draft.probs is not None
    rows = slice(row, row + 1)
    first = Draft.chain(draft.tokens[rows, :length], None, draft.probs[rows, :length].double())
    stops = verify.get(name).stop_probs(first, target_probs[:, : length + 1])
    return float((stops * torch.arange(length + 1)).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", help="default: the shipped pair")
    parser.add_argument("--drafter")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=128, help="of each output")
    parser.add_argument("--repeats", type=int, default=4, help="outputs of each prompt")
    options = parser.parse_args()
    if options.temperature <= 0:
        parser.error("greedy outputs are the same under all: give a temperature above 0")
    if (options.target is None) != (options.drafter is None):
        parser.error("give --target and --drafter, or neither for the shipped pair")
    target, drafter = (load(options.target), load(options.drafter)) if options.target else tiny_pair()
    rule = Compared()
    engine = Engine(target, DraftModel(drafter), rule, LENGTHS[-1], reuse_prefixes=False)
    texts = [item.text for item in prompts.load("builtin")]
    for repeat in range(options.repeats):
        params = [
            SamplingParams(temperature=options.temperature, seed=at, max_new_tokens=options.tokens, ignore_eos=True)
            for at in range(repeat * len(texts), (repeat + 1) * len(texts))
        ]
        for completion in engine.generate(texts, params):
            if completion.error is not None:
                raise completion.error
    accepted = np.array(rule.accepted)
    table = Table("draft tokens", *VERIFIERS, "gain", title=f"Tokens a round, {len(accepted):,} drafts")
    for at, length in enumerate(LENGTHS):
        emitted = 1 + accepted[:, :, at].mean(0)
        table.add_row(str(length), *(f"{one:.2f}" for one in emitted), f"{emitted[-1] / emitted[0] - 1:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
