"""Mean acceptance length of the shipped pair's best trees against its best chains, at equal node budgets.

Temperature 1, verifier `traversal` (block verification on chains). Trees are drawn without replacement; their shapes
are optimal for acceptance rates measured on other prompts. The results do not depend on the machine's speed.

Run with: python benchmarks/trees.py --data DIR [--out DIR], DIR as for recipes/tiny_pair/train.py; the plot needs
matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from foretoken import Completion, Engine, SamplingParams, tiny_pair
from foretoken.drafters import DraftModel
from foretoken.drafters.shapes import AcceptanceTable
from foretoken.drafters.tree_plan import TreePlan
from foretoken.tune.acceptance_table import measure_acceptance

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes" / "tiny_pair"))
from data import encode, load_sources
from distill import prompts_from

BUDGETS = (8, 12, 16, 24, 32)
CHAINS = (5, 8, 12, 16, 24, 32)
DEPTH = 12
SEED = 11


@dataclass
class Run:
    """Emitted tokens and rounds, one entry for each prompt."""

    emitted: np.ndarray
    rounds: np.ndarray

    @classmethod
    def of(cls, completions: list[Completion]) -> Run:
        """The run that gave these completions."""
        return cls(*(np.array([getattr(c.stats, name) for c in completions], float) for name in ("emitted", "rounds")))

    @property
    def length(self) -> float:
        """Mean acceptance length."""
        return float(self.emitted.sum() / self.rounds.sum())

    @property
    def influence(self) -> np.ndarray:
        """Influence of each prompt on the mean, a ratio of sums: the sum of their squares is the mean's variance."""
        return (self.emitted - self.length * self.rounds) / self.rounds.sum()

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return float(np.sqrt((self.influence**2).sum()))

    def error_of_difference(self, other: Run) -> float:
        """Standard error of the difference from a run on the same prompts."""
        return float(np.sqrt(((self.influence - other.influence) ** 2).sum()))


def main() -> None:
    """Measure, print a table, write it and a plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("benchmarks"))
    parser.add_argument("--prompts", type=int, default=24, help="of each of four kinds of text")
    parser.add_argument("--tokens", type=int, default=128, help="a prompt")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target, model = tiny_pair()
    drafter = DraftModel(model)
    tests, others = _prompts(arguments.data, target.tokenizer, arguments.prompts)
    params = SamplingParams(max_new_tokens=arguments.tokens, ignore_eos=True)
    rates = measure_acceptance(target, drafter, others, params, depth=DEPTH, max_batch_size=8)
    runs: dict[str, dict[int, Run]] = {"chain": {}, "tree": {}}
    plans = [("chain", size, TreePlan()) for size in CHAINS]
    plans += [("tree", size, TreePlan(rates, depth=DEPTH)) for size in BUDGETS]
    for kind, size, drafter.tree in plans:
        engine = Engine(target, drafter, "traversal", size, max_batch_size=16, reuse_prefixes=False)
        seeded = [replace(params, seed=SEED + number) for number in range(len(tests))]
        runs[kind][size] = Run.of(engine.generate(tests, seeded))
        print(f"{kind} of {size}: {runs[kind][size].length:.3f} ± {runs[kind][size].error:.3f}", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    result = _compare(runs, rates)
    (arguments.out / "trees.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    _print(result)
    _plot(result, arguments.out / "trees.svg")


def _prompts(data: Path, tokenizer, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts to compare on, and others to measure acceptance rates on, all from held-out text."""
    tests, others = [], []
    for source in load_sources(data):
        documents = encode(tokenizer, source.held_out)
        random = np.random.default_rng(SEED)
        tests += [prompt.tolist() for prompt in prompts_from(documents[::2], count, tokenizer, random)]
        others += [prompt.tolist() for prompt in prompts_from(documents[1::2], count // 2, tokenizer, random)]
    return tests, others


def _compare(runs: dict[str, dict[int, Run]], rates: AcceptanceTable) -> dict:
    rows = []
    for budget, tree in runs["tree"].items():
        length, chain = max(
            ((k, run) for k, run in runs["chain"].items() if k <= budget), key=lambda pair: pair[1].length
        )
        shape = TreePlan(rates, depth=DEPTH).fitting(budget, DEPTH)
        rows.append(
            {
                "budget": budget,
                "tree": tree.length,
                "tree_error": tree.error,
                "chain": chain.length,
                "chain_error": chain.error,
                "chain_length": length,
                "difference": tree.length - chain.length,
                "difference_error": tree.error_of_difference(chain),
                "depth": shape.depth,
                "children_of_the_root": len(shape.children[0]),
                "expected": rates.expected(shape),
            }
        )
    chains = {k: [run.length, run.error] for k, run in runs["chain"].items()}
    return {
        "budgets": rows,
        "chains": chains,
        "rates": rates.rates,
        "rounds": int(runs["tree"][BUDGETS[0]].rounds.sum()),
    }


def _print(result: dict) -> None:
    table = Table("nodes", "tree", "best chain", "its length", "difference", "tree: depth, children of the root")
    table.title = "mean acceptance length ± standard error, temperature 1"
    for row in result["budgets"]:
        table.add_row(
            str(row["budget"]),
            f"{row['tree']:.3f} ± {row['tree_error']:.3f}",
            f"{row['chain']:.3f} ± {row['chain_error']:.3f}",
            str(row["chain_length"]),
            f"{row['difference']:+.3f} ± {row['difference_error']:.3f}",
            f"{row['depth']}, {row['children_of_the_root']}",
        )
    Console(width=120).print(table)


def _plot(result: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    rows, chains = result["budgets"], result["chains"]
    axes.errorbar(
        [row["budget"] for row in rows],
        [row["tree"] for row in rows],
        [row["tree_error"] for row in rows],
        marker="o",
        capsize=3,
        label="best tree",
    )
    axes.errorbar(
        list(chains), *zip(*chains.values(), strict=True), marker="s", capsize=3, label="chain", color="tab:gray"
    )
    axes.set(xlabel="drafted tokens a round", ylabel="mean acceptance length", xlim=(0, None))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
