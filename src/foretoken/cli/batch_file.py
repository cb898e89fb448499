"""The files of ``foretoken batch``: OpenAI's form of requests, a line each, and of their answers."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.errors import ForetokenError, PromptError, did_you_mean
from foretoken.serve import strict_json

if TYPE_CHECKING:
    from foretoken.serve.in_process import Answer

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_FIELDS = ("custom_id", "method", "url", "body")
_DEEPEST = 200
"""Levels of a body: requests go to other processes, which thousands of levels don't."""

_BEGINNING = b'{"id":"batch_req_'


@dataclass(frozen=True)
class Item:
    """One request.

    Attributes:
        line: its number in the file, from 1.
        custom_id: its name, which the answer has too.
        url: a path of the API.
        body: what is asked.
    """

    line: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class BadLine:
    """A line that holds no request.

    Attributes:
        line: its number in the file, from 1.
        reason: what is wrong with it.
    """

    line: int
    reason: str


def read_items(file: Path) -> Iterator[Item | BadLine]:
    """The requests of a file, line by line; empty lines are left out.

    Raises:
        PromptError: the file can't be read.
    """
    seen: set[str] = set()
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    item = _item(number, line)
                except PromptError as error:
                    yield BadLine(number, str(error))
                    continue
                if item.custom_id in seen:
                    yield BadLine(number, f"its custom_id {item.custom_id!r} is that of an earlier line: use another")
                    continue
                seen.add(item.custom_id)
                yield item
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise PromptError(f"the file of requests {str(file)!r} can't be read: {reason}") from error


def _item(number: int, line: bytes) -> Item:
    try:
        value = strict_json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"it is no JSON ({error}): write an object with {', '.join(_FIELDS)}") from None
    if not isinstance(value, dict):
        raise PromptError(f"it is no object but a {type(value).__name__}: write one with {', '.join(_FIELDS)}")
    for name in value:
        if name not in _FIELDS:
            raise PromptError(f"it has a field {name!r}{did_you_mean(name, _FIELDS)}: leave it out")
    name, url, body = value.get("custom_id"), value.get("url"), value.get("body")
    if not isinstance(name, str) or not name:
        raise PromptError("it has no custom_id: give a string that no other line has")
    if value.get("method", "POST") != "POST":
        raise PromptError(f"its method is {value['method']!r}: use 'POST'")
    if url not in PATHS:
        raise PromptError(f"its url is {url!r}: use one of {', '.join(PATHS)}")
    if not isinstance(body, dict):
        raise PromptError("its body is no object: give what would be sent to the url")
    if body.get("stream"):
        raise PromptError("its body asks for a stream: leave it out")
    if _is_deep(body):
        raise PromptError(f"its body is nested more than {_DEEPEST} levels deep: send flat objects")
    return Item(number, name, url, body)


def _is_deep(value: Any) -> bool:
    """Whether JSON is nested more than `_DEEPEST` levels deep."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


class Results:
    """The file of answers: each is appended as it comes, so that a run that was killed can go on.

    A last line that was not written to its end is cut off. While it is open, no other process may write to it.

    Args:
        file: is made if it is not there.

    Attributes:
        done: names of the requests that have their answer.
        errors: how many of the answers that the file held when it was opened are errors.

    Raises:
        ForetokenError: it can't be written, another process has it, or it holds something else than answers.
    """

    def __init__(self, file: Path) -> None:
        try:
            self._file = file.open("a+b", buffering=0)
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise ForetokenError(f"can't write {str(file)!r} ({reason}): give a file in a folder of yours") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ForetokenError(
                f"another process writes to {str(file)!r}: wait for it, or give another file"
            ) from None
        self.errors, self._name = 0, str(file)
        is_kept = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)  # a device has no answers of earlier runs
        try:
            self.done = self._read(file) if is_kept else set()
        except ForetokenError:
            self._file.close()
            raise

    def _read(self, file: Path) -> set[str]:
        done, end, line = set(), 0, b"\n"
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n") and line[: len(_BEGINNING)] == _BEGINNING[: len(line)]:
                    self._file.truncate(end)  # the process was killed as it wrote this
                    break
                try:
                    name, is_error = _read_answer(line)
                except (ValueError, RecursionError):
                    raise ForetokenError(
                        f"line {number:,} of {str(file)!r} is no answer of a batch: give another file for the answers"
                    ) from None
                done.add(name)
                self.errors += is_error
                end += len(line)
            else:
                if not line.endswith(b"\n"):  # whole, but another program wrote it
                    self._file.write(b"\n")
        return done

    def add(self, item: Item, answer: Answer) -> None:
        """Append an answer.

        Raises:
            ForetokenError: the file can't be written.
        """
        response = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
        told = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": item.custom_id, "response": response, "error": None}
        line = json.dumps(told, separators=(",", ":")).encode() + b"\n"
        try:
            while line:  # at once, but where the disk is full
                line = line[self._file.write(line) or 0 :]
        except OSError as error:
            raise ForetokenError(
                f"{self._name!r} can't be written ({error.strerror}): free some space; the same command then goes on"
            ) from error
        self.done.add(item.custom_id)

    def close(self) -> None:
        """Let other processes have it."""
        self._file.close()


def _read_answer(line: bytes) -> tuple[str, bool]:
    """The request's name, and whether it was answered with an error."""
    value = json.loads(line)
    if not isinstance(value, dict) or not isinstance(value.get("custom_id"), str) or "response" not in value:
        raise ValueError
    response = value["response"]
    status = response.get("status_code") if isinstance(response, dict) else None
    return value["custom_id"], not isinstance(status, int) or status >= 400
