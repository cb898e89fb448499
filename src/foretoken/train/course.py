"""Settings and progress of a training run: how long to train and how, what is done, and what a progress bar shows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from foretoken.errors import ParameterError
from foretoken.sampling.params import check_integer, check_number


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
