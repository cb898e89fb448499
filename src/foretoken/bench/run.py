"""A benchmark: engines take turns, case by case, so that what slows the machine for a while slows all of them."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.bench import machine, workload
from foretoken.bench.engines import Engine, python_of
from foretoken.bench.errors import BenchError, Unsupported
from foretoken.bench.process import WORKERS, Worker
from foretoken.bench.store import Record, Store, key
from foretoken.bench.workload import Prompt

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        target: folder of the target's checkpoint.
        drafter: folder of the draft model's, or None.
        engines: what takes part.
        prompts: what is continued.
        batches: prompts decoded at once.
        temperatures: 0 is greedy.
        repeats: how often each case is measured.
        max_new_tokens: tokens of each text; end tokens don't end it.
        dtype: of the weights and of arithmetic: ``float32`` or ``bfloat16``.
        device: ``cpu``, ``cuda``, …
        threads: of each engine.
        peers: folder of the engines' environments.
        cache: folder of converted checkpoints.
        seed: of sampled texts.
    """

    target: Path
    drafter: Path | None
    engines: tuple[Engine, ...]
    prompts: tuple[Prompt, ...]
    batches: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    repeats: int = 3
    max_new_tokens: int = 64
    dtype: str = "bfloat16"
    device: str = "cpu"
    threads: int = field(default_factory=machine.cores)
    peers: Path | None = None
    cache: Path = field(default_factory=lambda: machine.cache_folder("bench"))
    seed: int = 0

    def settings(self) -> dict[str, Any]:
        """What all results of one file share."""
        from foretoken.bench.shape import Shape

        def told(folder: Path | None) -> Any:
            if folder is None:
                return None
            shape = Shape.of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
            return {
                "name": "/".join(folder.parts[-2:]),
                "parameters": shape.parameters,
                "read_parameters": shape.read_parameters,
                "cached_per_token": 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim,
            }

        return {
            "target": told(self.target),
            "drafter": told(self.drafter),
            "prompts": workload.fingerprint(self.prompts),
            "max_new_tokens": self.max_new_tokens,
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.threads,
            "seed": self.seed,
        }

    @property
    def max_length(self) -> int:
        """Tokens of the longest text, and a draft behind it."""
        ks = [engine.k for engine in self.engines if isinstance(engine.k, int)]
        longest = max(len(prompt.tokens) for prompt in self.prompts)
        return longest + self.max_new_tokens + max(ks, default=16) + 1


@dataclass(frozen=True)
class Case:
    """One batch of prompts at one temperature."""

    category: str
    prompts: tuple[Prompt, ...]
    temperature: float
    repeat: int

    def record(self, engine: Engine) -> Record:
        """The part of a result that is known before."""
        return {
            "kind": "run",
            "engine": engine.label,
            "family": engine.family,
            "mode": engine.mode,
            "k": engine.k,
            "batch": len(self.prompts),
            "temperature": self.temperature,
            "repeat": self.repeat,
            "category": self.category,
            "items": [prompt.item.id for prompt in self.prompts],
            "prompt_tokens": [len(prompt.tokens) for prompt in self.prompts],
        }


def cases(plan: Plan) -> list[Case]:
    """All of them: every batch size and temperature once before any is measured again."""
    return [
        Case(category, tuple(prompts), temperature, repeat)
        for repeat in range(plan.repeats)
        for size in plan.batches
        for temperature in plan.temperatures
        for category, prompts in workload.batches(plan.prompts, size)
    ]


Progress = Callable[[int, int, str], None]
"""Called with the runs made, the runs planned, and what is going on."""


def measure(plan: Plan, store: Store, progress: Progress = lambda *_: None) -> None:
    """Make all runs of a plan that the store does not hold yet.

    An engine that can't run a case, or fails, is left out from then on, and the store says why.

    Raises:
        BenchError: the results can't be written.
    """
    with ExitStack() as stack:
        _Measurement(plan, store, progress, stack).run()


class _Measurement:
    def __init__(self, plan: Plan, store: Store, progress: Progress, stack: ExitStack) -> None:
        self._plan, self._store, self._progress, self._stack = plan, store, progress, stack
        self._workers: dict[str, Worker | BenchError] = {}
        self._out: dict[tuple[str, int, float], str] = {}
        self._warm: set[tuple[str, int, float]] = set()
        self._made = 0

    def run(self) -> None:
        plan, done = self._plan, self._store.done()
        todo = [
            (case, engine)
            for number, case in enumerate(cases(plan))
            for engine in _turns(plan.engines, number)
            if key(case.record(engine)) not in done
        ]
        if not todo:
            return
        self._store.add({"kind": "machine", **machine.describe(plan.device), "time": int(time.time())})
        repeat = None
        for case, engine in todo:
            if case.repeat != repeat:
                repeat = case.repeat
                rate = machine.bandwidth(plan.device, plan.threads)
                self._store.add({"kind": "bandwidth", "bytes_per_second": rate, "repeat": repeat})
            self._progress(self._made, len(todo), engine.label)
            self._one(case, engine)
            self._made += 1
        self._progress(self._made, len(todo), "done")

    def _one(self, case: Case, engine: Engine) -> None:
        kind = (engine.label, len(case.prompts), case.temperature)
        if kind in self._out:
            return
        try:
            engine.check(len(case.prompts))
            worker = self._worker(engine)
            if kind not in self._warm:
                worker.ask(self._request(case, engine, min(WARM_UP_TOKENS, self._plan.max_new_tokens)))
                self._warm.add(kind)
            # The same with one token tells what the prompt costs.
            first = worker.ask(self._request(case, engine, 1))
            result = worker.ask(self._request(case, engine, self._plan.max_new_tokens))
        except BenchError as error:
            self._leave_out(kind, case, engine, error)
            return
        counts = [len(tokens) for tokens in result["tokens"]]
        if counts != [self._plan.max_new_tokens] * len(case.prompts):
            wrong = BenchError(f"it wrote {counts} tokens where {self._plan.max_new_tokens} each were asked for")
            self._leave_out(kind, case, engine, wrong)
            return
        told = {name: value for name, value in result.items() if name != "tokens" or case.temperature == 0}
        self._store.add({**case.record(engine), **told, "first_seconds": first["seconds"], "generated": sum(counts)})

    def _leave_out(self, kind: tuple[str, int, float], case: Case, engine: Engine, error: BenchError) -> None:
        self._out[kind] = str(error)
        can = "can't" if isinstance(error, Unsupported) else "failed"
        names = ("engine", "family", "mode", "k", "batch", "temperature")
        told = {name: value for name, value in case.record(engine).items() if name in names}
        self._store.add({**told, "kind": "skipped", "why": can, "reason": str(error)})

    def _request(self, case: Case, engine: Engine, num_tokens: int) -> dict[str, Any]:
        return {
            "mode": engine.mode,
            "k": engine.k,
            "prompts": [prompt.tokens for prompt in case.prompts],
            "num_tokens": num_tokens,
            "temperature": case.temperature,
            "seed": self._plan.seed + 1_000_003 * case.repeat,
        }

    def _worker(self, engine: Engine) -> Worker:
        known = self._workers.get(engine.process)
        if known is None or (isinstance(known, Worker) and not known.alive):
            try:
                known = self._start(engine)
                self._stack.callback(known.close)
            except BenchError as error:
                known = error
            self._workers[engine.process] = known
        if isinstance(known, BenchError):
            raise known
        return known

    def _start(self, engine: Engine) -> Worker:
        plan = self._plan
        options = {
            "target": str(plan.target),
            "drafter": None if plan.drafter is None else str(plan.drafter),
            "dtype": plan.dtype,
            "device": plan.device,
            "threads": plan.threads,
            "max_length": plan.max_length,
            "max_batch": max(plan.batches),
            "modes": sorted({one.mode for one in plan.engines if one.process == engine.process}),
            "mode": engine.mode,
            "k": engine.k,
            "options": dict(engine.options),
            "cache": str(plan.cache),
        }
        python = python_of(engine.kind, plan.peers)
        environment = {
            "OMP_NUM_THREADS": str(plan.threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            **engine.kind.environment,
        }
        worker = Worker([python, str(WORKERS / engine.kind.worker), json.dumps(options)], environment)
        self._store.add({"kind": "machine", "engine": engine.process, "versions": worker.versions})
        return worker


def _turns(engines: Sequence[Engine], number: int) -> Iterator[Engine]:
    """The engines in an order of its own for each case: nobody always runs after the same one."""
    order = list(engines)
    random.Random(number).shuffle(order)
    yield from order
