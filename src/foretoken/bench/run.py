"""A benchmark: engines take turns, case by case."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from foretoken.bench.engines import EngineConfig
from foretoken.bench.errors import BenchError
from foretoken.bench.plan import BenchPlan, Case, cases
from foretoken.bench.records import Store, key
from foretoken.bench.turns import order
from foretoken.errors import ForetokenError
from foretoken.models import machine
from foretoken.peers.environments import python_of
from foretoken.peers.errors import PeerError, Unsupported
from foretoken.peers.launch import Launch, request, start
from foretoken.peers.process import Worker

WARM_UP_TOKENS = 16

Progress = Callable[[int, int, str], None]
"""Called with the runs made, the runs planned, and what is going on."""


def measure(plan: BenchPlan, store: Store, progress: Progress = lambda *_: None) -> None:
    """Make all runs of a plan that the store does not hold yet.

    An engine that can't run a case, or fails, is left out from then on; the store has its error.

    Raises:
        BenchError: the results can't be written, or the store's are of another processor, GPU or version.
    """
    with ExitStack() as stack:
        _Measurement(plan, store, progress, stack).run()


class _Measurement:
    def __init__(self, plan: BenchPlan, store: Store, progress: Progress, stack: ExitStack) -> None:
        self._plan, self._store, self._progress, self._stack = plan, store, progress, stack
        self._workers: dict[str, Worker | PeerError] = {}
        self._out: set[tuple[str, int, float]] = set()
        self._warm: dict[str, set[tuple[str, int, float]]] = {}  # by process

    def run(self) -> None:
        plan, done = self._plan, self._store.done()
        todo = [
            (case, engine)
            for number, case in enumerate(cases(plan))
            for engine in order(plan.engines, number)
            if key(case.record(engine)) not in done
        ]
        if not todo:
            return
        here = machine.describe(plan.device)
        self._check_machine(here)
        self._store.add({"kind": "machine", **here, "time": int(time.time())})
        last = None
        for made, (case, engine) in enumerate(todo):
            if case is not last:  # neighbours on a shared machine come and go
                last = case
                rate = machine.bandwidth(plan.device, plan.threads)
                self._store.add({"kind": "bandwidth", "bytes_per_second": rate, "repeat": case.repeat})
            self._progress(made, len(todo), engine.label)
            self._run_one(case, engine)
        self._progress(len(todo), len(todo), "done")

    def _check_machine(self, here: dict[str, Any]) -> None:
        """Ratios are formed between all engines of a file, whenever each was measured."""
        before = next((one for one in self._store.of("machine") if "cpu" in one), here)
        for name, was, now in (
            ("processor", before["cpu"], here["cpu"]),
            ("GPU", before.get("gpu", {}).get("name"), here.get("gpu", {}).get("name")),
            ("Foretoken", before["versions"]["foretoken"], here["versions"]["foretoken"]),
        ):
            if was != now:
                raise BenchError(
                    f"the results were measured with {name} {was!r}, and now it is {now!r}: name another file, for "
                    "ratios compare what was measured alike"
                )

    def _run_one(self, case: Case, engine: EngineConfig) -> None:
        kind = (engine.label, len(case.prompts), case.temperature)
        if kind in self._out:
            return
        try:
            engine.check(len(case.prompts), self._plan.device)
            worker = self._worker(engine)
            if kind not in self._warm[engine.process]:
                worker.ask(self._request(case, engine, min(WARM_UP_TOKENS, self._plan.max_new_tokens)))
                self._warm[engine.process].add(kind)
            # The same request with one token measures the prefill.
            first = worker.ask(self._request(case, engine, 1))
            result = worker.ask(self._request(case, engine, self._plan.max_new_tokens))
            counts = _lengths(result, len(case.prompts), self._plan.max_new_tokens)
        except ForetokenError as error:
            self._leave_out(kind, case, engine, error)
            return
        fields = {name: value for name, value in result.items() if name != "tokens" or case.temperature == 0}
        self._store.add({**case.record(engine), **fields, "first_seconds": first["seconds"], "generated": sum(counts)})

    def _leave_out(self, kind: tuple[str, int, float], case: Case, engine: EngineConfig, error: ForetokenError) -> None:
        self._out.add(kind)
        can = "can't" if isinstance(error, Unsupported) else "failed"
        names = ("engine", "family", "mode", "k", "batch", "temperature")
        fields = {name: value for name, value in case.record(engine).items() if name in names}
        self._store.add({**fields, "kind": "skipped", "why": can, "reason": str(error)})

    def _request(self, case: Case, engine: EngineConfig, num_tokens: int) -> dict[str, Any]:
        seed = self._plan.seed + 1_000_003 * case.repeat
        return request(
            engine.mode,
            engine.k,
            [prompt.tokens for prompt in case.prompts],
            num_tokens,
            {"temperature": case.temperature},
            [seed + row for row in range(len(case.prompts))],
        )

    def _worker(self, engine: EngineConfig) -> Worker:
        known = self._workers.get(engine.process)
        if known is None or (isinstance(known, Worker) and not known.alive):
            try:
                known = self._start(engine)
                self._stack.callback(known.close)
            except PeerError as error:
                known = error
            self._workers[engine.process] = known
        if isinstance(known, PeerError):
            raise known
        return known

    def _start(self, engine: EngineConfig) -> Worker:
        plan = self._plan
        launch = Launch(
            target=str(plan.target),
            drafter=None if plan.drafter is None else str(plan.drafter),
            mode=engine.mode,
            k=engine.k,
            dtype=plan.dtype,
            device=plan.device,
            threads=plan.threads,
            max_length=plan.max_length,
            max_batch=max(plan.batches),
            options=dict(engine.options),
            cache=str(plan.cache),
        )
        worker = start(engine.kind, python_of(engine.kind, plan.peers), launch)
        self._warm[engine.process] = set()  # the process before may have died
        self._store.add({"kind": "machine", "engine": engine.process, "versions": worker.versions})
        return worker


def _lengths(result: dict[str, Any], batch: int, num_tokens: int) -> list[int]:
    """Lengths of the outputs.

    Raises:
        BenchError: they do not fit the request.
    """
    try:
        counts = [len(tokens) for tokens in result["tokens"]]
        float(result["seconds"])
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(f"it answered something that holds no outputs ({error!r})") from error
    if counts != [num_tokens] * batch:
        raise BenchError(f"it wrote {counts} tokens where {num_tokens} each were requested")
    return counts
