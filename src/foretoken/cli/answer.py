"""Decode one request, to its end or until Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from foretoken.engine.outputs import Completion, DecodeStats, StreamEvent, TokenLogprob

if TYPE_CHECKING:
    from foretoken.engine.engine import Engine
    from foretoken.engine.prompts import Prompt
    from foretoken.sampling import SamplingParams

INTERRUPTED = "interrupt"


@dataclass
class Answer:
    """The output of one request, complete or up to an interruption."""

    token_ids: list[int]
    text: str
    finish_reason: str
    stats: DecodeStats
    logprobs: list[TokenLogprob] | None = None
    rounds: list[StreamEvent] = field(default_factory=list)

    @property
    def interrupted(self) -> bool:
        """Ctrl-C ended it."""
        return self.finish_reason == INTERRUPTED


def run(
    engine: Engine,
    prompt: Prompt,
    params: SamplingParams,
    trace: bool = False,
    show: Callable[[StreamEvent], None] = lambda event: None,
    prediction: str | None = None,
) -> Answer:
    """Decode one prompt; Ctrl-C ends it after the round that is going on.

    Args:
        engine: decodes.
        prompt: a string, token ids or chat messages.
        params: how to sample.
        trace: have each round's draft in the events.
        show: called with each event.
        prediction: what the output is expected to be.
    """
    events: list[StreamEvent] = []
    completion: Completion | None = None
    with stop_on_interrupt() as stopped:
        for event in engine.stream(prompt, params, prediction=prediction, trace=trace):
            show(event)
            # Statistics are one object that goes on counting, and so is the completion: neither belongs to a round.
            events.append(replace(event, completion=None))
            completion = event.completion
            if stopped.is_set():
                break
    if completion is not None:
        return Answer(
            completion.token_ids,
            completion.text,
            completion.finish_reason,
            completion.stats,
            completion.logprobs,
            events,
        )
    pieces = [piece for event in events for piece in event.pieces]
    return Answer(
        [piece.token_id for piece in pieces],
        "".join(piece.text for piece in pieces),
        INTERRUPTED,
        events[-1].stats if events else DecodeStats(),
        rounds=events,
    )


@contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """Turn Ctrl-C into an event, so that a round is never cut in two; a second Ctrl-C interrupts at once."""
    stopped = threading.Event()

    def stop(signum: int, frame: Any) -> None:
        stopped.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
