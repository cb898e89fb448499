"""A benchmark: engines take turns, case by case, so that what slows the machine for a while slows all of them."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from foretoken.bench import machine
from foretoken.bench.engines import Engine, python_of
from foretoken.bench.errors import BenchError, Unsupported
from foretoken.bench.plan import Case, Plan, cases
from foretoken.bench.process import WORKERS, Worker
from foretoken.bench.store import Store, key

WARM_UP_TOKENS = 16


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
        last = None
        for case, engine in todo:
            if case is not last:  # neighbours on a shared machine come and go
                last = case
                rate = machine.bandwidth(plan.device, plan.threads)
                self._store.add({"kind": "bandwidth", "bytes_per_second": rate, "repeat": case.repeat})
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
            **{name: os.environ.get(name, value) for name, value in engine.kind.environment.items()},
        }
        worker = Worker([python, str(WORKERS / engine.kind.worker), json.dumps(options)], environment)
        self._store.add({"kind": "machine", "engine": engine.process, "versions": worker.versions})
        return worker


def _turns(engines: Sequence[Engine], number: int) -> Iterator[Engine]:
    """The engines in an order of its own for each case: nobody always runs after the same one."""
    order = list(engines)
    random.Random(number).shuffle(order)
    yield from order
