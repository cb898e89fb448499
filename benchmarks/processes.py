"""What is drafted by default beside fixed draft lengths, each in a process of its own: one row, short sampled chats.

Settings that share a process share its models, and what one of them leaves in the processor's caches the next one uses.
What a user runs is one setting, from a store of costs that is empty; and by what is measured while it starts, two
processes of the same setting may decide differently, so that there should be several of each. They take turns in random
order, each after some requests of its own.

    python benchmarks/processes.py                                       plain decoding, five tokens, defaults
    python benchmarks/processes.py --temperature 0 --settings none draft-model:5 auto,draft-model auto,draft-model
    python benchmarks/processes.py --trees ../other ...                  all but the first once more, of another tree

A setting is a drafter and a draft length (`draft-model:5`; by default the policy's). The first one is what others are
compared with. Ratios are geometric means over turns, with their standard errors; "rounds" are tokens of each of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from contextlib import ExitStack, closing
from math import exp, log
from pathlib import Path
from statistics import fmean, median, stdev
from time import perf_counter
from typing import IO, NamedTuple, cast

from rich.console import Console
from rich.table import Table

SETTINGS = ("none", "draft-model:5", *("draft-model",) * 3, *("auto,draft-model",) * 3)
TOKENS = 48


class Turn(NamedTuple):
    """Of one setting."""

    rate: float
    round: float


def serve(setting: str, options: argparse.Namespace) -> None:
    """Be the process of a setting: for each line of standard input, a turn."""
    from serve_load import Load

    from foretoken import Engine, SamplingParams, tiny_pair_path

    name, _, length = setting.partition(":")
    pair = tiny_pair_path()
    engine = Engine(
        pair / "target",
        None if name == "none" else name.replace("draft-model", str(pair / "drafter")),
        dtype=options.dtype,
        num_speculative_tokens=int(length) if length else "auto",
    )
    engine.warm_up()
    load = Load(0, 1, TOKENS, options.temperature)
    params = SamplingParams(max_new_tokens=load.tokens, temperature=load.temperature)

    def turn(first: int, count: int) -> Turn:
        began, tokens, rounds = perf_counter(), 0, 0
        for index in range(first, first + count):
            done = engine.generate([load.messages(index)], params)[0]
            tokens, rounds = tokens + len(done.token_ids), rounds + done.stats.rounds
        return Turn(tokens / (perf_counter() - began), tokens / rounds)

    turn(0, options.warm)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(turn(*json.loads(line))), flush=True)


class Process:
    """One that serves turns of a setting.

    Args:
        setting: of it.
        tree: whose `src` it runs.
        options: of all.
    """

    def __init__(self, setting: str, tree: Path, options: argparse.Namespace) -> None:
        self.label = setting if tree == Path(__file__).parents[1] else f"{setting} ({tree.name})"
        self.turns: list[Turn] = []
        self._store = tempfile.TemporaryDirectory()
        line = [sys.executable, __file__, "--dtype", options.dtype, "--temperature", str(options.temperature)]
        environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "FORETOKEN_CACHE": self._store.name}
        self._running = subprocess.Popen(
            [*line, "--warm", str(options.warm), "--serve", setting],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._read()

    def take_turn(self, first: int, count: int) -> None:
        """Some requests."""
        asked = cast(IO[str], self._running.stdin)
        asked.write(json.dumps([first, count]) + "\n")
        asked.flush()
        self.turns.append(Turn(*self._read()))

    def close(self) -> None:
        """End it."""
        cast(IO[str], self._running.stdin).close()
        self._running.wait(30)
        self._store.cleanup()

    def _read(self) -> list[float]:
        line = cast(IO[str], self._running.stdout).readline()
        if not line:
            raise RuntimeError(f"the process of {self.label} has ended: see above")
        return cast(list[float], json.loads(line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=SETTINGS)
    parser.add_argument("--trees", nargs="*", type=Path, default=[], help="in which all but the first run, too")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--requests", type=int, default=8, help="of a turn")
    parser.add_argument("--warm", type=int, default=60, help="requests before the first turn")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options)
        return
    here = Path(__file__).parents[1]
    wanted = [(setting, here) for setting in options.settings]
    wanted += [(setting, tree.resolve()) for tree in options.trees for setting in options.settings[1:]]
    with ExitStack() as running:
        processes = [running.enter_context(closing(Process(setting, tree, options))) for setting, tree in wanted]
        for number in range(options.turns):
            for one in random.Random(number).sample(processes, len(processes)):
                one.take_turn(options.warm + number * options.requests, options.requests)
    table = Table("setting", "tokens/s", "rounds", f"÷ {processes[0].label}")
    for one in processes:
        ratios = [log(turn.rate / first.rate) for turn, first in zip(one.turns, processes[0].turns, strict=True)]
        error = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
        table.add_row(
            one.label,
            f"{median(turn.rate for turn in one.turns):.0f}",
            f"{fmean(turn.round for turn in one.turns):.2f}",
            f"{exp(fmean(ratios)):.3f} ± {error:.3f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
