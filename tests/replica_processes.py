"""Processes of this machine, by /proc."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def parents() -> dict[int, int]:
    """Of each process, its parent."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                found[int(file.parent.name)] = int(parent)
    return found


def below(pid: int) -> list[int]:
    """A process's children, and theirs."""
    children = [child for child, parent in parents().items() if parent == pid]
    return [*children, *(one for child in children for one in below(child))]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def maps(pid: int, library: str) -> bool:
    """Whether a process has loaded a library."""
    try:
        return library in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False
