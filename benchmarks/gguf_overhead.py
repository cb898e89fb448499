"""Plain decoding of a GGUF file by the engine against llama.cpp's own calls in a bare loop.

The bare loop does nothing but `llama_decode` and an argmax of the logits, with llama.cpp's default parameters. Both
take turns in one process, so that a slow phase of the machine affects both; medians over the repeats. Peak memory is
that of a process of its own for each.

Run with: python benchmarks/gguf_overhead.py FILE [--tokens 128] [--repeats 9] [--threads 1] [--context 1024] [--memory]
[--native]
"""

from __future__ import annotations

import argparse
import ctypes
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from foretoken import Engine, SamplingParams, load
from foretoken.models.base import LanguageModel
from foretoken.models.gguf.layouts import Batch
from foretoken.models.gguf.library import library

PROMPT = [3 + i % 50 for i in range(32)]


class Bare:
    """A loaded file and a context for one sequence, without anything of Foretoken's but the declared functions."""

    def __init__(self, path: Path, threads: int, context: int) -> None:
        self._calls = calls = library()
        self._model = calls.llama_model_load_from_file(str(path).encode(), calls.model_params())
        params = calls.context_params()
        params.n_ctx = context
        params.n_threads = params.n_threads_batch = threads
        self._context = calls.llama_init_from_model(self._model, params)
        self._memory = calls.llama_get_memory(self._context)
        self._vocab_size = calls.llama_vocab_n_tokens(calls.llama_model_get_vocab(self._model))
        size = params.n_batch
        self._ids, self._positions = (ctypes.c_int32 * size)(), (ctypes.c_int32 * size)()
        self._counts = (ctypes.c_int32 * size)(*[1] * size)
        self._zero = (ctypes.c_int32 * 1)(0)
        self._rows = (ctypes.c_void_p * size)(*[ctypes.addressof(self._zero)] * size)
        self._wanted = (ctypes.c_int8 * size)()

    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        """The most probable continuation, token by token."""
        self._calls.llama_memory_clear(self._memory, False)
        new, position, output = prompt, 0, []
        while len(output) < tokens:
            count = len(new)
            self._ids[:count] = new
            self._positions[:count] = range(position, position + count)
            self._wanted[:count] = [0] * (count - 1) + [1]
            arrays = (self._positions, self._counts, self._rows, self._wanted)
            batch = Batch(count, ctypes.addressof(self._ids), None, *map(ctypes.addressof, arrays))
            assert self._calls.llama_decode(self._context, batch) == 0
            logits = (ctypes.c_float * self._vocab_size).from_address(self._calls.llama_get_logits(self._context))
            position += count
            new = [int(np.frombuffer(logits, dtype=np.float32).argmax())]
            output += new
        return output


class Ours:
    """The engine without a drafter, on llama.cpp."""

    def __init__(self, path: Path, threads: int, context: int) -> None:
        self._engine = Engine(self.load(path, threads, context), None)

    def load(self, path: Path, threads: int, context: int) -> LanguageModel:
        """The model."""
        return load(path, n_threads=threads, n_ctx=context)

    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        """The most probable continuation, token by token."""
        params = SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
        return self._engine.generate(prompt, params).token_ids


class Native(Ours):
    """The engine without a drafter, on the native runner, which has as many threads as torch."""

    def load(self, path: Path, threads: int, context: int) -> LanguageModel:
        """See `Ours`."""
        return load(path, runner="native", n_ctx=context)


SIDES = {"llama.cpp": Bare, "foretoken": Ours}


def measure(arguments: argparse.Namespace) -> None:
    """Print medians of tokens a second, wall clock, and of the CPU time a token."""
    given = (arguments.file, arguments.threads, arguments.context)
    sides = {name: side(*given) for name, side in SIDES.items()}
    outputs = {name: side.generate(PROMPT, arguments.tokens) for name, side in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(arguments.repeats):
        for name in list(sides)[:: 1 if repeat % 2 else -1]:
            start, before = time.perf_counter(), time.process_time()
            sides[name].generate(PROMPT, arguments.tokens)
            seconds[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - before)
    for name in sides:
        print(
            f"{name}: {arguments.tokens / median(seconds[name]):.1f} tokens/s, "
            f"{1e3 * median(cpu[name]) / arguments.tokens:.3f} ms of CPU a token"
        )
    ratios = [bare / ours for bare, ours in zip(seconds["llama.cpp"], seconds["foretoken"], strict=True)]
    work = [bare / ours for bare, ours in zip(cpu["llama.cpp"], cpu["foretoken"], strict=True)]
    print(f"foretoken / llama.cpp: {median(ratios):.3f} by the clock, {median(work):.3f} by CPU time; medians of pairs")
    print(
        "same tokens" if outputs["llama.cpp"] == outputs["foretoken"] else "other tokens: the passes round differently"
    )


def peak(arguments: argparse.Namespace) -> None:
    """Print this process's peak memory after filling a context with one side."""
    if arguments.peak == "imports":
        library()
    else:
        side = SIDES[arguments.peak](arguments.file, arguments.threads, arguments.context)
        length = arguments.context - arguments.tokens - 1
        side.generate([3 + i % 50 for i in range(length)], arguments.tokens)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def compare_memory(arguments: argparse.Namespace) -> None:
    """Print the peak memory of each side in MiB."""
    found = {}
    for name in ("imports", *SIDES):
        command = [sys.executable, __file__, *sys.argv[1:], "--peak", name]
        found[name] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1024
        print(f"{name}: {found[name]:.0f} MiB")
    bare, ours, imports = (found[name] for name in ("llama.cpp", "foretoken", "imports"))
    print(f"foretoken / llama.cpp: {ours / bare:.3f}, {(ours - imports) / (bare - imports):.3f} without imports")


def main() -> None:
    """Measure one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--memory", action="store_true", help="compare peak memory instead")
    parser.add_argument("--peak", choices=("imports", *SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--native", action="store_true", help="the native runner instead of llama.cpp's")
    arguments = parser.parse_args()
    if arguments.native:
        SIDES["foretoken"] = Native
    torch.set_num_threads(arguments.threads)
    if arguments.peak:
        peak(arguments)
    elif arguments.memory:
        compare_memory(arguments)
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
