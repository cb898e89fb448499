"""A pair of checkpoints widened for one benchmark: made once, and kept."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from foretoken.bench.llama_checkpoint import Checkpoint
from foretoken.bench.shape import choose_shape, parse_size
from foretoken.bench.widening import VOCAB_SIZE, widen
from foretoken.errors import ParameterError

_RATIO = 36
"""Times that a target has a draft model's parameters, where the draft model can be had so small."""


def widened_pair(target: Path, drafter: Path | None, to: str, folder: Path) -> tuple[Path, Path | None]:
    """A pair that computes what a small one does, at a larger one's cost.

    Args:
        target: folder of a small checkpoint.
        drafter: likewise, if there is one.
        to: the target's wanted parameters, ``500M`` for example. A draft model gets a 36th of them, or as few as it can
            be widened to with the target's vocabulary.
        folder: where the checkpoints are kept, in folders of their own.

    Returns:
        The folders of the two.

    Raises:
        ParameterError: the size can't be had, or the folder can't be written to.
        ModelError: a checkpoint can't be read, or is of another kind.
    """
    parameters = parse_size(to)
    shape = Checkpoint.read(target).shape
    vocab_size = max(shape.vocab_size, VOCAB_SIZE)
    choose_shape(shape, parameters, vocab_size)  # before anything is written
    made = _kept(target, parameters, vocab_size, folder)
    if drafter is None:
        return made, None
    return made, _kept(drafter, _least(drafter, parameters // _RATIO, parameters, vocab_size), vocab_size, folder)


def _least(drafter: Path, wanted: int, most: int, vocab_size: int) -> int:
    """The wanted number of parameters, or the least above it that the drafter can be widened to."""
    shape = Checkpoint.read(drafter).shape
    size = max(wanted, shape.parameters)
    while True:
        try:
            return choose_shape(shape, size, vocab_size).parameters
        except ParameterError:
            size = size * 21 // 20  # shapes may miss a size by as much
            if size > most:
                raise


def _kept(checkpoint: Path, parameters: int, vocab_size: int, folder: Path) -> Path:
    """The widened checkpoint, made if it is not there."""
    digest = hashlib.sha256(f"{parameters} {vocab_size}".encode())
    for file in sorted([checkpoint / "config.json", *checkpoint.glob("*.safetensors")]):
        digest.update(file.read_bytes())
    path = folder / digest.hexdigest()[:16]
    if not (path / "config.json").is_file():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as fresh:  # an interrupted one is no checkpoint
                widen(checkpoint, parameters, Path(fresh) / "made", vocab_size=vocab_size)
                shutil.rmtree(path, ignore_errors=True)
                (Path(fresh) / "made").rename(path)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ParameterError(
                f"can't keep widened checkpoints in {folder} ({reason}): name another --cache"
            ) from error
    return path
