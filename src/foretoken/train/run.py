"""A training run: from files with prompts to a folder that `Engine` takes as a drafter."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from foretoken.engine.cache_budget import parse_bytes
from foretoken.errors import ParameterError
from foretoken.heads import MedusaConfig
from foretoken.models import load
from foretoken.sampling.params import check_integer, check_number
from foretoken.train.card import card
from foretoken.train.course import Course, News, Totals
from foretoken.train.data import Features, split
from foretoken.train.errors import TrainingError
from foretoken.train.learners import DraftLearner, Learner, MedusaLearner, draft_config, eagle3_config, make_eagle3
from foretoken.train.loop import fit
from foretoken.train.prompts import read_prompts
from foretoken.train.samples import SHARD, TargetSample, write_samples
from foretoken.train.storage import write_json, writing
from foretoken.train.teacher import Teacher
from foretoken.train.verdict import Verdict, lookup_lengths

Kind = Literal["draft", "medusa", "eagle3"]
WORK, RUN = "training", "run.json"
_FORMAT = 2
"""Of what is kept of a run; another one has sequences of other prompts or temperatures."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The sequences that the drafter is trained on: prompts, and the target's outputs.

    Attributes:
        data: files with prompts; see `read_prompts`.
        num_samples: sequences.
        max_new_tokens: most tokens of an output.
        max_length: most tokens of prompt and output; longer prompts are left out.
        prompt_tokens: tokens of a prompt that is cut out of a document.
        temperatures: of sampling, in turn; 0 is greedy.
        held_out: most sequences that are kept for measuring.
        seed: of the prompts' order and of the sampling.
    """

    data: tuple[Path, ...]
    num_samples: int = 4096
    max_new_tokens: int = 128
    max_length: int = 1024
    prompt_tokens: int = 48
    temperatures: tuple[float, ...] = (1.0, 1.0, 0.0)
    held_out: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.data:
            raise ParameterError("no data: name at least one file with prompts for the target")
        for name in ("num_samples", "max_new_tokens", "prompt_tokens", "held_out"):
            check_integer(name, getattr(self, name), 1, cure="leave it out for the default")
        check_integer("max_length", self.max_length, self.max_new_tokens + 1, cure="it holds prompt and output")
        check_integer("seed", self.seed, 0, cure="use 0")
        if not self.temperatures:
            raise ParameterError("no temperatures: give one at least, such as 1")
        for value in self.temperatures:
            check_number("temperature", value, 0.0, 100.0, cure="use 0 for greedy outputs")


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """What is trained.

    Attributes:
        kind: "draft" (a small Llama), "medusa" or "eagle3".
        draft_vocab_size: eagle3: size of the head's vocabulary, the most frequent tokens; None for all.
        target_layers: eagle3: whose outputs are fused; None for EAGLE's choice.
        num_key_value_heads: eagle3: heads of keys and values; None for as many as the target has.
        num_heads: medusa: tokens that are predicted.
        num_layers: decoder layers of a draft model, residual blocks of a Medusa head.
        hidden_size: draft: width; None for about a third of the target's.
    """

    kind: Kind
    draft_vocab_size: int | None = None
    target_layers: tuple[int, ...] | None = None
    num_key_value_heads: int | None = None
    num_heads: int = 4
    num_layers: int | None = None
    hidden_size: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ParameterError(f"can't train {self.kind!r}: choose one of {', '.join(get_args(Kind))}")
        check_integer("num_heads", self.num_heads, 1, 64, cure="one head a token to draft")
        if self.num_layers is not None:
            check_integer("num_layers", self.num_layers, 1, cure="leave it out for the default")

    def config(self, teacher: Teacher) -> Any:
        """The config of such a drafter for a target.

        Raises:
            ParameterError: a value is out of the target's range.
        """
        if self.kind == "eagle3":
            return eagle3_config(teacher, self.draft_vocab_size, self.target_layers, self.num_key_value_heads)
        if self.kind == "medusa":
            sizes = teacher.hidden_size, teacher.vocab_size, self.num_heads, self.num_layers or 1
            return MedusaConfig(*sizes, teacher.num_layers)
        return draft_config(teacher, self.num_layers or 2, self.hidden_size)

    def make(self, teacher: Teacher, samples: Sequence[TargetSample], seed: int) -> Learner:
        """A fresh learner for a target."""
        config = self.config(teacher)
        if self.kind == "eagle3":
            return make_eagle3(teacher, config, samples, seed)
        return (MedusaLearner if self.kind == "medusa" else DraftLearner)(teacher, config, seed)


@dataclass(frozen=True)
class TrainingReport:
    """A finished run.

    Attributes:
        folder: what `Engine` takes as a drafter.
        totals: steps, tokens, acceptance.
        parameters: weights of the drafter.
        verdict: whether it is worth using.
    """

    folder: Path
    totals: Totals
    parameters: int
    verdict: Verdict


@dataclass(frozen=True)
class State:
    """What a progress bar shows.

    Attributes:
        stage: "samples" or "training".
        fraction: of the stage, 0 to 1.
        text: details in words.
        news: of training.
    """

    stage: str
    fraction: float
    text: str
    news: News | None = field(default=None)


def train(
    target: Any,
    shape: DrafterShape,
    corpus: Corpus,
    course: Course,
    out: str | Path,
    *,
    cache_size: int | str = "4GiB",
    export_speculators: Path | None = None,
    licence: str | None = None,
    command: str | None = None,
    watch: Callable[[State], None] = lambda state: None,
    **load_options: Any,
) -> TrainingReport:
    """Train a drafter for a target: the target generates sequences, and the drafter learns its distribution along them.

    Progress is saved in ``OUT/training``: the same call resumes a run that was stopped.

    Args:
        target: a folder, a hub id, or a transformers model, with its tokenizer.
        shape: what is trained.
        corpus: on which sequences.
        course: how long, and how.
        out: folder for the result; `Engine` takes it as a drafter.
        cache_size: most bytes of hidden states on disk, a number or ``"4GiB"``; 0 computes them each time.
        export_speculators: eagle3: folder to write the head to in the format of `speculators` too, which vLLM loads.
        licence: for the card.
        command: for the card.
        watch: called with the progress.
        load_options: of `foretoken.load`.

    Raises:
        ParameterError: a value out of its range, or data that can't be used.
        ModelError: the target can't be loaded, or nothing can be trained for it.
        TrainingError: the folder has another run, the disk is full, or the loss is NaN or infinite.
        KeyboardInterrupt: stopped by a signal; progress is saved.
    """
    out = Path(out).expanduser()
    limit = 0 if str(cache_size).strip() == "0" else parse_bytes(cache_size, "cache_size")
    if export_speculators is not None and shape.kind != "eagle3":
        raise ParameterError(f"export_speculators writes EAGLE-3 heads: leave it out for {shape.kind}")
    teacher = Teacher(target, **load_options)
    shape.config(teacher)  # fail before sequences are generated
    work = out / WORK
    prompts = _prompts(teacher, corpus)
    _claim(out, _identity(teacher, shape, corpus, course))
    if export_speculators is not None:  # now, since it may lie in `out`; and before sequences are generated
        with writing(export_speculators):
            export_speculators.mkdir(parents=True, exist_ok=True)
    samples = _samples(target, teacher, prompts, corpus, work / "samples", watch, load_options)
    learning, measuring = split(samples, min(len(prompts), corpus.num_samples), corpus.held_out)
    learner = shape.make(teacher, learning, corpus.seed)
    features = Features(teacher, learner.layers, work / "features", limit)

    def show(news: News) -> None:
        lengths = ", ".join(f"{kind} {length:.2f}" for kind, length in news.lengths.items())
        watch(
            State(
                "training", news.fraction, f"step {news.step:,}, loss {news.loss:.3f}, tokens a pass: {lengths}", news
            )
        )

    totals = fit(learner, teacher, features, learning, measuring, course, work, show)
    name = str(target) if isinstance(target, str | Path) else teacher.name
    with writing(out):
        learner.save(out, name, "eagle")
        if export_speculators is not None:
            learner.save(export_speculators, name, "speculators")
        parameters = sum(weight.numel() for weight in learner.module.parameters())
        lookup = lookup_lengths(measuring, teacher.vocab_size)
        report = TrainingReport(
            out, totals, parameters, Verdict(totals.lengths, lookup, parameters / teacher.num_parameters)
        )
        (out / "README.md").write_text(
            card(
                shape.kind,
                name,
                asdict(shape),
                asdict(corpus),
                asdict(course),
                totals,
                parameters,
                licence,
                command,
                sum(len(sample.tokens) for sample in learning),
                report.verdict,
            ),
            encoding="utf-8",
        )
    shutil.rmtree(work / "features", ignore_errors=True)
    return report


def _prompts(teacher: Teacher, corpus: Corpus) -> list[list[int]]:
    """The prompts that leave room for an output.

    Raises:
        ParameterError: no prompt can, or there are fewer than two.
    """
    longest = min(teacher.max_length, corpus.max_length) - corpus.max_new_tokens
    if longest < 1:
        raise ParameterError(
            f"max_new_tokens is {corpus.max_new_tokens:,}, and {teacher.name} takes {teacher.max_length:,} tokens, "
            "prompt and output together: lower it"
        )
    prompts = read_prompts(teacher.model, corpus.data, corpus.prompt_tokens, longest, corpus.seed)
    if min(len(prompts), corpus.num_samples) < 2:
        raise ParameterError(
            f"num_samples is {corpus.num_samples:,}, and there are {len(prompts):,} prompts: both must be at least 2, "
            "since some sequences are trained on and some held out; give more data, or raise num_samples"
        )
    return prompts


def _samples(
    target: Any,
    teacher: Teacher,
    prompts: Sequence[Sequence[int]],
    corpus: Corpus,
    folder: Path,
    watch: Callable[[State], None],
    load_options: dict[str, Any],
) -> list[TargetSample]:
    def show(done: int, wanted: int, what: str) -> None:
        watch(State("samples", done / wanted, f"{done:,} of {wanted:,} {what}"))

    wanted = -(-corpus.num_samples // SHARD)
    complete = all((folder / f"{number:05d}.npz").is_file() for number in range(wanted))
    # The native runner generates several times as fast as the module that training uses.
    writer = teacher.model if complete else load(target, **load_options)
    return write_samples(
        writer, prompts, corpus.num_samples, corpus.max_new_tokens, corpus.temperatures, corpus.seed, folder, show
    )


def _identity(teacher: Teacher, shape: DrafterShape, corpus: Corpus, course: Course) -> dict[str, Any]:
    """The settings that must be the same when a run is resumed; its length and its evaluations may change."""
    files = [hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] for file in corpus.data]
    fields = {
        "format": _FORMAT,
        **asdict(shape),
        **asdict(corpus),
        **asdict(course),
        "corpus_seed": corpus.seed,
        "course_seed": course.seed,
        "data": files,
        "target": teacher.identity,
        "dtype": str(teacher.dtype).removeprefix("torch."),
    }
    for name in ("seed", "steps", "minutes", "patience", "evaluate_every", "micro_tokens"):
        del fields[name]
    return json.loads(json.dumps(fields))  # equal to what is loaded from a file


def _claim(out: Path, identity: dict[str, Any]) -> None:
    """Write a run's identity into its folder, or compare with the one that is there.

    Raises:
        TrainingError: the folder belongs to another run, or holds something else.
    """
    file = out / WORK / RUN
    if not file.is_file():
        if out.exists() and (not out.is_dir() or any(path.name != WORK for path in out.iterdir())):
            raise TrainingError(f"{out} is there already, and no run of this command made it: choose another --out")
        write_json(file, identity)
        return
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
        age = before.get("format")
        other = [name for name in identity if before.get(name) != identity[name]]
    except (OSError, ValueError, AttributeError) as error:
        raise TrainingError(f"{file} can't be read ({error}): remove {out}, or choose another --out") from error
    if age != _FORMAT:
        raise TrainingError(
            f"{out} is of a run that another release of Foretoken began: choose another --out, or go on with that "
            "release"
        )
    if other:
        changes = "; ".join(
            f"{name}: {before.get(name)} then, {identity[name]} now"
            if name not in ("target", "data")
            else f"another {name}"
            for name in other
        )
        raise TrainingError(f"{out} is of another run ({changes}): use that run's settings, or another --out")
