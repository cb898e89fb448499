"""Every drafter on every workload, in one process on one copy of the target: what is measured.

The drafters take turns prompt by prompt, plain decoding with them in every repeat; ratios are formed within a repeat.
Outputs end where the target ends them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from foretoken import drafters, workloads
from foretoken.bench.errors import BenchError
from foretoken.bench.records import Record, Store, key
from foretoken.bench.turns import order
from foretoken.drafters.sharing import forget_requests
from foretoken.engine.engine import Engine
from foretoken.engine.outputs import PARTS
from foretoken.errors import ForetokenError, ParameterError
from foretoken.models import LanguageModel, load, machine
from foretoken.sampling import SamplingParams
from foretoken.workloads import Prompt

PLAIN = "none"
MODEL = "draft-model"
CASCADE = f"prompt-lookup,{MODEL}"
SPEC_BENCH = {"maths": "math_reasoning", "code": "coding", "summarising": "summarization", "retrieval": "rag"}
"""Workloads that are categories of Spec-Bench."""

COPY_EDIT = "copy-edit"
WORKLOADS = (*SPEC_BENCH, COPY_EDIT)
WARM_UP_TOKENS = 32
CHAIN, TREE = 5, 16
"""Draft lengths unless another is named; cascades get as many tokens as trees."""

Progress = Callable[[int, int, str], None]
"""Called with the blocks made, the blocks planned, and what is going on."""


@dataclass(frozen=True, kw_only=True)
class DrafterPlan:
    """What is measured.

    Attributes:
        target: folder of the target's checkpoint.
        drafter: folder of what ``draft-model`` stands for; None: there is none.
        drafters: see `make_engine`; plain decoding is always measured.
        workloads: of `WORKLOADS`.
        spec_bench: Spec-Bench's ``question.jsonl``; all workloads but copy-edit need it.
        copy_edit_target: the target of that workload, if it has one of its own.
        limit: prompts of each workload.
        temperatures: 0 is greedy.
        repeats: how often each cell is measured.
        max_new_tokens: most tokens of an output.
        dtype: of weights and arithmetic.
        threads: of the process.
    """

    target: Path
    drafter: Path | None
    drafters: tuple[str, ...]
    workloads: tuple[str, ...]
    spec_bench: Path | None = None
    copy_edit_target: Path | None = None
    limit: int = 6
    temperatures: tuple[float, ...] = (0.0, 1.0)
    repeats: int = 3
    max_new_tokens: int = 256
    dtype: str = "float32"
    threads: int = 1

    def settings(self) -> Record:
        """What all results of one file share."""
        names = ("target", "drafter", "copy_edit_target", "dtype", "max_new_tokens", "threads")
        values = {name: getattr(self, name) for name in names}
        values = {name: value.resolve() if isinstance(value, Path) else value for name, value in values.items()}
        return {name: value if isinstance(value, (int, Path)) else str(value) for name, value in values.items()}


def default_drafters(model: bool = True) -> list[str]:
    """Plain decoding and all drafters that `drafters.known` names.

    One that can't be made from its name alone raises an error when it is tried, and is left out.

    Args:
        model: there is a draft model: it and a cascade of prompt lookup and it are among them.
    """
    others = [name for name, one in drafters.known().items() if not one.needs_model and name != PLAIN]
    return [PLAIN, MODEL, *others, CASCADE] if model else [PLAIN, *others]


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
    k: int | Literal["auto"] = int(number) if number.isdecimal() else "auto"
    engine = Engine(target, drafter, num_speculative_tokens=k, reuse_prefixes=False, **options)
    if not at:
        many = len(parts) > 1 or engine.drafter.trees
        engine.num_speculative_tokens = TREE if many else CHAIN
    return engine


def prompts_of(name: str, plan: DrafterPlan, target: LanguageModel) -> list[Prompt]:
    """The first prompts of a workload, as the target's token ids.

    Raises:
        ParameterError: an unknown name, or Spec-Bench's file is needed and missing.
    """
    if name == COPY_EDIT:
        items = workloads.load("copy_edit")[: plan.limit]
    elif name in SPEC_BENCH:
        items = workloads.select(workloads.load("spec_bench", plan.spec_bench), plan.limit, [SPEC_BENCH[name]])
    else:
        raise ParameterError(f"unknown workload {name!r}: choose one of {', '.join(WORKLOADS)}")
    max_tokens = target.max_length - plan.max_new_tokens - 32  # drafts may exceed the end
    return workloads.encode(items, target.tokenizer, max_tokens)


def one_output(engine: Engine, prompt: Prompt, params: SamplingParams) -> Record:
    """Generate once: counts, and seconds by part; those of the prefill and the first round apart, too."""
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
        "outputs": [digest],
    }


def added(records: Sequence[Record]) -> Record:
    """The sum of outputs' records."""
    counts = {name: sum(one[name] for one in records) for name in ("rounds", "emitted", "drafted", "accepted")}
    times = {
        name: {part: sum(one[name][part] for one in records) for part in PARTS} for name in ("seconds", "first_seconds")
    }
    return {**counts, **times, "outputs": [digest for one in records for digest in one["outputs"]]}


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
        """The fields that identify a run; see `foretoken.bench.records.key`."""
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
        done = store.done()
        found = [word for word in words if key(self.key(word)) not in done]
        return [PLAIN, *(word for word in found if word != PLAIN)] if found else []

    def measure(self, engines: Mapping[str, Engine], max_new_tokens: int) -> dict[str, Record]:
        """Let the engines take turns, prompt by prompt.

        Drafters that copy from other requests copy from the block's earlier prompts, and from nothing before it.
        """
        for engine in engines.values():
            forget_requests(engine.drafter)
        params = SamplingParams(temperature=self.temperature, max_new_tokens=max_new_tokens)
        outputs: dict[str, list[Record]] = {word: [] for word in engines}
        for number, prompt in enumerate(self.prompts):
            for word in order(list(engines), number + len(self.prompts) * self.repeat):
                outputs[word].append(one_output(engines[word], prompt, params))
        return {word: added(records) for word, records in outputs.items()}


class _Engines:
    """Targets and engines, each made when it is first needed."""

    def __init__(self, plan: DrafterPlan, leave_out: Callable[[str, ForetokenError], None]) -> None:
        self._plan, self._leave_out = plan, leave_out
        self._model = load(plan.drafter, dtype=plan.dtype, quantize="auto") if plan.drafter is not None else None
        self._targets: dict[Path, LanguageModel] = {}
        self._engines: dict[tuple[Path, str], Engine | None] = {}

    def target(self, name: str) -> LanguageModel:
        """The model that a workload is given to."""
        path = self._path(name)
        if path not in self._targets:
            self._targets[path] = load(path, dtype=self._plan.dtype)
        return self._targets[path]

    def _path(self, name: str) -> Path:
        other = self._plan.copy_edit_target if name == COPY_EDIT else None
        return other or self._plan.target

    def of(self, name: str, words: Iterable[str], warm_up: Prompt) -> dict[str, Engine]:
        """Those of a workload that can be made, warmed up."""
        found = {word: self._engine(name, word, warm_up) for word in words}
        return {word: engine for word, engine in found.items() if engine is not None}

    def _engine(self, name: str, word: str, warm_up: Prompt) -> Engine | None:
        made = self._path(name), word
        if made not in self._engines:
            try:
                engine = make_engine(word, self.target(name), self._model)
                for temperature in self._plan.temperatures:
                    params = SamplingParams(temperature=temperature, max_new_tokens=WARM_UP_TOKENS, ignore_eos=True)
                    engine.generate(list(warm_up.tokens), params)
                self._engines[made] = engine
            except ForetokenError as error:
                self._engines[made] = None
                self._leave_out(word, error)
        return self._engines[made]


def measure_drafters(
    plan: DrafterPlan,
    store: Store,
    progress: Progress = lambda *_: None,
    leave_out: Callable[[str, ForetokenError], None] = lambda *_: None,
) -> None:
    """Measure what the store lacks; a drafter that is named later is added to what is there, plain decoding beside it.

    Args:
        plan: what to measure.
        store: of these settings.
        progress: see `Progress`.
        leave_out: called with a drafter that can't be run, and why.

    Raises:
        ForetokenError: a model or a file can't be used, the results can't be written, or the store's are of other
            prompts.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(plan.threads)
    try:
        _measure(plan, store, progress, leave_out)
    finally:
        torch.set_num_threads(before)


def _measure(
    plan: DrafterPlan, store: Store, progress: Progress, leave_out: Callable[[str, ForetokenError], None]
) -> None:
    words = list(dict.fromkeys([PLAIN, *plan.drafters]))
    engines = _Engines(plan, leave_out)
    prompts = {name: prompts_of(name, plan, engines.target(name)) for name in plan.workloads}
    planned = [
        (block, missing)
        for repeat in range(plan.repeats)  # outermost, so that a cell's repeats are far apart
        for name, chosen in prompts.items()
        for temperature in plan.temperatures
        if (missing := (block := Block(name, temperature, repeat, chosen)).missing(words, store))
    ]
    if not planned:
        return
    session = len(store.of("machine"))
    about = {name: workloads.fingerprint(chosen) for name, chosen in prompts.items()}
    _check_prompts(about, store)
    store.add({"kind": "machine", **machine.describe(), "prompts": about, "time": int(time.time())})
    for made, (block, missing) in enumerate(planned):
        progress(made, len(planned), f"{block.workload}, temperature {block.temperature:g}")
        found = engines.of(block.workload, missing, block.prompts[0])
        if missing == [PLAIN] or list(found) != [PLAIN]:  # plain decoding alone is nothing to compare with
            for word, measured in block.measure(found, plan.max_new_tokens).items():
                store.add(block.record(word, session, measured))
    progress(len(planned), len(planned), "done")


def _check_prompts(about: Mapping[str, str], store: Store) -> None:
    """Check that each workload's prompts, by their fingerprints, are those of the results so far."""
    for record in store.of("machine"):
        for name, before in record.get("prompts", {}).items():
            if about.get(name, before) != before:
                raise BenchError(
                    f"the results of workload {name} are of other prompts: name another file, or the same limit and "
                    "questions to go on"
                )
