"""Options of ``foretoken train``, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from foretoken.errors import ParameterError

if TYPE_CHECKING:
    from foretoken.train import Corpus, Course

_TEXTS, _TRAINING = "Training data", "Training"
_Value = TypeVar("_Value")


@dataclass(kw_only=True)
class RunOptions:
    """For which target, and where to."""

    target: Annotated[str, typer.Option(metavar="MODEL", help="Folder or hub id of the target.", show_default=False)]
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            help="Folder for the drafter. The state of the training is kept in its subfolder 'training'.",
            show_default=False,
        ),
    ]
    cache_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Disk space for hidden states; 0 computes them each time.")
    ] = "4GiB"
    licence: Annotated[
        str | None, typer.Option("--licence", "--license", help="Licence named in the model card.", show_default=False)
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, samples and batches.")] = 0
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the target, and of the drafter's file. Default: auto.", show_default=False),
    ] = None
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, … Default: a GPU where there is one.", show_default=False)
    ] = None
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours.")] = False

    def load_options(self) -> dict[str, Any]:
        """Of `foretoken.load`."""
        given = {"dtype": self.dtype, "device": self.device}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(kw_only=True)
class CorpusOptions:
    """What the target writes."""

    data: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE",
            help="Prompts: text, or JSON lines with messages, conversations, question, instruction, prompt or text. "
            "Repeatable.",
            show_default=False,
            rich_help_panel=_TEXTS,
        ),
    ]
    num_samples: Annotated[int, typer.Option(help="Outputs of the target to train on.", rich_help_panel=_TEXTS)] = 4096
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Most tokens of an answer.", rich_help_panel=_TEXTS)
    ] = 128
    max_length: Annotated[
        int, typer.Option(help="Most tokens of prompt and answer; longer prompts are left out.", rich_help_panel=_TEXTS)
    ] = 1024
    prompt_tokens: Annotated[
        int, typer.Option(help="Tokens of a prompt that is cut out of a document.", rich_help_panel=_TEXTS)
    ] = 48
    temperature: Annotated[
        str,
        typer.Option("--temperature", "-t", metavar="LIST", help="Used in turn; 0 is greedy.", rich_help_panel=_TEXTS),
    ] = "1,1,0"
    held_out: Annotated[int, typer.Option(help="Outputs that are used for measuring only.", rich_help_panel=_TEXTS)] = (
        64
    )

    def corpus(self, seed: int) -> Corpus:
        """The library's corpus."""
        from foretoken.train import Corpus

        return Corpus(
            data=tuple(self.data),
            num_samples=self.num_samples,
            max_new_tokens=self.max_new_tokens,
            max_length=self.max_length,
            prompt_tokens=self.prompt_tokens,
            temperatures=listed(self.temperature, float, "temperature"),
            held_out=self.held_out,
            seed=seed,
        )


@dataclass(kw_only=True)
class CourseOptions:
    """How long to train, and how."""

    steps: Annotated[
        int | None,
        typer.Option(
            help="Optimizer steps. Default: 2000 without --minutes.", show_default=False, rich_help_panel=_TRAINING
        ),
    ] = None
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Training time, without the time in which the target answers.",
            show_default=False,
            rich_help_panel=_TRAINING,
        ),
    ] = None
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a step.", rich_help_panel=_TRAINING)] = 4096
    micro_tokens: Annotated[
        int, typer.Option(help="Tokens of one pass; fewer need less memory.", rich_help_panel=_TRAINING)
    ] = 2048
    lr: Annotated[float, typer.Option(help="Learning rate.", rich_help_panel=_TRAINING)] = 1e-3
    optimizer: Annotated[
        str, typer.Option(help="adamw, or muon for the matrices inside the layers.", rich_help_panel=_TRAINING)
    ] = "adamw"
    k: Annotated[
        int,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            help="Length of the chains that are trained. All Medusa heads are trained in any case.",
            rich_help_panel=_TRAINING,
        ),
    ] = 5
    share: Annotated[
        float,
        typer.Option(help="Fraction of positions whose chains go beyond one token.", rich_help_panel=_TRAINING),
    ] = 1.0
    evaluate_every: Annotated[
        int, typer.Option(help="Steps between two evaluations on held-out outputs.", rich_help_panel=_TRAINING)
    ] = 100
    patience: Annotated[
        int,
        typer.Option(
            help="Evaluations without a better result that end the training; 0: no limit.", rich_help_panel=_TRAINING
        ),
    ] = 8
    amp: Annotated[
        bool | None,
        typer.Option(
            "--amp/--no-amp",
            help="Multiply in bfloat16. Default: where the processor does that.",
            show_default=False,
            rich_help_panel=_TRAINING,
        ),
    ] = None

    def course(self, seed: int) -> Course:
        """The library's course."""
        from foretoken.train import Course

        return Course(
            steps=2000 if self.steps is None and self.minutes is None else self.steps,
            minutes=self.minutes,
            batch_tokens=self.batch_tokens,
            micro_tokens=self.micro_tokens,
            lr=self.lr,
            optimizer=self.optimizer,
            depths=self.k,
            share=self.share,
            evaluate_every=self.evaluate_every,
            patience=self.patience,
            amp=self.amp,
            seed=seed,
        )


def listed(text: str, kind: Callable[[str], _Value], name: str) -> tuple[_Value, ...]:
    """The values of a list with commas.

    Raises:
        ParameterError: one of them is of another kind.
    """
    try:
        return tuple(kind(part.strip()) for part in text.split(",") if part.strip())
    except ValueError:
        raise ParameterError(f"{name} is {text!r}: give numbers with commas between") from None
