"""Options of GGUF files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from foretoken.errors import ModelError, check_choice, shown

CacheType = Literal["auto", "f32", "f16", "bf16", "q8_0"]
TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8}
"""As ggml numbers them."""
TYPE_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}
_MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
_MAX_THREADS = 1024  # of many more than it can make, the library ends the process


@dataclass(frozen=True)
class Options:
    """How a GGUF file is loaded.

    Attributes:
        n_ctx: most tokens of a sequence; None for the context that the model was trained with.
        n_gpu_layers: layers that a GPU computes, where llama.cpp was built for one; None for all, 0 for none.
        n_threads: that compute; None for as many as torch uses.
        cache_type: of keys and values; "auto" for float32 where the weights are, else float16, as llama.cpp has it.
        mmap: map the file into memory instead of reading it.
        rows: most rows of one llama.cpp context; further ones get another.
        sequences: most sequences of one context, at least one more than `rows`.
    """

    n_ctx: int | None = None
    n_gpu_layers: int | None = None
    n_threads: int | None = None
    cache_type: CacheType = "auto"
    mmap: bool = True
    rows: int = 32
    sequences: int = 64

    def __post_init__(self) -> None:
        for name, least in (("n_ctx", 1), ("n_gpu_layers", 0), ("n_threads", 1)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ModelError(f"{name} is {shown(value)}: give a whole number of at least {least}, or None")
        if self.n_threads is not None and self.n_threads > _MAX_THREADS:
            raise ModelError(f"n_threads is {self.n_threads:,}: give at most {_MAX_THREADS:,}, or None")
        check_choice("cache_type", self.cache_type, get_args(CacheType), ModelError)
        if not 1 <= self.rows < self.sequences <= _MAX_SEQUENCES:
            raise ModelError(
                f"{self.rows} rows and {self.sequences} sequences of a context: rows are at least 1, sequences more, "
                f"and at most {_MAX_SEQUENCES}"
            )
