"""Time of a draft by `suffix`, by the length of the sequence, and the memory of its automaton.

The sequence grows by four tokens before each draft of sixteen, as in a round that accepts three; times include adding
them to the automaton. Medians and 99th percentiles in microseconds: of the automaton alone (adding tokens, and finding
the chain or tree), and of the whole `propose` call, which also makes tensors. `code` is this package's source in the
shipped pair's tokens, `random` draws tokens from a Zipf distribution, `periodic` repeats fifty tokens.

Run with: python benchmarks/suffix.py [--rounds 500]
"""

from __future__ import annotations

import argparse
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

import foretoken
from foretoken import SamplingParams
from foretoken.drafters import Batch, Suffix
from foretoken.drafters.automaton import ROOT, SuffixAutomaton
from foretoken.sampling import Sampler
from foretoken.sequence import Sequence

LENGTHS = (1_000, 10_000, 100_000)
NEW = 4
NODES = 16


def sequences(length: int) -> dict[str, list[int]]:
    """Tokens of each kind, at least that many."""
    package = Path(foretoken.__file__).parent
    source = "".join(file.read_text(encoding="utf-8") for file in sorted(package.rglob("*.py")))
    tokenizer = AutoTokenizer.from_pretrained(package / "assets" / "tiny_pair" / "target")
    generator = random.Random(0)
    return {
        "code": tokenizer(source, verbose=False)["input_ids"],
        "random": [int(generator.paretovariate(1.0)) for _ in range(length)],
        "periodic": list(range(50)) * (length // 50 + 1),
    }


def bytes_per_token(tokens: list[int]) -> float:
    """Memory of the automaton, as counted by the allocator."""
    tracemalloc.start()
    automaton, end = SuffixAutomaton(), ROOT
    for token in tokens:
        end = automaton.append(end, token)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used / len(tokens)


def automaton_alone(tokens: list[int], length: int, trees: bool, rounds: int) -> list[float]:
    """Microseconds of each round."""
    automaton, end = SuffixAutomaton(), ROOT
    for token in tokens[:length]:
        end = automaton.append(end, token)
    position = length

    def call() -> None:
        nonlocal end, position
        for token in tokens[position : position + NEW]:
            end = automaton.append(end, token)
        position += NEW
        state, match = automaton.context(end)
        if trees:
            automaton.tree(state, match, NODES)
        else:
            automaton.chain(state, NODES)

    return timed(call, rounds)


def whole_call(tokens: list[int], length: int, trees: bool, rounds: int) -> list[float]:
    """Microseconds of each `propose`."""
    params = SamplingParams(temperature=0.0)
    sequence = Sequence(tokens[:length], length, params, 0)
    sampler = Sampler([params], [0], vocab_size=1 << 30)
    batch = Batch([sequence], sampler, sampler.seeds, sampler.positions([sequence]), 1 << 30, (False,), (trees,))
    drafter = Suffix(growth=NODES)
    drafter.propose(batch, [NODES])
    times = []
    for _ in range(rounds):
        position = len(sequence.tokens)
        sequence.tokens.extend(tokens[position : position + NEW])
        times += timed(lambda: drafter.propose(batch, [NODES]), 1)
    return times


def timed(call: Callable[[], object], times: int) -> list[float]:
    """Microseconds of each call."""
    result = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        result.append(1e6 * (time.perf_counter() - start))
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    table = Table("sequence", "tokens", "bytes a token", "chain", "tree", "propose, chain", "propose, tree")
    for name, tokens in sequences(max(LENGTHS) + rounds * NEW).items():
        for length in LENGTHS:
            cells = []
            for measure in (automaton_alone, whole_call):
                for trees in (False, True):
                    times = measure(tokens, length, trees, rounds)
                    cells.append(f"{median(times):.0f} / {quantiles(times, n=100)[-1]:.0f}")
            table.add_row(name, f"{length:,}", f"{bytes_per_token(tokens[:length]):.0f}", *cells)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
