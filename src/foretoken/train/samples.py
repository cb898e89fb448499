"""Training data: outputs of the target, saved to disk while they are generated."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foretoken.engine.engine import Engine
from foretoken.models.base import LanguageModel
from foretoken.sampling import SamplingParams
from foretoken.train.errors import TrainingError
from foretoken.train.storage import replacing

SHARD = 128
_BATCH_SIZE = 64  # sequences generated at once
"""Sequences of one file."""

Watch = Callable[[int, int, str], None]
"""(done, all, what is counted), for a progress bar."""


@dataclass(frozen=True)
class TargetSample:
    """A prompt and the target's output.

    Attributes:
        tokens: ``[T]`` int32, prompt and output.
        start: index of the output's first token.
        temperature: of sampling; 0 is greedy.
        prompt: number of its prompt; sequences with the same prompt are all trained on or all held out.
    """

    tokens: NDArray[np.int32]
    start: int
    temperature: float
    prompt: int


def write_samples(
    target: LanguageModel,
    prompts: Sequence[Sequence[int]],
    count: int,
    max_new_tokens: int,
    temperatures: Sequence[float],
    seed: int,
    folder: Path,
    watch: Watch,
) -> list[TargetSample]:
    """Generate outputs for prompts with the target, without speculation; files that are in `folder` already are loaded.

    A drafter drafts only after tokens of the target's output, and other texts have another distribution: so the target
    writes what it is trained on. Sequence i continues prompt ``i mod len(prompts)``, with the temperatures in turn
    (another one when the prompt recurs) and a seed of its own: the result does not depend on where a run was stopped
    and resumed.

    Args:
        target: the model.
        prompts: token ids.
        count: sequences.
        max_new_tokens: most tokens of an output.
        temperatures: in turn.
        seed: of sampling.
        folder: for the files, `SHARD` sequences each.
        watch: called after each file.

    Raises:
        TrainingError: the disk is full, or the target can't generate (too long a prompt, or NaN in its logits).
    """
    engine = Engine(target, None, max_batch_size=_BATCH_SIZE, reuse_prefixes=False)
    samples: list[TargetSample] = []
    for first in range(0, count, SHARD):
        numbers = range(first, min(count, first + SHARD))
        file = folder / f"{first // SHARD:05d}.npz"
        if not file.is_file():
            params = [
                SamplingParams(
                    temperature=temperatures[(i // len(prompts) + i % len(prompts)) % len(temperatures)],
                    max_new_tokens=max_new_tokens,
                    seed=seed * 1_000_003 + i,
                )
                for i in numbers
            ]
            outputs = engine.generate([list(prompts[i % len(prompts)]) for i in numbers], params)
            failed = next((output.error for output in outputs if output.error is not None), None)
            if failed is not None:
                raise TrainingError(f"{target.name} could not complete a prompt: {failed}") from failed
            sequences = [
                [*prompts[i % len(prompts)], *output.token_ids] for i, output in zip(numbers, outputs, strict=True)
            ]
            with replacing(file) as temporary, temporary.open("wb") as opened:
                np.savez(
                    opened,
                    tokens=np.concatenate([np.asarray(tokens, np.int32) for tokens in sequences]),
                    lengths=[len(tokens) for tokens in sequences],
                    starts=[len(prompts[i % len(prompts)]) for i in numbers],
                    temperatures=[one.temperature for one in params],
                )
            watch(numbers.stop, count, "sequences")
        samples += _read(file, [i % len(prompts) for i in numbers])
    return samples


def _read(file: Path, prompts: Sequence[int]) -> list[TargetSample]:
    try:
        with np.load(file) as stored:
            sequences = np.split(stored["tokens"], np.cumsum(stored["lengths"])[:-1])
            fields = zip(sequences, stored["starts"], stored["temperatures"], prompts, strict=True)
            return [
                TargetSample(tokens, int(start), float(temperature), prompt)
                for tokens, start, temperature, prompt in fields
            ]
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise TrainingError(f"{file} is broken ({error}): remove it, and its sequences are generated again") from error
