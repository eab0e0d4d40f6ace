"""Local files: the backend of local disks and shared file systems.

Must not know what the files mean.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from relight.errors import (
    ConfigError,
    CorruptionError,
    MissingCopyError,
    RelightError,
    StorageFullError,
    StorageUnavailableError,
)
from relight.storage.backend import StoredFile
from relight.storage.file_read import read_range
from relight.storage.file_write import NAME_MAX_BYTES, TEMP_PREFIX, write_blocks, write_whole
from relight.storage.files import Files

__all__ = ["LocalBackend", "local_path", "storage_error"]

_ATTEMPTS = 4
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}


def local_path(url: str) -> Path:
    """Return the absolute path that `url` names: ``file:///path``, an absolute path or a relative one.

    The path is opaque: nothing in it is decoded, expanded or matched as a pattern.

    Raises:
        ConfigError: another scheme, ``file://host/path``, an empty path, or one that begins with "~".
    """
    path = url.removeprefix("file://")
    if path != url and not path.startswith("/"):
        raise ConfigError(f"{url!r} names a host; write file:///path with three slashes", tier=url)
    if path == url and _SCHEME.match(url):
        raise ConfigError(
            f"{url!r} is no local path; write file:///path, or ./ before a relative one", tier=url
        )
    if not path or "\0" in path:
        raise ConfigError(
            f"{url!r} is no path; give a directory such as runs/gpt or file:///data/gpt", tier=url
        )
    if path == "~" or path.startswith("~/"):
        raise ConfigError(
            f"{url!r}: '~' is not expanded; use os.path.expanduser, or ./~ for that name", tier=url
        )
    absolute = Path.cwd() / path
    # Two spellings of one place must give one root, and only the file system knows what ".." after a link means.
    return Path(os.path.realpath(absolute)) if ".." in absolute.parts else absolute


def storage_error(
    error: OSError,
    *,
    url: str,
    name: str,
    doing: str,
    needed_bytes: int | None = None,
    free_bytes: int | None = None,
) -> RelightError:
    """Return the relight error for an operating-system error met while `doing` ("reading", ...) `name` below `url`.

    No space or quota: `StorageFullError`. Absent while reading: `MissingCopyError`. Anything else:
    `StorageUnavailableError`.
    """
    place = f"{url}/{name}"
    reason = f"{error.strerror or error} (errno {error.errno})"
    if error.errno in _FULL:
        sizes = f"; needs {needed_bytes} bytes, {free_bytes} are free" if needed_bytes is not None else ""
        return StorageFullError(
            f"no space while {doing} {place}: {reason}{sizes}",
            tier=url,
            path=name,
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )
    if doing == "reading" and error.errno in _MISSING:
        return MissingCopyError(f"{place} is not there", tier=url, path=name)
    return StorageUnavailableError(f"{doing} {place} failed: {reason}", tier=url, path=name)


class LocalBackend:
    """Files below one directory, which is made when the first file is stored. Fulfils `StorageBackend`.

    A stored file, and every directory above it up to the root, survives a loss of power once `put` returned.
    Links to directories below the root are neither followed nor written through.
    """

    def __init__(self, root: Path, files: Files | None = None) -> None:
        self.root = Path.cwd() / root
        self.url = f"file://{self.root}"
        self._files = files if files is not None else Files()
        self._durable_dirs: set[Path] = set()

    def put(self, name: str, data: memoryview | bytes, *, if_absent: bool = False) -> bool:
        """Store `data` under `name`; see `StorageBackend.put`.

        On failure the unfinished file is removed. A file found there already is durable too after return.
        """
        path = self._path_of(name)
        view = memoryview(data).cast("B")
        with self._mapped("writing", name, needed_bytes=view.nbytes):
            for _ in range(_ATTEMPTS - 1):
                try:
                    return self._put(path, view, if_absent=if_absent)
                except FileNotFoundError:
                    # Another process removed the directory, or took the unfinished file for a left-over.
                    self._durable_dirs.clear()
            return self._put(path, view, if_absent=if_absent)

    def put_blocks(
        self, name: str, size_bytes: int, blocks: Iterable[memoryview], *, if_absent: bool = False
    ) -> bool:
        """Store `blocks` under `name`; see `StorageBackend.put_blocks`."""
        path = self._path_of(name)
        with self._mapped("writing", name, needed_bytes=size_bytes):
            self._ensure_dir(path.parent)
            stored = write_blocks(self._files, path, size_bytes, blocks, if_absent=if_absent)
            self._files.sync_dir(path.parent)
        return stored

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        """Return the whole file; see `StorageBackend.get`."""
        with self._mapped("reading", name), self._opened(name) as descriptor:
            size_bytes = os.fstat(descriptor).st_size
            if max_bytes is not None and size_bytes > max_bytes:
                raise CorruptionError(
                    f"{self.url}/{name} has {size_bytes} bytes; at most {max_bytes} were expected",
                    tier=self.url,
                    path=name,
                )
            data = bytearray(size_bytes)
            done = read_range(descriptor, self._path_of(name), 0, memoryview(data))
        return bytes(data[:done])

    def read_into(self, name: str, offset_bytes: int, target: memoryview) -> None:
        """Fill `target` from the file; see `StorageBackend.read_into`.

        Fast for 1 MiB and more at page-aligned offsets into page-aligned memory.
        """
        view = target.cast("B")
        with self._mapped("reading", name), self._opened(name) as descriptor:
            done = read_range(descriptor, self._path_of(name), offset_bytes, view)
        if done < view.nbytes:
            end = offset_bytes + done
            raise CorruptionError(
                f"{self.url}/{name} ends at byte {end}; {offset_bytes + view.nbytes} were expected",
                tier=self.url,
                path=name,
            )

    def list(self, prefix: str = "") -> list[StoredFile]:
        """Return the stored files whose names start with `prefix`; see `StorageBackend.list`."""
        folder = prefix.rpartition("/")[0]
        top = self._path_of(folder) if folder else self.root
        with self._mapped("listing", prefix):
            return sorted(self._walk(top, folder, prefix), key=lambda file: file.name)

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Return the names of directories that start with `prefix`; see `StorageBackend.folders`."""
        above, _, start = prefix.rpartition("/")
        top = self._path_of(above) if above else self.root
        with self._mapped("listing", prefix):
            try:
                entries = list(os.scandir(top))
            except (FileNotFoundError, NotADirectoryError):
                return []
            found = [
                entry.name
                for entry in entries
                if entry.name.startswith(start)
                and not entry.name.startswith(TEMP_PREFIX)
                and entry.is_dir(follow_symlinks=False)
            ]
        return sorted(f"{above}/{name}" if above else name for name in found)

    def size_bytes(self, name: str) -> int | None:
        """Return the size of a stored file, or None if it is not there."""
        path = self._path_of(name)
        try:
            seen = path.stat()
        except OSError as error:
            if error.errno in _MISSING:
                return None
            raise storage_error(error, url=self.url, name=name, doing="looking at") from error
        return seen.st_size if stat.S_ISREG(seen.st_mode) else None

    def delete(self, name: str) -> None:
        """Remove a file, or everything below a name with a trailing "/"; durable after return."""
        path = self._path_of(name.removesuffix("/"), is_unfinished=True)
        with self._mapped("removing", name):
            if name.endswith("/"):
                self._durable_dirs.clear()
                self._remove_tree(path)
            else:
                with suppress(FileNotFoundError, NotADirectoryError):
                    self._files.unlink(path)
            # Absence is made durable too: whoever removed the file may have died before the directory was synced.
            with suppress(FileNotFoundError, NotADirectoryError):
                self._files.sync_dir(path.parent)

    def unfinished(self, prefix: str = "") -> Sequence[str]:
        """Return names of unfinished writes and of empty directories; see `StorageBackend.unfinished`."""
        folder = prefix.rpartition("/")[0]
        top = self._path_of(folder) if folder else self.root
        with self._mapped("listing", prefix):
            return sorted(self._leftovers(top, folder, prefix))

    def _path_of(self, name: str, *, is_unfinished: bool = False) -> Path:
        parts = name.split("/")
        for part in parts:
            is_temp = part.startswith(TEMP_PREFIX) and not is_unfinished
            if part in ("", ".", "..") or "\0" in part or is_temp:
                raise ConfigError(f"{name!r} is not a name below {self.url}", tier=self.url, path=name)
            if len(os.fsencode(part)) > NAME_MAX_BYTES:
                raise ConfigError(f"{part!r} is longer than {NAME_MAX_BYTES} bytes", tier=self.url, path=name)
        return self.root.joinpath(*parts)

    @contextmanager
    def _mapped(self, doing: str, name: str, needed_bytes: int | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            free = self._free_bytes() if error.errno in _FULL else None
            raise storage_error(
                error, url=self.url, name=name, doing=doing, needed_bytes=needed_bytes, free_bytes=free
            ) from error

    def _free_bytes(self) -> int | None:
        try:
            seen = os.statvfs(self.root)
        except OSError:
            return None
        return seen.f_bavail * seen.f_frsize

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        # Without O_NONBLOCK a pipe under a stored name would hang the reader.
        descriptor = os.open(self._path_of(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise MissingCopyError(f"{self.url}/{name} is not a regular file", tier=self.url, path=name)
            yield descriptor
        finally:
            os.close(descriptor)

    def _put(self, path: Path, view: memoryview, *, if_absent: bool) -> bool:
        self._ensure_dir(path.parent)
        found = if_absent and path.exists()
        stored = not found and write_whole(self._files, path, view, if_absent=if_absent)
        # Also when another stored it: our caller goes on as if it were durable.
        self._files.sync_dir(path.parent)
        return stored

    def _ensure_dir(self, folder: Path) -> None:
        if folder in self._durable_dirs:
            return
        below_root = folder != self.root and self.root in folder.parents
        exists = folder.is_dir() and not (below_root and folder.is_symlink())
        if exists and not below_root and folder != self.root:
            # Above the root, what is there is not ours to answer for.
            return
        if below_root or not exists:
            self._ensure_dir(folder.parent)
        if not exists:
            try:
                self._files.make_dir(folder)
            except FileExistsError:
                # Another process made the same directory just now: good. A file or a link: not.
                if folder.is_symlink() or not folder.is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(folder)) from None
        try:
            self._files.sync_dir(folder.parent)
        except PermissionError:
            # A directory given to us below one that we may not read: whoever made it answers for it.
            if not exists:
                raise
        self._durable_dirs.add(folder)

    def _walk(self, top: Path, name: str, prefix: str) -> Iterator[StoredFile]:
        try:
            entries = list(os.scandir(top))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            entry_name = f"{name}/{entry.name}" if name else entry.name
            if entry.name.startswith(TEMP_PREFIX) or not entry_name.startswith(prefix):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(top / entry.name, entry_name, prefix)
            elif entry.is_file():
                with suppress(FileNotFoundError):
                    yield StoredFile(name=entry_name, size_bytes=entry.stat().st_size)

    def _leftovers(self, top: Path, name: str, prefix: str) -> Iterator[str]:
        try:
            entries = list(os.scandir(top))
        except (FileNotFoundError, NotADirectoryError):
            return
        is_asked = f"{name}/".startswith(prefix) if name else not prefix
        if not entries and name and is_asked:
            yield f"{name}/"
        for entry in entries:
            entry_name = f"{name}/{entry.name}" if name else entry.name
            if entry.name.startswith(TEMP_PREFIX):
                if is_asked:
                    yield entry_name
            elif entry_name.startswith(prefix) and entry.is_dir(follow_symlinks=False):
                yield from self._leftovers(top / entry.name, entry_name, prefix)

    def _remove_tree(self, folder: Path) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                self._remove_below(folder)
            except OSError as error:
                # A straggler may store one more file between our listing and the removal of the directory.
                if error.errno != errno.ENOTEMPTY or attempt == _ATTEMPTS - 1:
                    raise
            else:
                return

    def _remove_below(self, folder: Path) -> None:
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            return
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                self._remove_below(folder / entry.name)
            else:
                with suppress(FileNotFoundError):
                    self._files.unlink(folder / entry.name)
        with suppress(FileNotFoundError):
            self._files.remove_dir(folder)
