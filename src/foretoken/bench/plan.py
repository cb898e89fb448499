"""What a benchmark measures: settings, and the cases they make."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken import workloads
from foretoken.bench.engines import EngineConfig
from foretoken.bench.records import Record
from foretoken.cache_folder import cache_folder
from foretoken.errors import ParameterError
from foretoken.models import gguf, machine
from foretoken.workloads import Prompt


@dataclass(frozen=True)
class BenchPlan:
    """What is measured.

    Attributes:
        target: the target's GGUF file, or the folder of its checkpoint.
        drafter: the same of the draft model, or None for none.
        engines: what takes part.
        prompts: what is continued.
        batches: prompts decoded at once.
        temperatures: 0 is greedy.
        repeats: how often each case is measured.
        max_new_tokens: tokens of each output; end tokens don't end it.
        dtype: of the weights and of arithmetic: ``float32`` or ``bfloat16``.
        device: ``cpu``, ``cuda``, …
        threads: of each engine.
        peers: folder of the engines' environments.
        cache: folder of converted checkpoints.
        seed: of sampled outputs.
    """

    target: Path
    drafter: Path | None
    engines: tuple[EngineConfig, ...]
    prompts: tuple[Prompt, ...]
    batches: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    repeats: int = 3
    max_new_tokens: int = 64
    dtype: str = "bfloat16"
    device: str = "cpu"
    threads: int = field(default_factory=machine.cores)
    peers: Path | None = None
    cache: Path = field(default_factory=lambda: cache_folder("bench"))
    seed: int = 0

    def settings(self) -> dict[str, Any]:
        """What all results of one file share.

        Of a model that is no Llama-like decoder the sizes are left out, and with them what is derived from these.

        Raises:
            ParameterError: a checkpoint's config.json can't be read.
        """
        from foretoken.bench.shape import Shape

        def described(folder: Path | None) -> Any:
            if folder is None:
                return None
            file = gguf.find(folder)
            if file is not None:
                model = gguf.load(file, folder.name)
                size = 4 if self.dtype == "float32" else 2  # in which the summary counts
                return {
                    "name": folder.name,
                    "parameters": model.num_parameters,
                    "read_parameters": model.weight_bytes // size,
                    "cached_per_token": model.cell_bytes // size,
                }
            name = "/".join(folder.parts[-2:])
            try:
                shape = Shape.of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
            except (OSError, ValueError) as error:
                raise ParameterError(f"{str(folder)!r} has no config.json that can be read: {error}") from error
            except KeyError:  # another kind of decoder, whose weights these sizes would not tell
                return {"name": name}
            return {
                "name": name,
                "parameters": shape.parameters,
                "read_parameters": shape.read_parameters,
                "cached_per_token": 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim,
            }

        return {
            "target": described(self.target),
            "drafter": described(self.drafter),
            "prompts": workloads.fingerprint(self.prompts),
            "max_new_tokens": self.max_new_tokens,
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.threads,
            "seed": self.seed,
        }

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence, and a draft behind it."""
        ks = [engine.k for engine in self.engines if isinstance(engine.k, int)]
        longest = max(len(prompt.tokens) for prompt in self.prompts)
        return longest + self.max_new_tokens + max(ks, default=16) + 1


@dataclass(frozen=True)
class Case:
    """One batch of prompts at one temperature."""

    category: str
    prompts: tuple[Prompt, ...]
    temperature: float
    repeat: int

    def record(self, engine: EngineConfig) -> Record:
        """The part of a result that is known before."""
        return {
            "kind": "run",
            "engine": engine.label,
            "family": engine.family,
            "mode": engine.mode,
            "k": engine.k,
            "batch": len(self.prompts),
            "temperature": self.temperature,
            "repeat": self.repeat,
            "category": self.category,
            "items": [prompt.item.id for prompt in self.prompts],
            "prompt_tokens": [len(prompt.tokens) for prompt in self.prompts],
        }


def cases(plan: BenchPlan) -> list[Case]:
    """All of them: every batch size and temperature once before any is measured again."""
    return [
        Case(category, tuple(prompts), temperature, repeat)
        for repeat in range(plan.repeats)
        for size in plan.batches
        for temperature in plan.temperatures
        for category, prompts in workloads.batches(plan.prompts, size)
    ]
