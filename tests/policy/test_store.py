"""The store of costs and acceptance rates between processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from foretoken.policy import store


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    return tmp_path


def test_what_was_written_is_read():
    store.write("a", {"x": 1})
    store.write("b", {"x": 2})
    assert store.read("a") == {"x": 1}
    assert store.read("b") == {"x": 2}
    assert store.read("c") == {}


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_a_damaged_file_counts_as_empty(folder, text):
    (folder / "foretoken").mkdir()
    (folder / "foretoken" / "costs.json").write_text(text)
    assert store.read("a") == {}
    store.write("a", {"x": 1})
    assert store.read("a") == {"x": 1}


def test_processes_that_write_at_once_lose_nothing(folder):
    program = (
        "import sys; from foretoken.policy import store\n"
        "for at in range(25): store.write(f'{sys.argv[1]} {at}', {'at': at})"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, name]) for name in ("one", "two")]
    assert [writer.wait() for writer in writers] == [0, 0]
    for name in ("one", "two"):
        assert [store.read(f"{name} {at}") for at in range(25)] == [{"at": at} for at in range(25)]


def test_a_folder_that_cant_be_written_raises_nothing(monkeypatch, folder):
    (folder / "file").write_text("")
    monkeypatch.setenv("FORETOKEN_CACHE", str(folder / "file"))
    store.write("a", {"x": 1})
    assert store.read("a") == {}


def test_without_a_home_folder_nothing_is_stored(monkeypatch):
    def unknown(user):
        raise KeyError(user)

    for name in ("FORETOKEN_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)  # as in a container whose user has no entry
    with pytest.raises(RuntimeError):
        Path.home()
    store.write("a", {"x": 1})
    assert store.read("a") == {}
