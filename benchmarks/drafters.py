"""Drafter × workload: mean acceptance length, what a round costs, and tokens/s against plain decoding.

Everything runs in one process on one copy of the target. The drafters take turns prompt by prompt, and plain decoding
takes its turn with them in every repeat, so that what slows the machine for a while slows all of them; ratios are
formed within a repeat. Texts end where the target ends them. With --json a run that was interrupted goes on where it
ended, and a drafter that is named later is added to what is there (plain decoding is then measured anew beside it).

Run with: python benchmarks/drafters.py --spec-bench FILE [--json FILE] [--markdown FILE] [--copy-edit-target DIR]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from foretoken import Engine, SamplingParams, drafters, tiny_pair_path, workloads
from foretoken.bench.records import Record, Store
from foretoken.bench.turns import Spread
from foretoken.engine.outputs import PARTS
from foretoken.errors import ForetokenError, ParameterError
from foretoken.models import LanguageModel, load, machine
from foretoken.workloads import Prompt

PLAIN = "none"
MODEL = "draft-model"
CASCADE = f"prompt-lookup,{MODEL}"
SPEC_BENCH = {"maths": "math_reasoning", "code": "coding", "summarising": "summarization", "retrieval": "rag"}
COPY_EDIT = "copy-edit"
WORKLOADS = (*SPEC_BENCH, COPY_EDIT)
WARM_UP_TOKENS = 32
CHAIN, TREE = 5, 16
"""Tokens drafted a round; cascades take as many as trees, since they ask drafters that pay by the token for few."""


def default_drafters() -> list[str]:
    """Plain decoding, the draft model, a cascade of it and prompt lookup, and all that `drafters.known` names besides.

    One that can't be made of its name alone says so when it is tried, and is left out.
    """
    others = [name for name, one in drafters.known().items() if not one.needs_model and name != PLAIN]
    return [PLAIN, MODEL, *others, CASCADE]


def make_engine(word: str, target: LanguageModel, model: LanguageModel | None) -> Engine:
    """What measures a drafter.

    Args:
        word: as `Engine` takes it; ``draft-model`` in it stands for `model`. ``;NAME=VALUE`` behind it is an option of
            `Engine`, such as ``;verifier=block``. ``@K`` at the end sets the number of tokens drafted a round,
            ``@auto`` leaves it to the controller; without, it is `CHAIN` or `TREE`.
        target: loaded.
        model: likewise.

    Raises:
        ForetokenError: there is no such drafter for this target.
    """
    described, at, number = word.partition("@")
    if at and number != "auto" and not number.isdecimal():
        raise ParameterError(f"drafter {word!r}: write a number of tokens after the @, or auto")
    name, *given = described.split(";")
    options: dict[str, Any] = {}
    for option in given:
        key, equals, value = option.partition("=")
        if not equals:
            raise ParameterError(f"drafter {word!r}: write an option as NAME=VALUE")
        options[key] = value
    parts: list[Any] = [model if part == MODEL else part for part in name.split(",")]
    if None in parts:
        raise ParameterError(f"drafter {word!r} needs a model: name it with --drafter")
    drafter = None if name == PLAIN else parts if len(parts) > 1 else parts[0]
    k = int(number) if number.isdecimal() else "auto"
    engine = Engine(target, drafter, num_speculative_tokens=k, reuse_prefixes=False, **options)
    if not at:
        many = len(parts) > 1 or getattr(engine.drafter, "trees", False)
        engine.num_speculative_tokens = TREE if many else CHAIN
    return engine


def prompts_of(name: str, spec_bench: Path | None, limit: int, target: LanguageModel, room: int) -> list[Prompt]:
    """The first prompts of a workload, as the target reads them.

    Raises:
        ParameterError: an unknown name, or Spec-Bench's file is needed and missing.
    """
    if name == COPY_EDIT:
        items = workloads.load("copy_edit")[:limit]
    elif name in SPEC_BENCH:
        items = workloads.select(workloads.load("spec_bench", spec_bench), limit, [SPEC_BENCH[name]])
    else:
        raise ParameterError(f"unknown workload {name!r}: choose one of {', '.join(WORKLOADS)}")
    return workloads.encode(items, target.tokenizer, room)


def one_text(engine: Engine, prompt: Prompt, params: SamplingParams) -> Record:
    """Generate once: counts, and seconds by part, those up to the first round's end (the prompt's) apart."""
    first: dict[str, float] = {}
    for event in engine.stream(list(prompt.tokens), params):
        first = first or dict(event.stats.seconds)
        completion = event.completion
    assert completion is not None
    stats = completion.stats
    digest = hashlib.sha256(json.dumps(completion.token_ids).encode()).hexdigest()[:12]
    return {
        "rounds": stats.rounds,
        "emitted": stats.emitted,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "seconds": stats.seconds,
        "first_seconds": first,
        "texts": [digest],
    }


def added(records: Sequence[Record]) -> Record:
    """The sum of texts' records."""
    counts = {name: sum(one[name] for one in records) for name in ("rounds", "emitted", "drafted", "accepted")}
    times = {
        name: {part: sum(one[name][part] for one in records) for part in PARTS} for name in ("seconds", "first_seconds")
    }
    return {**counts, **times, "texts": [text for one in records for text in one["texts"]]}


@dataclass(frozen=True)
class Block:
    """What is measured together: one workload at one temperature, once."""

    workload: str
    temperature: float
    repeat: int
    prompts: Sequence[Prompt]

    def record(self, word: str, session: int, measured: Record) -> Record:
        """A drafter's result, in the form that a `Store` keeps."""
        return {"kind": "run", **self.key(word), "workload": self.workload, "session": session, **measured}

    def key(self, word: str) -> Record:
        """What makes a run the same as another; see `foretoken.bench.records.key`."""
        items = [prompt.item.id for prompt in self.prompts]
        return {
            "engine": word,
            "batch": 1,
            "temperature": self.temperature,
            "repeat": self.repeat,
            "items": [self.workload, *items],
        }

    def missing(self, words: Iterable[str], store: Store) -> list[str]:
        """The drafters that the store has no result of; plain decoding among them wherever there is one."""
        from foretoken.bench.records import key

        done = store.done()
        found = [word for word in words if key(self.key(word)) not in done]
        return [PLAIN, *(word for word in found if word != PLAIN)] if found else []

    def measure(self, engines: Mapping[str, Engine], max_new_tokens: int) -> dict[str, Record]:
        """Let the engines take turns, in an order that moves on from prompt to prompt."""
        params = SamplingParams(temperature=self.temperature, max_new_tokens=max_new_tokens)
        words = list(engines)
        texts: dict[str, list[Record]] = {word: [] for word in words}
        for place, prompt in enumerate(self.prompts):
            at = (place + self.repeat) % len(words)
            for word in words[at:] + words[:at]:
                texts[word].append(one_text(engines[word], prompt, params))
        return {word: added(records) for word, records in texts.items()}


@dataclass(frozen=True)
class Cell:
    """A drafter on a workload at one temperature.

    Attributes:
        mean_acceptance_length: emitted tokens a target pass.
        round_seconds: of a round by part, those that read a prompt left out.
        rate: tokens a second, the prompt's reading included; over the repeats.
        over_plain: times plain decoding's rate in the same repeat.
        same_texts: share of texts that equal plain decoding's in the same repeat.
    """

    mean_acceptance_length: float
    round_seconds: dict[str, float]
    rate: Spread
    over_plain: Spread
    same_texts: float

    @property
    def milliseconds(self) -> float:
        """Of a whole round."""
        return 1e3 * sum(self.round_seconds.values())


def cells(runs: Sequence[Record]) -> dict[tuple[str, float, str], Cell]:
    """Of each workload, temperature and drafter that was measured."""
    plain = {_place(run): run for run in runs if run["engine"] == PLAIN}
    groups: dict[tuple[str, float, str], list[Record]] = {}
    for run in runs:
        groups.setdefault((run["workload"], run["temperature"], run["engine"]), []).append(run)
    return {place: _cell(group, [plain[_place(run)] for run in group]) for place, group in groups.items()}


def _place(run: Record) -> tuple[Any, ...]:
    return run["workload"], run["temperature"], run["repeat"], run["session"]


def _cell(runs: Sequence[Record], plain: Sequence[Record]) -> Cell:
    total = added(runs)
    later = max(total["rounds"] - len(total["texts"]), 1)  # rounds but each text's first
    rate = Spread.of(map(_rate, runs))
    over = Spread.of(_rate(run) / _rate(other) for run, other in zip(runs, plain, strict=True))
    assert rate is not None
    assert over is not None
    pairs = [
        pair for run, other in zip(runs, plain, strict=True) for pair in zip(run["texts"], other["texts"], strict=True)
    ]
    return Cell(
        total["emitted"] / total["rounds"],
        {part: (total["seconds"][part] - total["first_seconds"][part]) / later for part in PARTS},
        rate,
        over,
        sum(one == other for one, other in pairs) / len(pairs),
    )


def _rate(run: Record) -> float:
    return run["emitted"] / sum(run["seconds"].values())


def _settled(found: Mapping[tuple[str, float, str], Cell]) -> Iterator[tuple[float, list[str], list[str]]]:
    """Temperatures, with the workloads and drafters that were measured at each, in the order of measurement."""
    for temperature in dict.fromkeys(temperature for _, temperature, _ in found):
        here = [place for place in found if place[1] == temperature]
        yield temperature, list(dict.fromkeys(p[0] for p in here)), list(dict.fromkeys(p[2] for p in here))


def _titled(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def show(found: Mapping[tuple[str, float, str], Cell], console: Console) -> None:
    """A table for each temperature and workload."""
    for temperature, names, words in _settled(found):
        for name in names:
            table = Table(title=f"{name}, {_titled(temperature)}", title_justify="left", box=SIMPLE_HEAD)
            table.add_column("drafter", no_wrap=True)
            headings = ["acceptance\nlength", "ms a\nround", *PARTS, "tokens/s", "× plain"]
            for heading in headings + (["same\ntexts"] if temperature == 0 else []):
                table.add_column(heading, justify="right")
            for word in words:
                cell = found.get((name, temperature, word))
                if cell is None:
                    continue
                over = cell.over_plain
                row = [
                    f"{cell.mean_acceptance_length:.2f}",
                    f"{cell.milliseconds:.2f}",
                    *(f"{1e3 * cell.round_seconds[part]:.2f}" for part in PARTS),
                    f"{cell.rate.median:.0f}",
                    f"{over.median:.2f} ({over.low:.2f}–{over.high:.2f})",
                ]
                table.add_row(word, *row, *([f"{cell.same_texts:.0%}"] if temperature == 0 else []))
            console.print(table)


def markdown(found: Mapping[tuple[str, float, str], Cell]) -> str:
    """A table for each temperature: drafters down, workloads across, the fastest of each workload in bold."""
    lines = []
    for temperature, names, words in _settled(found):
        lines += [f"{_titled(temperature).capitalize()}:", "", f"| drafter | {' | '.join(names)} |"]
        lines.append("| --- |" + " --- |" * len(names))
        for word in words:
            entries = [_entry(found, name, temperature, word) for name in names]
            lines.append(f"| `{word}` | {' | '.join(entries)} |")
        lines.append("")
    return "\n".join(lines)


def _entry(found: Mapping[tuple[str, float, str], Cell], name: str, temperature: float, word: str) -> str:
    cell = found.get((name, temperature, word))
    if cell is None:
        return "–"
    best = max(one.over_plain.median for (n, t, _), one in found.items() if (n, t) == (name, temperature))
    drafting = 1e3 * cell.round_seconds["drafter"]
    told = f"{cell.mean_acceptance_length:.2f}; {cell.milliseconds:.1f} ({drafting:.1f}) ms; "
    if word == PLAIN:
        return f"{told}{cell.rate.median:.0f}/s"
    times = f"{cell.over_plain.median:.2f}×"
    return told + (f"**{times}**" if cell.over_plain.median == best else times)


class Bench:
    """Targets and engines, each made when it is first needed.

    Args:
        arguments: of the command line.
        console: where to say what is left out.
    """

    def __init__(self, arguments: argparse.Namespace, console: Console) -> None:
        self.arguments, self.console = arguments, console
        self.words = list(dict.fromkeys([PLAIN, *arguments.drafters]))
        self._load = partial(load, dtype=arguments.dtype)
        self._model = self._load(arguments.drafter, quantize="auto") if arguments.drafter else None
        self._targets: dict[str, LanguageModel] = {}
        self._engines: dict[tuple[str, str], Engine | None] = {}

    def target(self, name: str) -> LanguageModel:
        """The model that a workload is given to."""
        path = self._path(name)
        if path not in self._targets:
            self._targets[path] = self._load(path)
        return self._targets[path]

    def _path(self, name: str) -> str:
        other = self.arguments.copy_edit_target if name == COPY_EDIT else None
        return str(other or self.arguments.target)

    def engines(self, name: str, words: Iterable[str], warm_up: Prompt) -> dict[str, Engine]:
        """Those for a workload that can be made, warm."""
        found = {word: self._engine(name, word, warm_up) for word in words}
        return {word: engine for word, engine in found.items() if engine is not None}

    def _engine(self, name: str, word: str, warm_up: Prompt) -> Engine | None:
        place = self._path(name), word
        if place not in self._engines:
            try:
                engine = make_engine(word, self.target(name), self._model)
                for temperature in self.arguments.temperatures:
                    params = SamplingParams(temperature=temperature, max_new_tokens=WARM_UP_TOKENS, ignore_eos=True)
                    engine.generate(list(warm_up.tokens), params)
                self._engines[place] = engine
            except ForetokenError as error:
                self._engines[place] = None
                self.console.print(f"not run: {word}: {error}", style="yellow", soft_wrap=True)
        return self._engines[place]

    def blocks(self) -> list[Block]:
        """All that is to be measured: repeats outermost, so that a case's repeats are far apart."""
        told = self.arguments
        made: dict[str, list[Prompt]] = {}
        for name in told.workloads:
            target = self.target(name)
            room = target.max_length - told.max_new_tokens - 32  # drafts may reach behind the end
            made[name] = prompts_of(name, told.spec_bench, told.limit, target, room)
        return [
            Block(name, temperature, repeat, prompts)
            for repeat in range(told.repeats)
            for name, prompts in made.items()
            for temperature in told.temperatures
        ]

    def settings(self) -> Record:
        """What all results of one file share."""
        told = self.arguments
        texts = ("target", "drafter", "copy_edit_target", "dtype", "max_new_tokens", "threads")
        return {name: value if isinstance(value := getattr(told, name), int) else str(value) for name in texts}

    def run(self, store: Store) -> None:
        """Measure what the store lacks."""
        blocks = [(block, words) for block in self.blocks() if (words := block.missing(self.words, store))]
        if not blocks:
            return
        session = len(store.of("machine"))
        store.add({"kind": "machine", **machine.describe(), "time": int(time.time())})
        with Progress(console=self.console, disable=not self.console.is_terminal) as bar:
            for block, words in bar.track(blocks, description="drafters"):
                engines = self.engines(block.workload, words, block.prompts[0])
                if words == [PLAIN] or list(engines) != [PLAIN]:  # plain decoding alone is nothing to compare with
                    for word, measured in block.measure(engines, self.arguments.max_new_tokens).items():
                        store.add(block.record(word, session, measured))


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def listed(text: str) -> list[str]:
        return [part for part in text.split("+") if part]

    pair = tiny_pair_path()
    parser.add_argument("--target", type=Path, default=pair / "target", help="model folder (default: the shipped one)")
    parser.add_argument("--drafter", type=Path, default=pair / "drafter", help=f"what {MODEL!r} stands for")
    parser.add_argument("--copy-edit-target", type=Path, help="target of that workload; see recipes/copy_edit")
    parser.add_argument(
        "--drafters",
        type=listed,
        default=default_drafters(),
        help="+ between; ;NAME=VALUE and @K as in make_engine",
    )
    parser.add_argument("--workloads", type=listed, default=list(WORKLOADS), help="with + between")
    parser.add_argument("--spec-bench", type=Path, help="its question.jsonl; all workloads but copy-edit need it")
    parser.add_argument("--limit", type=int, default=6, help="prompts of each workload")
    parser.add_argument("--temperatures", type=lambda text: [float(one) for one in listed(text)], default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=machine.cores())
    parser.add_argument("--json", type=Path, help="JSON lines; if the file is there, go on where it ends")
    parser.add_argument("--markdown", type=Path, help="write the tables there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and show all that is known."""
    told = parsed(arguments)
    torch.set_num_threads(told.threads)
    console = Console(width=120)
    try:
        bench = Bench(told, console)
        store = Store(told.json, bench.settings())
        bench.run(store)
    except ForetokenError as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit("stopped; with --json the same command goes on from here") from None
    found = cells(store.of("run"))
    show(found, console)
    if told.markdown is not None:
        told.markdown.write_text(markdown(found), encoding="utf-8")


if __name__ == "__main__":
    main()
