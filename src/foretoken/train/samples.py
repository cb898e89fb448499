"""What a drafter learns from: texts that the target itself wrote, kept on disk as they come."""

from __future__ import annotations

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
"""Texts of one file."""

Watch = Callable[[int, int, str], None]
"""(done, all, what is counted), for a progress bar."""


@dataclass(frozen=True)
class TargetSample:
    """A text of the target's.

    Attributes:
        tokens: ``[T]`` int32, prompt and answer.
        start: place of the answer's first token.
        temperature: that it was written at; 0 is greedy.
        prompt: number of its prompt: texts with one prompt are never on both sides of the held-out line.
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
    batch_size: int = 64,
) -> list[TargetSample]:
    """Have the target answer prompts, plainly; what is in `folder` already is read.

    A drafter is asked only at places where the target's own text has led, and prompts come from elsewhere: hence the
    answers. Text i answers prompt ``i mod len(prompts)``, at the temperatures in turn (at another one when the prompt
    comes again), with a seed of its own: what is written does not depend on where a run was stopped.

    Args:
        target: the model.
        prompts: token ids.
        count: texts.
        max_new_tokens: most tokens of an answer.
        temperatures: in turn.
        seed: of the texts.
        folder: for the files, `SHARD` texts each.
        watch: is told after each file.
        batch_size: texts written at once.

    Raises:
        TrainingError: the disk is full, or the target can't write (it takes no longer texts, or gives broken scores).
    """
    engine = Engine(target, None, max_batch_size=batch_size, reuse_prefixes=False)
    samples: list[TargetSample] = []
    for first in range(0, count, SHARD):
        numbers = range(first, min(count, first + SHARD))
        file = folder / f"{first // SHARD:05d}.npz"
        if not file.is_file():
            params = [
                SamplingParams(
                    temperature=temperatures[(i // len(prompts) + i) % len(temperatures)],
                    max_new_tokens=max_new_tokens,
                    seed=seed * 1_000_003 + i,
                )
                for i in numbers
            ]
            answers = engine.generate([list(prompts[i % len(prompts)]) for i in numbers], params)
            failed = next((answer.error for answer in answers if answer.error is not None), None)
            if failed is not None:
                raise TrainingError(f"{target.name} could not answer a prompt: {failed}") from failed
            texts = [
                [*prompts[i % len(prompts)], *answer.token_ids] for i, answer in zip(numbers, answers, strict=True)
            ]
            with replacing(file) as temporary, temporary.open("wb") as opened:
                np.savez(
                    opened,
                    tokens=np.concatenate([np.asarray(text, np.int32) for text in texts]),
                    lengths=[len(text) for text in texts],
                    starts=[len(prompts[i % len(prompts)]) for i in numbers],
                    temperatures=[one.temperature for one in params],
                )
            watch(numbers.stop, count, "texts")
        samples += _read(file, [i % len(prompts) for i in numbers])
    return samples


def _read(file: Path, prompts: Sequence[int]) -> list[TargetSample]:
    try:
        with np.load(file) as stored:
            texts = np.split(stored["tokens"], np.cumsum(stored["lengths"])[:-1])
            facts = zip(texts, stored["starts"], stored["temperatures"], prompts, strict=True)
            return [TargetSample(text, int(start), float(heat), prompt) for text, start, heat, prompt in facts]
    except (OSError, ValueError, KeyError) as error:
        raise TrainingError(
            f"{file} is broken ({error}): remove it, and the target writes those texts again"
        ) from error
