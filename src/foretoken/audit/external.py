"""Subjects in another interpreter: a worker program that speaks JSON lines (see `workers.protocol`)."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from foretoken.audit.errors import AuditError
from foretoken.audit.subjects import Request, Sample, Speculation

START_SECONDS = 900.0
ANSWER_SECONDS = 300.0
WORKERS = Path(__file__).parent / "workers"


class ExternalSubject:
    """A program that samples on request.

    Args:
        command: the program and its arguments.
        environment: variables added to this process's.
        start_seconds: how long it may take until it is ready.
        answer_seconds: how long it may take for a request.

    Raises:
        AuditError: it can't be started, ends, or does not become ready in time.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        start_seconds: float = START_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self._seconds = answer_seconds
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._buffer = b""
        self.speculation: Speculation | None = None
        self.name = Path(command[-1] if len(command) == 1 else command[0]).name
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**os.environ, **(environment or {})},
            )
        except OSError as error:
            raise AuditError(f"{command[0]} can't be started: {error.strerror}") from error
        try:
            ready = self._read(start_seconds)
            if "error" in ready:
                raise AuditError(f"the subject did not start: {ready['error']}")
            self.name = str(ready["name"])
            self.details = {str(key): str(value) for key, value in ready["details"].items()}
        except (AuditError, KeyError, AttributeError) as error:
            self.close(patience_seconds=1.0)
            if isinstance(error, AuditError):
                raise
            raise AuditError(f"the subject said {ready!r} where it should have said that it is ready") from error

    def sample(self, request: Request) -> list[Sample]:
        """Send the request and wait for the answer."""
        params = asdict(request.params)
        message = {
            "prompt": list(request.prompt),
            "count": request.count,
            "num_tokens": request.num_tokens,
            "seed": request.seed,
            "seeds": request.seeds(),
            "params": params,
            "logprobs": request.logprobs,
        }
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise AuditError(f"{self.name} has ended{self._last_words()}") from error
        answer = self._read(self._seconds)
        if "error" in answer:
            raise AuditError(f"{self.name} failed: {answer['error']}")
        try:
            told = answer.get("speculation")
            if told is not None:
                drafted = told["drafted"]
                self.speculation = Speculation(None if drafted is None else int(drafted), int(told["accepted"]))
            return [_sample(one) for one in answer["samples"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise AuditError(f"{self.name} answered something that holds no samples ({error!r})") from error

    def _read(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                raise AuditError(
                    f"{self.name} did not answer within {seconds:.0f} seconds{self._last_words()}: allow it more time, "
                    "or audit with fewer texts"
                )
            if select.select([self._process.stdout], [], [], min(left, 1.0))[0]:
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    self._process.wait()
                    raise AuditError(f"{self.name} ended with status {self._process.returncode}{self._last_words()}")
                self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise AuditError(f"{self.name} answered {line[:80]!r}, which is no JSON") from error
        if not isinstance(answer, dict):
            raise AuditError(f"{self.name} answered {line[:80]!r}, which is no JSON object")
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return f"; its last words: {lines[-1].strip()}" if lines else ""

    def close(self, patience_seconds: float = 20.0) -> None:
        """End the program: by closing its input, and by force if it does not end within `patience_seconds`."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(OSError):  # It may have ended already.
                self._process.stdin.close()
        try:
            self._process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()


def _sample(data: dict[str, Any]) -> Sample:
    told = data.get("top_logprobs")
    logprobs = None if told is None else [{int(k): float(v) for k, v in place.items()} for place in told]
    return Sample([int(token) for token in data["tokens"]], data.get("rounds"), logprobs)


def vllm_subject(
    python: str,
    target: str,
    drafter: str | None = None,
    mode: str = "draft-model",
    num_speculative_tokens: int = 2,
    engine: Mapping[str, Any] | None = None,
    seeded: bool = True,
) -> ExternalSubject:
    """vLLM's offline engine in the interpreter `python`.

    Args:
        python: interpreter of an environment that has vLLM.
        target: folder or hub id.
        drafter: folder or hub id, for ``mode="draft-model"``.
        mode: ``draft-model``, ``ngram`` or ``none``.
        num_speculative_tokens: k.
        engine: further arguments of ``vllm.LLM``.
        seeded: give each request a seed of its own; otherwise the engine's generator draws for all.
    """
    speculative: dict[str, Any] | None
    if mode == "none":
        speculative = None
    elif mode == "ngram":
        speculative = {"method": "ngram", "num_speculative_tokens": num_speculative_tokens}
        speculative.update(prompt_lookup_max=3, prompt_lookup_min=1)
    elif mode == "draft-model":
        if drafter is None:
            raise AuditError("mode draft-model needs a drafter: name its folder")
        speculative = {
            "method": "draft_model",
            "model": drafter,
            "num_speculative_tokens": num_speculative_tokens,
            "max_model_len": 256,
        }
    else:
        raise AuditError(f"unknown mode {mode!r} for vLLM: choose one of draft-model, ngram, none")
    options = {"target": target, "speculative": speculative, "engine": dict(engine or {}), "seeded": seeded}
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    environment = {name: os.environ.get(name, value) for name, value in environment.items()}
    return ExternalSubject([python, str(WORKERS / "vllm_worker.py"), json.dumps(options)], environment)


def openvino_subject(
    python: str,
    target: str,
    drafter: str | None = None,
    mode: str = "draft-model",
    num_speculative_tokens: int = 2,
) -> ExternalSubject:
    """OpenVINO GenAI in the interpreter `python`; checkpoints are converted into a folder of their own beside them.

    Args:
        python: interpreter of an environment that has openvino-genai and optimum-intel.
        target: folder.
        drafter: folder, for ``mode="draft-model"``.
        mode: ``draft-model``, ``prompt-lookup`` or ``none``.
        num_speculative_tokens: k.
    """
    if mode not in ("draft-model", "prompt-lookup", "none"):
        raise AuditError(f"unknown mode {mode!r} for OpenVINO: choose one of draft-model, prompt-lookup, none")
    if mode == "draft-model" and drafter is None:
        raise AuditError("mode draft-model needs a drafter: name its folder")
    options = {"target": target, "drafter": drafter, "mode": mode, "k": num_speculative_tokens}
    return ExternalSubject([python, str(WORKERS / "openvino_worker.py"), json.dumps(options)])
