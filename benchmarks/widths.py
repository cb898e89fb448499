"""The cost of a pass with another number of tokens than the last one's, for which OpenVINO's runtime prepares anew.

For pairs of widths (tokens in a pass): median milliseconds of passes of one width only, and of passes that alternate
between the two, without and with padding by `foretoken.models.widths.PassWidths`.

Run with: python benchmarks/widths.py [--target DIR] [--dtype bfloat16] [--passes N]

With --widening, milliseconds of passes in float32 whose 16-bit weights are widened in the pass, and before, by turns;
and whether scores are the same to the last bit (`foretoken.models.native.widening`).
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from foretoken import tiny_pair_path
from foretoken.models import load
from foretoken.models.native.cache import Feed
from foretoken.models.native.compilation import GraphKey
from foretoken.models.native.openvino_backend import OpenVinoBackend
from foretoken.models.native.widening import seconds_of
from foretoken.models.widths import PassWidths

PAIRS = ((1, 4), (1, 6), (3, 4), (4, 8), (6, 7), (6, 9), (8, 16))
TOKENS = (1, 2, 4, 5, 6, 9, 13, 17, 32, 64)
LENGTH = 200
"""Tokens in the KV cache before each pass."""


class Meter:
    """Times passes of a model.

    Args:
        backend: the model's backend.
        passes: timed passes for each width.
    """

    def __init__(self, backend: OpenVinoBackend, passes: int) -> None:
        self._backend, self._passes = backend, passes
        self._cache = backend.open(1)

    def alternating(self, widths: tuple[int, ...], patience: int) -> dict[int, float]:
        """Median milliseconds of passes of each width; the widths alternate."""
        self._backend.graphs(GraphKey()).widths = PassWidths(patience)
        found: dict[int, list[float]] = {width: [] for width in widths}
        for number in range(self._passes + 3):
            for width in widths:
                feed = Feed(0, LENGTH, [5] * width, 0, None)
                start = time.perf_counter()
                self._backend.score(self._cache, [feed], [(0, node) for node in range(width)], ())
                if number >= 3:
                    found[width].append(1e3 * (time.perf_counter() - start))
        return {width: median(values) for width, values in found.items()}


def widening(target: str, passes: int) -> Table:
    """The table of `--widening`, of graphs for passes over any number of tokens."""
    backend = load(target, runner="native", backend="openvino", dtype="float32").backend
    graphs = backend.graphs(GraphKey()), backend.graphs(GraphKey(widened=True))
    table = Table(box=SIMPLE_HEAD, title="milliseconds a pass, weights widened")
    for column in ("tokens", "in it", "before", "same scores"):
        table.add_column(column, justify="right")
    for size in track(TOKENS, console=Console(stderr=True), transient=True):
        scores = [backend.try_out(graph, size) for graph in graphs]
        times = (f"{1e3 * seconds:.2f}" for seconds in seconds_of(backend.try_out, graphs, size, passes))
        table.add_row(str(size), *times, "yes" if torch.equal(*scores) else "no")
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default=str(tiny_pair_path() / "target"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--passes", type=int, default=40)
    parser.add_argument("--widening", action="store_true")
    arguments = parser.parse_args()
    if arguments.widening:
        Console().print(widening(arguments.target, arguments.passes))
        return
    backend = load(arguments.target, runner="native", backend="openvino", dtype=arguments.dtype).backend
    backend.narrow = None  # passes of some widths would have graphs of their own
    meter, console = Meter(backend, arguments.passes), Console()
    table = Table(box=SIMPLE_HEAD, title="milliseconds a pass")
    for column in ("tokens", "one width", "changing", "changing, padded"):
        table.add_column(column, justify="right")
    for pair in track(PAIRS, console=Console(stderr=True), transient=True):
        same = {width: meter.alternating((width,), 0)[width] for width in pair}
        changing, padded = meter.alternating(pair, 0), meter.alternating(pair, 28)
        row = (" / ".join(f"{times[width]:.2f}" for width in pair) for times in (same, changing, padded))
        table.add_row(" / ".join(map(str, pair)), *row)
    console.print(table)


if __name__ == "__main__":
    main()
