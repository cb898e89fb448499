"""Ends a process with everything that it has started. Standard library only.

Run as a program, it watches over processes of its owner. It reads JSON objects, one a line: ``{"pid": n, "folder":
path, "polite": seconds}`` names a process to end, a folder to remove, and the time between SIGTERM and SIGKILL;
``{"done": n}`` says that this has been done. When its input ends
(the owner has closed it, or has died in whatever way) it ends and removes what is left.
"""

import json
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

_POLL_SECONDS = 0.01

Process = tuple[int, str]
"""Process id, and the time it started at: ids are used again."""


def _table() -> dict[int, tuple[str, int, int, str]]:
    """State, parent, session and start time of every process; empty where there is no /proc."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        found[int(folder.name)] = (fields[0], int(fields[1]), int(fields[3]), fields[19])
    return found


def tree(root: int, known: frozenset[Process] = frozenset()) -> frozenset[Process]:
    """Running processes of a session and their descendants, those that have left the session included.

    Args:
        root: process id of the session's leader.
        known: processes found earlier; they and their descendants count as long as they run.
    """
    table = _table()
    if not table:
        return frozenset({(root, "")}) if _exists(root) else frozenset()
    wanted = {pid for pid, start in known if pid in table and table[pid][3] == start}
    wanted |= {pid for pid, (_, _, session, _) in table.items() if pid == root or session == root}
    size = 0
    while size < len(wanted):
        size = len(wanted)
        wanted |= {pid for pid, (_, parent, _, _) in table.items() if parent in wanted}
    return frozenset((pid, table[pid][3]) for pid in wanted if table[pid][0] not in "ZX")


def end_tree(root: int, known: frozenset[Process], patience_seconds: float) -> None:
    """End a session's processes and their descendants: politely first, by force after `patience_seconds`.

    Args:
        root: process id of the session's leader.
        known: see `tree`.
        patience_seconds: between SIGTERM and SIGKILL; what cleans up after itself (shared memory, sockets) can.
    """
    signalled: set[Process] = set()
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + patience_seconds
        while time.monotonic() < deadline:
            known = tree(root, known)
            if not known:
                return
            for process in known:
                if number == signal.SIGKILL or process not in signalled:
                    _send(process[0], number)
                    _send(process[0], signal.SIGCONT)  # a stopped process ends when it goes on
            signalled |= known
            time.sleep(_POLL_SECONDS)


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    """Watch until the input ends."""
    watched: dict[int, tuple[str, float]] = {}
    for line in sys.stdin:
        message = json.loads(line)
        if "done" in message:
            watched.pop(message["done"], None)
        else:
            watched[message["pid"]] = message["folder"], message["polite"]
    for pid, (folder, patience_seconds) in watched.items():
        end_tree(pid, frozenset(), patience_seconds)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
