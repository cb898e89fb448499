"""The training loop of both models, with checkpoints and a progress bar that shows loss and time left."""

from __future__ import annotations

import copy
import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from data import Rows
from optim import Optimizers, course
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

from foretoken.models.processor import multiplies_bfloat16

CHECKPOINT_SECONDS = 120
BatchLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(model's logits [B, T, V], token ids [B, T], labels [B, T]) to a scalar loss."""


@dataclass(frozen=True)
class Plan:
    """How long and on what batches: `minutes` of training time or `steps`, whichever is given."""

    minutes: float | None = None
    steps: int | None = None
    lengths: tuple[tuple[float, int], ...] = ((0.0, 256),)  # (from this progress on, tokens in a row)
    micro_tokens: int = 1536  # tokens of one backward pass: small enough for the processor's caches
    accumulate: int = 4  # backward passes a step, shared among torch's threads
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    decay_from: float = 0.45

    def progress(self, step: int, seconds: float) -> float:
        return step / self.steps if self.steps else seconds / (60 * (self.minutes or 1.0))

    def length(self, progress: float) -> int:
        return [length for start, length in self.lengths if progress >= start][-1]


def save_atomically(state: dict, path: Path) -> None:
    """Write beside, then rename: a stop in mid-write leaves the older checkpoint whole."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


class StopRequest:
    """Turns Ctrl-C and SIGTERM into a flag, so that a step is never cut in half; a second Ctrl-C is immediate."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> StopRequest:
        self._old = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


def fit(
    name: str,
    model: nn.Module,
    rows: Rows,
    batch_loss: BatchLoss,
    plan: Plan,
    folder: Path,
    pad: int,
) -> dict:
    """Train `model` in place and return the totals; goes on from `folder`'s checkpoint where there is one.

    Each of torch's threads takes whole micro-batches on its own view of the weights: threads then synchronise once a
    step, not at every operator, which matters where they share the cores with other work.

    Ctrl-C ends the step at hand, saves, and exits with code 130.
    """
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / f"{name}.pt"
    optimizers = Optimizers(model, plan.muon_lr, plan.adam_lr)
    totals = {"step": 0, "tokens": 0, "seconds": 0.0, "done": False}
    if checkpoint.is_file():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizers"])
        rows.state = state["rows"]
        totals = state["totals"]

    def save() -> None:
        save_atomically(
            {
                "model": model.state_dict(),
                "optimizers": optimizers.state_dict(),
                "rows": rows.state,
                "totals": totals,
            },
            checkpoint,
        )

    console = Console()
    columns = (
        TextColumn(f"{name:8s}"),
        BarColumn(),
        TextColumn("{task.percentage:5.1f}%  step {task.fields[step]}  loss {task.fields[loss]}  "),
        TimeElapsedColumn(),
        TextColumn("left {task.fields[left]}"),
    )
    model.train()
    recent: list[float] = []
    last_save = time.monotonic()
    replicas = replicate(model, min(torch.get_num_threads(), plan.accumulate))
    workers = ThreadPoolExecutor(len(replicas), initializer=torch.set_num_threads, initargs=(1,))
    with workers, StopRequest() as stop, Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=1.0, step=totals["step"], loss="-", left="-")
        while not totals["done"]:
            started = time.monotonic()
            progress = plan.progress(totals["step"], totals["seconds"])
            length = plan.length(progress)
            batch = [rows.batch(max(1, plan.micro_tokens // length), length, pad) for _ in range(plan.accumulate)]
            targets = sum(int((labels[:, 1:] >= 0).sum()) for _, labels in batch)
            loss_sum = sum(workers.map(partial(backward, batch_loss, targets), replicas, split(batch, len(replicas))))
            gather_gradients(replicas)
            if not np.isfinite(loss_sum):
                raise FloatingPointError(
                    f"{name}: loss is {loss_sum} at step {totals['step']}: lower the learning rate"
                )
            optimizers.step(course(progress, decay_from=plan.decay_from))
            totals["step"] += 1
            totals["tokens"] += targets
            totals["seconds"] += time.monotonic() - started
            progress = plan.progress(totals["step"], totals["seconds"])
            totals["done"] = progress >= 1
            recent = [*recent[-24:], loss_sum]
            mean = sum(recent) / len(recent)
            left = totals["seconds"] * (1 / progress - 1)
            bar.update(task, completed=progress, step=totals["step"], loss=f"{mean:.3f}", left=f"{left / 60:.1f} min")
            if totals["step"] == 1 or totals["step"] % 25 == 0 or totals["done"]:
                record = {
                    "step": totals["step"],
                    "loss": round(mean, 4),
                    "length": length,
                    "tokens": totals["tokens"],
                    "seconds": round(totals["seconds"], 1),
                }
                with open(folder / f"{name}.log.jsonl", "a", encoding="utf-8") as log:
                    log.write(json.dumps(record) + "\n")
                if not console.is_terminal:
                    print(f"{name} {100 * progress:.1f}%", record, flush=True)
            if stop.asked or totals["done"] or time.monotonic() - last_save > CHECKPOINT_SECONDS:
                save()
                last_save = time.monotonic()
            if stop.asked and not totals["done"]:
                console.print(f"{name}: stopped at step {totals['step']}; the same command goes on from here")
                raise SystemExit(130)
    return totals


def replicate(model: nn.Module, count: int) -> list[nn.Module]:
    """The model and `count - 1` views of it: the same weights, gradients of their own."""
    replicas = [model, *(copy.deepcopy(model) for _ in range(count - 1))]
    for replica in replicas[1:]:
        for own, shared in zip(replica.parameters(), model.parameters(), strict=True):
            own.data = shared.data
    return replicas


def split(batch: list, count: int) -> list[list]:
    return [batch[i::count] for i in range(count)]


def mixed_precision() -> torch.autocast:
    """Passes in bfloat16 where the processor multiplies that; elsewhere they take nine times as long as in float32."""
    return torch.autocast("cpu", torch.bfloat16, enabled=multiplies_bfloat16())


def backward(
    batch_loss: BatchLoss, targets: int, model: nn.Module, batch: list[tuple[np.ndarray, np.ndarray]]
) -> float:
    """Add these micro-batches' gradients to the model's; their part of the mean loss over `targets` positions."""
    total = 0.0
    for ids_np, labels_np in batch:
        ids, labels = torch.from_numpy(ids_np), torch.from_numpy(labels_np)
        with mixed_precision():
            logits = model(input_ids=ids, use_cache=False).logits
        share = float((labels_np[:, 1:] >= 0).sum()) / targets
        loss = batch_loss(logits, ids, labels) * share
        loss.backward()
        total += loss.item()
    return total


def gather_gradients(replicas: list[nn.Module]) -> None:
    """Sum all gradients into the first replica's; the others' are dropped."""
    for first, *others in zip(*(replica.parameters() for replica in replicas), strict=True):
        for other in others:
            first.grad += other.grad
            other.grad = None


def next_token_loss(logits: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of each token given those before it."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
