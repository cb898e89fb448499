"""A cascade's choices in simulated time: real outputs, real drafts, the real `Cascade`, and given costs of rounds.

A greedy output is the same with every drafter, and so is an output under shared noise. So outputs, and what the draft
model proposes at each position, are recorded once, and every drafter is replayed on them. The cascade's clock advances
by the given costs of calls and passes, with noise, and by more where a pass has another width than the last one
(`PassWidths`). This measures the choice alone, with its estimates.

Run with: python benchmarks/cascade.py --spec-bench FILE [--copy-edit-target DIR] [--recording FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from foretoken import Engine, SamplingParams, tiny_pair_path, workloads
from foretoken.draft import Draft
from foretoken.drafters import Cascade, PromptLookup, Suffix
from foretoken.drafters.base import Batch, Drafter
from foretoken.models import load
from foretoken.models.widths import PassWidths
from foretoken.sequence import Sequence
from foretoken.verify import Verdict

WORKLOADS = {"maths": "math_reasoning", "code": "coding", "summarising": "summarization", "retrieval": "rag"}
COPY_EDIT = "copy-edit"
LONGEST = 16  # tokens of a draft
PLAIN, MODEL = "none", "draft-model@5"
LOOKUPS: dict[str, type[Drafter]] = {"prompt-lookup": PromptLookup, "suffix": Suffix}

Trace = dict[str, Any]
"""One request: ``prompt`` and ``output``, and for each position of the output the ``drafts`` of the draft model."""


@dataclass(frozen=True)
class Times:
    """Milliseconds, assumed.

    Attributes:
        first, further: of a pass over a token, and of each token more.
        change: added to a pass of another width than the last one.
        call, step: of a call of the draft model, and of each of its tokens.
        own: the cascade's work in a round.
        lookup: a lookup's.
        patience: of `PassWidths`.
    """

    first: float
    further: float
    change: float
    call: float
    step: float
    own: float
    lookup: float
    patience: int


MACHINES = {
    "shipped pair": Times(3.0, 0.08, 1.2, 0.9, 0.45, 0.2, 0.1, 28),
    "500M": Times(38.0, 1.2, 5.0, 1.5, 1.2, 0.2, 0.1, 4),
}


def engine_of(model: Path) -> Engine:
    """An engine without a drafter; its noise is keyed by seed and position, the same for all models."""
    return Engine(load(model, dtype="float32"), None, verifier="coupled", reuse_prefixes=False)


def record(spec_bench: Path, limit: int, tokens: int, copy_edit: Path | None) -> dict[str, list[Trace]]:
    """Outputs by workload and temperature, and the shipped draft model's drafts at each of their positions."""
    pair = tiny_pair_path()
    target, drafter = engine_of(pair / "target"), engine_of(pair / "drafter")
    questions = workloads.load("spec_bench", spec_bench)
    tasks = {name: (target, workloads.select(questions, limit, [category])) for name, category in WORKLOADS.items()}
    if copy_edit is not None:
        tasks[COPY_EDIT] = engine_of(copy_edit), workloads.load("copy_edit")[:limit]
    found: dict[str, list[Trace]] = {}
    for name, (writer, items) in tasks.items():
        prompts = workloads.encode(items, target.target.tokenizer, 300)
        for temperature in (0.0, 1.0):
            traces = found.setdefault(f"{name}, {temperature:g}", [])
            for seed, prompt in enumerate(track(prompts, f"{name}, temperature {temperature:g}")):
                params = SamplingParams(temperature=temperature, max_new_tokens=tokens, seed=seed)
                output = writer.generate(list(prompt.tokens), params).token_ids
                prefixes = [[*prompt.tokens, *output[:end]] for end in range(1, len(output))]
                some = SamplingParams(temperature=temperature, max_new_tokens=LONGEST, seed=seed, ignore_eos=True)
                parts = [prefixes[at : at + 32] for at in range(0, len(prefixes), 32)]
                drafts = [one.token_ids for part in parts for one in drafter.generate(part, some)]
                traces.append({"prompt": list(prompt.tokens), "output": output, "drafts": drafts})
    return found


class Clock:
    """Simulated seconds."""

    def __init__(self) -> None:
        self.milliseconds = 0.0

    def __call__(self) -> float:
        return self.milliseconds / 1e3


@dataclass
class Machine:
    """Advances the clock by what work costs."""

    times: Times
    clock: Clock
    seed: int
    width: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._widths = PassWidths(self.times.patience)

    def spend(self, milliseconds: float) -> None:
        """Some work, with noise of 15%, and twice as long once in fifty times."""
        slow = self._random.random() < 0.02
        self.clock.milliseconds += milliseconds * (1.0 + 0.15 * (self._random.random() - 0.5) + slow)

    def score(self, tokens: int) -> None:
        """A pass of the target."""
        before, self.width = self.width, self._widths.fit(tokens)
        change = self.times.change if self.width != before else 0.0
        self.spend(self.times.first + self.times.further * (self.width - 1) + change)


class Recorded(Drafter):
    """A draft model that proposes what was recorded."""

    name = "draft-model"

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.trace: Trace = {}

    def propose(self, batch: Batch, limits: list[int]) -> Draft:
        (limit,), sequence = limits, batch.sequences[0]
        if limit:
            self._machine.spend(self._machine.times.call + self._machine.times.step * limit)
        recorded = self.trace["drafts"][len(sequence.output) - 1] if limit else []
        return Draft.from_lists([recorded[:limit]])


@dataclass
class Contender:
    """A drafter and what it took so far, by workload."""

    name: str
    machine: Machine
    target: str
    milliseconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._model = Recorded(self.machine)
        lookup, _, others = self.name.partition(",")
        self._drafter: Any = LOOKUPS[lookup]() if lookup in LOOKUPS else None
        if others:
            times = self.machine.times
            self._drafter = Cascade([self._drafter, self._model], clock=self.machine.clock)
            self._drafter.keep_costs(f"{self.target} {self.name}")
            # What calibration would have found.
            passes = [(size, (times.first + times.further * (size - 1)) / 1e3) for size in (1, 2, 6, 9)]
            calls = [(length, (times.call + times.step * length) / 1e3) for length in (1, 5)]
            self._drafter.measure(passes, [[], calls])

    def replay(self, name: str, trace: Trace, greedy: bool) -> None:
        """Replay one output."""
        began, output, times = self.machine.clock.milliseconds, trace["output"], self.machine.times
        self._model.trace = trace
        params = SamplingParams(temperature=0.0 if greedy else 1.0, max_new_tokens=len(output))
        sequence = Sequence([*trace["prompt"], output[0]], len(trace["prompt"]), params, 0)
        while left := len(output) - len(sequence.output):
            done = len(output) - left
            seeds, positions = torch.zeros(1, dtype=torch.int64), torch.tensor([len(sequence.tokens)])
            batch = Batch([sequence], None, seeds, positions, 1 << 16, (not greedy,), (False,))  # type: ignore[arg-type]
            start = self.machine.clock.milliseconds
            draft = self._draft(batch, left - 1)
            tokens = draft.tokens[0, : draft.counts[0]].tolist()
            right = next(
                (n for n, pair in enumerate(zip(tokens, output[done:], strict=False)) if pair[0] != pair[1]),
                len(tokens),
            )
            right = min(right, left - 1)
            self.machine.score(len(tokens) + 1)
            if self._drafter is not None:
                path = torch.arange(1, len(tokens) + 1)[None]
                verdict = Verdict(path, torch.tensor([right]), torch.tensor([output[done + right]]))
                self._drafter.observe(batch, draft, verdict, torch.empty(0))
            if isinstance(self._drafter, Cascade):
                self.machine.spend(times.own)
                self._drafter.observe_seconds((self.machine.clock.milliseconds - start) / 1e3)
            sequence.tokens.extend(output[done : done + right + 1])
        self.milliseconds[name] = self.milliseconds.get(name, 0.0) + self.machine.clock.milliseconds - began

    def _draft(self, batch: Batch, most: int) -> Draft:
        if self.name == MODEL:
            return self._model.propose(batch, [min(5, most)])
        if self._drafter is None:
            return Draft.empty(1)
        self.machine.spend(self.machine.times.lookup)
        return self._drafter.propose(batch, [min(LONGEST, most)])


def race(traces: dict[str, list[Trace]], times: Times, seed: int) -> dict[str, dict[str, float]]:
    """Milliseconds of all contenders by workload; they take turns, output by output. Each target has its own."""
    found: dict[str, dict[str, float]] = {}
    for target in ("shipped", COPY_EDIT):
        machine = Machine(times, Clock(), seed)
        names = [PLAIN, MODEL, *LOOKUPS, *(f"{lookup},draft-model" for lookup in LOOKUPS)]
        contenders = [Contender(name, machine, target) for name in names]
        for name, rows in traces.items():
            for trace in rows if name.startswith(COPY_EDIT) == (target == COPY_EDIT) else []:
                for contender in contenders:
                    contender.replay(name, trace, name.endswith(", 0"))
        for contender in contenders:
            found.setdefault(contender.name, {}).update(contender.milliseconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spec-bench", type=Path, required=True, help="its question.jsonl")
    parser.add_argument("--copy-edit-target", type=Path, help="a model of recipes/copy_edit, for that workload too")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each workload")
    parser.add_argument("--tokens", type=int, default=160, help="of each output")
    parser.add_argument("--recording", type=Path, help="JSON; written, and read if it is there")
    args = parser.parse_args()
    if args.recording is not None and args.recording.exists():
        traces = json.loads(args.recording.read_text())
    else:
        traces = record(args.spec_bench, args.limit, args.tokens, args.copy_edit_target)
        if args.recording is not None:
            args.recording.write_text(json.dumps(traces))
    console = Console(width=140)
    for name, times in MACHINES.items():
        with tempfile.TemporaryDirectory() as folder:
            os.environ["FORETOKEN_CACHE"] = folder
            for process in ("first", "next"):
                title = f"{name}, {process} process: speed, times plain decoding's"
                console.print(table_of(title, race(traces, times, seed=0)))


def table_of(title: str, contenders: dict[str, dict[str, float]]) -> Table:
    """Speeds by workload; those of cascades also as multiples of the best of their parts and of plain decoding."""
    plain = contenders[PLAIN]
    table = Table(title=title, title_justify="left")
    table.add_column("drafter", no_wrap=True)
    for one in plain:
        table.add_column(one.replace(", ", "\n"), justify="right")
    for name, spent in contenders.items():
        table.add_row(name, *(f"{plain[key] / spent[key]:.2f}" for key in plain))
    for name in (name for name in contenders if "," in name):
        parts = [contenders[part] for part in (PLAIN, MODEL, name.partition(",")[0])]
        shares = [min(part[key] for part in parts) / contenders[name][key] for key in plain]
        table.add_row(f"{name.partition(',')[0]}, …: × best part", *(f"{share:.2f}" for share in shares), style="bold")
    return table


if __name__ == "__main__":
    main()
