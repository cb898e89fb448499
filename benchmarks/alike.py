"""How many greedy outputs differ from those of plain decoding alone: in their tokens, and in a bit of their scores.

Prompts are those of the workloads, up to 100 tokens of each, so that outputs of 100 end before `Limits.alike_tokens`.
Each is decoded plainly by itself, and then by other engines of the same target: with drafts, and in batches. "no" in
the column "alike" is with a limit of one token, as runtimes usually are.

    python benchmarks/alike.py [--target DIR --drafter DIR] [--dtype bfloat16] [--limit 12] [--max-new-tokens 100]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.progress import track
from rich.table import Table

from foretoken import Completion, Engine, Limits, SamplingParams, load, tiny_pair_path, workloads

WORKLOADS = ("builtin", "copy_edit")
LONGEST = 100


def differing(found: Sequence[Completion], expected: Sequence[Completion]) -> tuple[int, int]:
    """Of so many outputs, how many have other tokens, and other log-probabilities of them."""
    pairs = list(zip(found, expected, strict=True))
    tokens = sum(one.token_ids != other.token_ids for one, other in pairs)
    return tokens, sum(one.logprobs != other.logprobs for one, other in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(tiny_pair_path() / "target"))
    parser.add_argument("--drafter", default=str(tiny_pair_path() / "drafter"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--limit", type=int, default=12, help="prompts of each workload")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    given = parser.parse_args()
    target = load(given.target, dtype=given.dtype)
    prompts = [
        list(prompt.tokens)
        for name in WORKLOADS
        for prompt in workloads.encode(workloads.load(name)[: given.limit], target.tokenizer, LONGEST)
    ]
    params = SamplingParams(max_new_tokens=given.max_new_tokens, temperature=0.0, logprobs=0, ignore_eos=True)
    table = Table(title=f"Of {len(prompts)} greedy outputs ({target.dtype}), those unlike plain decoding alone")
    for column in ("alike", "drafter", "batch", "in tokens", "in bits"):
        table.add_column(column, justify="right" if column.startswith("in") else "left")
    drafters = {"none": "none", "auto": "auto", "draft model": given.drafter, "both": f"auto,{given.drafter}"}
    for alike, limits in (("no", Limits(alike_tokens=1)), ("yes", Limits())):
        plain = Engine(target, "none", limits=limits, reuse_prefixes=False)
        expected = [plain.generate(prompt, params) for prompt in track(prompts, "plain", transient=True)]
        for label, drafter in drafters.items():
            for size in (1, 8):
                engine = Engine(target, drafter, limits=limits, max_batch_size=size, reuse_prefixes=False)
                groups = [prompts[at : at + size] for at in range(0, len(prompts), size)]
                found = [
                    one for group in track(groups, label, transient=True) for one in engine.generate(group, params)
                ]
                table.add_row(alike, label, str(size), *map(str, differing(found, expected)))
    Console().print(table)


if __name__ == "__main__":
    main()
