"""Answer one prompt on the screen: stream it, trace it, compare it, or put it into JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from foretoken.cli import render
from foretoken.cli.answer import INTERRUPTED, Answer, run
from foretoken.cli.compare import Comparison, fix_seed, plain_engine, relation, warm_up
from foretoken.cli.options import OutputOptions
from foretoken.cli.screen import Screen, has_colour
from foretoken.engine.outputs import StreamEvent

if TYPE_CHECKING:
    from foretoken.engine.engine import Engine
    from foretoken.engine.prompts import Prompt
    from foretoken.sampling import SamplingParams


def respond(
    engine: Engine, prompt: Prompt, params: SamplingParams, output: OutputOptions, screen: Screen, echo: str = ""
) -> Answer:
    """Decode one prompt, and show it as the options say.

    Args:
        engine: decodes.
        prompt: text or messages.
        params: how to sample.
        output: what to show.
        screen: where.
        echo: the text that is continued, shown before it to people.
    """
    if output.compare:
        return _compare(engine, prompt, params, output, screen, echo)
    if output.json:
        answer = run(engine, prompt, params, output.trace)
        print_json(screen, answer.as_json(output.trace))
        return answer
    answer = show_answer(engine, prompt, params, output, screen, echo)
    screen.note(render.summary(answer.stats, answer.finish_reason))
    return answer


def _compare(
    engine: Engine, prompt: Prompt, params: SamplingParams, output: OutputOptions, screen: Screen, echo: str = ""
) -> Answer:
    """Decode with speculation and without, and show both as `respond` would; the speculative answer."""
    params = fix_seed(engine, params)
    warm_up(engine, prompt)
    engine.release()  # both are to read the prompt
    plain = plain_engine(engine)
    if output.json:
        speculative = run(engine, prompt, params, output.trace)
        other = run(plain, prompt, params) if not speculative.interrupted else None
    else:
        name = f"{engine.drafter.name}, k = {engine.num_speculative_tokens}"
        screen.note(f"── with {name}", style="bold")
        speculative = show_answer(engine, prompt, params, output, screen, echo)
        other = None
        if not speculative.interrupted:
            screen.note("── target alone", style="bold")
            # Programs want the text once.
            silent = not screen.out.is_terminal
            other = run(plain, prompt, params) if silent else _show_plain(plain, prompt, params, screen, echo)
    if other is None or other.interrupted:
        if output.json:
            print_json(screen, speculative.as_json(output.trace))
        else:
            screen.note(render.summary(speculative.stats, INTERRUPTED))
        return replace(speculative, finish_reason=INTERRUPTED)
    result = Comparison(engine.drafter.name, speculative, other, relation(engine, params, speculative, other))
    if output.json:
        print_json(screen, result.as_json(output.trace))
    else:
        screen.notes.print(result.table())
        screen.note(result.relation, style="")
    return speculative


def _show_plain(engine: Engine, prompt: Prompt, params: SamplingParams, screen: Screen, echo: str) -> Answer:
    return show_answer(engine, prompt, params, OutputOptions(), screen, echo)


def show_answer(
    engine: Engine, prompt: Prompt, params: SamplingParams, output: OutputOptions, screen: Screen, echo: str = ""
) -> Answer:
    """Stream one answer; with a trace, the trace first and then the whole text."""
    writer = render.TokenWriter(screen.out)
    speculates = engine.num_speculative_tokens and engine.drafter.name != "none"
    if has_colour(screen.out) and speculates and not output.trace and not screen.explained:
        screen.notes.print(render.legend(), soft_wrap=True)
        screen.explained = True
    show = _tracer(engine, output, screen) if output.trace else writer.write
    try:
        if not output.trace:
            writer.prompt(echo)
        answer = run(engine, prompt, params, output.trace, show)
        if output.trace:
            writer.prompt(echo)
            for event in answer.rounds:
                writer.write(event)
    finally:
        writer.end()
    return answer


def _tracer(engine: Engine, output: OutputOptions, screen: Screen) -> Callable[[StreamEvent], None]:
    tokenizer = engine.target.tokenizer
    coloured = has_colour(screen.notes)
    screen.notes.print(render.trace_header(output.probs, coloured), soft_wrap=True)
    number = 0

    def token_text(token_id: int) -> str:
        return str(tokenizer.decode([token_id])) if tokenizer is not None else ""

    def show(event: StreamEvent) -> None:
        nonlocal number
        number += 1
        line = render.trace_line(number, event, token_text, output.probs, coloured)
        screen.notes.print(line, soft_wrap=True)

    return show


def print_json(screen: Screen, value: Any) -> None:
    """One JSON document on one line, whatever the terminal's width."""
    screen.out.file.write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")
    screen.out.file.flush()
