"""Settings of a server: names, keys and limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from foretoken.errors import ParameterError, check_choice, check_flag
from foretoken.sampling.params import check_integer, check_number

KEEP_ALIVE = 75.0
"""Seconds for which a connection without a request stays open: longer than the minute of most reverse proxies, which
would send a request as it is being closed."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """What a server allows; the engine has settings of its own.

    Attributes:
        model: the name that requests call the target by.
        api_keys: keys that a request must show one of; empty lets everybody in.
        cors_origins: origins of web pages that may ask; ``*`` for all.
        max_queue: most choices (completions under way) that wait for a row; further requests get status 429.
        max_choices: most choices of one request: prompts × n.
        max_output_tokens: most tokens that a request may ask for.
        max_logprobs: most probable tokens that a request may have reported with each token.
        max_body_bytes: of a request's body.
        body_seconds: within which a client has to send its body.
        queue_seconds: for which a choice may wait for a row; None for no limit.
        request_seconds: within which a request has to be answered once it is let in; None for no limit.
        send_seconds: within which a client has to take what is ready for it; further it is cut off.
        max_backlog: events of a choice (one a round, of one token or several) that its client may be behind.
        log_bodies: log what clients send.
        expose_metrics: serve ``/metrics``.
        replica: the name of this server among several; ids of responses begin with it, so that the next request of a
            conversation finds the server that keeps it.
        page: serve the page at ``/``, and what it asks for under ``/v1/foretoken``.
        sampling_defaults: how a request is sampled that does not say: ``"model"`` as the target's makers want it
            (`LanguageModel.sampling_defaults`), ``"openai"`` as OpenAI does, at temperature 1 without truncation.

    Raises:
        ParameterError: a value is out of its range.
    """

    model: str
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_queue: int = 256
    max_choices: int = 128
    max_output_tokens: int = 16_384
    max_logprobs: int = 20
    max_body_bytes: int = 8 * 2**20
    body_seconds: float = 60.0
    queue_seconds: float | None = 600.0
    request_seconds: float | None = 3600.0
    send_seconds: float = 60.0
    max_backlog: int = 4_096
    log_bodies: bool = False
    expose_metrics: bool = True
    page: bool = True
    replica: str = ""
    sampling_defaults: Literal["model", "openai"] = "model"

    def __post_init__(self) -> None:
        if not self.model:
            raise ParameterError("the served model's name is empty: give at least one character")
        for name, low in (
            ("max_queue", 0),
            ("max_choices", 1),
            ("max_output_tokens", 1),
            ("max_logprobs", 0),
            ("max_body_bytes", 1),
            ("max_backlog", 1),
        ):
            check_integer(name, getattr(self, name), low, cure="raise it")
        for name in ("body_seconds", "queue_seconds", "request_seconds", "send_seconds"):
            if (seconds := getattr(self, name)) is not None:
                check_number(name, seconds, 0.0, above=True, cure="give seconds, such as 60")
        check_flag("expose_metrics", self.expose_metrics)
        check_flag("page", self.page)
        check_flag("log_bodies", self.log_bodies)
        check_choice("sampling_defaults", self.sampling_defaults, ("model", "openai"))
        for origin in self.cors_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise ParameterError(f"the origin {origin!r} is none: write it like https://example.org, or * for all")
        for key in self.api_keys:
            # Headers carry printable ASCII alone; another key could never be shown.
            if not key or not key.isascii() or not key.isprintable() or key != key.strip():
                raise ParameterError("an API key has to be printable ASCII without spaces around it: make another one")
