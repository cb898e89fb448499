"""The engine of ``foretoken serve``: in its process, or in one of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.cli.options import ModelOptions
from foretoken.cli.screen import Screen
from foretoken.cli.serve import ready_engine

if TYPE_CHECKING:
    from foretoken.engine.engine import Engine
    from foretoken.serve.apart.process import EngineProcess
    from foretoken.serve.decoding import Decoding
    from foretoken.serve.settings import ServeSettings

_FILES = ("chat_template", "profile", "tree")
"""Options that may name a pipe of this process, which another one can't read."""


@contextmanager
def served_engine(
    models: ModelOptions,
    limits: ServeSettings,
    max_batch_size: int,
    cache_memory: str | None,
    screen: Screen,
    *,
    apart: bool,
) -> Iterator[Callable[[], Decoding]]:
    """What gives an engine. One of another process is made while the block goes on with something else.

    The engine ends with the block. What is given raises ForetokenError where a model can't be loaded.

    Args:
        models: of the engine.
        limits: of its requests.
        max_batch_size: most requests that are decoded at once.
        cache_memory: most KV cache; None for no limit.
        screen: for messages.
        apart: in a process of its own, where its tokenizer can be handed over.
    """

    def here() -> Decoding:
        from foretoken.serve.decoding import DecodingHere

        engine = ready_engine(models, max_batch_size, cache_memory, screen)
        return DecodingHere(engine, queue_seconds=limits.queue_seconds, max_events=limits.max_backlog)

    if not apart:
        yield here
        return
    from foretoken.serve.apart.process import EngineProcess

    with ExitStack() as held:
        models = _without_pipes(models, held)
        make = _MakeEngine(models, max_batch_size, cache_memory, screen.notes.no_color)
        process = EngineProcess(make, limits.queue_seconds)
        held.callback(_end, process, screen)

        def wait() -> Decoding:
            if (found := process.decoding(limits.max_backlog)) is not None:
                return found
            process.close()
            screen.note("the target's tokenizer can't go to another process: loading the models again, in this one")
            return here()

        yield wait


@dataclass(frozen=True)
class _MakeEngine:
    """Makes the engine that the options describe, in whichever process."""

    models: ModelOptions
    max_batch_size: int
    cache_memory: str | None
    no_color: bool

    def __call__(self) -> Engine:
        from foretoken.cli.setup import keep_quiet

        screen = Screen(self.no_color)
        keep_quiet(screen)
        return ready_engine(self.models, self.max_batch_size, self.cache_memory, screen)


def _without_pipes(models: ModelOptions, held: ExitStack) -> ModelOptions:
    """The options with what pipes hold in files, which `held` removes."""
    copies: dict[str, Any] = {}
    for name, value in ((name, vars(models)[name]) for name in _FILES):
        with suppress(OSError, ValueError):  # what can't be read is told where it is needed
            if value is not None and _is_of_this_process(Path(value)):
                folder = held.enter_context(tempfile.TemporaryDirectory(prefix="foretoken-"))
                copy = Path(folder) / name
                copy.write_bytes(Path(value).read_bytes())
                copies[name] = type(value)(copy)
    return replace(models, **copies)


def _is_of_this_process(file: Path) -> bool:
    return file.is_fifo() or file.is_char_device() or str(file).startswith(("/dev/", "/proc/"))


def _end(process: EngineProcess, screen: Screen) -> None:
    process.close()
    if screen.notes.is_terminal:
        screen.notes.show_cursor()  # the process hides it while it loads, and may have been ended then
