"""The training loop, with checkpoints, early stopping and the choice of weights by acceptance on held-out sequences."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.errors import ParameterError
from foretoken.models.processor import multiplies_bfloat16
from foretoken.models.threads import one_thread
from foretoken.sampling.params import check_integer, check_number
from foretoken.train.data import Features, TrainingBatch, micro_batches, schedule
from foretoken.train.errors import TrainingError
from foretoken.train.learners import Learner
from foretoken.train.measure import acceptance, loss_of
from foretoken.train.samples import TargetSample
from foretoken.train.storage import replacing
from foretoken.train.teacher import Teacher

CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"
COMPLETE = "complete"
_CHECKPOINT_SECONDS = 120.0
_WARM_UP = 0.03
_LAST = 0.03
"""Final learning rate, as a fraction of the highest."""
_INHERITED = 0.15
"""Learning rate of weights that are initialised with the target's, as a fraction of `Course.lr`."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """How long to train, and how.

    Attributes:
        steps: optimizer steps; None if only `minutes` limits training.
        minutes: training time; with both, training ends at the first limit that is reached.
        batch_tokens: tokens of a step.
        micro_tokens: tokens of one forward and backward pass; fewer take less memory.
        lr: highest learning rate.
        optimizer: "adamw", or "muon" for the matrices inside the layers.
        depths: tokens of the chains that are trained; of Medusa, all heads are.
        share: fraction of positions whose chains go beyond the first depth.
        evaluate_every: steps between two evaluations on held-out sequences.
        patience: evaluations without a better acceptance before training ends early; 0 never ends it.
        amp: multiply in bfloat16; None does so on devices that support it.
        seed: of the batches' order.
    """

    steps: int | None = None
    minutes: float | None = None
    batch_tokens: int = 4096
    micro_tokens: int = 2048
    lr: float = 1e-3
    optimizer: str = "adamw"
    depths: int = 5
    share: float = 1.0
    evaluate_every: int = 100
    patience: int = 8
    amp: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise ParameterError("a training run needs an end: give steps, or minutes")
        if self.steps is not None:
            check_integer("steps", self.steps, 1, cure="one step at least")
        if self.minutes is not None:
            check_number("minutes", self.minutes, 0.0, above=True, cure="use steps for short runs")
        for name in ("batch_tokens", "micro_tokens", "depths", "evaluate_every"):
            check_integer(name, getattr(self, name), 1, cure="leave it out for the default")
        check_integer("patience", self.patience, 0, cure="use 0 to train to the end")
        check_number("lr", self.lr, 0.0, above=True, cure="leave it out for the default")
        check_number("share", self.share, 0.0, 1.0, above=True, cure="use 1 for all positions")
        if self.optimizer not in ("adamw", "muon") or not hasattr(
            torch.optim, "Muon" if self.optimizer == "muon" else "AdamW"
        ):
            raise ParameterError(f"optimizer is {self.optimizer!r}: use adamw, or muon with torch 2.9 or later")

    def progress(self, step: int, seconds: float) -> float:
        """How much of the training is done, 0 to 1."""
        parts = [0.0]
        if self.steps:
            parts.append(step / self.steps)
        if self.minutes:
            parts.append(seconds / (60 * self.minutes))
        return min(1.0, max(parts))


@dataclass
class Totals:
    """A run's progress.

    Attributes:
        step: steps taken.
        tokens: tokens of the sequences trained on, repetitions counted.
        seconds: of training.
        epoch: pass over the sequences.
        cursor: next batch of it.
        looks: evaluations since the best one.
        best: best score so far; see `Tally.score`.
        lengths: mean acceptance lengths at the best.
        done: training is over.
        reason: why.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    epoch: int = 0
    cursor: int = 0
    looks: int = 0
    best: float = 0.0
    lengths: dict[str, float] = field(default_factory=dict)
    done: bool = False
    reason: str = ""


@dataclass(frozen=True)
class News:
    """What a progress bar shows.

    Attributes:
        fraction: of the training, 0 to 1.
        step: of how many.
        loss: mean of the last steps.
        lengths: mean acceptance lengths at the last evaluation.
        measured: that evaluation was at this step.
    """

    fraction: float
    step: int
    loss: float
    lengths: dict[str, float]
    measured: bool


class StopRequest:
    """Turns Ctrl-C and SIGTERM into a flag that is checked between steps; the second Ctrl-C is immediate."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Optimizers:
    """One or two optimizers that share one learning rate schedule."""

    def __init__(self, learner: Learner, course: Course) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        inherited: list[nn.Parameter] = []
        for name, weight in learner.module.named_parameters():
            if name in learner.inherited:
                inherited.append(weight)
            else:
                (matrices if weight.ndim == 2 and course.optimizer == "muon" else others).append(weight)
        groups: list[dict[str, Any]] = [{"params": others}, {"params": inherited, "lr": course.lr * _INHERITED}]
        self._all: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(groups, lr=course.lr, betas=(0.9, 0.95), weight_decay=0.01)
        ]
        if matrices:
            self._all.append(
                torch.optim.Muon(matrices, lr=course.lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
            )
        self._weights = [*matrices, *others, *inherited]
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self._all]

    def step(self, factor: float) -> None:
        """Take a step with the gradients, then clear them."""
        nn.utils.clip_grad_norm_(self._weights, 1.0)
        for optimizer, peaks in zip(self._all, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """For a checkpoint."""
        return [optimizer.state_dict() for optimizer in self._all]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """From a checkpoint."""
        for optimizer, state in zip(self._all, states, strict=True):
            optimizer.load_state_dict(state)


def rate(progress: float) -> float:
    """Factor on the learning rate: linear warm-up, then a cosine."""
    if progress < _WARM_UP:
        return (progress + 1e-3) / (_WARM_UP + 1e-3)
    return _LAST + (1 - _LAST) * 0.5 * (1 + math.cos(math.pi * (progress - _WARM_UP) / (1 - _WARM_UP)))


def fit(
    learner: Learner,
    teacher: Teacher,
    features: Features,
    learning: Sequence[TargetSample],
    measuring: Sequence[TargetSample],
    course: Course,
    folder: Path,
    watch: Callable[[News], None],
) -> Totals:
    """Train; `learner` has the best weights afterwards. Resumes from the checkpoint in `folder` if there is one.

    Every step is a function of the weights, the step's number and the seed: with `steps` as its limit, a run that was
    stopped and resumed ends with the same weights as one that was not.

    Args:
        learner: what is trained.
        teacher: the target.
        features: hidden states; a sequence's number there is its index in `learning`.
        learning: sequences to train on.
        measuring: held-out sequences.
        course: how long, and how.
        folder: for the checkpoint and the log.
        watch: called after each step.

    Raises:
        TrainingError: the disk is full, the checkpoint is broken, or the loss is NaN or infinite.
        KeyboardInterrupt: stopped by a signal; the checkpoint has been written.
    """
    module = learner.module
    depths = course.depths if learner.max_depth is None else learner.max_depth  # all that is saved
    optimizers = Optimizers(learner, course)
    totals, best = Totals(), _copy(module)
    checkpoint = folder / CHECKPOINT
    if checkpoint.is_file():
        totals, best = _restore(checkpoint, learner, optimizers)
        patient = not course.patience or totals.looks < course.patience
        if course.progress(totals.step, totals.seconds) < 1 and (totals.reason == COMPLETE or patient):
            totals.done = False  # the limits have been raised since

    def save() -> None:
        features.flush()
        state = {
            "module": module.state_dict(),
            "optimizers": optimizers.state_dict(),
            "totals": vars(totals),
            "best": best,
        }
        # Write through a Python file: its errors name the disk's problem, torch's own say "unexpected pos".
        with replacing(checkpoint) as temporary, temporary.open("wb") as opened:
            torch.save(state, opened)

    def gradients_of(numbered: tuple[int, list[int]]) -> tuple[TrainingBatch, float, Sequence[Tensor | None]]:
        """One part of a step: its batch, its loss, and the gradient by each weight, scaled to its part of the step."""
        number, part = numbered
        micro_batch = features.batch([learning[i] for i in part], part)
        seed = (course.seed * 1_000_003 + totals.step) * 64 + number
        part_loss = loss_of(learner, teacher, micro_batch, depths, course.share, seed)
        if not part_loss.requires_grad:
            return micro_batch, 0.0, [None] * len(weights)
        scaled = part_loss * (sum(lengths[i] for i in part) / count)
        return micro_batch, float(part_loss.detach()), torch.autograd.grad(scaled, weights, allow_unused=True)

    def each(function: Callable[[Any], Any], parts: Iterable[Any]) -> Iterator[Any]:
        def multiplied(part: Any) -> Any:
            with _autocast(teacher, course):
                return function(part)

        return workers.map(multiplied, parts)

    def evaluate(loss: float) -> bool:
        """Measure acceptance on held-out sequences; returns whether it is the best so far."""
        module.eval()
        tally = acceptance(learner, teacher, features, measuring, course.micro_tokens, each)
        module.train()
        record = {"step": totals.step, "loss": round(loss, 4), **{k: round(v, 4) for k, v in tally.lengths().items()}}
        _log(folder, record | {"tokens": totals.tokens, "seconds": round(totals.seconds, 1)})
        latest.update(tally.lengths())
        better = tally.score() > totals.best * 1.001
        totals.looks = 0 if better else totals.looks + 1
        if tally.score() > totals.best:
            totals.best, totals.lengths = tally.score(), tally.lengths()
            return True
        return False

    weights = list(module.parameters())
    lengths = [len(sample.tokens) for sample in learning]
    latest = dict(totals.lengths)
    recent: list[float] = []
    batches = schedule(lengths, course.batch_tokens, course.seed, totals.epoch)
    last_save = time.monotonic()
    module.train()
    # On the CPU each thread takes whole parts: threads then synchronise once a step, not at every operator.
    threads = torch.get_num_threads() if teacher.device.type == "cpu" else 1
    workers = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    count = 1
    with workers, one_thread(teacher.device.type == "cpu"), StopRequest() as stop:
        if not totals.step and not totals.done:
            evaluate(math.nan)
        while not totals.done:
            started = time.monotonic()
            if totals.cursor >= len(batches):
                totals.epoch, totals.cursor = totals.epoch + 1, 0
                batches = schedule(lengths, course.batch_tokens, course.seed, totals.epoch)
            batch = batches[totals.cursor]
            count = sum(lengths[number] for number in batch)
            loss = 0.0
            parts = list(micro_batches(batch, lengths, course.micro_tokens))
            for micro_batch, part_loss, gradients in each(gradients_of, enumerate(parts)):
                features.keep(micro_batch)
                loss += part_loss * sum(map(len, (sample.tokens for sample in micro_batch.samples))) / count
                for weight, gradient in zip(weights, gradients, strict=True):
                    if gradient is not None:
                        weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
            if not math.isfinite(loss):
                raise TrainingError(
                    f"the loss is {loss} at step {totals.step}: lower --lr, {course.lr:g} now, and begin anew in "
                    "another --out"
                )
            optimizers.step(rate(course.progress(totals.step, totals.seconds)))
            totals.step, totals.cursor = totals.step + 1, totals.cursor + 1
            totals.tokens += count
            totals.seconds += time.monotonic() - started
            recent = [*recent[-24:], loss]
            fraction = course.progress(totals.step, totals.seconds)
            measure = totals.step % course.evaluate_every == 0 or fraction >= 1
            if measure and evaluate(sum(recent) / len(recent)):
                best = _copy(module)
            if fraction >= 1:
                totals.done, totals.reason = True, COMPLETE
            elif course.patience and totals.looks >= course.patience:
                totals.done, totals.reason = True, f"no better for {totals.looks} evaluations"
            watch(News(fraction, totals.step, sum(recent) / len(recent), dict(latest), measure))
            if totals.done or stop.asked or time.monotonic() - last_save > _CHECKPOINT_SECONDS:
                save()
                last_save = time.monotonic()
            if stop.asked and not totals.done:
                raise KeyboardInterrupt
    module.load_state_dict(best)
    module.eval()
    return totals


def _copy(module: nn.Module) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _restore(checkpoint: Path, learner: Learner, optimizers: Optimizers) -> tuple[Totals, dict[str, Any]]:
    try:
        state = torch.load(checkpoint, map_location=next(learner.module.parameters()).device, weights_only=True)
        learner.module.load_state_dict(state["module"])
        optimizers.load_state_dict(state["optimizers"])
        return Totals(**state["totals"]), state["best"]
    except Exception as error:  # what torch raises for a broken file is of many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise TrainingError(
            f"{checkpoint} can't be used ({reason}): remove it, and training starts anew on the same sequences"
        ) from error


def _autocast(teacher: Teacher, course: Course) -> Any:
    device = teacher.device.type
    amp = course.amp
    if amp is None:
        amp = multiplies_bfloat16() if device == "cpu" else device == "cuda" and torch.cuda.is_bf16_supported()
    # No cache of rounded weights: its entries would belong to the autograd graph of the thread that made them.
    return torch.autocast(device, torch.bfloat16, cache_enabled=False) if amp else nullcontext()


def _log(folder: Path, record: dict[str, Any]) -> None:
    record = {name: value for name, value in record.items() if value == value}  # the first loss is NaN
    file = folder / LOG
    lines = file.read_text(encoding="utf-8") if file.is_file() else ""
    with replacing(file) as temporary:
        temporary.write_text(lines + json.dumps(record) + "\n", encoding="utf-8")
