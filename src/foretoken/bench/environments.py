"""Environments of the other engines: one each, since their requirements exclude each other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from foretoken.bench.engines import KINDS, EngineKind, python_of
from foretoken.bench.errors import BenchError, Unsupported
from foretoken.cache_folder import cache_folder
from foretoken.errors import ParameterError


def default_folder() -> Path:
    """Where environments are put unless another folder is named."""
    return cache_folder("peers")


Run = Callable[[Sequence[str]], int]
"""Runs a command with its output on standard error; returns its status."""


def _run(command: Sequence[str]) -> int:
    return subprocess.run(list(command), stdout=sys.stderr, check=False).returncode


def installable() -> list[EngineKind]:
    """Engines that have an environment of their own."""
    return [kind for kind in KINDS.values() if kind.requirements]


def found(peers: Path) -> dict[str, str | None]:
    """The interpreter of each engine, None where there is none."""
    result: dict[str, str | None] = {}
    for kind in KINDS.values():
        try:
            result[kind.name] = python_of(kind, peers)
        except Unsupported:
            result[kind.name] = None
    return result


def install(names: Sequence[str], peers: Path, run: Run = _run) -> None:
    """Make environments under a folder and install engines into them; those that are there are brought up to date.

    Args:
        names: of engines.
        peers: the folder.
        run: what runs commands.

    Raises:
        ParameterError: an engine that has no environment of its own.
        BenchError: a command failed.
    """
    for name in names:
        if name not in {kind.name for kind in installable()}:
            known = ", ".join(kind.name for kind in installable())
            raise ParameterError(f"engine {name!r} can't be installed: choose from {known}")
    for name in names:
        kind = KINDS[name]
        folder = peers / kind.folders[0]
        steps = [[sys.executable, "-m", "venv", str(folder)]] if not (folder / "pyvenv.cfg").exists() else []
        python = str(folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python"))
        steps.append([python, "-m", "pip", "install", *kind.requirements])
        steps += [[python, *command] for command in kind.after_install]
        for step in steps:
            status = run(step)
            if status != 0:
                raise BenchError(f"{name} could not be installed: {' '.join(step)} ended with status {status}")
