"""Options of ``foretoken bench drafters``, and what they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.bench_options import listed
from foretoken.errors import ParameterError

if TYPE_CHECKING:
    from foretoken.bench.drafter_runs import DrafterPlan


@dataclass(kw_only=True)
class DrafterOptions:
    """What ``bench drafters`` measures, and how."""

    target: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Target. Default: the shipped one.", show_default=False)
    ] = None
    drafter: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="What draft-model stands for. Default: the shipped one with the shipped target, else none.",
            show_default=False,
        ),
    ] = None
    copy_edit_target: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Target of that workload, see recipes/copy_edit. Default: the same.", show_default=False
        ),
    ] = None
    drafters: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="With + between, a cascade with commas. NAME;OPTION=VALUE for an option of Engine, NAME@K for another "
            "draft length than 5 (trees and cascades: 16). Default: all that need nothing else.",
            show_default=False,
        ),
    ] = None
    workloads: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="maths, code, summarising, retrieval (these need --spec-bench), copy-edit. Default: all that can be "
            "had.",
            show_default=False,
        ),
    ] = None
    spec_bench: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Spec-Bench's question.jsonl.", show_default=False)
    ] = None
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each workload.")] = 6
    temperature: Annotated[
        str, typer.Option("--temperature", "-t", metavar="LIST", help="Temperatures; 0 is greedy.")
    ] = "0,1"
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each cell.")] = 3
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=2, help="Most tokens of an output.")] = (
        256
    )
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, of weights and arithmetic.")] = "float32"
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads. Default: one for each core.", show_default=False)
    ] = None

    def plan(self) -> DrafterPlan:
        """The library's plan.

        Raises:
            ParameterError: a value is out of its range, or a file can't be used.
        """
        from foretoken import tiny_pair_path
        from foretoken.bench.drafter_runs import COPY_EDIT, WORKLOADS, DrafterPlan, default_drafters
        from foretoken.models import machine

        target, drafter = self.target, self.drafter
        if target is None:
            target = tiny_pair_path() / "target"
            drafter = drafter or tiny_pair_path() / "drafter"
        for folder in (target, drafter, self.copy_edit_target):
            if folder is not None and not (folder / "config.json").is_file():
                raise ParameterError(f"{str(folder)!r} holds no config.json: name a checkpoint's folder")
        if self.dtype not in ("float32", "bfloat16"):
            raise ParameterError(f"dtype {self.dtype!r}: choose float32 or bfloat16")
        workloads = WORKLOADS if self.spec_bench is not None else (COPY_EDIT,)
        if self.workloads is not None:
            workloads = tuple(listed(self.workloads, str, "workloads"))
        for name in workloads:
            if name not in WORKLOADS:
                raise ParameterError(f"unknown workload {name!r}: choose one of {', '.join(WORKLOADS)}")
        words = default_drafters(model=drafter is not None)
        if self.drafters is not None:
            words = [word for word in self.drafters.split("+") if word]
        temperatures = listed(self.temperature, float, "temperature")
        if not all(0 <= value <= 100 for value in temperatures):
            raise ParameterError(f"temperature is {self.temperature!r}: give numbers from 0 to 100, such as 0,1")
        return DrafterPlan(
            target=target,
            drafter=drafter,
            drafters=tuple(words),
            workloads=workloads,
            spec_bench=self.spec_bench,
            copy_edit_target=self.copy_edit_target,
            limit=self.limit,
            temperatures=tuple(temperatures),
            repeats=self.repeats,
            max_new_tokens=self.max_new_tokens,
            dtype=self.dtype,
            threads=self.threads or machine.cores(),
        )
