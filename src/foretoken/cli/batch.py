"""Many prompts from a file of JSON lines, and an answer a line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.cli.answer import Answer, stop_on_interrupt
from foretoken.cli.json_output import answer_json, print_json, settings_json
from foretoken.cli.options import SamplingOptions
from foretoken.cli.prompt import read_text
from foretoken.cli.screen import Screen
from foretoken.errors import ForetokenError, ParameterError, PromptError, did_you_mean
from foretoken.serve import strict_json

if TYPE_CHECKING:
    from foretoken.engine.engine import Engine
    from foretoken.engine.prompts import Prompt
    from foretoken.engine.scheduler import Request
    from foretoken.sampling import SamplingParams

SUFFIXES = (".jsonl", ".ndjson")
_TEXT_FIELDS = ("prompt", "messages", "id", "prediction")


@dataclass(frozen=True)
class Item:
    """One line of the file.

    Attributes:
        line: its number, from 1.
        identifier: its ``id``, any JSON; the line's number where it has none.
        prompt: text (``prompt``), or chat messages (``messages``).
        prediction: what the output is expected to be (``prediction``).
        given: the fields of `SamplingParams` that the line sets.
        params: the command line's, with those that the line sets.
    """

    line: int
    identifier: Any
    prompt: str | list[dict[str, Any]]
    prediction: str | None
    given: Mapping[str, Any]
    params: SamplingParams

    def under(self, params: SamplingParams) -> Item:
        """The same line with other parameters of the command line."""
        return replace(self, params=replace(params, **self.given))


def is_batch(file: Path | None) -> bool:
    """Whether it is a file of JSON lines, by its name."""
    return file is not None and file.suffix.lower() in SUFFIXES


def read_batch(file: Path, params: SamplingParams) -> list[Item]:
    """The prompts of a file: a line is a JSON string, or an object with ``prompt`` or ``messages``.

    An object may also have an ``id``, which is given back, and the names of `SamplingParams`.

    Raises:
        PromptError: the file can't be read, or a line of it; the message has the line's number.
    """
    items = []
    for number, line in enumerate(read_text(file, "prompt file").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            items.append(_item(number, line, params))
        except ForetokenError as error:
            raise PromptError(f"line {number:,} of {str(file)!r}: {error}") from error
    if not items:
        raise PromptError(f"prompt file {str(file)!r} holds no prompts: write a JSON string or object on each line")
    return items


def _item(number: int, line: str, params: SamplingParams) -> Item:
    try:
        value = strict_json.loads(line)  # a number that is none could not be written into the answer
    except (ValueError, RecursionError) as error:
        raise PromptError(f'it is no JSON ({error}): write {{"prompt": "…"}}, or a string in quotes') from error
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise PromptError(f'it is no object but a {type(value).__name__}: write {{"prompt": "…"}}, or a string')
    settings = {name: content for name, content in value.items() if name not in _TEXT_FIELDS}
    known = [option.name for option in fields(SamplingOptions)]
    for name in settings:
        if name not in known:
            every = (*_TEXT_FIELDS, *known)
            raise ParameterError(f"unknown field {name!r}{did_you_mean(name, every)}: it may have {', '.join(every)}")
    if "prompt" not in value and "messages" not in value:
        raise PromptError("it has neither 'prompt' nor 'messages': write one of them")
    if "prompt" in value and "messages" in value:
        raise PromptError("it has both 'prompt' and 'messages': leave one out")
    if "prompt" in value and not (isinstance(value["prompt"], str) and value["prompt"]):
        raise PromptError(f"its prompt is {value['prompt']!r}: give a string of at least one character")
    if "messages" in value and not (isinstance(value["messages"], list) and value["messages"]):
        raise PromptError(f"its messages are {value['messages']!r}: give a list of objects with 'role' and 'content'")
    prediction = value.get("prediction")
    if prediction is not None and not isinstance(prediction, str):
        raise PromptError(f"its prediction is {prediction!r}: give a string")
    if isinstance(settings.get("logit_bias"), dict):
        settings["logit_bias"] = {_token(token): bias for token, bias in settings["logit_bias"].items()}
    prompt = value["prompt"] if "prompt" in value else value["messages"]
    return Item(number, value.get("id", number), prompt, prediction, settings, replace(params, **settings))


def _token(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ParameterError(f"logit_bias has the key {text!r}: give token ids") from None


def answer_batch(engine: Engine, items: list[Item], chat: bool, screen: Screen) -> tuple[bool, bool]:
    """Decode all prompts, as many at once as the engine has rows, and write a line of JSON for each, in order.

    A prompt that fails has ``error`` in its line. Ctrl-C ends the run after the round; finished answers are written.

    Args:
        engine: decodes.
        items: the prompts.
        chat: put prompts that are text into the chat template.
        screen: where answers and progress go.

    Returns:
        Whether all could be answered, and whether Ctrl-C ended it.
    """
    requests: list[Request | ForetokenError] = []
    for item in items:
        try:
            requests.append(engine.submit(_prompt(item, chat), item.params, prediction=item.prediction))
        except ForetokenError as error:
            requests.append(error)
    written, failed = 0, False
    with _progress(screen, len(items)) as advance, stop_on_interrupt() as stopped:
        while written < len(items):
            while written < len(items) and (record := _record(engine, items[written], requests[written])) is not None:
                print_json(screen, record)
                failed |= "error" in record
                written += 1
                advance(written)
            if written < len(items):
                if stopped.is_set():
                    break
                with suppress(ForetokenError):  # the requests that it ended have it
                    engine.step()
    interrupted = written < len(items)
    for request in requests:
        if not isinstance(request, ForetokenError):
            request.cancel()
    return not failed, interrupted


def _prompt(item: Item, chat: bool) -> Prompt:
    if isinstance(item.prompt, str) and chat:
        return [{"role": "user", "content": item.prompt.strip()}]
    return item.prompt


def _record(engine: Engine, item: Item, request: Request | ForetokenError) -> dict[str, Any] | None:
    """The line of an answer; None where it is not finished."""
    about = {"id": item.identifier, "line": item.line}
    if isinstance(request, ForetokenError):
        return {**about, "error": str(request)}
    done = request.completion
    if done is None:
        return None
    if done.error is not None:
        return {**about, "error": str(done.error)}
    answer = Answer(done.token_ids, done.text, done.finish_reason, done.stats, done.logprobs)
    return {**about, **settings_json(engine, item.params), **answer_json(engine, answer)}


@contextmanager
def _progress(screen: Screen, total: int) -> Iterator[Any]:
    if not screen.notes.is_terminal or screen.out.is_terminal:  # the answers themselves show how far it is
        yield lambda done: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen.notes, transient=True) as bar:
        task = bar.add_task("answers", total=total)
        yield lambda done: bar.update(task, completed=done)
