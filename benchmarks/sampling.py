"""Time of what a round does with its logits: one row, k = 5, a vocabulary of 128,256."""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from foretoken.draft import Draft
from foretoken.randomness import gumbel, uniforms
from foretoken.sampling import Sampler, SamplingParams, check_finite, draw
from foretoken.sequence import Sequence

NODES, VOCAB_SIZE = 6, 128_256


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Median of wall-clock times."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, NODES, VOCAB_SIZE, generator=generator)
    # A real model's logits fall with the logarithm of the rank: a Zipf-like law with a heavy head.
    ranks = torch.argsort(torch.rand(noise.shape, generator=generator), dim=-1) + 1
    shapes = {"peaked": -1.6 * ranks.log() + 0.5 * noise, "flat": noise}
    draft = Draft.chain(torch.randint(VOCAB_SIZE, (1, NODES - 1), generator=generator))
    tokens = torch.randint(VOCAB_SIZE, (1000,), generator=generator).tolist()

    def report(name: str, call: Callable[[], object]) -> None:
        print(f"{name:58s} {milliseconds(call, arguments.repeats):8.2f} ms")

    settings = {
        "greedy": SamplingParams(temperature=0),
        "temperature 1": SamplingParams(),
        "temperature 0.8": SamplingParams(temperature=0.8),
        "top_k 50": SamplingParams(top_k=50),
        "top_k 50, top_p 0.95, temperature 0.8": SamplingParams(top_k=50, top_p=0.95, temperature=0.8),
        "top_p 0.95": SamplingParams(top_p=0.95),
        "min_p 0.05": SamplingParams(min_p=0.05),
        "repetition_penalty 1.1, 1,000 tokens": SamplingParams(repetition_penalty=1.1),
    }
    for shape, logits in shapes.items():
        for name, params in settings.items():
            sequence = Sequence(tokens, 500, params, 1)
            sampler = Sampler([params], [1], vocab_size=VOCAB_SIZE)
            report(f"{shape}: probabilities, {name}", lambda: sampler.probabilities(logits, [sequence], draft))  # noqa: B023
            report(f"{shape}: picks, {name}", lambda: sampler.picks(logits, [sequence], draft))  # noqa: B023
        for name, warper in {
            "top_k 50": TopKLogitsWarper(50),
            "top_p 0.95": TopPLogitsWarper(0.95),
            "temperature 0.8": TemperatureLogitsWarper(0.8),
        }.items():
            chain = LogitsProcessorList([warper])
            report(f"{shape}: transformers, {name}, and softmax", lambda: chain(None, logits[0]).softmax(-1))  # noqa: B023
    law = shapes["peaked"].softmax(-1)[0]
    seeds, positions = torch.tensor([1]), torch.arange(NODES)[None]
    report("draw, 1 row", lambda: draw(law[:1], uniforms(seeds, positions[:, :1], 0)[0]))
    report("draw, 6 rows", lambda: draw(law, uniforms(seeds, positions, 0)[0]))
    report("gumbel, 6 rows", lambda: gumbel(seeds, positions, VOCAB_SIZE))
    report("check_finite", lambda: check_finite(shapes["flat"]))


if __name__ == "__main__":
    main()
