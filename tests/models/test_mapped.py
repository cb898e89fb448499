"""Tensors in a temporary file, and their memory given back."""

from __future__ import annotations

import errno
import mmap
import tempfile
import threading
from collections import namedtuple

import pytest
import torch

from foretoken.models import mapped
from foretoken.models.mapped import ScratchFile, meanwhile

PAGE = mmap.ALLOCATIONGRANULARITY
needs_release = pytest.mark.skipif(not mapped.CAN_RELEASE, reason="this system has no way to give memory back")


def tensors():
    given = torch.Generator().manual_seed(0)
    wide = torch.randn(3, PAGE, generator=given)
    return [wide, wide.to(torch.bfloat16), (100 * wide).to(torch.int8), wide.T]


@needs_release
def test_tensors_in_the_file_are_the_same_before_and_after_their_memory_is_given_back(tmp_path):
    file = ScratchFile(tmp_path / "made", 1000)
    kept = [file.keep(tensor) for tensor in tensors()]
    for _ in range(2):
        for found, expected in zip(kept, tensors(), strict=True):
            assert found.dtype is expected.dtype
            assert torch.equal(found, expected)
            assert found.data_ptr() % PAGE == 0
        file.release()
    assert list((tmp_path / "made").iterdir()) == []


@needs_release
def test_small_tensors_stay_in_memory(tmp_path):
    file = ScratchFile(tmp_path, 1000)
    small, large = torch.zeros(PAGE - 1, dtype=torch.int8), torch.zeros(PAGE, dtype=torch.int8)
    assert file.keep(small) is small
    assert file.keep(large) is not large


class FullDisk:
    """A file of which so many bytes can be written, a part of them at a time."""

    def __init__(self, file, room):
        self._file, self._room = file, room
        self.fileno, self.seek, self.tell, self.truncate = file.fileno, file.seek, file.tell, file.truncate

    def write(self, data):
        if self._file.tell() >= self._room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._file.write(data[: min(10_000, self._room - self._file.tell())])


@needs_release
def test_tensors_stay_in_memory_where_the_disk_is_full(tmp_path, monkeypatch):
    make = tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **options: FullDisk(make(**options), 5 * PAGE))
    file = ScratchFile(tmp_path, 1000)
    small, large = torch.arange(PAGE // 8), torch.arange(PAGE)
    kept = [file.keep(small), file.keep(large), file.keep(small + 1)]
    assert kept[1] is large
    assert torch.equal(kept[0], small)
    assert torch.equal(kept[2], small + 1)
    assert kept[2] is not small


def test_tensors_stay_in_memory_where_no_file_can_be_made(tmp_path, monkeypatch):
    tensor = torch.zeros(PAGE)
    (tmp_path / "file").write_text("")
    assert ScratchFile(tmp_path / "file", 1000).keep(tensor) is tensor
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(mapped.shutil, "disk_usage", lambda folder: usage(2000))
    assert ScratchFile(tmp_path, 1000).keep(tensor) is tensor
    if mapped.CAN_RELEASE:
        assert ScratchFile(tmp_path, 999).keep(tensor) is not tensor
    monkeypatch.setattr(mapped, "CAN_RELEASE", False)
    assert ScratchFile(tmp_path, 999).keep(tensor) is tensor


def test_work_is_done_meanwhile_and_once_after_a_block():
    done = []
    with meanwhile(lambda: done.append(1)):
        before = len(done)
    assert len(done) > before
    with pytest.raises(KeyError), meanwhile(lambda: done.clear()):
        raise KeyError
    assert done == []
    turns = iter(range(1000))
    twice = threading.Event()
    with meanwhile(lambda: next(turns) and twice.set()):
        assert twice.wait(60)
