"""Local files under faults: order of calls, disk full, failing and interrupted calls, short writes, loss of power."""

from __future__ import annotations

import errno
import mmap
import os
import random
from pathlib import Path

import pytest

from relight.errors import StorageFullError, StorageUnavailableError
from relight.storage.files import Files
from relight.storage.local import LocalBackend
from relight.testing.files import (
    FailingFiles,
    FullDiskFiles,
    Killed,
    KillingFiles,
    LayeredFiles,
    PowerLossFiles,
    RecordingFiles,
)

MIB = 2**20


def aligned(num_bytes: int, fill: int = 5) -> memoryview:
    view = memoryview(mmap.mmap(-1, num_bytes))
    view[:] = bytes([fill]) * num_bytes
    return view


def everything_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_hb08_content_is_synced_before_the_name_and_the_directory_after(tmp_path: Path) -> None:
    files = RecordingFiles()
    backend = LocalBackend(tmp_path / "root", files)
    backend.put("dir/file", b"content", if_absent=True)
    temp = next(call.path for call in files.calls if call.operation == "create")
    assert temp.parent == tmp_path / "root/dir"
    assert [(call.operation, call.target or call.path) for call in files.calls] == [
        ("make_dir", tmp_path / "root"),
        ("sync_dir", tmp_path),
        ("make_dir", tmp_path / "root/dir"),
        ("sync_dir", tmp_path / "root"),
        ("create", temp),
        ("allocate", temp),
        ("write", temp),
        ("sync", temp),
        ("close", temp),
        ("link", tmp_path / "root/dir/file"),
        ("unlink", temp),
        ("sync_dir", tmp_path / "root/dir"),
    ]


def test_hb08_a_replaced_file_is_never_unlinked_first(tmp_path: Path) -> None:
    LocalBackend(tmp_path).put("file", b"old")
    files = RecordingFiles()
    LocalBackend(tmp_path, files).put("file", b"new")
    after_sync = files.operations()[files.operations().index("sync") :]
    assert after_sync == ["sync", "close", "rename", "sync_dir"]


def test_large_aligned_writes_are_direct_and_aligned(tmp_path: Path) -> None:
    files = RecordingFiles()
    LocalBackend(tmp_path, files).put("file", aligned(20 * MIB + 5))
    assert (tmp_path / "file").stat().st_size == 20 * MIB + 5
    assert [call.num_bytes for call in files.calls if call.operation == "write"] in (
        [8 * MIB, 8 * MIB, 4 * MIB, 4096],
        # A file system without direct I/O gets the bytes as they are.
        [8 * MIB, 8 * MIB, 4 * MIB + 5],
    )


class ShortWrites(LayeredFiles):
    """Every write takes at most `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self.most_bytes = most_bytes

    def write(self, descriptor: int, data: memoryview, offset_bytes: int) -> int:
        return super().write(descriptor, data[: self.most_bytes], offset_bytes)


@pytest.mark.parametrize("most_bytes", [100_000, 4096 * 3 + 512, 4096])
def test_short_writes_are_continued(tmp_path: Path, most_bytes: int) -> None:
    data = aligned(2 * MIB + 77)
    data[MIB : MIB + 3] = b"abc"
    LocalBackend(tmp_path, ShortWrites(most_bytes)).put("file", data)
    assert (tmp_path / "file").read_bytes() == bytes(data)


class NoDirect(LayeredFiles):
    """Refuse direct I/O at the open, having made the file, or at the first write."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at
        self.direct: set[int] = set()

    def create(self, path: Path, *, direct: bool) -> int:
        descriptor = super().create(path, direct=False)
        if direct and self.at == "create":
            super().close(descriptor)
            raise OSError(errno.EINVAL, "no direct I/O")
        if direct:
            self.direct.add(descriptor)
        return descriptor

    def write(self, descriptor: int, data: memoryview, offset_bytes: int) -> int:
        if descriptor in self.direct:
            raise OSError(errno.EINVAL, "no direct I/O")
        return super().write(descriptor, data, offset_bytes)

    def close(self, descriptor: int) -> None:
        self.direct.discard(descriptor)
        super().close(descriptor)


@pytest.mark.parametrize("at", ["create", "write"])
def test_file_systems_without_direct_io_get_buffered_writes(tmp_path: Path, at: str) -> None:
    data = aligned(3 * MIB + 1)
    LocalBackend(tmp_path, NoDirect(at)).put("file", data)
    assert (tmp_path / "file").read_bytes() == bytes(data)
    assert everything_below(tmp_path) == ["file"]


@pytest.mark.parametrize("at", ["allocate", "write", "sync", "close"])
@pytest.mark.parametrize("share", ["nothing", "half", "all but one"])
@pytest.mark.parametrize("num_bytes", [1000, 2 * MIB])
def test_hb09_a_full_disk_leaves_no_partial_file(tmp_path: Path, at: str, share: str, num_bytes: int) -> None:
    fits = {"nothing": 0, "half": num_bytes // 2, "all but one": num_bytes - 1}[share]
    LocalBackend(tmp_path).put("step-1/file", b"older")
    files = FullDiskFiles(fits, at=at)
    backend = LocalBackend(tmp_path, files)
    with pytest.raises(StorageFullError, match=f"needs {num_bytes} bytes") as raised:
        backend.put("step-2/file", aligned(num_bytes), if_absent=True)
    assert raised.value.details["needed_bytes"] == num_bytes
    assert raised.value.details["free_bytes"] > 0
    assert [name for name in everything_below(tmp_path) if "file" in name] == ["step-1/file"]
    assert files.num_refused == 1
    files.free_space()
    assert backend.put("step-2/file", aligned(num_bytes), if_absent=True)


def test_hb09_a_full_disk_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    files = RecordingFiles(FullDiskFiles(MIB, at="allocate"))
    with pytest.raises(StorageFullError):
        LocalBackend(tmp_path, files).put("file", aligned(2 * MIB))
    assert "write" not in files.operations()


@pytest.mark.parametrize("if_absent", [True, False])
@pytest.mark.parametrize("num_bytes", [10, 2 * MIB + 1])
def test_a_call_that_fails_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, num_bytes: int, *, if_absent: bool
) -> None:
    at = 0
    while True:
        folder = tmp_path / str(at)
        if not if_absent:
            LocalBackend(folder).put("dir/file", b"old")
        files = FailingFiles(at)
        backend = LocalBackend(folder, files)
        try:
            backend.put("dir/file", aligned(num_bytes), if_absent=if_absent)
        except StorageUnavailableError:
            seen = backend.get("dir/file") if backend.size_bytes("dir/file") is not None else None
            assert seen in (bytes(aligned(num_bytes)), None if if_absent else b"old")
            assert files.num_calls > at
            assert [name for name in everything_below(folder) if ".tmp-" in name] == []
        if files.num_calls <= at:
            break
        at += 1
    assert at >= 9


def _kill_everywhere(tmp_path: Path, seed: int | None, *, if_absent: bool) -> int:
    """Die before each call in turn, then lose power; return how many calls there were."""
    at = 0
    while True:
        folder = tmp_path / str(at)
        folder.mkdir()
        LocalBackend(folder).put("dir/other", b"other")
        if not if_absent:
            LocalBackend(folder).put("dir/file", b"old")
        power = PowerLossFiles(folder)
        files = KillingFiles(at, die=lambda: None, inner=power)
        is_stored = False
        try:
            LocalBackend(folder, files).put("dir/file", b"new content", if_absent=if_absent)
            is_stored = True
        except Killed:
            pass
        power.cut_power(None if seed is None else random.Random(seed + at))
        backend = LocalBackend(folder)
        seen = backend.get("dir/file") if backend.size_bytes("dir/file") is not None else None
        allowed = [b"new content"] if is_stored else [b"new content", None if if_absent else b"old"]
        assert seen in allowed
        assert backend.get("dir/other") == b"other"
        if not files.is_dead:
            return at
        at += 1


@pytest.mark.parametrize("if_absent", [True, False])
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_loss_of_power_at_any_call_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, seed: int | None, *, if_absent: bool
) -> None:
    assert _kill_everywhere(tmp_path, seed, if_absent=if_absent) >= 8


def test_a_file_found_there_is_durable_too(tmp_path: Path) -> None:
    power = PowerLossFiles(tmp_path)

    class NoDirSync(LayeredFiles):
        def sync_dir(self, path: Path) -> None:
            if (tmp_path / "file").exists():
                raise Killed("sync_dir")
            super().sync_dir(path)

    with pytest.raises(Killed):
        LocalBackend(tmp_path, NoDirSync(power)).put("file", b"content", if_absent=True)
    assert not LocalBackend(tmp_path, power).put("file", b"content", if_absent=True)
    power.cut_power()
    assert LocalBackend(tmp_path).get("file") == b"content"


def test_a_removal_that_was_made_by_a_dead_process_is_made_durable(tmp_path: Path) -> None:
    LocalBackend(tmp_path).put("file", b"content")
    power = PowerLossFiles(tmp_path)
    power.unlink(tmp_path / "file")
    LocalBackend(tmp_path, power).delete("file")
    power.cut_power()
    assert everything_below(tmp_path) == []


def test_the_power_loss_layer_loses_what_was_not_synced(tmp_path: Path) -> None:
    files = PowerLossFiles(tmp_path)
    descriptor = files.create(tmp_path / "synced", direct=False)
    files.write(descriptor, memoryview(b"content"), 0)
    files.sync(descriptor)
    files.write(descriptor, memoryview(b"later"), 7)
    files.close(descriptor)
    files.close(files.create(tmp_path / "empty", direct=False))
    files.sync_dir(tmp_path)
    files.close(files.create(tmp_path / "no-entry", direct=False))
    files.make_dir(tmp_path / "dir")
    files.cut_power()
    assert everything_below(tmp_path) == ["empty", "synced"]
    assert (tmp_path / "synced").read_bytes() == b"content"


def test_reserving_space_reports_what_the_system_says(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    try:
        with pytest.raises(OSError, match="seek"):
            Files().allocate(writer, 10)
    finally:
        os.close(reader)
        os.close(writer)
