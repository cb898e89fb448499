"""A GGUF file on both runners in turns: is the one that `runner="auto"` takes the faster one?

All engines live in one process and continue the same prompts in turns, so that a slow phase of the machine affects all;
tokens a second, prompt included, medians over prompts and repeats. A draft model is loaded as `Engine` loads it. Each
engine writes one output before the first that counts. With ``--checkpoint`` the native runner takes the checkpoint of
the file instead, rounded in its own way: what does one gain who has no file?

Run with: python benchmarks/gguf_runners.py FILE [--drafter FILE] [--tokens 96] [--repeats 3] [--threads 2]
    [--checkpoint FOLDER --quantize int4]
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter

import torch

from foretoken import Engine, SamplingParams, load, workloads
from foretoken.models import LanguageModel
from foretoken.models.native import NativeModel

RUNNERS = ("native", "gguf")


def runner_of(model: LanguageModel) -> str:
    """Which of `RUNNERS` it is."""
    return "native" if isinstance(model, NativeModel) else "gguf"


def main() -> None:
    """Measure one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--drafter", help="a draft model")
    parser.add_argument("--checkpoint", help="what the native runner takes in place of the file")
    parser.add_argument("--quantize", help="how the checkpoint is rounded")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.checkpoint is None:
        print(f"runner='auto' takes {runner_of(load(given.file))}")
        native = load(given.file, runner="native")
    else:
        native = load(given.checkpoint, runner="native", dtype="float32", quantize=given.quantize)
    targets = {
        "native": native,
        "gguf": load(given.file, runner="gguf", n_threads=given.threads),
    }
    drafters = [None, "auto", *([["auto", given.drafter]] if given.drafter else [])]
    items = workloads.select(workloads.load("builtin"), 1, ("code", "prose"))
    prompts = [prompt.tokens for prompt in workloads.encode(items, targets["gguf"].tokenizer, 1_000)]
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_new_tokens=given.tokens, ignore_eos=True)
        for drafter in drafters:
            engines = {name: Engine(targets[name], drafter, reuse_prefixes=False) for name in RUNNERS}
            rates: dict[str, list[float]] = {name: [] for name in RUNNERS}
            for engine in engines.values():
                engine.generate(prompts[0], params)
            for repeat in range(given.repeats):
                for prompt in prompts:
                    for name in RUNNERS[:: 1 if repeat % 2 else -1]:
                        start = perf_counter()
                        engines[name].generate(prompt, params)
                        rates[name].append(given.tokens / (perf_counter() - start))
            found = {name: median(each) for name, each in rates.items()}
            words = ", ".join(f"{name} {rate:.1f}" for name, rate in found.items())
            label = {0: "plain", 1: "auto", 2: "auto and draft model"}[drafters.index(drafter)]
            print(f"T={temperature:g} {label}: {words} tokens/s; the fastest is {max(found, key=found.__getitem__)}")


if __name__ == "__main__":
    main()
