"""A conversation with a model behind any server that speaks OpenAI's API."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from time import perf_counter
from typing import Any

import httpx2

from foretoken.cli import render
from foretoken.cli.answer import INTERRUPTED, stop_on_interrupt
from foretoken.cli.conversation import Command, Conversation, parse, written
from foretoken.cli.json_output import print_json
from foretoken.cli.options import OutputOptions, SamplingOptions
from foretoken.cli.screen import Screen
from foretoken.engine.outputs import DecodeStats, Piece, StreamEvent
from foretoken.errors import ForetokenError, ParameterError, shown
from foretoken.sampling.params import CHECKPOINT_FIELDS

KEY_VARIABLES = ("FORETOKEN_API_KEY", "OPENAI_API_KEY")
OWNER = "foretoken"
"""Who owns the model, by the list of models of our own server, which takes and tells more than others."""

_CONNECT_SECONDS, _READ_SECONDS = 10.0, 600.0
_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


@dataclass
class RemoteAnswer:
    """An answer, as it grows.

    Attributes:
        text: so far.
        finish_reason: None while it grows.
        usage: as the server tells it, if it does.
        seconds: until its end.
        first_seconds: until its first characters.
        logprobs: of its tokens, in the server's form; empty where it sends none.
    """

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    seconds: float = 0.0
    first_seconds: float | None = None
    logprobs: list[Any] = field(default_factory=list)


class Server:
    """A server that speaks OpenAI's API.

    Args:
        url: its address, with or without ``/v1``.
        model: the name of a model there; None for the only one, or the first one.

    Attributes:
        url: the address that paths are appended to.
        model: the model's name.
        is_ours: it is ``foretoken serve``.

    Raises:
        ForetokenError: it can't be reached, or has no such model.
    """

    def __init__(self, url: str, model: str | None) -> None:
        if not re.match(r"https?://[^/?#\s]", url):
            raise ParameterError(f"--url {url!r} is no address: write it like http://127.0.0.1:8000/v1")
        self.url = url.rstrip("/") if re.match(r"https?://[^/]+/.", url) else f"{url.rstrip('/')}/v1"
        key = next(filter(None, map(os.environ.get, KEY_VARIABLES)), None)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        try:
            timeout = httpx2.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS)
            self._client = httpx2.Client(headers=headers, timeout=timeout, follow_redirects=True)
        except (UnicodeEncodeError, httpx2.HTTPError) as error:
            raise ParameterError(f"the API key of {' or '.join(KEY_VARIABLES)} can't be sent: {error}") from None
        models = self._models()
        if model is None and not models:
            raise ForetokenError(f"{self.url} lists no models: name one with --model")
        self.model = models[0]["id"] if model is None else model
        self.is_ours = any(one.get("owned_by") == OWNER for one in models if one["id"] == self.model)

    def _models(self) -> list[dict[str, Any]]:
        try:
            response = self._client.get(f"{self.url}/models")
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ForetokenError(f"{self.url} can't be reached ({error}): is the server there?") from None
        if response.status_code == 404:
            return []  # not every server has the list
        _check(response, response.content)
        try:
            return [one for one in response.json()["data"] if isinstance(one["id"], str)]
        except (ValueError, KeyError, TypeError):
            raise ForetokenError(f"{self.url}/models is no list of models: give the address of an API") from None

    def chat(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of an answer. Close the iterator to end the request.

        Raises:
            ForetokenError: the server refuses it, fails, or can't be reached any more.
        """
        asked = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **body}
        try:
            with self._client.stream("POST", f"{self.url}/chat/completions", json=asked) as response:
                if response.status_code >= 400:
                    _check(response, response.read())
                for line in _lines(response.iter_bytes()):
                    name, _, data = line.partition(":")
                    if name != "data" or not data.strip():
                        continue
                    if data.strip() == "[DONE]":
                        return
                    yield _chunk(data)
        except httpx2.HTTPError as error:
            raise ForetokenError(f"the connection to {self.url} has failed ({error}): ask again") from None


def _lines(parts: Iterable[bytes]) -> Iterator[str]:
    """The lines of server-sent events. httpx ends lines at U+2028 and other characters, too, which JSON may hold."""
    rest = b""
    for part in parts:
        *lines, rest = re.split(rb"\r\n|\n|\r", rest + part)
        for line in lines:
            yield line.decode("utf-8", "replace")
    yield rest.decode("utf-8", "replace")


def _chunk(data: str) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
        if not isinstance(chunk, dict):
            raise ValueError
    except (ValueError, RecursionError):
        raise ForetokenError(f"the server sent {shown(data)}: give the address of an OpenAI-compatible API") from None
    if chunk.get("error"):
        raise ForetokenError(f"the server says: {_message(chunk)}")
    return chunk


def _check(response: httpx2.Response, content: bytes) -> None:
    if response.status_code < 400:
        return
    try:
        told = _message(json.loads(content))
    except (ValueError, RecursionError):
        told = response.reason_phrase
    cure = f": put a valid key into {' or '.join(KEY_VARIABLES)}" if response.status_code in (401, 403) else ""
    raise ForetokenError(f"the server says: {told} (status {response.status_code}){cure}")


def _message(body: Any) -> str:
    error = body.get("error", body.get("detail")) if isinstance(body, dict) else body
    told = error.get("message", error) if isinstance(error, dict) else error
    return render.harmless(str(told)[:1000])


class RemoteChat(Conversation):
    """The state of a conversation with a server's model.

    Of the settings, those are sent that were given or differ from their defaults; so a server gets no field that nobody
    asked for.

    Args:
        server: what answers.
        sampling: how to sample.
        output: what to show.
        screen: where.
        given: names of the settings that were given, with their defaults or other values.

    Raises:
        ParameterError: log-probabilities are asked for, and not JSON, which alone has them.
    """

    def __init__(
        self,
        server: Server,
        sampling: SamplingOptions,
        output: OutputOptions,
        screen: Screen,
        given: Iterable[str] = (),
    ) -> None:
        super().__init__(sampling, screen, dict.fromkeys(CHECKPOINT_FIELDS, "the server's"))
        self._server = server
        self._output = output
        self._given = set(given)
        if sampling.logprobs is not None:
            self._check_logprobs()
        self._answers: list[RemoteAnswer] = []
        self._length: int | None = None
        if server.is_ours:
            self.changeable = ("num_speculative_tokens",)
            command = Command("/k N|auto", "draft at most N tokens a round", self.setter("num_speculative_tokens"))
            self.commands = {"num_speculative_tokens": command, **self.commands}

    def ask(self, question: str) -> None:
        """See `Conversation`."""
        messages = [*self.messages, {"role": "user", "content": question}]
        answer = self._answer({"messages": self.with_system(messages), **self._fields()})
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._answers.append(answer)
        self.interrupted = answer.finish_reason == INTERRUPTED

    def change(self, name: str, text: str) -> None:
        """See `Conversation`."""
        self._length = None if text == "auto" else parse(name, text, int)
        self.screen.note(f"{name} is now {text}")

    def _set(self, name: str, text: str) -> None:
        if name == "logprobs" and text not in ("", "none"):
            self._check_logprobs()
        super()._set(name, text)
        if text:
            self._given.add(name)

    def _check_logprobs(self) -> None:
        if not self._output.json:
            raise ParameterError("logprobs of a server's model are told in JSON alone: give --json, or none of them")

    def current(self, name: str) -> str:
        """See `Conversation`."""
        if name in self.changeable:
            return "auto" if self._length is None else written(self._length)
        return super().current(name)

    def check_system(self, text: str) -> None:
        """The server's template decides, when a question is asked."""

    def reset(self, argument: str) -> None:
        """See `Conversation`."""
        super().reset(argument)
        self._answers = []

    def stats(self, argument: str) -> None:
        """See `Conversation`."""
        if not self._answers:
            self.screen.note("no answers yet")
            return
        tokens = sum((answer.usage or {}).get("completion_tokens", 0) for answer in self._answers)
        seconds = sum(answer.seconds for answer in self._answers)
        count = len(self._answers)
        self.screen.note(f"{count} {'answer' if count == 1 else 'answers'} · {tokens:,} tokens · {seconds:.1f} s")

    def _fields(self) -> dict[str, Any]:
        self.sampling.params()  # raises what is out of its range
        given: dict[str, Any] = {}
        for option in fields(self.sampling):
            default = option.default_factory() if option.default_factory is not MISSING else option.default
            value = getattr(self.sampling, option.name)
            if value != default or (option.name in self._given and value not in (None, [])):
                given[_NAMES.get(option.name, option.name)] = value
        if "logit_bias" in given:
            bias = self.sampling.params().logit_bias or {}
            given["logit_bias"] = {str(token): max(value, -100.0) for token, value in bias.items()}
        if (top := given.pop("logprobs", None)) is not None:
            given |= {"logprobs": True, "top_logprobs": top}
        if self._server.is_ours:
            given["speculation"] = {} if self._length is None else {"num_speculative_tokens": self._length}
        return given

    def _answer(self, body: dict[str, Any]) -> RemoteAnswer:
        answer, began = RemoteAnswer(), perf_counter()
        writer = render.TokenWriter(self.screen.out)
        chunks = self._server.chat(body)
        try:
            with stop_on_interrupt() as stopped:
                for chunk in chunks:
                    text = _take(answer, chunk)
                    if text and answer.first_seconds is None:
                        answer.first_seconds = perf_counter() - began
                    if text and not self._output.json:
                        writer.write(_event(text))
                    if stopped.is_set():
                        answer.finish_reason = INTERRUPTED
                        break
        finally:
            chunks.close()  # type: ignore[attr-defined]  # a generator
            answer.seconds = perf_counter() - began
            if not self._output.json:
                writer.end()
        if self._output.json:
            told = {"model": self._server.model, "text": answer.text, "finish_reason": answer.finish_reason}
            if "logprobs" in body:
                told["logprobs"] = answer.logprobs
            print_json(self.screen, {**told, "usage": answer.usage, "seconds": answer.seconds})
        else:
            self.screen.note(_summary(answer))
        return answer


def _take(answer: RemoteAnswer, chunk: dict[str, Any]) -> str:
    """Add a chunk to an answer; the characters that it brought."""
    answer.usage = chunk.get("usage") or answer.usage
    text = ""
    for choice in chunk.get("choices") or ():
        text += (choice.get("delta") or {}).get("content") or ""
        answer.logprobs += (choice.get("logprobs") or {}).get("content") or ()
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    answer.text += text
    return text


def _event(text: str) -> StreamEvent:
    return StreamEvent((Piece(-1, text, "target"),), DecodeStats())


def _summary(answer: RemoteAnswer) -> str:
    usage = answer.usage or {}
    parts = []
    if tokens := usage.get("completion_tokens"):
        parts += [f"{tokens:,} tokens", f"{tokens / answer.seconds:.1f} tokens/s"]
    if answer.first_seconds is not None:
        parts.append(f"first token after {answer.first_seconds:.2f} s")
    if isinstance(told := usage.get("speculation"), dict):
        parts.append(f"mean acceptance length {told['mean_acceptance_length']:.2f}")
        parts.append(f"{told['accepted_tokens']:,} of {told['draft_tokens']:,} draft tokens accepted")
    return " · ".join([*parts, f"ended by {answer.finish_reason}"])
