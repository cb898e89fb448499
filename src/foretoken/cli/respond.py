"""Answer one prompt on the screen: stream it, trace it, compare it, or put it into JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from foretoken.cli import render
from foretoken.cli.answer import INTERRUPTED, Answer, run
from foretoken.cli.compare import Comparison, alternate, fix_seed, plain_engine, relation, warm_up
from foretoken.cli.json_output import answer_json, print_json, settings_json, token_text
from foretoken.cli.options import OutputOptions
from foretoken.cli.screen import Screen, has_colour
from foretoken.engine.outputs import StreamEvent

if TYPE_CHECKING:
    from foretoken.engine.engine import Engine
    from foretoken.engine.prompts import Prompt
    from foretoken.sampling import SamplingParams


def respond(
    engine: Engine,
    prompt: Prompt,
    params: SamplingParams,
    output: OutputOptions,
    screen: Screen,
    echo: str = "",
    prediction: str | None = None,
) -> Answer:
    """Decode one prompt, and show it as the options say.

    Args:
        engine: decodes.
        prompt: a string, token ids or chat messages.
        params: how to sample.
        output: what to show.
        screen: where.
        echo: the text that is continued, shown before the output to people.
        prediction: what the output is expected to be.
    """
    if output.compare:
        return _compare(engine, prompt, params, output, screen, echo, prediction)
    if output.json:
        answer = run(engine, prompt, params, output.trace, prediction=prediction)
        print_json(screen, {**settings_json(engine, params), **answer_json(engine, answer, output.trace)})
        return answer
    answer = show_answer(engine, prompt, params, output, screen, echo, prediction)
    screen.note(render.summary(answer.stats, answer.finish_reason))
    return answer


def _compare(
    engine: Engine,
    prompt: Prompt,
    params: SamplingParams,
    output: OutputOptions,
    screen: Screen,
    echo: str,
    prediction: str | None,
) -> Answer:
    """Decode with speculation and without, in turns, and show the first run of each as `respond` would."""
    params = fix_seed(engine, params)
    plain = plain_engine(engine)
    warm_up(engine, plain, prompt, params)
    if output.json:
        ours = run(engine, prompt, params, output.trace, prediction=prediction)
        theirs = run(plain, prompt, params) if not ours.interrupted else None
    else:
        name = f"{render.drafter_label(engine.drafter)}, k = {engine.num_speculative_tokens}"
        screen.note(f"── with {name}", style="bold")
        ours = show_answer(engine, prompt, params, output, screen, echo, prediction)
        theirs = None
        if not ours.interrupted:
            screen.note("── target alone", style="bold")
            # A program that reads the output should get it once.
            silent = not screen.out.is_terminal
            theirs = run(plain, prompt, params) if silent else _show_plain(plain, prompt, params, screen, echo)
    if theirs is None or theirs.interrupted:
        if output.json:
            print_json(screen, {**settings_json(engine, params), **answer_json(engine, ours, output.trace)})
        else:
            screen.note(render.summary(ours.stats, INTERRUPTED))
        return replace(ours, finish_reason=INTERRUPTED)
    answers, others = [ours], [theirs]
    interrupted = alternate(engine, plain, prompt, params, answers, others, prediction=prediction)
    result = Comparison(render.drafter_label(engine.drafter), answers, others, relation(engine, params, ours, theirs))
    if output.json:
        print_json(screen, result.as_json(engine, params, output.trace))
    else:
        screen.notes.print(result.table())
        screen.note(result.measured)
        screen.note(result.relation, style="")
    return replace(ours, finish_reason=INTERRUPTED) if interrupted else ours


def _show_plain(engine: Engine, prompt: Prompt, params: SamplingParams, screen: Screen, echo: str) -> Answer:
    return show_answer(engine, prompt, params, OutputOptions(), screen, echo)


def show_answer(
    engine: Engine,
    prompt: Prompt,
    params: SamplingParams,
    output: OutputOptions,
    screen: Screen,
    echo: str = "",
    prediction: str | None = None,
) -> Answer:
    """Stream one answer; with a trace, the trace first and then the whole output."""
    writer = render.TokenWriter(screen.out)
    speculates = engine.num_speculative_tokens and (prediction or engine.drafter.name != "none")
    if has_colour(screen.out) and speculates and not output.trace and not screen.explained:
        screen.notes.print(render.legend(), soft_wrap=True)
        screen.explained = True
    show = _tracer(engine, output, screen) if output.trace else writer.write
    try:
        if not output.trace:
            writer.prompt(echo)
        answer = run(engine, prompt, params, output.trace, show, prediction)
        if output.trace:
            writer.prompt(echo)
            for event in answer.rounds:
                writer.write(event)
    finally:
        writer.end()
    if answer.logprobs is not None:
        screen.notes.print(render.logprobs(answer.logprobs, lambda token: token_text(engine, token)))
    return answer


def _tracer(engine: Engine, output: OutputOptions, screen: Screen) -> Callable[[StreamEvent], None]:
    coloured = has_colour(screen.notes)
    screen.notes.print(render.trace_header(output.probs, coloured), soft_wrap=True)
    number = 0

    def show(event: StreamEvent) -> None:
        nonlocal number
        number += 1
        line = render.trace_line(number, event, lambda token: token_text(engine, token), output.probs, coloured)
        screen.notes.print(line, soft_wrap=True)

    return show
