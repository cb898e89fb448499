"""Engines that answer the requests of ``foretoken batch``: one in this process, or several, each in its own."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import TYPE_CHECKING, Any

from foretoken.cli.batch_file import Item
from foretoken.cli.options import ModelOptions
from foretoken.cli.screen import Screen
from foretoken.errors import ForetokenError
from foretoken.models.machine import cores

if TYPE_CHECKING:
    from fastapi import FastAPI

    from foretoken.serve.in_process import Answer

Done = Callable[[Item, "Answer"], None]


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is made, and what it allows.

    Attributes:
        models: which models.
        max_batch_size: most completions that are decoded at once.
        cache_memory: most KV cache; None for no limit.
        served_model_name: what requests call the model; None for its own name.
        max_output_tokens: most tokens that a request may ask for.
        no_color: in messages.
    """

    models: ModelOptions
    max_batch_size: int
    cache_memory: str | None
    served_model_name: str | None
    max_output_tokens: int
    no_color: bool

    @property
    def window(self) -> int:
        """Requests that an engine has at once: enough that some are ready whenever a row becomes free."""
        return self.max_batch_size + 8

    def app(self) -> FastAPI:
        """The application with an engine of its own.

        Raises:
            ForetokenError: a model can't be loaded.
        """
        from foretoken.cli.serve import model_name
        from foretoken.cli.setup import keep_quiet, load_engine
        from foretoken.serve.app import create_app
        from foretoken.serve.settings import ServeSettings

        screen = Screen(self.no_color)
        keep_quiet(screen)
        engine = load_engine(self.models, screen, max_batch_size=self.max_batch_size, cache_memory=self.cache_memory)
        settings = ServeSettings(
            model=self.served_model_name or model_name(engine.target.name),
            max_queue=2**31,  # the window is the limit
            max_output_tokens=self.max_output_tokens,
            queue_seconds=None,
            request_seconds=None,
            expose_metrics=False,
        )
        return create_app(engine, settings)


def run_here(options: EngineOptions, items: Iterator[Item], done: Done) -> None:
    """Have one engine, in this process, answer the requests.

    Args:
        options: of the engine.
        items: the requests.
        done: called with each answer, as it comes.

    Raises:
        ForetokenError: a model can't be loaded, or the engine has ended with an error.
    """
    app = options.app()

    async def take() -> Item | None:
        return next(items, None)

    asyncio.run(_answer(app, take, done, options.window))


async def _answer(app: FastAPI, take: Callable[[], Awaitable[Item | None]], done: Done, window: int) -> None:
    from foretoken.serve.in_process import post
    from foretoken.serve.service import Service

    service: Service = app.state.service

    async def work() -> None:
        while (item := await take()) is not None:
            answer = await post(app, item.url, item.body)
            if service.engine.failure is not None:
                raise ForetokenError(f"the engine has ended with an error ({service.engine.failure}): run it again")
            done(item, answer)

    tasks = [asyncio.create_task(work()) for _ in range(window)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await service.aclose()


def run_processes(options: EngineOptions, jobs: int, items: Iterator[Item], done: Done) -> None:
    """Have several engines, each in a process, answer the requests; who is ready first gets the next one.

    Args:
        options: of each engine.
        jobs: how many.
        items: the requests.
        done: called with each answer, as it comes.

    Raises:
        ForetokenError: a model can't be loaded, or an engine has ended.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(cores() // jobs, 1)))
    context = multiprocessing.get_context("spawn")
    processes, open_items, told = {}, {}, set()  # the last: that there is nothing left to answer
    try:
        for _ in range(jobs):
            here, there = context.Pipe()
            process = context.Process(target=_process, args=(there, options), daemon=True)
            process.start()
            there.close()
            processes[here], open_items[here] = process, 0
        while processes:
            for ready in wait(list(processes)):
                assert isinstance(ready, Connection)
                message = _received(ready)
                if isinstance(message, str):
                    raise ForetokenError(message)
                if message is None:
                    if open_items.pop(ready) or ready not in told:
                        raise ForetokenError("the process of an engine has ended: run it again to go on")
                    processes.pop(ready).join()
                    continue
                if isinstance(message, tuple):
                    done(*message)
                    open_items[ready] -= 1
                try:
                    for item in _some(items, options.window - open_items[ready]):
                        ready.send(item)
                        open_items[ready] += 1
                    if not open_items[ready]:
                        told.add(ready)
                        ready.send(None)
                except OSError:  # it has ended: what it said before is read first
                    pass
    finally:
        for process in processes.values():
            process.kill()


def _received(connection: Connection) -> Any:
    """The next message of an engine's process; None where it has ended."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


def _some(items: Iterator[Item], most: int) -> Iterator[Item]:
    for _ in range(most):
        item = next(items, None)
        if item is None:
            return
        yield item


def _process(connection: Connection, options: EngineOptions) -> None:
    """What a process does: it says that it is ready, and answers what it is sent, until that is None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that writes the answers
    try:
        asyncio.run(_serve(connection, options))
    except ForetokenError as error:
        connection.send(str(error))


async def _serve(connection: Connection, options: EngineOptions) -> None:
    app, loop = options.app(), asyncio.get_running_loop()
    items: asyncio.Queue[Item | None] = asyncio.Queue()
    connection.send(True)

    async def take() -> Item | None:
        item = await items.get()
        if item is None:
            items.put_nowait(None)  # for the others, too
        return item

    def done(item: Item, answer: Any) -> None:
        connection.send((item, answer))

    def read() -> None:
        try:
            while (item := connection.recv()) is not None:
                loop.call_soon_threadsafe(items.put_nowait, item)
        except (EOFError, ConnectionError):  # the other side was killed: nobody wants the answers
            os._exit(1)
        loop.call_soon_threadsafe(items.put_nowait, None)

    Thread(target=read, daemon=True).start()
    await _answer(app, take, done, options.window)
