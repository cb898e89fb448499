"""Atomic writes, and the errors of full disks."""

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
    """Turn errors of writing a file or folder into `TrainingError`.

    Raises:
        TrainingError: writing failed; for a full disk the message says how to resume.
    """
    try:
        yield
    except Exception as error:
        number = _reason(error)
        if number in _FULL:
            what = "files may not grow so large here (ulimit -f)" if number == errno.EFBIG else "the disk is full"
            raise TrainingError(
                f"{what}: {path} can't be written ({_free(path)} free). Make room, or lower --cache-size; the same "
                "command then resumes from what was saved"
            ) from error
        if isinstance(error, OSError):
            raise TrainingError(f"{path} can't be written ({error.strerror or error}): choose another --out") from error
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write a file to, which is then renamed to `path`: a stop, or a power cut, before that leaves
    `path` unchanged.

    Raises:
        TrainingError: see `writing`.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            with temporary.open("r+b") as written:
                os.fsync(written.fileno())  # a name may reach the disk before the bytes
            os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON, replacing the file; see `replacing`."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _reason(error: BaseException) -> int | None:
    """The errno of the system error that caused an exception; None if there was none.

    Libraries may keep only its message, or raise an exception of their own while they handle it.
    """
    if isinstance(error, OSError):
        return error.errno
    number = next((number for number in _FULL if os.strerror(number) in str(error)), None)
    behind = error.__cause__ or error.__context__
    return number if number is not None or behind is None else _reason(behind)


def _free(path: Path) -> str:
    try:
        return show_bytes(shutil.disk_usage(path.parent).free)
    except OSError:
        return "an unknown amount"
