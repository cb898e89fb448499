"""What loading raises, as errors that name the model and the cure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from foretoken.errors import ModelError, OutOfMemory
from foretoken.models.tokenizers import first_line

_POINTER = b"version https://git-lfs"


@contextmanager
def translated_errors(name: str, source: str) -> Iterator[None]:
    """Raise every error as one of this package.

    Args:
        name: what messages call the model.
        source: its folder or hub id.

    Raises:
        ModelError: instead of all errors but those of memory.
        OutOfMemory: memory ran out.
    """
    try:
        yield
    except (ModelError, OutOfMemory):
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise _out_of_memory(name) from error
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        if isinstance(error, RuntimeError) and re.search("not enough memory|can't allocate memory", text):
            raise _out_of_memory(name) from error
        raise ModelError(_message(name, source, error, text)) from error


def _message(name: str, source: str, error: Exception, text: str) -> str:
    first = first_line(error)
    if not Path(source).is_dir() and isinstance(error, OSError):
        return (
            f"{name!r} is neither a folder here nor a model that the hub could give ({type(error).__name__}): "
            "check the name, the network and, for gated models, your access"
        )
    if "trust_remote_code" in text and "custom code" in text:
        return (
            f"{name} runs with code of its own alone, which transformers does not have: read that code, and if you "
            "trust it, load the model in Python, with trust_remote_code=True"
        )
    if "model type" in text and ("not recognize" in text or "unrecognized" in text.lower()):
        import transformers

        return f"{name} has an architecture unknown to transformers {transformers.__version__}: {first}"
    if isinstance(error, ImportError):
        return f"{name} can't be loaded without a package that is not installed: {first}"
    if "unexpected keyword argument" in text or "`attn_implementation" in text:
        return f"{name} can't be loaded with these options: {first}"
    if "ignore_mismatched_sizes" in text:
        return f"{name} can't be loaded, its files are broken: the weights have other shapes than config.json says"
    folder = Path(source)
    # Other files are not loaded, nor are the second ones where there are the first.
    for file in sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin")):
        if _is_pointer(file):
            return f"{name} can't be loaded: {file.name} is a pointer of Git LFS, not the weights: run 'git lfs pull'"
    return f"{name} can't be loaded, its files are broken or incomplete ({type(error).__name__}): {first}"


def _is_pointer(file: Path) -> bool:
    """Whether a file is what a clone without Git LFS has in a large file's place."""
    try:
        with file.open("rb") as start:
            return start.read(len(_POINTER)) == _POINTER
    except OSError:
        return False


def _out_of_memory(name: str) -> OutOfMemory:
    return OutOfMemory(
        f"memory ran out while loading {name}: lower the dtype (bfloat16), or use a quantised or smaller checkpoint"
    )
