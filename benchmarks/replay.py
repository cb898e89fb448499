"""The policy in simulated time: its speed over the best fixed choice's, over machines, workloads and lengths of output.

Nothing is measured but the choice: outputs and machines are those of tests/policy/replay.py, costs are given, and the
policy sees them with noise and with a calibration that errs by 15%. Outputs are made from seeds; no constant of the
policy was set on the default ones.

    python benchmarks/replay.py                 default ÷ best fixed and ÷ plain, and the worst cells
    python benchmarks/replay.py --nearly        machines where a model nearly pays, and models that are mostly right
    python benchmarks/replay.py --constants     the same with each tuned constant halved and doubled
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from foretoken.engine.rehearsal import TOKENS

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "policy"))
from replay import FIXED, LOOKUP_AT, MODEL_AT, Engine, Machine, fixed, outputs

MACHINES = {
    "8.7M": Machine(0.5, 1.5, 0.06, call=0.3, step=0.45, read=0.01),
    "150M": Machine(0.8, 11.0, 0.35, call=0.8, step=0.8, read=0.02, load=0.1),
    "500M": Machine(1.0, 36.0, 1.2, call=1.5, step=1.2, read=0.03, load=0.1),
    "kernel at 6": Machine(1.0, 20.0, 1.5, call=1.5, step=1.2, read=0.03, kernel=6),
    "arithmetic": Machine(0.5, 2.0, 0.1, call=0.5, step=0.5, read=0.01, arithmetic=0.43),
    "dear drafter": Machine(1.0, 30.0, 1.0, call=1.5, step=9.0, read=0.3),
    "8.7M, widths": Machine(0.5, 1.5, 0.06, call=0.3, step=0.45, read=0.01, change=1.2, patience=28, free=0.01),
    "500M, widths": Machine(1.0, 36.0, 1.2, call=1.5, step=1.2, read=0.03, load=0.1, change=5.0, patience=4),
    "10M, together": Machine(0.0, 2.1, 0.15, call=0.5, step=0.55, read=0.04, free=0.04, apart=1.1),
    "10M, together, widths": Machine(
        0.0, 0.7, 0.03, call=0.2, step=0.25, read=0.01, free=0.015, apart=0.4, change=0.9, patience=28, back=1.0
    ),
    "GPU": Machine(2.0, 12.0, 0.02, call=1.0, step=2.2, read=0.001, noise=0.03),
}
"""Milliseconds, assumed: ratios like those of such targets on a processor, and of a GPU."""

_TEN = Machine(
    0.0, 1.6, 0.2, call=0.5, step=0.35, read=0.02, noise=0.15, change=0.6, patience=28, free=0.03, apart=0.3, back=0.5
)

NEARLY = {
    "10M": _TEN,
    "10M, not warmed up": replace(_TEN, weights=1.8, call=0.6, step=0.5, read=0.03, change=3.0, apart=0.55),
    "10M, fast": Machine(
        0.0, 0.62, 0.08, call=0.2, step=0.12, read=0.01, free=0.02, apart=0.3, change=0.4, patience=28, back=0.3
    ),
    "1B": Machine(2.0, 80.0, 3.0, call=2.0, step=6.0, read=0.1, noise=0.05),
    "dear drafter": Machine(1.0, 20.0, 1.0, call=2.0, step=5.0, read=0.2),
}
"""Likewise: the first two by what the shipped pair's rounds took on a processor, the third on a faster one."""

MOSTLY_RIGHT = (
    ("code", 0.9),
    ("code", 0.75),
    ("answer", 0.85),
    ("answer", 0.7),
    ("chat", 0.6),
    ("chat", 0.5),
    ("random", 0.3),
    ("random", 0.0),
)
"""Kinds of output beside these machines, and how often the draft model is right."""

WORKLOADS = (
    ("copy", 0.0),
    ("copy", 0.5),
    ("code", 0.0),
    ("code", 0.6),
    ("period", 0.0),
    ("period", 0.85),
    ("chat", 0.35),
    ("chat", 0.7),
    ("random", 0.0),
)
"""Kinds of output, and how often the draft model is right."""

ELSEWHERE = 0.12
"""Standard deviation of how often a model is right in what it rehearses, about how often it is right in requests: these
are about something else."""

DRAFTERS = ((LOOKUP_AT,), (MODEL_AT,), (LOOKUP_AT, MODEL_AT))
REQUESTS = 6

CONSTANTS = {
    "account": ("CREDIT", "LOOKS", "PACE", "_FIRST_LOOK"),
    "acceptance": ("KIND_WEIGHT", "LEVEL_WEIGHT", "REQUEST_WEIGHT", "ENGINE_MEMORY", "REQUEST_MEMORY"),
    "lines": ("_OUTLIER", "_STEADY"),
}


class Cell(NamedTuple):
    """A line of the table."""

    drafters: str
    machine: str
    workload: str
    right: float
    batch: int
    tokens: int
    seed: int


class Speed(NamedTuple):
    """The default's speed over that of the best fixed choice, and over plain decoding's."""

    best: float
    plain: float


def cells(lengths: list[int], sizes: list[int], seeds: list[int], *, nearly: bool = False) -> Iterator[Cell]:
    """All cells; `nearly` those of `NEARLY` and `MOSTLY_RIGHT`."""
    for seed in seeds:
        for machine in NEARLY if nearly else MACHINES:
            for workload, right in MOSTLY_RIGHT if nearly else WORKLOADS:
                for size in sizes:
                    for length in lengths:
                        for names in DRAFTERS:
                            yield Cell(",".join(names), machine, workload, right, size, length, seed)


def measure(cell: Cell, machines: Mapping[str, Machine] = MACHINES, *, reads: bool = True) -> Speed:
    """Replay the first requests of a fresh engine; `reads` as those of `replay.Engine`."""
    machine, names = machines[cell.machine], tuple(cell.drafters.split(","))
    rows = outputs(cell.workload, cell.right, cell.tokens, REQUESTS * cell.batch, 1_000 + cell.seed)
    batches = [rows[at * cell.batch : (at + 1) * cell.batch] for at in range(REQUESTS)]
    plain = sum(fixed(machine, batches, MODEL_AT, 0))
    best = min(plain, *(sum(fixed(machine, batches, name, k)) for name in names for k in FIXED))
    follows = machine.apart > 0.0 and LOOKUP_AT in names  # a single row, between passes that go together
    engine = Engine(
        machine, names, seed=cell.seed, error=1.15, follows=follows, reads=reads, rehearsed=_rehearsed(cell)
    )
    own = sum(map(engine.run, batches))
    return Speed(best / own, plain / own)


def _rehearsed(cell: Cell) -> list[bool]:
    """Which tokens of an answer to another question the model foresees."""
    random = np.random.default_rng(2_000 + cell.seed)
    rate = float(np.clip(random.normal(cell.right, ELSEWHERE), 0.02, 0.98)) if cell.right else 0.0
    (answer,) = outputs("answer", rate, TOKENS, 1, 3_000 + cell.seed)
    return answer.right


def summary(title: str, found: dict[Cell, Speed]) -> Table:
    """A line for each set of drafters."""
    table = Table(title=title, title_justify="left")
    for name in ("drafters", "cells", "÷ best", "least", "below 0.92", "÷ plain, least", "below 0.98"):
        table.add_column(name, justify="left" if name == "drafters" else "right")
    for names in DRAFTERS:
        speeds = [speed for cell, speed in found.items() if cell.drafters == ",".join(names)]
        table.add_row(
            ",".join(names),
            str(len(speeds)),
            f"{exp(fmean(log(speed.best) for speed in speeds)):.3f}",
            f"{min(speed.best for speed in speeds):.3f}",
            str(sum(speed.best < 0.92 for speed in speeds)),
            f"{min(speed.plain for speed in speeds):.3f}",
            str(sum(speed.plain < 0.98 for speed in speeds)),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 64, 200], help="of each output")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--worst", type=int, default=10, help="cells that are listed")
    parser.add_argument("--constants", action="store_true", help="halve and double each tuned constant")
    parser.add_argument("--nearly", action="store_true", help="machines where a model nearly pays")
    parser.add_argument("--sampled", action="store_true", help="requests of which a model reads nothing beforehand")
    args = parser.parse_args()
    console, machines = Console(width=140), NEARLY if args.nearly else MACHINES
    all_cells = list(cells(args.tokens, args.batches, args.seeds, nearly=args.nearly))
    found = {cell: measure(cell, machines, reads=not args.sampled) for cell in all_cells}
    console.print(summary("the first six requests of an engine", found))
    for cell, speed in sorted(found.items(), key=lambda pair: pair[1])[: args.worst]:
        console.print(f"{speed.best:.3f}  ÷ plain {speed.plain:.2f}  {cell}", highlight=False)
    if args.constants:
        for module, names in CONSTANTS.items():
            for name in names:
                home = import_module(f"foretoken.policy.{module}")
                usual = vars(home)[name]
                for value in (usual / 2, usual * 2):
                    setattr(home, name, type(usual)(value))
                    console.print(
                        summary(
                            f"{module}.{name} = {value:g}",
                            {cell: measure(cell, machines, reads=not args.sampled) for cell in all_cells},
                        )
                    )
                setattr(home, name, usual)


if __name__ == "__main__":
    main()
