"""GGUF files, which llama.cpp runs. Importing this imports neither torch nor llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.models.gguf.file import find, parts_of
from foretoken.models.gguf.options import CacheType, Options

if TYPE_CHECKING:
    from foretoken.models.gguf.runner import GgufModel

__all__ = ["CacheType", "Options", "find", "load", "parts_of"]


def load(path: Path, name: str, options: Options | None = None, tokenizer: Any | None = None) -> GgufModel:
    """Load a GGUF file; see `foretoken.models.gguf.loading.load_gguf`."""
    from foretoken.models.gguf.loading import load_gguf

    return load_gguf(path, name, options, tokenizer)
