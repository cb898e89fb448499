"""Tokens per second of the shipped pair, alone and with each drafter, in turns; medians and ratios of one run.

Run with: python benchmarks/pair.py [--repeats 3] [--threads 2]
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from foretoken import DecodeStats, Engine, SamplingParams, tiny_pair

QUESTIONS = (
    "A baker sells 12 loaves in the morning and half as many in the afternoon. Each costs $3. How much does he earn?",
    "Mia reads 15 pages a day. Her book has 180 pages, and she has read a quarter of it. How many days are left?",
)
TEXTS = (
    'def write_table(rows, path):\n    """Write rows to a file.',
    "Fellow citizens of the Senate and of the House of Representatives:\n",
    "GLOUCESTER:\nMy gracious lord,",
)
TOKENS = 96


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    start = time.perf_counter()
    target, drafter = tiny_pair()
    print(f"both models loaded in {time.perf_counter() - start:.2f} s (imports not counted)")
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS] + list(TEXTS)
    engines = {"none": Engine(target, reuse_prefixes=False)}
    engines |= {
        f"draft-model, k = {k}": Engine(target, drafter, num_speculative_tokens=k, reuse_prefixes=False)
        for k in (2, 3, 4, 5)
    }
    engines |= {name: Engine(target, name, reuse_prefixes=False) for name in ("prompt-lookup", "ngram-storage")}
    for temperature in (0.0, 1.0):
        runs: dict[str, list[float]] = {name: [] for name in engines}
        stats: dict[str, DecodeStats] = {}
        for repeat in range(arguments.repeats + 1):
            for name, engine in engines.items():
                total = DecodeStats()
                for seed, prompt in enumerate(prompts):
                    params = SamplingParams(temperature=temperature, seed=seed, max_new_tokens=TOKENS, ignore_eos=True)
                    total = DecodeStats.total([total, engine.generate(prompt, params).stats])
                stats[name] = total
                if repeat:  # the first turn warms up
                    runs[name].append(total.tokens_per_second)
        _print(temperature, runs, stats)


def _print(temperature: float, runs: dict[str, list[float]], stats: dict[str, DecodeStats]) -> None:
    table = Table(
        "drafter", "tokens/s", "ratio", "mean acceptance length", "ms a round: drafter, target, verify, other"
    )
    table.title = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    alone = median(runs["none"])
    for name, speeds in runs.items():
        one = stats[name]
        parts = ", ".join(f"{1e3 * seconds / one.rounds:.2f}" for seconds in one.seconds.values())
        speed = median(speeds)
        table.add_row(name, f"{speed:.0f}", f"{speed / alone:.2f}", f"{one.mean_acceptance_length:.2f}", parts)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
