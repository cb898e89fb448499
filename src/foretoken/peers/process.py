"""A worker program in a process of its own, which is stopped while others are measured."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from foretoken.peers import guard
from foretoken.peers.errors import PeerError, Unsupported

WORKERS = Path(__file__).parent / "workers"
START_SECONDS = 900.0
ANSWER_SECONDS = 1800.0
MAX_ANSWER_BYTES = 1 << 28
END_SECONDS = 10.0
"""How long a program may take to end once it has closed its output."""
POLITE_SECONDS = 2.0
"""Between SIGTERM and SIGKILL, for what a program has left running."""

# By default torch caches compiled code in the folder for temporary files, which is removed: name another folder.
_COMPILED = {"TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}")}


class Worker:
    """A program that speaks `foretoken.peers.workers.protocol`.

    It gets a session and a folder for temporary files of its own. When it is closed, all processes that it has started
    end with it and the folder is removed; a second, small process sees to this if this one is killed.

    Args:
        command: the program and its arguments.
        environment: variables added to this process's.
        name: what messages call it; None: the program's file.
        start_seconds: how long it may take until it is ready.
        answer_seconds: how long it may take for a request.

    Attributes:
        versions: of what it runs, by name.
        pid: its process id.

    Raises:
        PeerError: it can't be started, ends, or does not become ready in time.
        Unsupported: the engine does not support its options.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        name: str | None = None,
        start_seconds: float = START_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        if os.name != "posix":
            raise PeerError("engines in processes of their own are run on Linux and macOS only: use one of these")
        self._seconds = answer_seconds
        self._name = name or Path(command[1] if len(command) > 1 else command[0]).stem
        self._buffer = b""
        self._closed = False
        with ExitStack() as stack:
            self._log = stack.enter_context(tempfile.TemporaryFile())
            folder = tempfile.mkdtemp(prefix="foretoken-peer-")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            try:
                # Before the worker, so that it is watched from its start.
                self._guard = _start_guard()
                stack.callback(_end, self._guard)
                self._process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    env={**_COMPILED, **os.environ, "TMPDIR": folder, **(environment or {})},
                    start_new_session=True,
                )
            except OSError as error:
                raise PeerError(f"{command[0]} can't be started: {error.strerror}") from error
            stack.callback(_end, self._process)
            self._resources = stack.pop_all()
        self.pid = self._process.pid
        try:
            self._tell_guard({"pid": self.pid, "folder": folder, "polite": POLITE_SECONDS})
            ready = self._answer(start_seconds)
            if ready.get("ready") is not True:
                raise self._broken(f"{self._name} sent {ready!r} instead of its ready message")
            self.versions = {str(key): str(value) for key, value in dict(ready.get("versions", {})).items()}
        except BaseException:
            self.close(patience_seconds=0.0)
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and wait for the answer; before and after, the program is stopped.

        Raises:
            Unsupported: the engine can't do this.
            PeerError: it failed, ended, took too long or answered nonsense. After the last three it is closed: a late
                answer must not be taken for that of another request.
        """
        if self._closed:
            raise PeerError(f"{self._name} has ended")
        assert self._process.stdin is not None
        with self._awake():
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
            except OSError as error:
                raise self._broken(f"{self._name} has ended{self._last_words()}") from error
            return self._answer(self._seconds)

    @property
    def alive(self) -> bool:
        """It takes requests."""
        return not self._closed and self._process.poll() is None

    @contextmanager
    def _awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        if not self._closed:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _answer(self, seconds: float) -> dict[str, Any]:
        line = self._line(seconds)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._broken(f"{self._name} answered {line[:80]!r}, which is no JSON") from error
        if not isinstance(answer, dict):
            raise self._broken(f"{self._name} answered {line[:80]!r}, which is no JSON object")
        if "error" in answer:
            raise (Unsupported if answer.get("unsupported") else PeerError)(str(answer["error"]))
        return answer

    def _line(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._broken(f"{self._name} did not answer within {seconds:,g} seconds{self._last_words()}")
            if select.select([self._process.stdout], [], [], min(left, 1.0))[0]:
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    raise self._broken(f"{self._name} ended with status {self._status()}{self._last_words()}")
                self._buffer += data
                if len(self._buffer) > MAX_ANSWER_BYTES:
                    raise self._broken(f"{self._name} answered more than {MAX_ANSWER_BYTES >> 20} MiB in one line")
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def _status(self) -> int | str:
        try:
            return self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # it has closed its output, and goes on
            return "unknown"

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return f"; its last words: {lines[-1].strip()[:200]}" if lines else ""

    def _broken(self, message: str) -> PeerError:
        self.close(patience_seconds=0.0)
        return PeerError(message)

    def close(self, patience_seconds: float = 10.0) -> None:
        """End the program with all that it has started, and remove its temporary files.

        Args:
            patience_seconds: how long it may take to end by itself once its input is closed.
        """
        if self._closed:
            return
        known = guard.tree(self.pid)
        self._signal(signal.SIGCONT)
        self._closed = True
        if self._process.stdin is not None:
            with suppress(OSError):  # it may have ended already
                self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_seconds)
        guard.end_tree(self.pid, known, POLITE_SECONDS)
        self._process.wait()
        self._tell_guard({"done": self.pid})
        self._resources.close()

    def _tell_guard(self, message: dict[str, Any]) -> None:
        assert self._guard.stdin is not None
        with suppress(OSError):  # somebody has killed it
            self._guard.stdin.write(json.dumps(message).encode() + b"\n")
            self._guard.stdin.flush()


def _start_guard() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close a process's pipes, which ends it, and wait for that."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):  # its reader is gone
                stream.close()
    process.wait()
