"""What is learnt about a machine, kept from process to process in one small file."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from foretoken.cache_folder import cache_folder


def key_of(*parts: object) -> str:
    """The key for models and a drafter on this machine, as it is set up now."""
    machine = (platform.node(), platform.machine(), os.cpu_count(), torch.get_num_threads(), torch.__version__)
    return " | ".join(map(str, (*machine, *parts)))


def _path() -> Path:
    return cache_folder("costs.json")


def read() -> dict[str, Any]:
    """All that is kept, by key; nothing where there is no such file, or a damaged one."""
    with suppress(OSError, ValueError):
        found = json.loads(_path().read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def write(content: dict[str, Any]) -> None:
    """Keep this and nothing else; where that can't be written, it is let go."""
    path = _path()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Several processes may write at once: each replaces the file by a whole one.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(file.name, path)
