"""The policy in simulated time on outputs of real models: what a draft model is worth at each of their positions.

A trace is an output of the target with, for each of its tokens, the chance that the draft model's token is accepted
there: the sum of min(p, q), which is 0 or 1 in greedy outputs. While drafts are accepted the draft model sees nothing
but the output, so that traces say how any choice would have gone; in sampled outputs a token that is accepted is taken
to be the one that came. The simulation is that of tests/policy/replay.py.

    python benchmarks/traces.py record TRACES.json --spec-bench FILE --humaneval FILE    of the shipped pair
    python benchmarks/traces.py replay TRACES.json                 default ÷ best fixed and ÷ plain, a useless model too
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from foretoken.policy.costs import ASKED_SECONDS, CALLED_SECONDS, Costs
from policy import prompts_of  # benchmarks/policy.py

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "policy"))
from replay import FIXED, LOOKUP_AT, MODEL_AT, Engine, Machine, Output, fixed

MACHINES = {
    "8.7M": Machine(0.5, 1.5, 0.06, call=0.3, step=0.45, read=0.01),
    "10M, 16 bits": Machine(0.9, 0.45, 0.035, call=0.5, step=0.22, read=0.01, change=0.25, patience=28, free=0.01),
    "10M, 32 bits": Machine(0.9, 0.5, 0.15, call=0.6, step=0.25, read=0.01, change=0.3, patience=28, free=0.01),
    "150M": Machine(0.8, 11.0, 0.35, call=0.8, step=0.8, read=0.02, load=0.1),
    "500M, widths": Machine(1.0, 36.0, 1.2, call=1.5, step=1.2, read=0.03, load=0.1, change=5.0, patience=4),
    "dear drafter": Machine(1.0, 30.0, 1.0, call=1.5, step=9.0, read=0.3),
}
"""Milliseconds: those of 10M are like those of a processor whose passes over it take little but overhead."""
WORKLOADS = ("maths", "code", "copy-edit", "summarising", "chat")
TEMPERATURES = (0.0, 0.7, 1.0)
DRAFTERS = ((MODEL_AT,), (LOOKUP_AT, MODEL_AT))


class Speed(NamedTuple):
    """The default's speed over that of the best fixed choice, and over plain decoding's."""

    best: float
    plain: float


class Cell(NamedTuple):
    """A line of the results."""

    machine: str
    workload: str
    temperature: float
    tokens: int
    drafters: tuple[str, ...]
    useless: bool
    seed: int
    seeded: bool = False


def record(spec_bench: Path | None, humaneval: Path | None, limit: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Traces of the shipped pair."""
    import torch
    from transformers import AutoModelForCausalLM

    import foretoken
    from foretoken import SamplingParams, tiny_pair, tiny_pair_path

    target, _ = tiny_pair()
    scorers = [
        AutoModelForCausalLM.from_pretrained(tiny_pair_path() / part, dtype=torch.float32)
        for part in ("target", "drafter")
    ]
    engine = foretoken.Engine(target, None)
    for workload, temperature in track([*product(WORKLOADS, TEMPERATURES)], "Outputs"):
        for number, prompt in enumerate(prompts_of(workload, target, spec_bench, humaneval, limit)):
            params = SamplingParams(temperature=temperature, max_new_tokens=tokens, ignore_eos=True, seed=100 + number)
            output = engine.generate(prompt, params).token_ids
            whole = torch.tensor([[*prompt, *output]])
            with torch.inference_mode():
                p, q = (scorer(whole).logits[0, len(prompt) - 1 : -1] for scorer in scorers)
            if temperature:
                accepted = torch.minimum((p / temperature).softmax(-1), (q / temperature).softmax(-1)).sum(-1)
            else:
                accepted = (p.argmax(-1) == q.argmax(-1)).float()
            yield {
                "workload": workload,
                "temperature": temperature,
                "prompt": list(prompt),
                "tokens": list(output),
                "accepted": [round(float(one), 2) for one in accepted],
            }


def measure(traces: dict[tuple[str, float], list[dict[str, Any]]], passes: int, cell: Cell) -> Speed:
    """The first requests of a fresh engine, one after the other: each output `passes` times."""
    random, requests = np.random.default_rng(cell.seed), []
    for trace in traces[cell.workload, cell.temperature] * passes:
        accepted = np.array(trace["accepted"][: cell.tokens]) * (not cell.useless)
        right = (random.random(len(accepted)) < accepted).tolist()
        requests.append([Output(trace["prompt"], trace["tokens"][: cell.tokens], right).prepare()])
    machine = MACHINES[cell.machine]
    plain = sum(fixed(machine, requests, MODEL_AT, 0))
    best = min(plain, *(sum(fixed(machine, requests, name, k)) for name in cell.drafters for k in FIXED))
    assumed = _assumed(machine, cell.drafters, random) if cell.seeded else None
    engine = Engine(machine, cell.drafters, seed=cell.seed, error=1.15, reproducible=cell.seeded, assumed=assumed)
    own = sum(map(engine.run, requests))
    return Speed(best / own, plain / own)


def _assumed(machine: Machine, drafters: tuple[str, ...], random: np.random.Generator) -> Costs:
    """What requests with a seed go by: costs of a machine that is as fast as this one within a third or so.

    Plain passes don't go together in these replays, so that rounds cost nothing besides their passes.
    """
    plain = machine.target(1)
    fast, step, position = np.exp(random.normal(0.0, 0.3, 3))
    steps = [machine.step * step / plain if name == MODEL_AT else 0.0 for name in drafters]
    share = (machine.target(9) - plain) / 8.0 / plain * position
    asking, calling = (1e3 * seconds / (plain * fast) for seconds in (ASKED_SECONDS, CALLED_SECONDS))
    return Costs.by_bytes(1.0, steps, share, asking, calling)


def summary(found: dict[Cell, Speed]) -> Table:
    """A line for each set of drafters, of a useful model and of a useless one."""
    table = Table(title="outputs of real models, first requests of an engine", title_justify="left")
    for name in ("drafters", "model", "cells", "÷ best", "least", "below 0.92", "÷ plain", "least", "below 0.98"):
        table.add_column(name, justify="left" if name in ("drafters", "model") else "right")
    for useless, names in product((False, True), DRAFTERS):
        speeds = [speed for cell, speed in found.items() if (cell.useless, cell.drafters) == (useless, names)]
        best, plain = [speed.best for speed in speeds], [speed.plain for speed in speeds]
        table.add_row(
            ", ".join(names),
            "useless" if useless else "as recorded",
            str(len(speeds)),
            f"{exp(fmean(map(log, best))):.3f}",
            f"{min(best):.3f}",
            str(sum(one < 0.92 for one in best)),
            f"{exp(fmean(map(log, plain))):.3f}",
            f"{min(plain):.3f}",
            str(sum(one < 0.98 for one in plain)),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("record", "replay"))
    parser.add_argument("traces", type=Path)
    parser.add_argument("--spec-bench", type=Path, help="its question.jsonl; to record")
    parser.add_argument("--humaneval", type=Path, help="its prompts; to record")
    parser.add_argument("--limit", type=int, default=8, help="outputs of each workload and temperature")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[32, 64, 200], help="of each output; recorded: the most"
    )
    parser.add_argument("--passes", type=int, default=1, help="how often each output is a request of the engine")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seeded", action="store_true", help="requests have seeds: no clock may tell their costs")
    parser.add_argument("--worst", type=int, default=10, help="cells that are listed")
    args = parser.parse_args()
    if args.action == "record":
        made = list(record(args.spec_bench, args.humaneval, args.limit, max(args.tokens)))
        args.traces.write_text(json.dumps(made), encoding="utf-8")
        return
    traces = defaultdict(list)
    for trace in json.loads(args.traces.read_text(encoding="utf-8")):
        traces[trace["workload"], trace["temperature"]].append(trace)
    cells = [
        Cell(machine, *key, tokens, names, useless, seed, args.seeded)
        for machine, key, tokens, names, useless, seed in product(
            MACHINES, traces, args.tokens, DRAFTERS, (False, True), args.seeds
        )
    ]
    with ProcessPoolExecutor() as pool:
        speeds = pool.map(partial(measure, dict(traces), args.passes), cells, chunksize=8)
        found = dict(zip(cells, track(speeds, "Replays", total=len(cells)), strict=True))
    console = Console(width=140)
    console.print(summary(found))
    for cell, speed in sorted(found.items(), key=lambda pair: pair[1])[: args.worst]:
        console.print(f"{speed.best:.3f}  ÷ plain {speed.plain:.2f}  {cell}", highlight=False)


if __name__ == "__main__":
    main()
