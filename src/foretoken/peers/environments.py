"""Environments of the other engines: one each, since their requirements exclude each other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from foretoken.cache_folder import cache_folder
from foretoken.errors import ParameterError
from foretoken.models.processor import cpuinfo
from foretoken.peers.errors import PeerError, Unsupported
from foretoken.peers.kinds import KINDS, EngineKind

Command = Callable[[Sequence[str]], int]
"""Runs a command with its output on standard error; returns its status."""


def default_folder() -> Path:
    """The folder of environments unless another one is named."""
    return cache_folder("peers")


def installable() -> list[EngineKind]:
    """Engines that have an environment of their own."""
    return [kind for kind in KINDS.values() if kind.requirements]


def python_of(kind: EngineKind, peers: Path | None) -> str:
    """The interpreter that runs an engine.

    Foretoken's own for itself; and for transformers, and for llama.cpp's server where it is installed, unless they
    have an environment.

    Args:
        kind: the engine.
        peers: folder of environments; None: there is none.

    Raises:
        Unsupported: the engine has no environment.
    """
    for folder in kind.folders if peers is not None else ():
        assert peers is not None
        python = _python(peers / folder)
        if python.exists():
            return str(python)
    own = kind.name == "llama-server" and find_spec("xllamacpp") is not None and find_spec("gguf") is not None
    if own or kind.name in ("foretoken", "transformers"):
        return sys.executable
    where = f"{peers} has no environment for it" if peers is not None else "no folder of environments was named"
    raise Unsupported(f"{where}: foretoken bench peers --install {kind.name}")


def found(peers: Path) -> dict[str, str | None]:
    """The interpreter of each engine, None where there is none."""
    result: dict[str, str | None] = {}
    for kind in KINDS.values():
        try:
            result[kind.name] = python_of(kind, peers)
        except Unsupported:
            result[kind.name] = None
    return result


def _run(command: Sequence[str]) -> int:
    return subprocess.run(list(command), stdout=sys.stderr, check=False).returncode


def install(names: Sequence[str], peers: Path, run: Command = _run) -> None:
    """Make environments under a folder and install engines into them; existing ones are brought up to date.

    A new environment whose engine can't be installed is removed again.

    Args:
        names: of engines.
        peers: the folder.
        run: runs a command.

    Raises:
        ParameterError: an engine that has no environment of its own, or something else is where it would be made.
        PeerError: a command failed.
    """
    known = {kind.name: kind for kind in installable()}
    for name in names:
        if name not in known:
            raise ParameterError(f"engine {name!r} can't be installed: choose from {', '.join(known)}")
        folder = peers / known[name].folders[0]
        if folder.exists() and not _is_environment(folder) and not (folder.is_dir() and not any(folder.iterdir())):
            raise ParameterError(
                f"{name} can't be installed: {str(folder)!r} holds something else than an environment (it has no "
                "pyvenv.cfg): name another folder with --peers, or move what is there"
            )
    for name in names:
        kind = known[name]
        folder = peers / kind.folders[0]
        fresh = not _is_environment(folder)  # so there is nothing in it that could be lost
        steps = [[sys.executable, "-m", "venv", str(folder)]] if fresh else []
        python = str(_python(folder))
        steps.append(
            [python, "-m", "pip", "install", *build_options(kind, cpuinfo().get("flags", "")), *kind.requirements]
        )
        steps += [[python, *command] for command in kind.after_install]
        try:
            for step in steps:
                status = run(step)
                if status != 0:
                    raise PeerError(f"{name} could not be installed: {' '.join(step)} ended with status {status}")
        except BaseException:
            if fresh:  # an environment without its engine would count as one
                shutil.rmtree(folder, ignore_errors=True)
            raise


def build_options(kind: EngineKind, flags: str) -> list[str]:
    """Options of pip with which an engine is compiled for a processor.

    Args:
        kind: the engine.
        flags: of the processor, as Linux names them.
    """
    if not kind.without_amx or "amx_tile" not in flags.split():
        return []
    without = " ".join(f"-mno-{name}" for name in ("amx-tile", "amx-int8", "amx-bf16"))
    return ["-C", f"cmake.args=-DCMAKE_C_FLAGS={without};-DCMAKE_CXX_FLAGS={without}"]


def _is_environment(folder: Path) -> bool:
    return (folder / "pyvenv.cfg").exists()


def _python(environment: Path) -> Path:
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
