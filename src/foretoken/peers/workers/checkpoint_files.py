"""The GGUF file of a model that a worker runs: itself, or made of its checkpoint once."""

import hashlib
from pathlib import Path
from typing import Any

from protocol import Unsupported  # type: ignore[import-not-found]


def gguf_file(options: dict[str, Any], part: str) -> Path:
    """The file of a model.

    Args:
        options: of the worker.
        part: ``target`` or ``drafter``, which names a GGUF file or a checkpoint's folder.

    Raises:
        Unsupported: the checkpoint can't be converted.
    """
    given = Path(options[part])
    if given.is_file():
        return given
    import gguf_writer  # type: ignore[import-not-found]

    stamp = max(one.stat().st_mtime_ns for one in given.glob("*.safetensors"))
    described = f"{given.resolve()} {stamp} {options['dtype']} 3"
    made = Path(options["cache"]) / "gguf" / f"{hashlib.sha256(described.encode()).hexdigest()[:16]}.gguf"
    try:
        gguf_writer.convert(given, made, options["dtype"])
    except ValueError as error:
        raise Unsupported(f"the checkpoint can't be made a GGUF file: {error}") from error
    return made
