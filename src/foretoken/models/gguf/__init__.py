"""GGUF files, which llama.cpp runs. Importing this imports neither torch nor llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.models.gguf.file import find, parts_of
from foretoken.models.gguf.options import CacheType, Options

if TYPE_CHECKING:
    from foretoken.models.gguf.header import Header
    from foretoken.models.gguf.loading import Vocabulary
    from foretoken.models.gguf.runner import GgufModel

__all__ = ["CacheType", "Options", "find", "load", "load_vocabulary", "parts_of", "read_header", "uses_gpu"]


def load(path: Path, name: str, options: Options | None = None, tokenizer: Any | None = None) -> GgufModel:
    """Load a GGUF file; see `foretoken.models.gguf.loading.load_gguf`."""
    from foretoken.models.gguf.loading import load_gguf

    return load_gguf(path, name, options, tokenizer)


def uses_gpu() -> bool:
    """Whether the installed llama.cpp was built for a GPU, and finds one."""
    from foretoken.models.gguf.library import library

    return bool(library().llama_supports_gpu_offload())


def read_header(parts: Sequence[Path]) -> Header:
    """What files say about their model; see `foretoken.models.gguf.header.read_header`."""
    from foretoken.models.gguf import header

    return header.read_header(parts)


def load_vocabulary(parts: Sequence[Path], header: Header, name: str) -> Vocabulary:
    """The vocabulary alone; see `foretoken.models.gguf.loading.load_vocabulary`."""
    from foretoken.models.gguf import loading

    return loading.load_vocabulary(parts, header, name)
