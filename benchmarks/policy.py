"""The policy against every fixed choice, on real engines: the default's speed over the best fixed draft length.

Every setting is an engine of its own on the same loaded models; settings take turns request by request, in an order
that is drawn anew for each, so that other work on the machine slows all of them alike. The default starts with an empty
cost store, as a first process does; its first request is measured too. Speeds are of the rounds: before a call is timed
its engine has prefilled the prompts, so that the first setting does not pay alone for a width of passes that the
runtime has not seen. What the default's first call takes besides, to calibrate, is a column of its own.

"÷ best" is the default over the setting that turned out fastest. Of eight settings whose times vary by chance, the
fastest one was lucky: even a default that always took the best one would fall short. "held out" is free of that: the
setting that was fastest in every second call, against the default in the other calls, both ways.

Tables, one command each:

    python benchmarks/policy.py fixed --drafters lookup suffix DRAFT_MODEL …   default ÷ best fixed, ÷ plain
    python benchmarks/policy.py first --drafters …                            the first six requests of 64 tokens
    python benchmarks/policy.py overhead                                      what a choice costs, in microseconds

Workloads but copy-edit and random are read from files: name them with ``--spec-bench`` and ``--humaneval``.

``--quick`` takes two workloads, one length and two draft lengths. ``--ready`` warms all engines up first, as a service
does.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from random import Random
from statistics import fmean, median
from time import perf_counter, thread_time
from typing import Any

from rich.console import Console
from rich.table import Table

from foretoken import Engine, SamplingParams, load, tiny_pair, workloads
from foretoken.drafters import Cascade, DraftModel, PromptLookup
from foretoken.models import LanguageModel
from foretoken.policy.request import Offer, Row

FIXED = (1, 2, 3, 5, 8, 12, 16)
DEFAULT, PLAIN = "auto", 0
CATEGORIES = {
    "maths": "math_reasoning",
    "summarising": "summarization",
    "retrieval": "rag",
    "chat": "writing",
}
RANDOM = "random"  # prompts of random tokens: no drafter is of use


@dataclass(frozen=True)
class Cell:
    """A line of a table."""

    drafter: str
    workload: str
    temperature: float
    batch: int
    tokens: int


def prompts_of(
    name: str, target: LanguageModel, spec_bench: Path | None, humaneval: Path | None, limit: int
) -> list[Any]:
    """Token ids of some prompts of a workload."""
    if name == RANDOM:
        import torch

        made = torch.Generator().manual_seed(1)
        return [torch.randint(5, target.vocab_size, (64,), generator=made).tolist() for _ in range(limit)]
    if name == "code":
        items = workloads.load("humaneval", humaneval)[:limit]
    elif name == "copy-edit":
        items = workloads.load("copy_edit")[:limit]
    else:
        items = workloads.select(workloads.load("spec_bench", spec_bench), limit, [CATEGORIES[name]])
    return [list(prompt.tokens) for prompt in workloads.encode(items, target.tokenizer, 300)]


def race(
    target: LanguageModel,
    drafter: Any,
    cell: Cell,
    prompts: Sequence[Any],
    lengths: Sequence[int],
    passes: int,
    ready: bool,
) -> tuple[dict[int | str, list[float]], float]:
    """Seconds of each call's rounds, by setting, which take turns; and of the default's first call besides."""
    settings: list[int | str] = [PLAIN, *lengths, DEFAULT]
    engines = {k: Engine(target, drafter(), num_speculative_tokens=k) for k in settings}
    params = SamplingParams(temperature=cell.temperature, max_new_tokens=cell.tokens, ignore_eos=True)
    warm = SamplingParams(temperature=cell.temperature, max_new_tokens=20, ignore_eos=True)
    for k in settings:
        if ready:
            engines[k].warm_up(params)
        elif k != DEFAULT:  # its calibration is measured
            engines[k].generate([prompts[0]] * cell.batch, warm)
    seconds: dict[int | str, list[float]] = {k: [] for k in settings}
    besides = 0.0
    order, prefill = Random(1), replace(params, max_new_tokens=1)
    for number in range(passes * len(prompts)):
        rows = [prompts[(number + row) % len(prompts)] for row in range(cell.batch)]
        for k in order.sample(settings, len(settings)):
            engines[k].generate(rows, prefill)
            start = perf_counter()
            completions = engines[k].generate(rows, params)
            whole = perf_counter() - start
            seconds[k].append(max(sum(one.stats.seconds.values()) for one in completions))
            if k == DEFAULT and not number:
                besides = whole - seconds[k][0]
            engines[k].release()
    return seconds, besides


def best_fixed(seconds: dict[int | str, list[float]], calls: slice) -> tuple[int | str, float]:
    """The fixed setting with the smallest sum, and the sum."""
    sums = {k: sum(each[calls]) for k, each in seconds.items() if k != DEFAULT}
    best = min(sums, key=sums.__getitem__)
    return best, sums[best]


def held_out(seconds: dict[int | str, list[float]], calls: slice) -> float:
    """The default over the best fixed setting, which is chosen by one half of the calls and measured on the other."""
    numbers = range(len(seconds[DEFAULT]))[calls]
    best, own = 0.0, 0.0
    for first in (0, 1):
        chosen, _ = best_fixed({k: [each[at] for at in numbers[first::2]] for k, each in seconds.items()}, slice(None))
        measured = numbers[1 - first :: 2]
        best += sum(seconds[chosen][at] for at in measured)
        own += sum(seconds[DEFAULT][at] for at in measured)
    return best / own


def table_of(found: dict[Cell, tuple[dict[int | str, list[float]], float]], calls: slice, title: str) -> Table:
    """A line a cell: default over plain and over the best fixed choice, and the spread over calls."""
    table = Table(title=title, title_justify="left")
    names = (
        "drafter",
        "workload",
        "T",
        "batch",
        "tokens",
        "best k",
        "÷ plain",
        "÷ best",
        "held out",
        "median",
        "spread",
        "besides",
    )
    for name in names:
        table.add_column(name, justify="left" if name in ("drafter", "workload") else "right")
    over_best, over_plain, fairly = [], [], []
    for cell, (seconds, besides) in found.items():
        best, least = best_fixed(seconds, calls)
        own, plain = sum(seconds[DEFAULT][calls]), sum(seconds[PLAIN][calls])
        each = sorted(a / b for a, b in zip(seconds[best][calls], seconds[DEFAULT][calls], strict=True))
        over_best.append(least / own)
        over_plain.append(plain / own)
        fairly.append(held_out(seconds, calls))
        table.add_row(
            Path(cell.drafter).name,
            cell.workload,
            f"{cell.temperature:g}",
            str(cell.batch),
            str(cell.tokens),
            str(best),
            f"{plain / own:.2f}",
            f"{least / own:.2f}",
            f"{fairly[-1]:.2f}",
            f"{median(each):.2f}",
            f"{each[len(each) // 4]:.2f}–{each[-1 - len(each) // 4]:.2f}",
            f"{besides:.2f} s",
        )
    columns = over_plain, over_best, fairly
    table.add_row("geometric mean", *[""] * 5, *(f"{exp(fmean(map(log, column))):.3f}" for column in columns))
    table.add_row("least", *[""] * 5, *(f"{min(column):.3f}" for column in columns))
    return table


def overhead(console: Console) -> None:
    """Processor time of a choice in microseconds, by batch size."""
    table = Table(title="a choice, in µs", title_justify="left")
    for name in ("drafters", "batch", "choose"):
        table.add_column(name)
    target, drafter = tiny_pair()
    for drafters in ([PromptLookup()], [DraftModel(drafter)], [PromptLookup(), DraftModel(drafter)]):
        cascade = Cascade(drafters)
        cascade.check_target(target)
        for batch in (1, 4, 16):
            policy, spent, rounds = cascade.policy, 0.0, 400
            requests = [policy.open(sampled=False) for _ in range(batch)]
            for number in range(rounds):
                offers = [Offer(0, 16, 1 + number % 8)] if cascade.free[0] else []
                rows = [Row(request, 100, [0] * len(drafters), offers) for request in requests]
                start = thread_time()
                policy.choose(rows)
                spent += thread_time() - start
                for row in rows:
                    for offer in row.offers:
                        policy.judge(row.request, 0, 1 + number % 4, number % 4, offer.match)
                positions = batch + sum(row.chosen.tokens for row in rows)
                policy.lessons.learn(rows, [1 + number % 4] * batch, positions, [], 0.002)
            table.add_row(",".join(one.name for one in drafters), str(batch), f"{spent / rounds * 1e6:.0f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=("fixed", "first", "overhead"))
    parser.add_argument("--target", help="a folder; the shipped one by default")
    parser.add_argument("--drafters", nargs="+", default=["lookup", "prompt-lookup"], help="names or folders of models")
    parser.add_argument("--workloads", nargs="+", default=["maths", "code", "chat", RANDOM])
    parser.add_argument("--spec-bench", type=Path, help="its question.jsonl")
    parser.add_argument("--humaneval", type=Path, help="its prompts")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--tokens", nargs="+", type=int, default=[32, 128, 512])
    parser.add_argument("--limit", type=int, default=6, help="prompts of each workload")
    parser.add_argument("--passes", type=int, default=2, help="over the prompts")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ready", action="store_true", help="engines are warmed up first, as those of a service are")
    args = parser.parse_args()
    console = Console(width=140)
    if args.table == "overhead":
        overhead(console)
        return
    lengths = FIXED
    if args.quick:
        args.workloads, args.tokens, args.batches = args.workloads[:2], [64], args.batches[:1]
        args.temperatures, lengths = args.temperatures[:1], (2, 5)
    for name in args.workloads:  # before models are loaded
        if name in CATEGORIES and args.spec_bench is None:
            parser.error(f"workload {name} needs Spec-Bench's questions: name them with --spec-bench FILE")
        if name == "code" and args.humaneval is None:
            parser.error("workload code needs HumanEval's prompts: name them with --humaneval FILE")
    first = args.table == "first"
    if first:
        args.tokens, args.passes, args.limit = [64], 1, 6
    shipped, draft = tiny_pair(dtype=args.dtype)
    target = shipped if args.target is None else load(args.target, dtype=args.dtype)
    found: dict[Cell, tuple[dict[int | str, list[float]], float]] = {}
    for name in args.workloads:
        prompts = prompts_of(name, target, args.spec_bench, args.humaneval, args.limit)
        for drafter in args.drafters:
            for temperature in args.temperatures:
                for batch in args.batches:
                    for tokens in args.tokens:
                        cell = Cell(drafter, name, temperature, batch, tokens)
                        with tempfile.TemporaryDirectory() as folder:
                            os.environ["FORETOKEN_CACHE"] = folder
                            make = (lambda: draft) if drafter == "draft-model" else (lambda drafter=drafter: drafter)
                            found[cell] = race(target, make, cell, prompts, lengths, args.passes, args.ready)
                        console.print(table_of({cell: found[cell]}, slice(None), ""))
    calls = slice(0, 6) if first else slice(None)
    console.print(table_of(found, calls, "first six requests" if first else "default against fixed draft lengths"))


if __name__ == "__main__":
    main()
