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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.models.processor import multiplies_bfloat16
from foretoken.models.threads import one_thread
from foretoken.train.course import Course, News, Totals
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
    training = _Training(learner, teacher, features, learning, measuring, course, folder)
    # On the CPU each thread takes whole parts: threads then synchronise once a step, not at every operator.
    threads = torch.get_num_threads() if teacher.device.type == "cpu" else 1
    workers = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    with workers, one_thread(teacher.device.type == "cpu"), StopRequest() as stop:
        training.run(workers, stop, watch)
    learner.module.load_state_dict(training.best)
    learner.module.eval()
    return training.totals


class _Training:
    """A run of `fit`, whose arguments it takes.

    Attributes:
        totals: its progress.
        best: the best weights so far.
    """

    def __init__(
        self,
        learner: Learner,
        teacher: Teacher,
        features: Features,
        learning: Sequence[TargetSample],
        measuring: Sequence[TargetSample],
        course: Course,
        folder: Path,
    ) -> None:
        self._learner, self._teacher, self._features, self._course = learner, teacher, features, course
        self._learning, self._measuring, self._folder = learning, measuring, folder
        self._module = learner.module
        self._depths = course.depths if learner.max_depth is None else learner.max_depth  # all that is saved
        self._optimizers = Optimizers(learner, course)
        self.totals, self.best = Totals(), _copy(self._module)
        self._checkpoint = folder / CHECKPOINT
        if self._checkpoint.is_file():
            self.totals, self.best = _restore(self._checkpoint, learner, self._optimizers)
            totals = self.totals
            patient = not course.patience or totals.looks < course.patience
            if course.progress(totals.step, totals.seconds) < 1 and (totals.reason == COMPLETE or patient):
                totals.done = False  # the limits have been raised since
        self._weights = list(self._module.parameters())
        self._lengths = [len(sample.tokens) for sample in learning]
        self._latest = dict(self.totals.lengths)  # mean acceptance lengths at the last evaluation
        self._batches = schedule(self._lengths, course.batch_tokens, course.seed, self.totals.epoch)

    def run(self, workers: ThreadPoolExecutor, stop: StopRequest, watch: Callable[[News], None]) -> None:
        """Train to the end, with the parts of each step in these threads; arguments and errors as for `fit`."""
        course, totals = self._course, self.totals
        recent: list[float] = []
        last_save = time.monotonic()
        self._module.train()
        if not totals.step and not totals.done:
            self._evaluate(math.nan, workers)
        while not totals.done:
            recent = [*recent[-24:], self._step(workers)]
            loss = sum(recent) / len(recent)
            fraction = course.progress(totals.step, totals.seconds)
            measure = totals.step % course.evaluate_every == 0 or fraction >= 1
            if measure and self._evaluate(loss, workers):
                self.best = _copy(self._module)
            if fraction >= 1:
                totals.done, totals.reason = True, COMPLETE
            elif course.patience and totals.looks >= course.patience:
                totals.done, totals.reason = True, f"no better for {totals.looks} evaluations"
            watch(News(fraction, totals.step, loss, dict(self._latest), measure))
            if totals.done or stop.asked or time.monotonic() - last_save > _CHECKPOINT_SECONDS:
                self._save()
                last_save = time.monotonic()
            if stop.asked and not totals.done:
                raise KeyboardInterrupt

    def _step(self, workers: ThreadPoolExecutor) -> float:
        """Take one step, and count it; returns its loss."""
        course, totals, lengths = self._course, self.totals, self._lengths
        started = time.monotonic()
        if totals.cursor >= len(self._batches):
            totals.epoch, totals.cursor = totals.epoch + 1, 0
            self._batches = schedule(lengths, course.batch_tokens, course.seed, totals.epoch)
        batch = self._batches[totals.cursor]
        count = sum(lengths[number] for number in batch)
        loss = 0.0
        parts = enumerate(micro_batches(batch, lengths, course.micro_tokens))
        for micro_batch, part_loss, gradients in self._each(workers, partial(self._gradients, count), parts):
            self._features.keep(micro_batch)
            loss += part_loss * sum(map(len, (sample.tokens for sample in micro_batch.samples))) / count
            for weight, gradient in zip(self._weights, gradients, strict=True):
                if gradient is not None:
                    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} at step {totals.step}: lower --lr, {course.lr:g} now, and begin anew in "
                "another --out"
            )
        self._optimizers.step(rate(course.progress(totals.step, totals.seconds)))
        totals.step, totals.cursor = totals.step + 1, totals.cursor + 1
        totals.tokens += count
        totals.seconds += time.monotonic() - started
        return loss

    def _gradients(
        self, count: int, numbered: tuple[int, list[int]]
    ) -> tuple[TrainingBatch, float, Sequence[Tensor | None]]:
        """One part of a step of `count` tokens: its batch, its loss, and each weight's gradient, scaled to its part."""
        number, part = numbered
        micro_batch = self._features.batch([self._learning[i] for i in part], part)
        seed = (self._course.seed * 1_000_003 + self.totals.step) * 64 + number
        loss = loss_of(self._learner, self._teacher, micro_batch, self._depths, self._course.share, seed)
        if not loss.requires_grad:
            return micro_batch, 0.0, [None] * len(self._weights)
        scaled = loss * (sum(self._lengths[i] for i in part) / count)
        return micro_batch, float(loss.detach()), torch.autograd.grad(scaled, self._weights, allow_unused=True)

    def _each(self, workers: ThreadPoolExecutor, function: Callable[[Any], Any], parts: Iterable[Any]) -> Iterator[Any]:
        """A function's results for several parts, computed by the threads in the precision of `Course.amp`."""

        def multiplied(part: Any) -> Any:
            with _autocast(self._teacher, self._course):
                return function(part)

        return workers.map(multiplied, parts)

    def _evaluate(self, loss: float, workers: ThreadPoolExecutor) -> bool:
        """Measure acceptance on held-out sequences; returns whether it is the best so far."""
        totals = self.totals
        self._module.eval()
        each = partial(self._each, workers)
        micro_tokens = self._course.micro_tokens
        tally = acceptance(self._learner, self._teacher, self._features, self._measuring, micro_tokens, each)
        self._module.train()
        record = {"step": totals.step, "loss": round(loss, 4), **{k: round(v, 4) for k, v in tally.lengths().items()}}
        _log(self._folder, record | {"tokens": totals.tokens, "seconds": round(totals.seconds, 1)})
        self._latest.update(tally.lengths())
        better = tally.score() > totals.best * 1.001
        totals.looks = 0 if better else totals.looks + 1
        if tally.score() > totals.best:
            totals.best, totals.lengths = tally.score(), tally.lengths()
            return True
        return False

    def _save(self) -> None:
        self._features.flush()
        state = {
            "module": self._module.state_dict(),
            "optimizers": self._optimizers.state_dict(),
            "totals": vars(self.totals),
            "best": self.best,
        }
        # Write through a Python file: its errors name the disk's problem, torch's own say "unexpected pos".
        with replacing(self._checkpoint) as temporary, temporary.open("wb") as opened:
            torch.save(state, opened)


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
