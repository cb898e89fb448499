"""The folder of this package's caches: files that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str = "") -> Path:
    """A folder, or a file, in the user's cache; FORETOKEN_CACHE names another place than the system's."""
    root = os.environ.get("FORETOKEN_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "foretoken" / name
