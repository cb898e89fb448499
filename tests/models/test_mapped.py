"""Tensors in a temporary file, and their memory given back."""

from __future__ import annotations

import errno
import mmap
import tempfile
import threading
from collections import namedtuple
from itertools import count

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
    file = ScratchFile(tmp_path / "made", 100 * PAGE)
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
    file = ScratchFile(tmp_path, 3 * PAGE)
    small, large = torch.zeros(PAGE - 1, dtype=torch.int8), torch.zeros(PAGE, dtype=torch.int8)
    assert file.keep(small) is small
    assert file.keep(large) is not large


@needs_release
def test_tensors_beyond_the_files_room_stay_in_memory(tmp_path):
    file = ScratchFile(tmp_path, 3 * PAGE)
    first, wide, last, another = (torch.full((size,), 7, dtype=torch.int8) for size in (PAGE + 1, PAGE + 1, PAGE, PAGE))
    kept = [file.keep(tensor) for tensor in (first, wide, last, another)]
    assert kept[1] is wide
    assert kept[3] is another
    for found, expected in ((kept[0], first), (kept[2], last)):
        assert found is not expected
        assert torch.equal(found, expected)


@needs_release
def test_many_tensors_keep_one_file_open(tmp_path):
    resource = pytest.importorskip("resource")
    file = ScratchFile(tmp_path, 2000 * PAGE)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        kept = [file.keep(torch.full((PAGE,), i, dtype=torch.int16)) for i in range(400)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    file.release()
    assert [int(tensor[-1]) for tensor in kept] == list(range(400))


class FullDisk:
    """A file of which so many bytes can be written, a part of them at a time."""

    def __init__(self, file, room):
        self._file, self._room = file, room
        self.fileno, self.seek, self.truncate = file.fileno, file.seek, file.truncate

    def write(self, data):
        if self._file.tell() >= self._room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._file.write(data[: min(10_000, self._room - self._file.tell())])


@needs_release
def test_tensors_stay_in_memory_where_the_disk_is_full(tmp_path, monkeypatch):
    make = tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **options: FullDisk(make(**options), 5 * PAGE))
    file = ScratchFile(tmp_path, 100 * PAGE)
    small, large = torch.arange(PAGE // 8), torch.arange(PAGE)
    kept = [file.keep(small), file.keep(large), file.keep(small + 1)]
    assert kept[1] is large
    assert torch.equal(kept[0], small)
    assert torch.equal(kept[2], small + 1)
    assert kept[2] is not small


def test_tensors_stay_in_memory_where_no_file_can_be_made(tmp_path, monkeypatch):
    tensor, room = torch.zeros(PAGE), 4 * PAGE
    (tmp_path / "file").write_text("")
    assert ScratchFile(tmp_path / "file", room).keep(tensor) is tensor
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(mapped.shutil, "disk_usage", lambda folder: usage(2 * room))
    assert ScratchFile(tmp_path, room).keep(tensor) is tensor
    monkeypatch.setattr(mapped.shutil, "disk_usage", lambda folder: usage(2 * room + 1))
    if mapped.CAN_RELEASE:
        assert ScratchFile(tmp_path, room).keep(tensor) is not tensor
    monkeypatch.setattr(mapped, "CAN_RELEASE", False)
    assert ScratchFile(tmp_path, room).keep(tensor) is tensor
    ScratchFile(tmp_path, room).release()


def test_work_is_done_meanwhile_and_once_after_a_block():
    done = []
    with meanwhile(lambda: done.append(1)):
        before = len(done)
    assert len(done) > before
    with pytest.raises(KeyError), meanwhile(lambda: done.clear()):
        raise KeyError
    assert done == []
    turns = count()
    twice = threading.Event()
    with meanwhile(lambda: next(turns) and twice.set()):
        assert twice.wait(60)
