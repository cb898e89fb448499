"""Results as JSON lines: written as they come, read again where a run goes on after an interruption."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretoken.bench.errors import BenchError

Record = dict[str, Any]
KINDS = ("settings", "machine", "bandwidth", "run", "skipped", "acceptance")
_BEGINNING = '{"kind": "settings"'
"""Of a file of results."""
_KEY = ("engine", "batch", "temperature", "repeat", "items")


class Store:
    """Records of a benchmark, in a file if there is one.

    Args:
        file: JSON lines; read if it is there, appended to from then on. None keeps all in memory.
        settings: what all records of a file have in common; a path is kept as text, and is to be resolved.

    Attributes:
        records: all of them, the old ones first.

    Raises:
        BenchError: the file holds something else, or results of other settings.
    """

    def __init__(self, file: Path | None, settings: Mapping[str, Any]) -> None:
        self._file = file
        self.records: list[Record] = []
        if file is not None and (file.is_file() or file.is_dir()):  # a pipe or device has no results of earlier runs
            self.records = read(file)
        old = next((record for record in self.records if record["kind"] == "settings"), None)
        if old is None:
            if self.records:
                raise BenchError(f"{str(file)!r} holds results without their settings: name another file")
            if file is not None:
                file.write_text("", encoding="utf-8")
            self.add({"kind": "settings", **{name: _plain(value) for name, value in settings.items()}})
            return
        assert file is not None
        for name, value in settings.items():
            before, now = old.get(name), _plain(value)
            if isinstance(value, Path) and isinstance(before, str):  # files of earlier releases have it as it was given
                before = str(Path(before).resolve())
            if before != json.loads(json.dumps(now)):
                raise BenchError(
                    f"{str(file)!r} holds results with {name} {before!r}, and now it is {now!r}: name another "
                    "file, or the same settings to go on, or delete it"
                )
        # A line that was being written when the run was interrupted would spoil the next one.
        text = "".join(json.dumps(record) + "\n" for record in self.records)
        if file.read_text(encoding="utf-8") != text:
            whole = file.with_name(f"{file.name}.tmp")
            try:
                whole.write_text(text, encoding="utf-8")
                whole.replace(file)  # a process that is ended here leaves the old one
            except OSError as error:
                raise BenchError(f"{str(file)!r} can't be written ({error.strerror}): free some space") from error

    def add(self, record: Record) -> None:
        """Keep a record; it is in the file when this returns.

        Raises:
            BenchError: the file can't be written.
        """
        assert record["kind"] in KINDS
        self.records.append(record)
        if self._file is None:
            return
        try:
            with self._file.open("a", encoding="utf-8") as opened:
                opened.write(json.dumps(record) + "\n")
        except OSError as error:
            raise BenchError(
                f"{str(self._file)!r} can't be written ({error.strerror}): free some space, or name another file; with "
                "this one the same command resumes from the runs in it"
            ) from error

    def of(self, kind: str) -> list[Record]:
        """The records of one kind."""
        return [record for record in self.records if record["kind"] == kind]

    def done(self) -> set[tuple[Any, ...]]:
        """Keys of the runs that need not be made again."""
        return {key(record) for record in self.of("run")}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes a run the same as another.

    Raises:
        BenchError: it is no run of a benchmark.
    """
    try:
        *others, items = (record[name] for name in _KEY)
        return *others, tuple(items)
    except (KeyError, TypeError) as error:
        raise BenchError(
            f"a run among the results is damaged or none of a benchmark's ({error}): name a file of results"
        ) from error


def read(file: Path) -> list[Record]:
    """The records of a file; a last line that was cut short is left out.

    Raises:
        BenchError: it can't be read, or holds something else.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise BenchError(f"{str(file)!r} can't be read: {reason}") from error
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            cut_short = records or line.startswith(_BEGINNING) or _BEGINNING.startswith(line.rstrip())
            if number == len(lines) and cut_short:
                break
            raise BenchError(f"line {number} of {str(file)!r} is no JSON: name a file of results") from error
        if not isinstance(record, dict) or record.get("kind") not in KINDS:
            raise BenchError(f"line {number} of {str(file)!r} is no result: name a file of results")
        records.append(record)
    return records
