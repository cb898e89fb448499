"""Keeps costs and acceptance rates between processes, in one small JSON file: a prior for the next process."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from foretoken.cache_folder import cache_folder

_VERSION = "policy 3"  # of the entries; others are left alone
_MOST_ENTRIES = 200


def key_of(*parts: object) -> str:
    """The key for models and a drafter on this machine, as it is set up now."""
    machine = (platform.node(), platform.machine(), os.cpu_count(), torch.get_num_threads(), torch.__version__)
    return " | ".join(map(str, (_VERSION, *machine, *parts)))


def read(key: str) -> dict[str, Any]:
    """What is stored under a key; empty where there is nothing, or where the file is damaged."""
    found = _content().get(key)
    return found if isinstance(found, dict) else {}


def write(key: str, value: dict[str, Any]) -> None:
    """Store under a key, and keep all other keys, those of other processes too. Does nothing where it can't write."""
    with suppress(OSError, RuntimeError):
        path = cache_folder("costs.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            content = _content()
            content.pop(key, None)  # the newest comes last, the oldest goes
            content[key] = value
            content = dict(list(content.items())[-_MOST_ENTRIES:])
            # Readers hold no lock: they see the old file or the new one.
            with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
                file.write(json.dumps(content))  # several times as fast as `json.dump`
            os.replace(file.name, path)


def _content() -> dict[str, Any]:
    with suppress(OSError, ValueError, RuntimeError):  # nested too deeply, or no home folder: RuntimeErrors both
        found = json.loads(cache_folder("costs.json").read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Have the file's lock to oneself, where the system has such locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
