"""Files that are either whole or not there, and what is said when the disk is full."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from foretoken.errors import show_bytes
from foretoken.train.errors import TrainingError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say what it means when a file or folder can't be written.

    Raises:
        TrainingError: it can't; what is said of a full disk tells how to go on.
    """
    try:
        yield
    except Exception as error:
        number = _reason(error)
        if number in _FULL:
            what = "files may not grow so large here (ulimit -f)" if number == errno.EFBIG else "the disk is full"
            raise TrainingError(
                f"{what}: {path} can't be written ({_free(path)} free). Make room, or lower --cache-size; the same "
                "command then goes on from what was saved"
            ) from error
        if isinstance(error, OSError):
            raise TrainingError(f"{path} can't be written ({error.strerror or error}): choose another --out") from error
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which takes `path`'s place once it is written: a stop before that leaves `path` as it was.

    Raises:
        TrainingError: see `writing`.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON in place of what was there; see `replacing`."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _reason(error: BaseException) -> int | None:
    """The number of the system's error behind one, None where there is none.

    Libraries that write for us pass it on as text, or raise an error of their own while they handle it.
    """
    if isinstance(error, OSError):
        return error.errno
    told = next((number for number in _FULL if os.strerror(number) in str(error)), None)
    behind = error.__cause__ or error.__context__
    return told if told is not None or behind is None else _reason(behind)


def _free(path: Path) -> str:
    try:
        return show_bytes(shutil.disk_usage(path.parent).free)
    except OSError:
        return "nothing known to be"
