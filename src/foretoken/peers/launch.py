"""Starting an engine's worker, and the requests that it takes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from foretoken.cache_folder import cache_folder
from foretoken.models import machine
from foretoken.peers.kinds import EngineKind
from foretoken.peers.process import ANSWER_SECONDS, WORKERS, Worker


def _threads() -> int:
    """What OMP_NUM_THREADS says, as everywhere; one for each processor where it says nothing."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdecimal() and int(said) > 0 else machine.cores()


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Options that a worker is started with; see `foretoken.peers.workers.protocol`.

    Attributes:
        target: the target's GGUF file, or the folder of its checkpoint.
        drafter: those of the draft model; None if no mode needs it.
        mode: how to decode; engines that share a process between modes take others in requests, too.
        k: tokens drafted a round; None where nothing is drafted; ``auto`` where the engine chooses.
        dtype: of weights and arithmetic.
        device: ``cpu``, ``cuda``, …
        threads: of the process; default: as OMP_NUM_THREADS says, else one for each processor.
        max_length: tokens of the longest sequence, prompt included.
        max_batch: most prompts of a request.
        options: further arguments, of the engine's own.
        cache: folder of converted checkpoints.
    """

    target: str
    drafter: str | None
    mode: str
    k: int | str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = field(default_factory=_threads)
    max_length: int = 256
    max_batch: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    cache: str = field(default_factory=lambda: str(cache_folder("bench")))


def start(kind: EngineKind, python: str, launch: Launch, answer_seconds: float = ANSWER_SECONDS) -> Worker:
    """Start the worker of an engine.

    Args:
        kind: the engine.
        python: interpreter of its environment.
        launch: what to run.
        answer_seconds: how long it may take for a request.

    Raises:
        PeerError: it can't be started.
        Unsupported: it can't do what it is for.
    """
    environment = {
        "OMP_NUM_THREADS": str(launch.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **{name: os.environ.get(name, value) for name, value in kind.environment.items()},
    }
    command = [python, str(WORKERS / kind.worker), json.dumps(asdict(launch))]
    return Worker(command, environment, kind.name, answer_seconds=answer_seconds)


def request(
    mode: str,
    k: int | str | None,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    params: Mapping[str, Any],
    seeds: Sequence[int] | None,
    logprobs: int | None = None,
    ends: bool = False,
) -> dict[str, Any]:
    """A request as `Worker.ask` takes it; see `foretoken.peers.workers.protocol`."""
    return {
        "mode": mode,
        "k": k,
        "prompts": [list(prompt) for prompt in prompts],
        "num_tokens": num_tokens,
        "params": dict(params),
        "seeds": None if seeds is None else list(seeds),
        "logprobs": logprobs,
        "ends": ends,
    }
