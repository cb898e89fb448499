"""The demonstration: the shipped pair writes, speculatively and in colour, and is timed against the target alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from foretoken.cli import render
from foretoken.cli.answer import Answer, run
from foretoken.cli.checks import AUTO
from foretoken.cli.compare import Comparison, alternate, plain_engine, relation, warm_up
from foretoken.cli.json_output import token_text
from foretoken.cli.screen import has_colour
from foretoken.engine.outputs import StreamEvent
from foretoken.errors import ForetokenError

if TYPE_CHECKING:
    from foretoken.engine.engine import Engine
    from foretoken.sampling import SamplingParams

WIDTH = 100
_NORMAL = [(13, 17, 23), (248, 81, 73), (63, 185, 80), (227, 179, 65), (88, 166, 255), (188, 140, 255), (57, 197, 207)]
# In Rich's own theme for pictures green and yellow look alike.
PICTURE_THEME = TerminalTheme(
    (13, 17, 23), (201, 209, 217), [*_NORMAL, (177, 186, 196)], [(110, 118, 129), *_NORMAL[1:], (240, 246, 252)]
)
TRACED_ROUNDS = 8
TIMED_RUNS = 5
SEED = 1
"""Of what is shown. Timed runs have none: with one, costs that depend on no clock decide what is drafted."""


@dataclass(frozen=True)
class Scene:
    """One prompt of the demonstration."""

    title: str
    prompt: str
    temperature: float
    max_new_tokens: int
    trace: bool = False

    def params(self) -> SamplingParams:
        """How it is sampled."""
        from foretoken.sampling import SamplingParams

        return SamplingParams(temperature=self.temperature, max_new_tokens=self.max_new_tokens)


SCENES = (
    Scene(
        "a licence header, which the target has memorised",
        "# Licensed under the Apache License, Version 2.0",
        temperature=0.0,
        max_new_tokens=128,
    ),
    Scene(
        "a play",
        "KING RICHARD III:\nMy lord, the people of this city",
        temperature=0.8,
        max_new_tokens=96,
        trace=True,
    ),
)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C came during a scene."""


def play(drafting: Engine, console: Console) -> list[Comparison]:
    """Show every scene, and time it.

    Args:
        drafting: drafts a fixed number of tokens in each round, so that tokens of every kind are shown. Timed are its
            models with the default settings.
        console: to write to.
    """
    console.print(
        Text.assemble(
            ("Foretoken", "bold"),
            f": a small {drafting.drafter.name.replace('-', ' ')} drafts up to {drafting.num_speculative_tokens} "
            "tokens, the target scores them all in one pass, and the output is distributed as the target's own. Below "
            "each output is the speed by default: then each round drafts what pays, and nothing where nothing does. "
            "(This target has ten million parameters: it has memorised a licence and the form of a play, and little "
            "else.)",
        )
    )
    console.print(render.legend())
    timings = []
    default, alone = _default_engine(drafting), plain_engine(drafting)
    for scene in SCENES:
        _show(scene, drafting, console)
        warm_up(default, alone, scene.prompt, scene.params())
        timings.append(_time(scene, default, alone))
        console.print(_verdict(scene, timings[-1]), style="bold")
    console.print()
    console.print(_table(timings))
    console.print(timings[-1].measured, style="dim")
    return timings


def _default_engine(engine: Engine) -> Engine:
    """The same models, with what drafts for free, under the policy."""
    from foretoken.engine.engine import Engine

    # Every run is to prefill the prompt.
    return Engine(engine.target, [AUTO, *engine.drafter.models], engine.verifier, reuse_prefixes=False)


def _show(scene: Scene, engine: Engine, console: Console) -> None:
    how = "greedy" if scene.temperature == 0 else f"temperature {scene.temperature:g}"
    console.print()
    console.print(Rule(Text(f"{scene.title}, {how}", style="bold"), align="left", style="dim"))
    writer = render.TokenWriter(console)
    writer.prompt(scene.prompt)
    answer = _run(engine, scene, replace(scene.params(), seed=SEED), scene.trace, writer.write)
    writer.end()
    if scene.trace:
        _trace(answer, engine, console)


def _trace(answer: Answer, engine: Engine, console: Console) -> None:
    coloured = has_colour(console) or console.record
    rounds = answer.rounds[:TRACED_ROUNDS]
    console.print(f"The first {len(rounds)} rounds:", style="dim")
    console.print(render.trace_header(False, coloured))
    for number, event in enumerate(rounds, start=1):
        line = render.trace_line(number, event, lambda token: token_text(engine, token), False, coloured)
        console.print(line)


def _time(scene: Scene, engine: Engine, alone: Engine) -> Comparison:
    params = scene.params()
    ours, theirs = [_run(engine, scene, params)], [_run(alone, scene, params)]
    if alternate(engine, alone, scene.prompt, params, ours, theirs, runs=TIMED_RUNS):
        raise Interrupted
    same = relation(engine, params, ours[0], theirs[0])
    return Comparison(scene.title, ours, theirs, same)


def _run(
    engine: Engine,
    scene: Scene,
    params: SamplingParams,
    trace: bool = False,
    show: Callable[[StreamEvent], None] = lambda event: None,
) -> Answer:
    answer = run(engine, scene.prompt, params, trace, show)
    if answer.interrupted:
        raise Interrupted
    return answer


def _verdict(scene: Scene, timing: Comparison) -> str:
    same = ""
    if scene.temperature == 0:
        same = " · the same output, token by token" if timing.equal else " · outputs differ after a near tie (rounding)"
    return (
        f"{timing.speed:.0f} tokens/s, target alone {timing.plain_speed:.0f}: {timing.speed_up:.2f}× · "
        f"{timing.speculative[0].stats.mean_acceptance_length:.2f} tokens a pass{same}"
    )


def _table(timings: list[Comparison]) -> Table:
    table = Table("tokens/s", "target alone", "by default", "speed-up", "mean acceptance\nlength", "acceptance\nrate")
    for column in table.columns[1:]:
        column.justify = "right"
    for timing in timings:
        ours = timing.speculative[0].stats
        table.add_row(
            timing.name.partition(",")[0],
            f"{timing.plain_speed:.0f}",
            f"{timing.speed:.0f}",
            f"{timing.speed_up:.2f}×",
            f"{ours.mean_acceptance_length:.2f}",
            f"{ours.acceptance_rate:.0%}" if ours.drafted else "–",
        )
    return table


def save_svg(console: Console, file: Path) -> None:
    """Write what a recording console showed.

    Raises:
        ForetokenError: the file can't be written.
    """
    try:
        file.write_text(console.export_svg(title="foretoken demo", theme=PICTURE_THEME), encoding="utf-8")
    except OSError as error:
        raise ForetokenError(f"can't write {str(file)!r}: {error.strerror}") from error
