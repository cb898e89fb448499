"""Batches of sequences with the target's hidden states, which are cached on disk up to a size limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from foretoken.train.samples import TargetSample
from foretoken.train.storage import replacing
from foretoken.train.teacher import Teacher

_SHARD_BYTES = 64 << 20
_FEW = 6
_WINDOW = 16
"""Batches whose sequences are sorted by length together, to limit padding."""


@dataclass(frozen=True)
class TrainingBatch:
    """Sequences in rows, padded at their ends.

    Attributes:
        ids: ``[B, T]`` int64.
        lengths: ``[B]`` int64.
        states: ``[B, T, L · H]``, hidden states of the learner's layers, concatenated.
        last: ``[B, T, H]``, those of the last layer, after the final norm.
        samples: the sequences.
        numbers: their keys in the cache; see `Features.batch`.
        fresh: all hidden states, if they were computed and not loaded from a file; else None.
    """

    ids: Tensor
    lengths: Tensor
    states: Tensor
    last: Tensor
    samples: tuple[TargetSample, ...]
    numbers: tuple[int, ...]
    fresh: Tensor | None


def split(
    samples: Sequence[TargetSample], num_prompts: int, held_out: int
) -> tuple[list[TargetSample], list[TargetSample]]:
    """Sequences to train on, and held-out ones; those of one prompt are all on one side.

    The first prompts are held out, since prompts have been shuffled: a twentieth of `num_prompts`, the prompts with at
    least one sequence, but at least a few. At most `held_out` of their sequences are returned.
    """
    count = max(min(_FEW, num_prompts // 2), min(held_out, num_prompts // 20))
    learning = [sample for sample in samples if sample.prompt >= count]
    measuring = [sample for sample in samples if sample.prompt < count]
    return learning, measuring[:held_out]


def schedule(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of an epoch: indices of sequences, at most `batch_tokens` tokens a batch, padding included.

    A function of its arguments alone, so that a resumed run has the same batches.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths))
    typical = max(1, int(batch_tokens / max(1.0, float(np.mean(lengths)))))
    batches: list[list[int]] = []
    for start in range(0, len(order), typical * _WINDOW):
        window = sorted(order[start : start + typical * _WINDOW], key=lambda i: lengths[i])
        batch: list[int] = []
        for number in window:
            if batch and (len(batch) + 1) * lengths[number] > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(int(number))
        batches.append(batch)
    return [batches[i] for i in rng.permutation(len(batches))]


class Features:
    """Hidden states of sequences: loaded from memory-mapped files if they were computed before, else computed.

    Args:
        teacher: the target.
        layers: whose outputs are returned.
        folder: for the files; existing ones are used, and removed if they are broken.
        limit: most bytes of all files; what does not fit is computed each time. 0 stores nothing.

    Raises:
        TrainingError: the disk is full.
    """

    def __init__(self, teacher: Teacher, layers: Sequence[int], folder: Path, limit: int) -> None:
        self._teacher, self._folder, self._limit = teacher, folder, limit
        self._wanted = tuple(layers)
        self._stored = tuple(dict.fromkeys([*layers, teacher.num_layers]))
        self._where: dict[int, Path] = {}
        self._open: dict[Path, Any] = {}
        self._pending: dict[int, Tensor] = {}
        self._pending_bytes = 0
        self._bytes = 0
        for file in sorted(folder.glob("*.safetensors")):
            self._index(file)

    @property
    def stored_bytes(self) -> int:
        """Of all files."""
        return self._bytes

    def batch(self, samples: Sequence[TargetSample], numbers: Sequence[int]) -> TrainingBatch:
        """Sequences with their hidden states, on the target's device. May be called from several threads.

        Args:
            samples: the sequences.
            numbers: of each sequence, the number that it has in all calls: its key in the cache.
        """
        device, width = self._teacher.device, max(len(sample.tokens) for sample in samples)
        ids = torch.zeros(len(samples), width, dtype=torch.int64)
        for row, sample in enumerate(samples):
            ids[row, : len(sample.tokens)] = torch.from_numpy(sample.tokens.astype(np.int64))
        ids = ids.to(device)
        known = all(number in self._where or number in self._pending for number in numbers)
        if known:
            states = torch.zeros(*ids.shape, len(self._stored) * self._teacher.hidden_size, dtype=self._teacher.dtype)
            for row, (number, sample) in enumerate(zip(numbers, samples, strict=True)):
                states[row, : len(sample.tokens)] = self._read(number, len(sample.tokens))
            states = states.to(device)
        else:
            states = self._teacher.states(ids, self._stored)
        parts = states.unflatten(-1, (len(self._stored), -1))
        wanted = parts[:, :, [self._stored.index(layer) for layer in self._wanted]].flatten(2)
        lengths = torch.tensor([len(sample.tokens) for sample in samples], device=device)
        last = parts[:, :, self._stored.index(self._teacher.num_layers)]
        fresh = None if known else states
        return TrainingBatch(ids, lengths, wanted, last, tuple(samples), tuple(numbers), fresh)

    def keep(self, batch: TrainingBatch) -> None:
        """Cache a batch's hidden states if they were computed, within the size limit."""
        if batch.fresh is None:
            return
        for number, sample, states in zip(batch.numbers, batch.samples, batch.fresh, strict=True):
            size = states[0].numel() * states.element_size() * len(sample.tokens)
            known = number in self._where or number in self._pending
            if not known and self._bytes + self._pending_bytes + size <= self._limit:
                self._pending[number] = states[: len(sample.tokens)].cpu().clone()
                self._pending_bytes += size
        if self._pending_bytes > _SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write pending hidden states to a file."""
        if not self._pending:
            return
        names = (self._folder / f"{number:05d}.safetensors" for number in count(len(self._open)))
        file = next(name for name in names if name not in self._open)
        tensors = {str(number): states for number, states in self._pending.items()}
        with replacing(file) as temporary:
            save_file(tensors, temporary)
        self._index(file)  # before they leave `_pending`: other threads read meanwhile
        self._pending, self._pending_bytes = {}, 0

    def _index(self, file: Path) -> None:
        try:
            opened = safe_open(file, framework="pt")
        except SafetensorError:  # cut off by a power cut; what it had is computed again
            file.unlink(missing_ok=True)
            return
        self._open[file] = opened
        self._bytes += file.stat().st_size
        for name in opened.keys():  # noqa: SIM118  # no mapping
            self._where[int(name)] = file

    def _read(self, number: int, length: int) -> Tensor:
        pending = self._pending.get(number)
        if pending is not None:
            return pending
        states: Tensor = self._open[self._where[number]].get_tensor(str(number))
        assert len(states) == length
        return states


def micro_batches(batch: Sequence[int], lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """A batch, sorted by length, in parts of at most `tokens` tokens, padding included."""
    part: list[int] = []
    for number in batch:
        if part and (len(part) + 1) * lengths[number] > tokens:
            yield part
            part = []
        part.append(number)
    yield part
