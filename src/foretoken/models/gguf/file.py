"""GGUF files on the disk: which files a name stands for, and whether they are whole."""

from __future__ import annotations

import re
from pathlib import Path

from foretoken.errors import ModelError
from foretoken.models.locating import CONFIG, has_weights

_MAGIC = b"GGUF"
_OLDER = {b"lmgg": "GGML", b"tjgg": "GGJT", b"fmgg": "GGMF", b"algg": "GGLA"}
"""Beginnings of formats before GGUF, as they stand in a file."""
_VERSIONS = (2, 3)
_ADDRESS = re.compile(r"[a-z]{2,}:/", re.IGNORECASE)
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})(?P<of>-of-)(?P<total>\d{5})\.gguf", re.IGNORECASE)


def find(model: str | Path) -> Path | None:
    """The GGUF file that a name stands for: by its ending, by what the file begins with, or the only one of a folder.

    Returns:
        None for what is none: a checkpoint's folder, a hub id.

    Raises:
        ModelError: a folder has several of them, and no checkpoint's weights.
    """
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return None if (path / CONFIG).is_file() and has_weights(path) else _only_gguf(path)
        if path.suffix.lower() == ".gguf":
            return path
        if path.is_file():
            with path.open("rb") as file:
                return path if file.read(4) == _MAGIC else None
    except (OSError, RuntimeError, ValueError):  # no such user's home, a null character
        return None
    return None


def _only_gguf(folder: Path) -> Path | None:
    """The one model in a folder of GGUF files; None where there is none.

    Raises:
        ModelError: there are several.
    """
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() == ".gguf")
    firsts = [file for file in files if (part := _PART.fullmatch(file.name)) is None or int(part["number"]) == 1]
    firsts = [file for file in firsts if "mmproj" not in file.name.lower()]
    if len(firsts) > 1:
        names = ", ".join(file.name for file in firsts[:8])
        raise ModelError(f"{folder} holds {len(firsts)} GGUF models ({names}): give the path of one")
    return firsts[0] if firsts else None


def parts_of(path: Path) -> list[Path]:
    """All files of a model, the given one or the parts that it belongs to, in order.

    Raises:
        ModelError: a file is missing, cut off, or of another format or version.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        _check(path)
        return [path]
    total = int(match["total"])
    names = (f"{match['stem']}-{number:05d}{match['of']}{total:05d}{path.suffix}" for number in range(1, total + 1))
    parts = [path.with_name(name) for name in names]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelError(
            f"{path.name} is one of {total} parts, and {len(missing)} of them are not beside it: {missing[0]}"
            f"{' …' if len(missing) > 1 else ''}; put all parts into one folder"
        )
    for part in parts:
        _check(part)
    return parts


def _check(path: Path) -> None:
    """Check what a file begins with."""
    if path.is_dir():
        raise ModelError(f"{path} is a folder: give the path of a GGUF file")
    try:
        with path.open("rb") as file:
            start = file.read(24)
    except (FileNotFoundError, ValueError):  # a null character
        if _ADDRESS.match(str(path)):
            raise ModelError(f"{str(path)!r} is an address: download the file, and give its path") from None
        raise ModelError(f"there is no file {str(path)!r}: check the path") from None
    except OSError as error:
        raise ModelError(f"{path} can't be read ({error.strerror}): check the file and its permissions") from error
    magic = start[:4]
    if magic in _OLDER:
        raise ModelError(f"{path} is a {_OLDER[magic]} file, a format before GGUF: take a GGUF file of the model")
    if magic != _MAGIC:
        if start.startswith(b"version https://git-lfs"):
            raise ModelError(f"{path} is a pointer of Git LFS and not the model: run 'git lfs pull'")
        raise ModelError(f"{path} is no GGUF file: it begins with {magic!r} and not {_MAGIC!r}")
    if len(start) < 24:
        raise ModelError(f"{path} is cut off after {len(start)} bytes: download it again")
    version = int.from_bytes(start[4:8], "little")
    if version & 0xFFFF == 0:
        raise ModelError(f"{path} was written for a big-endian machine: take the file for this one")
    if version not in _VERSIONS:
        newer = version > max(_VERSIONS)
        raise ModelError(
            f"{path} has version {version} of GGUF, and {_VERSIONS[0]} and {_VERSIONS[-1]} can be read: "
            + (
                "update llama.cpp (pip install -U xllamacpp) and foretoken"
                if newer
                else "take a newer file of the model"
            )
        )
