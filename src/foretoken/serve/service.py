"""The engine as the HTTP endpoints see it: prompts in, events of all choices of a request out.

`Service` has what all requests share, `Batch` decodes the choices of one request. The endpoints (`openai_api`,
`messages`, `responses`) turn its events into their APIs' answers; `decoding` says where the engine runs.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache, partial
from time import monotonic, time
from typing import Any, TypeVar

from foretoken.engine.arguments import numbered
from foretoken.engine.detokenizer import token_text
from foretoken.engine.outputs import Completion, DecodeStats, StreamEvent
from foretoken.engine.streams import Streams
from foretoken.sampling import SamplingParams
from foretoken.serve.admission import Admission
from foretoken.serve.calls import CALL_MARK
from foretoken.serve.decoding import Decoding
from foretoken.serve.errors import ApiError, api_error, shutting_down
from foretoken.serve.figures import Figures
from foretoken.serve.logs import log_error
from foretoken.serve.metrics import Metrics, Watch
from foretoken.serve.progress import Progress
from foretoken.serve.response_template import read_template
from foretoken.serve.settings import ServeSettings
from foretoken.serve.streaming import WritePart
from foretoken.serve.tokenizing import Tokenizing

T = TypeVar("T")

_REPLACEMENT = "\ufffd"
"""What tokenizers put in place of bytes that are no character."""

_PROGRESS_SECONDS = 0.25
"""Between events of a choice that is not streamed, for the page and the metrics, which show its progress."""


class Service:
    """One engine that many requests share.

    Args:
        engine: what decodes; it belongs to the service until `aclose`.
        settings: what is allowed.

    Raises:
        ModelError: the tokenizer's response template can't be used.
    """

    def __init__(self, engine: Decoding, settings: ServeSettings) -> None:
        facts = engine.facts
        self.settings = settings
        self.engine = engine
        self.target = facts.target
        self.sampling_defaults = self.target.sampling_defaults if settings.sampling_defaults == "model" else {}
        """Sampling parameters of requests that do not name any."""
        self.drafter = facts.drafter
        self.created = int(time())
        self.response_template = read_template(self.target.tokenizer)
        """The format of answers, as transformers' parser takes it; None where the tokenizer has none."""
        self.tokenizing = Tokenizing(engine)
        self.admission = Admission(facts.max_batch_size, settings.max_queue)
        self.counting = Admission(facts.max_batch_size, settings.max_queue)
        """Of requests for tokens alone, which take no row and wait for no one's answer."""
        self.metrics = Metrics(settings.model, engine)
        self.figures = Figures()
        self.served = facts.served
        """The engine's settings that requests may ask for."""
        self.tokenizer = tokenizer = copy.deepcopy(self.target.tokenizer)
        """The event loop's copy of the target's tokenizer; None for a target without one."""
        mark = None if tokenizer is None else tokenizer.get_vocab().get(CALL_MARK)
        self.marks_are_special = mark is not None and self.is_special(mark)
        """Whether the mark before a call is a special token, which texts are without."""
        self.token_text = lru_cache(maxsize=self.target.vocab_size)(lambda token: token_text(tokenizer, token))
        """The string of one token; empty for a target without a tokenizer."""
        self.token_bytes = lru_cache(maxsize=self.target.vocab_size)(self._bytes_of)
        """The bytes that one token adds to the text."""

    def _bytes_of(self, token: int) -> bytes:
        text = self.token_text(token)
        known = self.engine.token_bytes(token) if _REPLACEMENT in text else None  # bytes of a part of a character
        return text.encode() if known is None else known

    def is_special(self, token: int) -> bool:
        """Whether texts are without this token, unless special tokens are asked for."""
        return not self.tokenizer.decode([token], skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @property
    def has_chat(self) -> bool:
        """Whether the target's tokenizer has a chat template."""
        return bool(getattr(self.target.tokenizer, "chat_template", None))

    @property
    def chat_template(self) -> str:
        """Of the target's tokenizer; empty without one."""
        return str(getattr(self.target.tokenizer, "chat_template", None) or "")

    @property
    def prompt_is_output(self) -> bool:
        """Whether prompt and output are one sequence; not with an encoder-decoder target."""
        return self.target.decoder_start_token_id is None

    def explain(self, error: Exception) -> ApiError:
        """The error that a client gets. Internal errors, of which it gets no details, are logged."""
        found = api_error(error, self.target.name, self.settings.model)
        if found.status == 500 and found is not error:
            log_error(error)
        return found

    def room(self, prompt: Sequence[int]) -> int:
        """Tokens that the target's context has left after a prompt, at least 1."""
        return max(self.target.max_length - (len(prompt) if self.prompt_is_output else 1), 1)

    def seconds_left(self, let_in: float) -> float | None:
        """For which a request may still take; None without a limit.

        Args:
            let_in: as `Admission.admit` has it.
        """
        limit = self.settings.request_seconds
        return None if limit is None else let_in + limit - monotonic()

    async def in_time(self, work: Coroutine[Any, Any, T], let_in: float) -> T:
        """The result of what comes before a request's choices, such as tokenizing: its time runs by then.

        Args:
            work: is cancelled where it takes too long.
            let_in: as `Admission.admit` has it.

        Raises:
            ApiError: it did; or as `work`.
        """
        try:
            async with asyncio.timeout(self.seconds_left(let_in)):
                return await work
        except TimeoutError:
            raise self.too_late() from None

    def too_late(self) -> ApiError:
        """What a request is told that takes longer than it may."""
        limit = self.settings.request_seconds
        message = f"the request was not answered within {limit:g} seconds: ask for fewer tokens, or again later"
        return ApiError(504, message, code="request_timeout")

    async def aclose(self) -> None:
        """End all requests and threads."""
        await self.engine.aclose()
        await asyncio.to_thread(self.tokenizing.close)


@dataclass(frozen=True)
class Batch:
    """The choices of one request: `n` of each prompt, one after the other.

    Attributes:
        service: what decodes them.
        prompts: tokens.
        params: of each prompt's first choice; the i-th has the seed plus i, where one is named.
        let_in: when the request was let in, as `Admission.admit` has it.
        n: choices of a prompt.
        settings: further arguments of `Engine.submit`.
    """

    service: Service
    prompts: list[list[int]]
    params: SamplingParams
    let_in: float
    n: int = 1
    settings: dict[str, Any] | None = None

    @property
    def size(self) -> int:
        """How many choices there are."""
        return len(self.prompts) * self.n

    def prompt(self, index: int) -> list[int]:
        """The prompt of a choice."""
        return self.prompts[index // self.n]

    async def parts(
        self, tell: Callable[[int, StreamEvent], str], write: WritePart | None
    ) -> AsyncGenerator[str, None]:
        """The parts of a stream that `write` has not written already.

        Args:
            tell: returns what an event adds to the stream, given the choice's index; called once for each event.
            write: writes a part while this generator waits for its next event; None where that is not possible.

        Raises:
            ApiError: see `events`.
        """

        def written(index: int, event: StreamEvent) -> bool:
            assert write is not None
            if not write(b""):
                return False
            if part := tell(index, event):
                write(part.encode())
            return True

        async with aclosing(self.events(None if write is None else written)) as events:
            async for index, event in events:
                if part := tell(index, event):
                    yield part

    async def events(
        self, at_once: Callable[[int, StreamEvent], bool] | None = None, *, whole: bool = False
    ) -> AsyncGenerator[tuple[int, StreamEvent], None]:
        """Every choice's events as they come, with the choice's index. Close the generator to cancel them all.

        Args:
            at_once: offered each event that comes while the generator waits, see `Streams.take_at_once`.
            whole: only the completions are wanted: they have the text, and most rounds have no event.

        Raises:
            ApiError: the engine refused a choice, or failed to complete it; the others are cancelled.
        """
        service = self.service
        watches = [Watch(service.metrics, len(self.prompt(index))) for index in range(self.size)]
        progress = [Progress() for _ in watches]
        stats: dict[int, DecodeStats] = {}  # of choices that have begun

        def count(index: int, event: StreamEvent) -> None:
            stats[index] = event.stats
            added = progress[index].added(event.stats)
            watches[index].event(event, added)
            service.figures.count(added)

        def take(index: int, event: StreamEvent) -> bool:
            assert at_once is not None
            taken = at_once(index, event)
            if taken:
                count(index, event)
            return taken

        try:
            with service.engine.streams(_PROGRESS_SECONDS if whole else 0.0) as streams:
                if at_once is not None:
                    streams.take_at_once(take)
                for index, watch in enumerate(watches):
                    watch.begun_at = partial(streams.begun_at, index)
                    self._submit(streams, index, watch, stream=not whole)
                if (left := service.seconds_left(self.let_in)) is not None:
                    streams.expire(left)
                while streams.left:
                    index, what = await streams.next()
                    if isinstance(what, StreamEvent):
                        count(index, what)
                    yield index, _event_of(what, watches[index])
        except TimeoutError:
            for watch in watches:
                watch.failed()
            raise service.too_late() from None
        except Exception as error:
            raise service.explain(error) from error
        finally:
            for index, so_far in stats.items():  # rounds without an event, where the request has ended early
                added = progress[index].added(so_far)
                watches[index].rounds(added)
                service.figures.count(added)
            for watch in watches:
                watch.end()
            service.metrics.longest_outputs.observe(max(watch.tokens for watch in watches))

    async def complete(self) -> list[Completion]:
        """Every choice's completion.

        Raises:
            ApiError: a choice failed; the others are cancelled.
        """
        completions: dict[int, Completion] = {}
        async with aclosing(self.events(whole=True)) as events:
            async for index, event in events:
                if event.completion is not None:
                    completions[index] = event.completion
        return [completions[index] for index in range(self.size)]

    def _submit(self, streams: Streams, index: int, watch: Watch, *, stream: bool) -> None:
        params = numbered(self.params, index % self.n)
        try:
            streams.submit(self.prompt(index), params, {**(self.settings or {}), "stream": stream})
        except Exception:
            watch.failed()
            raise


def _event_of(what: StreamEvent | Exception, watch: Watch) -> StreamEvent:
    """The event of a choice; its watch ends with the last one.

    Raises:
        Exception: the error that ended the choice, or that the server shuts down.
    """
    if isinstance(what, Exception):
        watch.failed()
        raise what
    if what.completion is not None:
        if what.completion.finish_reason == "cancelled":
            watch.failed()
            raise shutting_down()
        watch.end()
    return what
