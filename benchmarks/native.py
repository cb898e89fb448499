"""Milliseconds of a target pass: the native runner's backends against transformers, and against the memory bandwidth.

The shipped target, a random Llama of 468 million parameters, which is created first, or checkpoints that are named;
with ``--files`` their GGUF files on llama.cpp, too. All runners take turns in
every repeat, so that a slow phase of the machine affects all of them; medians, with the fastest pass in brackets.

Run with: python benchmarks/native.py [--models shipped,468M] [--repeats 5] [--threads 2] [--folder FOLDER]
    python benchmarks/native.py --models CHECKPOINT --files CHECKPOINT-Q4_0.gguf --runners "openvino int4"
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken.models import LanguageModel, load
from foretoken.models.tiny_pair import tiny_pair_path

CONTEXT = 128
CASES = ((1, 1), (1, 6), (1, 8), (1, 16), (4, 1), (4, 6), (16, 1), (16, 6))
"""Rows of the batch, and nodes scored in each."""


def make_468m(folder: Path) -> Path:
    """A checkpoint with random weights in bfloat16; an existing one is kept."""
    path = folder / "468M"
    if not (path / "config.json").is_file():
        config = LlamaConfig(
            vocab_size=32_000,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=24,
            num_attention_heads=16,
            num_key_value_heads=16,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
        )
        torch.manual_seed(0)
        LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


def runners(names: list[str]) -> dict[str, dict[str, Any]]:
    """Options of `load` by the runner's name in the table; all available ones if `names` is empty."""
    every: dict[str, dict[str, Any]] = {
        "hf": {"runner": "hf"},
        "torch": {"runner": "native", "backend": "torch"},
        "torch eager": {"runner": "native", "backend": "torch", "eager": True},
        "torch int8": {"runner": "native", "backend": "torch", "quantize": "int8"},
    }
    if find_spec("openvino") is not None:
        every["openvino"] = {"runner": "native", "backend": "openvino"}
        for quantize in ("int8", "int4"):
            every[f"openvino {quantize}"] = {"runner": "native", "backend": "openvino", "quantize": quantize}
    return {name: options for name, options in every.items() if not names or name in names}


def read_speed(block: torch.Tensor) -> float:
    """Memory bandwidth of all threads together in bytes a second, the best of a few tries."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        block.sum()
        best = min(best, time.perf_counter() - start)
    return block.numel() * block.element_size() / best


class Case:
    """A batch of one size with a filled KV cache, which scores the same draft repeatedly."""

    def __init__(self, model: LanguageModel, rows: int, nodes: int) -> None:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(3, model.vocab_size, (rows, CONTEXT), generator=generator)
        steps = torch.arange(CONTEXT).expand(rows, -1)
        self._model, self._cache = model, model.open(rows)
        model.forward(tokens, steps - 1, torch.full((rows,), CONTEXT), self._cache, keep="none")
        self._cache.commit(steps, torch.full((rows,), CONTEXT))
        self._tokens, self._parents = tokens[:, :nodes].contiguous(), steps[:, :nodes] - 1
        self._counts = torch.full((rows,), nodes)
        self._path, self._none = steps[:, :0], torch.zeros(rows, dtype=torch.int64)

    def seconds(self) -> float:
        """The time of one pass, which leaves the cache unchanged."""
        start = time.perf_counter()
        self._model.forward(self._tokens, self._parents, self._counts, self._cache)
        self._cache.commit(self._path, self._none)
        return time.perf_counter() - start


def measure(path: Path, dtype: str, arguments: argparse.Namespace, block: torch.Tensor, console: Console) -> None:
    """Measure one model and print a table."""
    sizes = arguments.cases or CASES
    models = {name: load(path, dtype=dtype, **options) for name, options in runners(arguments.runners).items()}
    models |= {file.stem: load(file, runner="gguf", n_threads=arguments.threads) for file in arguments.files}
    cases = {name: [Case(model, *case) for case in sizes] for name, model in models.items()}
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    speeds = []
    for repeat in range(arguments.repeats + 1):
        speeds.append(read_speed(block))
        for number in range(len(sizes)):
            for name in models:
                passes = [cases[name][number].seconds() for _ in range(arguments.passes)]
                if repeat:  # the first repeat is a warm-up
                    times[name, number] += passes
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    weights *= 2 if dtype == "float32" else 1  # both were stored in bfloat16
    if path.name == "468M":
        weights -= 32_000 * 1024 * 2  # a pass reads a few rows of the embedding table only
    table = Table("batch × nodes", *models, title=f"{path.name}, {dtype}: ms a pass, median [fastest]")
    for number, (rows, nodes) in enumerate(sizes):
        found = [times[name, number] for name in models]
        table.add_row(f"{rows} × {nodes}", *(f"{median(t) * 1e3:.2f} [{min(t) * 1e3:.2f}]" for t in found))
    console.print(table)
    if arguments.files:
        return
    limit = weights / max(speeds)
    console.print(
        f"memory reads {max(speeds) / 1e9:.1f} GB/s at best, {median(speeds) / 1e9:.1f} in the median; "
        f"{weights / 1e6:.0f} MB of weights take {limit * 1e3:.2f} ms. Share of that limit at 1 × 1, fastest pass: "
        + ", ".join(f"{name} {limit * share(name) / min(times[name, 0]):.0%}" for name in models)
    )


def share(runner: str) -> float:
    """Of bfloat16's bytes that the weights take on a runner."""
    return 0.5 if "int8" in runner else 0.28 if "int4" in runner else 1.0


def sizes_of(text: str) -> list[tuple[int, ...]]:
    """``[(1, 1), (1, 6)]`` from ``1x1,1x6``."""
    return [tuple(map(int, case.split("x"))) for case in text.split(",")]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="shipped,468M", help="these, or checkpoints, in the first of the dtypes")
    parser.add_argument("--files", type=lambda text: [Path(file) for file in text.split(",")], default=[])
    parser.add_argument("--runners", type=lambda text: text.split(","), default=[], help="default: all that can run")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="of the shipped model; 468M runs in bfloat16")
    parser.add_argument("--cases", type=sizes_of, help="batches times nodes, 1x1,1x6 for example; default: many")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "foretoken-benchmark")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console(width=150)
    block = torch.ones(1 << 26)  # 256 MB: far beyond any cache
    named = arguments.models.split(",")
    if "shipped" in named:
        for dtype in arguments.dtypes.split(","):
            measure(tiny_pair_path() / "target", dtype, arguments, block, console)
            gc.collect()
    if "468M" in named:
        measure(make_468m(arguments.folder), "bfloat16", arguments, block, console)
    for path in named:
        if path not in ("shipped", "468M"):
            measure(Path(path), arguments.dtypes.split(",")[0], arguments, block, console)


if __name__ == "__main__":
    main()
