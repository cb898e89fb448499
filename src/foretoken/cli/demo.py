"""The demonstration: the shipped pair writes, speculatively and in colour, and is timed against the target alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from foretoken.cli import render
from foretoken.cli.answer import Answer, run
from foretoken.cli.compare import plain_engine, warm_up
from foretoken.cli.screen import has_colour
from foretoken.engine.outputs import DecodeStats, StreamEvent
from foretoken.errors import ForetokenError

if TYPE_CHECKING:
    from foretoken.engine.engine import Engine
    from foretoken.engine.prompts import Prompt
    from foretoken.sampling import SamplingParams

WIDTH = 100
_NORMAL = [(13, 17, 23), (248, 81, 73), (63, 185, 80), (227, 179, 65), (88, 166, 255), (188, 140, 255), (57, 197, 207)]
# Rich's own theme for pictures has a green that is hardly told from its yellow.
PICTURE_THEME = TerminalTheme(
    (13, 17, 23), (201, 209, 217), [*_NORMAL, (177, 186, 196)], [(110, 118, 129), *_NORMAL[1:], (240, 246, 252)]
)
TRACED_ROUNDS = 8
TIMED_RUNS = 2  # of each kind, in turns: a machine's speed drifts


@dataclass(frozen=True)
class Scene:
    """One prompt of the demonstration."""

    title: str
    prompt: str
    chat: bool
    temperature: float
    max_new_tokens: int
    trace: bool = False

    def request(self) -> Prompt:
        """What the engine takes."""
        return [{"role": "user", "content": self.prompt}] if self.chat else self.prompt

    def params(self) -> SamplingParams:
        """How it is sampled."""
        from foretoken.sampling import SamplingParams

        return SamplingParams(temperature=self.temperature, max_new_tokens=self.max_new_tokens, seed=1)


SCENES = (
    Scene(
        "a school question",
        "Tom buys 3 bags of apples. Each bag has 4 apples and costs $2. He gives 5 apples to his sister and sells the "
        "rest for $1 each. How much money does he make after paying for the bags?",
        chat=True,
        temperature=0.0,
        max_new_tokens=128,
        trace=True,
    ),
    Scene(
        "a Python function",
        'def read_config(path, encoding="utf-8"):\n    """Read a configuration file.',
        chat=False,
        temperature=0.0,
        max_new_tokens=128,
    ),
    Scene(
        "a play",
        "KING RICHARD III:\nMy lord, the people of this city",
        chat=False,
        temperature=0.8,
        max_new_tokens=96,
    ),
)


@dataclass(frozen=True)
class Timing:
    """A scene with speculation and alone."""

    scene: Scene
    speculative: DecodeStats
    plain: DecodeStats
    equal: bool
    """Whether both wrote the same tokens."""

    @property
    def speed_up(self) -> float:
        """How many times faster speculation was."""
        return self.speculative.tokens_per_second / self.plain.tokens_per_second


class Interrupted(KeyboardInterrupt):
    """Ctrl-C came during a scene."""


def play(engine: Engine, console: Console) -> list[Timing]:
    """Show every scene, and time it."""
    console.print(
        Text.assemble(
            ("Foretoken", "bold"),
            f": {engine.drafter.name} guesses up to {engine.num_speculative_tokens} tokens ahead, the target checks "
            "them in one pass, and what it writes stays its own. (That is a model of ten million parameters: it knows "
            "how sentences and code look, and little else.)",
        )
    )
    console.print(render.legend())
    timings = []
    engine.reuse_prefixes = False  # every run is to read the prompt
    alone = plain_engine(engine)
    for scene in SCENES:
        warm_up(engine, alone, scene.request(), scene.params())
        _show(scene, engine, console)
        timings.append(_time(scene, engine, alone))
        console.print(_verdict(timings[-1]), style="bold")
    console.print()
    console.print(_table(timings, engine.drafter.name))
    return timings


def _show(scene: Scene, engine: Engine, console: Console) -> None:
    how = "greedy" if scene.temperature == 0 else f"temperature {scene.temperature:g}"
    console.print()
    console.print(Rule(Text(f"{scene.title}, {how}", style="bold"), align="left", style="dim"))
    writer = render.TokenWriter(console)
    writer.prompt(scene.prompt + ("\n" if scene.chat else ""))
    answer = _run(engine, scene, scene.trace, writer.write)
    writer.end()
    if scene.trace:
        _trace(answer, engine, console)


def _trace(answer: Answer, engine: Engine, console: Console) -> None:
    coloured = has_colour(console) or console.record
    tokenizer = engine.target.tokenizer
    assert tokenizer is not None
    rounds = answer.rounds[:TRACED_ROUNDS]
    console.print(f"The first {len(rounds)} rounds:", style="dim")
    console.print(render.trace_header(False, coloured))
    for number, event in enumerate(rounds, start=1):
        line = render.trace_line(number, event, lambda token: str(tokenizer.decode([token])), False, coloured)
        console.print(line)


def _time(scene: Scene, engine: Engine, alone: Engine) -> Timing:
    ours, theirs = [], []
    for _ in range(TIMED_RUNS):
        ours.append(_run(engine, scene))
        theirs.append(_run(alone, scene))
    return Timing(
        scene,
        DecodeStats.total(answer.stats for answer in ours),
        DecodeStats.total(answer.stats for answer in theirs),
        ours[0].token_ids == theirs[0].token_ids,
    )


def _run(
    engine: Engine, scene: Scene, trace: bool = False, show: Callable[[StreamEvent], None] = lambda event: None
) -> Answer:
    answer = run(engine, scene.request(), scene.params(), trace, show)
    if answer.interrupted:
        raise Interrupted
    return answer


def _verdict(timing: Timing) -> str:
    ours, theirs = timing.speculative, timing.plain
    same = ""
    if timing.scene.temperature == 0:
        same = " · the same text, token by token" if timing.equal else " · texts part at a near tie (rounding)"
    return (
        f"{ours.tokens_per_second:.0f} tokens/s, alone {theirs.tokens_per_second:.0f}: {timing.speed_up:.2f}× · "
        f"{ours.mean_acceptance_length:.2f} tokens a target pass{same}"
    )


def _table(timings: list[Timing], name: str) -> Table:
    table = Table("tokens/s", "alone", f"with {name}", "speed-up", "mean acceptance\nlength", "acceptance\nrate")
    for column in table.columns[1:]:
        column.justify = "right"
    for timing in timings:
        ours = timing.speculative
        table.add_row(
            timing.scene.title,
            f"{timing.plain.tokens_per_second:.0f}",
            f"{ours.tokens_per_second:.0f}",
            f"{timing.speed_up:.2f}×",
            f"{ours.mean_acceptance_length:.2f}",
            f"{ours.acceptance_rate:.0%}",
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
