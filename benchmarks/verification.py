"""Time from logits to tokens, against transformers' logits processors and its `_speculative_sampling`.

One row (and sixteen), k = 5, a vocabulary of 128,256. Input: the drafter's logits that its tokens were drawn from, and
the target's raw logits; output: the round's tokens. Both sides do the same work on the same numbers, in turns; medians
in milliseconds, and ratios. transformers verifies one row at a time, so that sixteen rows are a loop there.

Run with: python benchmarks/verification.py [--threads 2] [--repeats 30]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.utils import _speculative_sampling

from foretoken import SamplingParams, verify
from foretoken.draft import Draft
from foretoken.engine.verification import decide_batch
from foretoken.randomness import Stream, uniforms
from foretoken.sampling import Sampler, draw
from foretoken.sequence import Sequence

VOCAB_SIZE = 128_256
K = 5

SETTINGS = {
    "plain": (SamplingParams(), []),
    "top_k 50": (SamplingParams(top_k=50), [TopKLogitsWarper(50)]),
    "top_p 0.95": (SamplingParams(top_p=0.95), [TopPLogitsWarper(0.95)]),
}


def logits_of(shape: str, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Target ``[B, K+1, V]`` and drafter ``[B, K, V]`` logits that are about as similar as a real pair's."""
    size = (rows, K + 1, VOCAB_SIZE)
    if shape == "flat":
        target = torch.randn(size, generator=generator)
    else:
        # A real model's logits fall with the logarithm of the rank; this distribution has an entropy of some two nats.
        ranks = torch.rand(size, generator=generator).argsort(-1) + 1
        target = -2.2 * ranks.log()
    return target, target[:, :K] + 0.5 * torch.randn((rows, K, VOCAB_SIZE), generator=generator)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)
    table = Table("rows", "logits", "parameters", "transformers", "token", "ratio", "block", "block / token")
    for rows in (1, 16):
        for shape in ("peaked", "flat"):
            target, raw = logits_of(shape, rows, generator)
            for name, (params, processors) in SETTINGS.items():
                times = _case(
                    params, LogitsProcessorList(processors), target, raw, arguments.repeats // (rows // 8 or 1)
                )
                theirs, token, block = times
                table.add_row(
                    str(rows),
                    shape,
                    name,
                    f"{theirs:.2f}",
                    f"{token:.2f}",
                    f"{theirs / token:.1f}",
                    f"{block:.2f}",
                    f"{block / token:.2f}",
                )
    Console(width=110).print(table)


def _case(
    params: SamplingParams, processors: LogitsProcessorList, target: Tensor, raw: Tensor, repeats: int
) -> list[float]:
    rows = target.shape[0]
    sequences = [Sequence([1, 2, 3], 3, params, seed) for seed in range(rows)]
    sampler = Sampler([params] * rows, list(range(rows)), vocab_size=VOCAB_SIZE)
    q = torch.cat([sampler.probabilities(raw[:, i : i + 1], sequences, Draft.empty(rows)) for i in range(K)], dim=1)
    positions = sampler.positions(sequences)[:, None].expand(-1, K)
    tokens = draw(q, uniforms(sampler.seeds, positions, Stream.DRAFT + torch.arange(K)))
    # transformers takes the drafter's processed logits and computes q from them; so does our side here, by a softmax.
    # The memory of q belongs to a drafter, which reuses it in every round, so that it is not allocated here.
    drafted_logits, memory = q.log(), torch.empty_like(q)

    def ours(name: str) -> Callable[[], object]:
        verifier = verify.get(name)

        def call() -> object:
            draft = Draft.chain(tokens, probs=torch.softmax(drafted_logits, -1, out=memory))
            return decide_batch(verifier, sampler, sequences, draft, target).tokens.tolist()

        return call

    def theirs() -> object:
        result = []
        for row in range(rows):
            scores = target[row : row + 1]
            if processors:
                scores = scores.clone()
                for i in range(K + 1):
                    scores[:, i] = processors(tokens[row : row + 1, :i], scores[:, i])
            accepted, count = _speculative_sampling(tokens[row : row + 1], drafted_logits[row : row + 1], K, scores)
            result.append((accepted.tolist(), int(count)))
        return result

    return _interleaved([theirs, ours("token"), ours("block")], repeats)


def _interleaved(calls: list[Callable[[], object]], repeats: int) -> list[float]:
    """Medians in milliseconds; the calls take turns, so that a slow phase of the machine affects all of them."""
    seconds: list[list[float]] = [[] for _ in calls]
    order = list(zip(calls, seconds, strict=True))
    with torch.inference_mode():
        for turn in range(repeats + 2):
            # Later calls find the logits in the processor's cache: each call is first, second and third in turn.
            order.append(order.pop(0))
            for call, times in order:
                start = time.perf_counter()
                call()
                if turn >= 2:
                    times.append(time.perf_counter() - start)
    return [1e3 * median(times) for times in seconds]


if __name__ == "__main__":
    main()
