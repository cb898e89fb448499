"""A cascade's choices without a clock: real texts, real drafts, the real `Cascade`, and rounds whose times are given.

A greedy text is the same whatever drafts it, and so is a text under shared noise. So what each drafter would have
proposed at each place of a text is recorded once, and then texts are gone through by any drafter in simulated time: the
cascade's clock is moved on by what calls and passes are said to take, with noise, and dearer where a pass has another
width than the last one (`PassWidths`). What is left is the choice itself, its learning included.

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
from foretoken.models.native.widths import PassWidths
from foretoken.sequence import Sequence
from foretoken.verify import Verdict

WORKLOADS = {"maths": "math_reasoning", "code": "coding", "summarising": "summarization", "retrieval": "rag"}
COPY_EDIT = "copy-edit"
LONGEST = 16  # tokens of a draft
PLAIN, MODEL = "none", "draft-model@5"
LOOKUPS: dict[str, type[Drafter]] = {"prompt-lookup": PromptLookup, "suffix": Suffix}

Text = dict[str, Any]
"""``prompt`` and ``output``, and for each position of the output the ``drafts`` of the draft model."""


@dataclass(frozen=True)
class Times:
    """Milliseconds, about those of the shipped pair and of one of 500M and 14M on two cores.

    Attributes:
        first, further: of a pass over a token, and of each token more.
        change: of a pass of another width than the last one, besides.
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
    """Writes texts by the noise that a seed and a place have for all models; greedy ones without."""
    return Engine(load(model, dtype="float32"), None, verifier="coupled", reuse_prefixes=False)


def record(spec_bench: Path, limit: int, tokens: int, copy_edit: Path | None) -> dict[str, list[Text]]:
    """Texts by workload and temperature, and what the shipped drafter would say at each of their places."""
    pair = tiny_pair_path()
    target, drafter = engine_of(pair / "target"), engine_of(pair / "drafter")
    questions = workloads.load("spec_bench", spec_bench)
    tasks = {name: (target, workloads.select(questions, limit, [category])) for name, category in WORKLOADS.items()}
    if copy_edit is not None:
        tasks[COPY_EDIT] = engine_of(copy_edit), workloads.load("copy_edit")[:limit]
    found: dict[str, list[Text]] = {}
    for name, (writer, items) in tasks.items():
        prompts = workloads.encode(items, target.target.tokenizer, 300)
        for temperature in (0.0, 1.0):
            texts = found.setdefault(f"{name}, {temperature:g}", [])
            for seed, prompt in enumerate(track(prompts, f"{name}, temperature {temperature:g}")):
                params = SamplingParams(temperature=temperature, max_new_tokens=tokens, seed=seed)
                output = writer.generate(list(prompt.tokens), params).token_ids
                places = [[*prompt.tokens, *output[:end]] for end in range(1, len(output))]
                some = SamplingParams(temperature=temperature, max_new_tokens=LONGEST, seed=seed, ignore_eos=True)
                parts = [places[at : at + 32] for at in range(0, len(places), 32)]
                drafts = [one.token_ids for part in parts for one in drafter.generate(part, some)]
                texts.append({"prompt": list(prompt.tokens), "output": output, "drafts": drafts})
    return found


class Clock:
    """Simulated seconds."""

    def __init__(self) -> None:
        self.milliseconds = 0.0

    def __call__(self) -> float:
        return self.milliseconds / 1e3


@dataclass
class Machine:
    """Moves the clock on."""

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
    """A draft model that says what was recorded."""

    name = "draft-model"

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.text: Text = {}

    def propose(self, batch: Batch, limits: list[int]) -> Draft:
        (limit,), sequence = limits, batch.sequences[0]
        if limit:
            self._machine.spend(self._machine.times.call + self._machine.times.step * limit)
        said = self.text["drafts"][len(sequence.output) - 1] if limit else []
        return Draft.from_lists([said[:limit]])


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

    def write(self, name: str, text: Text, greedy: bool) -> None:
        """Go through one text."""
        began, output, times = self.machine.clock.milliseconds, text["output"], self.machine.times
        self._model.text = text
        params = SamplingParams(temperature=0.0 if greedy else 1.0, max_new_tokens=len(output))
        sequence = Sequence([*text["prompt"], output[0]], len(text["prompt"]), params, 0)
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


def race(texts: dict[str, list[Text]], times: Times, seed: int) -> dict[str, dict[str, float]]:
    """Milliseconds of all contenders by workload; they take turns, text by text. Each target has its own of them."""
    found: dict[str, dict[str, float]] = {}
    for target in ("shipped", COPY_EDIT):
        machine = Machine(times, Clock(), seed)
        names = [PLAIN, MODEL, *LOOKUPS, *(f"{lookup},draft-model" for lookup in LOOKUPS)]
        contenders = [Contender(name, machine, target) for name in names]
        for name, rows in texts.items():
            for text in rows if name.startswith(COPY_EDIT) == (target == COPY_EDIT) else []:
                for contender in contenders:
                    contender.write(name, text, name.endswith(", 0"))
        for contender in contenders:
            found.setdefault(contender.name, {}).update(contender.milliseconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spec-bench", type=Path, required=True, help="its question.jsonl")
    parser.add_argument("--copy-edit-target", type=Path, help="a model of recipes/copy_edit, for that workload too")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each workload")
    parser.add_argument("--tokens", type=int, default=160, help="of each text")
    parser.add_argument("--recording", type=Path, help="JSON; written, and read if it is there")
    told = parser.parse_args()
    if told.recording is not None and told.recording.exists():
        texts = json.loads(told.recording.read_text())
    else:
        texts = record(told.spec_bench, told.limit, told.tokens, told.copy_edit_target)
        if told.recording is not None:
            told.recording.write_text(json.dumps(texts))
    console = Console(width=140)
    for name, times in MACHINES.items():
        with tempfile.TemporaryDirectory() as folder:
            os.environ["FORETOKEN_CACHE"] = folder
            for process in ("first", "next"):
                title = f"{name}, {process} process: speed, times plain decoding's"
                console.print(table_of(title, race(texts, times, seed=0)))


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
