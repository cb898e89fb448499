"""A loaded model of llama.cpp, freed when nothing uses it any more."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

from foretoken.models.gguf.library import Library


class Handle:
    """A loaded model.

    Args:
        library: llama.cpp.
        pointer: to the model.

    Attributes:
        library: llama.cpp.
        pointer: to the model.
    """

    def __init__(self, library: Library, pointer: Any) -> None:
        self.library, self.pointer = library, pointer
        weakref.finalize(self, library.llama_model_free, pointer)

    def metadata(self, key: str) -> str | None:
        """A value of the file's metadata that is no list, as a string; None where it has none."""
        room = 1024
        text = ctypes.create_string_buffer(room)
        size = self.library.llama_model_meta_val_str(self.pointer, key.encode(), text, room)
        return text.value.decode("utf-8", "replace") if size >= 0 else None

    def number(self, key: str) -> int | None:
        """An integer of the file's metadata; None where it has none."""
        found = self.metadata(key)
        return int(found) if found is not None and found.lstrip("-").isdigit() else None
