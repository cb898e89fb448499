"""A worker in a process of its own, which stands still while others are measured."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from foretoken.bench.errors import BenchError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKERS = Path(__file__).parent / "workers"
START_SECONDS = 900.0
ANSWER_SECONDS = 1800.0


class Worker:
    """A program that speaks `foretoken.bench.workers.protocol`.

    Args:
        command: the program and its arguments.
        environment: variables added to this process's.
        start_seconds: how long it may take until it is ready.
        answer_seconds: how long it may take for a request.

    Attributes:
        versions: of what it runs, by name.

    Raises:
        BenchError: it can't be started, ends, or does not become ready in time.
        Unsupported: it says that it can't do what it is for.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        start_seconds: float = START_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self._seconds = answer_seconds
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._buffer = b""
        self._name = Path(command[1] if len(command) > 1 else command[0]).stem
        try:
            # A group of its own: engines start processes too, and all of them are to stand still together. It stays in
            # this session, so that a stopped group is woken and hung up on when this process dies without a word.
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**os.environ, **(environment or {})},
                process_group=0,
            )
        except OSError as error:
            self._log.close()
            raise BenchError(f"{command[0]} can't be started: {error.strerror}") from error
        try:
            ready = self._answer(start_seconds)
            self.versions = {str(name): str(version) for name, version in ready.get("versions", {}).items()}
        except BaseException:
            self.close(patience_seconds=1.0)
            raise
        self._signal("SIGSTOP")

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and wait for the answer; before and after the program stands still.

        Raises:
            Unsupported: the engine can't do this.
            BenchError: it failed, ended, or took too long.
        """
        assert self._process.stdin is not None
        with self._awake():
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
            except OSError as error:
                raise BenchError(f"{self._name} has ended{self._last_words()}") from error
            return self._answer(self._seconds)

    @property
    def alive(self) -> bool:
        """It has not ended."""
        return self._process.poll() is None

    @contextmanager
    def _awake(self) -> Iterator[None]:
        self._signal("SIGCONT")
        try:
            yield
        finally:
            self._signal("SIGSTOP")

    def _signal(self, name: str) -> None:
        number = getattr(signal, name, None)
        if number is not None:  # Windows has neither: there an idle engine's threads may cost others a little.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _answer(self, seconds: float) -> dict[str, Any]:
        line = self._line(seconds)
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise BenchError(f"{self._name} answered {line[:80]!r}, which is no JSON") from error
        if not isinstance(answer, dict):
            raise BenchError(f"{self._name} answered {line[:80]!r}, which is no JSON object")
        if "error" in answer:
            raise (Unsupported if answer.get("unsupported") else BenchError)(str(answer["error"]))
        return answer

    def _line(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise BenchError(f"{self._name} did not answer within {seconds:,.0f} seconds{self._last_words()}")
            if select.select([self._process.stdout], [], [], min(left, 1.0))[0]:
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    self._process.wait()
                    raise BenchError(f"{self._name} ended with status {self._process.returncode}{self._last_words()}")
                self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return f"; its last words: {lines[-1].strip()[:200]}" if lines else ""

    def close(self, patience_seconds: float = 10.0) -> None:
        """End the program: by closing its input, and by force, with all it has started, if it takes longer."""
        self._signal("SIGCONT")
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(OSError):  # It may have ended already.
                self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_seconds)
        # The group is there as long as one of its processes is: engines leave some behind.
        self._signal("SIGKILL")
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()
