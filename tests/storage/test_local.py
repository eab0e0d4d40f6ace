"""Local files: names, whole writes, listing, removal; what the operating system says becomes our errors."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path

import pytest

from relight.errors import (
    ConfigError,
    CorruptionError,
    MissingCopyError,
    RelightError,
    StorageFullError,
    StorageUnavailableError,
)
from relight.storage.backend import StoredFile, open_backend
from relight.storage.files import Files
from relight.storage.local import LocalBackend, local_path, storage_error

MIB = 2**20
ODD_NAMES = ["a b", "x[1]", "100%", "a#b?c", "-rf", "\u00fc", "new\nline", ".hidden", "n" * 255, "a:b", "*"]


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    return LocalBackend(tmp_path / "root")


def aligned(num_bytes: int, seed: int = 1) -> memoryview:
    """Return page-aligned memory with a pattern that differs from page to page."""
    view = memoryview(mmap.mmap(-1, max(num_bytes, 1)))[:num_bytes]
    for at in range(0, num_bytes, 4096):
        word = (at // 4096 * 7 + seed).to_bytes(8, "little")
        view[at : at + 8] = word[: num_bytes - at]
    return view


def names(backend: LocalBackend, prefix: str = "") -> list[str]:
    return [file.name for file in backend.list(prefix)]


def everything_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.mark.parametrize("url", ["{}", "file://{}"])
def test_every_spelling_of_a_root_addresses_the_same_place(tmp_path: Path, url: str) -> None:
    assert local_path(url.format(tmp_path / "r")) == tmp_path / "r"


def test_a_relative_path_is_taken_from_the_working_directory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert local_path("runs/a") == tmp_path / "runs" / "a"
    assert local_path("runs/../b") == tmp_path.resolve() / "b"


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/p",
        "s3:/bucket/p",
        "file:/x",
        "file://host/x",
        "mem://",
        "gs://b",
        "",
        "a\0b",
        "~/runs",
        "file://",
    ],
)
def test_what_is_no_local_path_is_refused_with_advice(url: str) -> None:
    with pytest.raises(ConfigError, match=r"write|give|use"):
        local_path(url)


def test_hf02_no_directory_is_ever_named_after_a_scheme(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_backend(f"file://{tmp_path}/r").put("a", b"1")
    open_backend("rel").put("a", b"2")
    with pytest.raises(ConfigError, match="no storage backend"):
        open_backend("s3://bucket/run")
    assert everything_below(tmp_path) == ["r", "r/a", "rel", "rel/a"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_hf03_names_are_opaque(tmp_path: Path, name: str) -> None:
    backend = LocalBackend(tmp_path / name)
    assert backend.put(f"{name}/{name}", b"content")
    assert backend.get(f"{name}/{name}") == b"content"
    assert backend.list() == [StoredFile(name=f"{name}/{name}", size_bytes=7)]
    assert local_path(backend.url) == backend.root
    backend.delete(f"{name}/")
    assert backend.list() == []


@pytest.mark.parametrize(
    "name", ["", "/abs", "../up", "a/../b", "a//b", "a/.", "a\0", "n" * 256, ".tmp-1-x", "a/.tmp-x"]
)
def test_names_that_could_leave_the_root_are_refused(backend: LocalBackend, name: str) -> None:
    for call in (lambda: backend.put(name, b""), lambda: backend.get(name), lambda: backend.size_bytes(name)):
        with pytest.raises(ConfigError):
            call()
    assert not backend.root.exists()


@pytest.mark.parametrize(
    "num_bytes", [0, 1, 4095, 4096, MIB - 1, MIB, MIB + 1, 3 * MIB + 4095, 17 * MIB + 1, 32 * MIB]
)
def test_content_comes_back_whole(backend: LocalBackend, num_bytes: int) -> None:
    data = aligned(num_bytes)
    assert backend.put("dir/file", data)
    back = aligned(num_bytes, seed=9)
    backend.read_into("dir/file", 0, back)
    assert bytes(back) == bytes(data)
    assert backend.get("dir/file") == bytes(data)
    assert backend.size_bytes("dir/file") == num_bytes
    assert everything_below(backend.root) == ["dir", "dir/file"]


@pytest.mark.parametrize("shift", [1, 512, 4096])
def test_memory_and_offsets_need_no_alignment(backend: LocalBackend, shift: int) -> None:
    data = aligned(4 * MIB)
    backend.put("file", data[shift:])
    back = aligned(3 * MIB + 10, seed=9)
    backend.read_into("file", 123, back[10:])
    assert bytes(back[10:]) == bytes(data[shift + 123 : shift + 123 + 3 * MIB])


def test_reading_past_the_end_is_corruption(backend: LocalBackend) -> None:
    backend.put("file", aligned(2 * MIB))
    for offset in (1, 4096, 2 * MIB, 2 * MIB + 1):
        with pytest.raises(CorruptionError, match="ends at byte"):
            backend.read_into("file", offset, aligned(2 * MIB))


def test_a_file_larger_than_expected_is_not_read(backend: LocalBackend) -> None:
    backend.put("file", b"12345")
    assert backend.get("file", max_bytes=5) == b"12345"
    with pytest.raises(CorruptionError, match="at most 4"):
        backend.get("file", max_bytes=4)


def test_what_is_not_there_is_a_missing_copy(backend: LocalBackend) -> None:
    backend.put("dir/file", b"x")
    for name in ("none", "dir/none", "none/file", "dir/file/below", "dir"):
        with pytest.raises(MissingCopyError):
            backend.get(name)
        assert backend.size_bytes(name) is None


def test_a_pipe_under_a_stored_name_does_not_hang_the_reader(backend: LocalBackend) -> None:
    backend.root.mkdir()
    os.mkfifo(backend.root / "pipe")
    with pytest.raises(MissingCopyError, match="regular"):
        backend.get("pipe")
    assert names(backend) == []


def test_put_replaces_whole_files(backend: LocalBackend) -> None:
    backend.put("file", b"old, and longer")
    assert backend.put("file", b"new")
    assert backend.get("file") == b"new"


def test_if_absent_never_replaces(backend: LocalBackend) -> None:
    assert backend.put("file", b"first", if_absent=True)
    assert not backend.put("file", b"second", if_absent=True)
    assert backend.get("file") == b"first"
    assert everything_below(backend.root) == ["file"]


def test_of_many_writers_of_one_name_one_wins(tmp_path: Path) -> None:
    start = threading.Barrier(8)
    wins: list[int] = []

    def write(number: int) -> None:
        backend = LocalBackend(tmp_path / "root")
        start.wait()
        if backend.put("dir/file", bytes([number]) * 100, if_absent=True):
            wins.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wins) == 1
    assert (tmp_path / "root/dir/file").read_bytes() == bytes(wins) * 100
    assert everything_below(tmp_path / "root") == ["dir", "dir/file"]


class LostAnswer(Files):
    """A network file system that makes the link and then loses the answer."""

    def __init__(self, code: int) -> None:
        self.code = code

    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize("code", [errno.EIO, errno.ETIMEDOUT, errno.EEXIST])
def test_a_link_whose_answer_was_lost_counts_as_made(tmp_path: Path, code: int) -> None:
    backend = LocalBackend(tmp_path, LostAnswer(code))
    assert backend.put("file", b"content", if_absent=True)
    assert everything_below(tmp_path) == ["file"]


def test_listing_shows_stored_files_by_prefix_and_no_unfinished_writes(backend: LocalBackend) -> None:
    for name in ("step-1/a", "step-1/b", "step-10/a", "other/a", "top"):
        backend.put(name, name.encode())
    (backend.root / "step-1/.tmp-1-a").write_bytes(b"half")
    (backend.root / ".tmp-2-top").write_bytes(b"half")
    (backend.root / "step-2").mkdir()
    assert names(backend) == ["other/a", "step-1/a", "step-1/b", "step-10/a", "top"]
    assert names(backend, "step-1") == ["step-1/a", "step-1/b", "step-10/a"]
    assert names(backend, "step-1/") == ["step-1/a", "step-1/b"]
    assert names(backend, "step-1/b") == ["step-1/b"]
    assert names(backend, "none/") == []
    assert backend.folders() == ["other", "step-1", "step-10", "step-2"]
    assert backend.folders("step-") == ["step-1", "step-10", "step-2"]
    assert backend.folders("step-1/") == []
    assert backend.unfinished() == [".tmp-2-top", "step-1/.tmp-1-a", "step-2/"]
    assert backend.unfinished("step-") == ["step-1/.tmp-1-a", "step-2/"]
    assert backend.unfinished("step-1/") == ["step-1/.tmp-1-a"]
    for name in backend.unfinished():
        backend.delete(name)
    assert backend.unfinished() == []
    assert len(names(backend)) == 5


def test_listing_a_root_that_does_not_exist_is_empty(backend: LocalBackend) -> None:
    assert backend.list() == []
    assert backend.list("step-") == []
    assert backend.folders("step-") == []
    assert backend.unfinished() == []


def test_delete_removes_everything_below_a_prefix(backend: LocalBackend) -> None:
    for name in ("a/1", "a/b/2", "ab/3"):
        backend.put(name, b"x")
    (backend.root / "a/.tmp-9-1").write_bytes(b"half")
    backend.delete("a/")
    assert everything_below(backend.root) == ["ab", "ab/3"]
    backend.delete("a/")
    backend.delete("a/1")
    backend.delete("none")
    backend.delete("ab/3")
    assert names(backend) == []


@pytest.mark.parametrize("name", ["", "/", "../", "a/../"])
def test_delete_never_reaches_the_root_or_beyond(backend: LocalBackend, name: str) -> None:
    backend.put("a/1", b"x")
    with pytest.raises(ConfigError):
        backend.delete(name)
    assert names(backend) == ["a/1"]


def test_links_are_removed_and_not_followed(backend: LocalBackend, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x")
    backend.put("dir/file", b"x")
    (backend.root / "dir/link").symlink_to(outside)
    (backend.root / "elsewhere").symlink_to(outside)
    assert names(backend) == ["dir/file"]
    with pytest.raises(StorageUnavailableError):
        backend.put("elsewhere/file", b"x")
    backend.delete("dir/")
    assert everything_below(outside) == ["precious"]


def test_a_directory_removed_by_another_process_is_made_again(backend: LocalBackend) -> None:
    other = LocalBackend(backend.root)
    backend.put("dir/one", b"1")
    other.delete("dir/")
    backend.put("dir/two", b"2")
    assert names(other) == ["dir/two"]


class SweptFiles(Files):
    """Another process removes the unfinished file while it is written; `stored` is what it has stored by then."""

    def __init__(self, target: Path, stored: bytes | None) -> None:
        self.target = target
        self.stored = stored
        self.num_sweeps = 0

    def link(self, source: Path, target: Path) -> None:
        if self.num_sweeps == 0:
            self.num_sweeps += 1
            source.unlink()
            if self.stored is not None:
                self.target.write_bytes(self.stored)
        super().link(source, target)


@pytest.mark.parametrize("stored", [None, b"same"])
def test_a_write_whose_unfinished_file_was_swept_still_ends_well(
    tmp_path: Path, stored: bytes | None
) -> None:
    backend = LocalBackend(tmp_path, SweptFiles(tmp_path / "file", stored))
    assert backend.put("file", b"same", if_absent=True) is (stored is None)
    assert backend.get("file") == b"same"
    assert everything_below(tmp_path) == ["file"]


@pytest.mark.parametrize("code", sorted(errno.errorcode))
@pytest.mark.parametrize("doing", ["reading", "writing", "listing", "removing", "looking at"])
def test_every_error_of_the_system_is_mapped(code: int, doing: str) -> None:
    error = storage_error(OSError(code, os.strerror(code)), url="file:///r", name="a/b", doing=doing)
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        expected: type[RelightError] = StorageFullError
    elif doing == "reading" and code in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
        expected = MissingCopyError
    else:
        expected = StorageUnavailableError
    assert type(error) is expected
    assert (error.tier, error.path) == ("file:///r", "a/b")
    assert "file:///r/a/b" in str(error)


def test_a_root_that_cannot_be_made_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageUnavailableError, match="file"):
        LocalBackend(tmp_path / "file" / "root").put("a", b"x")


@pytest.mark.parametrize("refused", ["open", "read"])
def test_file_systems_without_direct_io_are_read_through_the_page_cache(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    data = aligned(3 * MIB + 5)
    backend.put("file", data)
    drop_from_cache(backend.root / "file")
    direct: set[int] = set()
    real_open, real_preadv = os.open, os.preadv

    def open_file(path, flags, *args):
        if flags & os.O_DIRECT and refused == "open":
            raise OSError(errno.EINVAL, "no direct I/O")
        descriptor = real_open(path, flags & ~os.O_DIRECT, *args)
        if flags & os.O_DIRECT:
            direct.add(descriptor)
        return descriptor

    def preadv(descriptor, buffers, offset, *flags):
        if flags:
            raise OSError(errno.EOPNOTSUPP, "cannot tell")
        if descriptor in direct:
            direct.discard(descriptor)
            raise OSError(errno.EINVAL, "no direct I/O")
        return real_preadv(descriptor, buffers, offset)

    monkeypatch.setattr("relight.storage.file_read.os.open", open_file)
    monkeypatch.setattr("relight.storage.file_read.os.preadv", preadv)
    back = aligned(3 * MIB + 5, seed=9)
    backend.read_into("file", 0, back)
    monkeypatch.undo()
    assert bytes(back) == bytes(data)


def drop_from_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def test_a_cold_file_is_read_whole(backend: LocalBackend) -> None:
    data = aligned(5 * MIB + 77)
    backend.put("file", data)
    drop_from_cache(backend.root / "file")
    back = aligned(5 * MIB + 77, seed=9)
    backend.read_into("file", 0, back)
    assert bytes(back) == bytes(data)


def test_a_disk_error_while_reading_is_unavailable(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.put("file", aligned(2 * MIB))

    def preadv(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("relight.storage.file_read.os.preadv", preadv)
    with pytest.raises(StorageUnavailableError, match="Input/output error"):
        backend.read_into("file", 0, aligned(2 * MIB))


def test_looking_at_a_file_behind_a_loop_of_links_is_unavailable(backend: LocalBackend) -> None:
    backend.root.mkdir()
    (backend.root / "loop").symlink_to("loop")
    with pytest.raises(StorageUnavailableError):
        backend.size_bytes("loop")


def test_a_straggler_that_stores_while_its_directory_goes_is_removed_too(backend: LocalBackend) -> None:
    class Straggler(Files):
        num_late = 1

        def remove_dir(self, path: Path) -> None:
            if self.num_late:
                self.num_late -= 1
                (path / "late").write_bytes(b"late")
            super().remove_dir(path)

    files = Straggler()
    removing = LocalBackend(backend.root, files)
    backend.put("dir/file", b"x")
    removing.delete("dir/")
    assert everything_below(backend.root) == []
    backend.put("dir/file", b"x")
    files.num_late = 100
    with pytest.raises(StorageUnavailableError, match="not empty"):
        removing.delete("dir/")
