"""Temporary folders: removed at the end, or by the next process after one that was killed."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from foretoken.peers.scratch import scratch_folder

KILLED = (
    "import os, signal\n"
    "from foretoken.peers.scratch import scratch_folder\n"
    "with scratch_folder() as folder:\n"
    "    (folder / 'weights').write_text('x')\n"
    "    print(folder, flush=True)\n"
    "    os.kill(os.getpid(), signal.SIGKILL)"
)


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_a_folder_is_removed_at_the_end():
    with scratch_folder() as folder:
        (folder / "file").write_text("x")
    assert not folder.exists()


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_the_folder_of_a_killed_process_is_removed_by_the_next_and_no_other_is(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True)
    left = Path(done.stdout.strip())
    assert left.parent == tmp_path
    assert (left / "weights").is_file()
    (tmp_path / "foretoken-scratch-mine").mkdir()
    with scratch_folder() as running, scratch_folder():
        assert not left.exists()
        assert running.exists()
    assert [one.name for one in tmp_path.iterdir()] == ["foretoken-scratch-mine"]
