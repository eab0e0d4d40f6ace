"""A target outside of any run that comes to exist whole or not at all: written beside its place, then renamed.

Whatever happens, nothing half-written has the target's name. What a killed process left is removed by the next one
that writes the same target.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from relight.errors import ConfigError
from relight.stages import reached
from relight.storage.file_write import TEMP_PREFIX
from relight.storage.files import Files
from relight.storage.local import local_path, storage_error

__all__ = ["POINTS", "Output", "Stage"]

POINTS = ("stage.made", "stage.file_written", "stage.published")
"""Points announced while a target is made, in their order; the second once for each file."""

_CALL_BYTES = 8 * 2**20
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class Output(io.RawIOBase):
    """One file being written; may be sought, so that what is known late can be put in front."""

    def __init__(self, files: Files, path: Path) -> None:
        self._files = files
        self._at = 0
        self._descriptor = -1
        self._descriptor = files.create(path, direct=False)

    def tell(self) -> int:
        """Return the present position."""
        return self._at

    def seek(self, offset: int, _whence: int = io.SEEK_SET) -> int:
        """Go to a position, counted from the start: nobody asks for another."""
        self._at = offset
        return offset

    def write(self, data: Any) -> int:
        """Write all of `data` at the present position."""
        view = memoryview(data).cast("B")
        done = 0
        while done < view.nbytes:
            taken = self._files.write(self._descriptor, view[done : done + _CALL_BYTES], self._at + done)
            if taken <= 0:
                raise OSError(errno.EIO, "the file system took no bytes")
            done += taken
        self._at += done
        return done

    def finish(self) -> None:
        """Make the content durable, and have later reads come from the disk instead of memory."""
        self._files.sync(self._descriptor)
        with suppress(OSError):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file; its content is durable only after `finish`."""
        if not self.closed:
            super().close()
            if self._descriptor >= 0:
                self._files.close(self._descriptor)


class Stage:
    """A directory beside the target, in which it is made. Use as a context manager; call `publish` at the end.

    Args:
        target: path or ``file:///path`` of what will exist.
        is_folder: whether that is a directory; else it is the one file of that name in `folder`.
        force: replace what is there.
        ours: what names of files end with that may be removed with a directory that is replaced.
        files: the file calls.

    Raises:
        ConfigError: the target exists, and may not be replaced; or its place does not.
    """

    def __init__(
        self,
        target: str,
        *,
        is_folder: bool,
        force: bool = False,
        ours: tuple[str, ...] = (),
        files: Files | None = None,
    ) -> None:
        self.target = local_path(target.rstrip("/") or target)
        self._is_folder = is_folder
        self._force = force
        self._ours = ours
        self._files = files if files is not None else Files()
        self._lock = -1
        self._check()
        self.folder = self._path(f"{secrets.token_hex(8)}-{self.target.name}")

    def __enter__(self) -> Self:
        with self.mapped():
            self._remove_stale()
            self._files.make_dir(self.folder)
            try:
                self._lock = _locked(self.folder)
            except OSError:
                self.folder.rmdir()
                raise
        reached("stage.made")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    @contextmanager
    def output(self, name: str) -> Iterator[Output]:
        """Write file `name`; durable after a clean end."""
        with self.mapped():
            with Output(self._files, self.folder / name) as opened:
                yield opened
                opened.finish()
            reached("stage.file_written")

    def publish(self) -> None:
        """Give the target its name; durable after return.

        Raises:
            ConfigError: something else has got that name meanwhile.
        """
        made = self.folder if self._is_folder else self.folder / self.target.name
        with self.mapped():
            self._files.sync_dir(self.folder)
            self._check()
            if self._is_folder and self._force and self.target.exists():
                _exchange(made, self.target)
            elif self._is_folder or self._force:
                self._files.rename(made, self.target)
            else:
                self._name_once(made)
            self._files.sync_dir(self.target.parent)
        reached("stage.published")

    def _name_once(self, made: Path) -> None:
        try:
            self._files.link(made, self.target)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            # A file system without links; that nothing is there was checked just now.
            self._files.rename(made, self.target)

    @contextmanager
    def mapped(self) -> Iterator[None]:
        """Turn errors of the operating system into relight's."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                raise self._taken() from error
            url = f"file://{self.target.parent}"
            raise storage_error(error, url=url, name=self.target.name, doing="writing") from error

    def _path(self, rest: str) -> Path:
        return self.target.parent / f"{TEMP_PREFIX}{rest}"

    def _check(self) -> None:
        if not self.target.parent.is_dir():
            raise ConfigError(f"{self.target.parent} is no directory; make it first", path=str(self.target))
        if not os.path.lexists(self.target):
            return
        if self.target.is_symlink() or self.target.is_dir() != self._is_folder:
            kind = "a directory" if self._is_folder else "a file"
            raise ConfigError(
                f"{self.target} is there and is not {kind}; choose another target", path=str(self.target)
            )
        names = sorted(os.listdir(self.target)) if self._is_folder else []
        if self._is_folder and not names:
            return
        if not self._force:
            raise self._taken()
        strange = next((name for name in names if not name.endswith(self._ours)), None)
        if strange is not None:
            raise ConfigError(
                f"{self.target} holds {strange!r}, which no export wrote; --force does not remove that",
                path=str(self.target),
            )

    def _taken(self) -> ConfigError:
        return ConfigError(f"{self.target} is there already; --force replaces it", path=str(self.target))

    def _remove_stale(self) -> None:
        """Remove what processes that are gone left of the same target."""
        for entry in self.target.parent.iterdir():
            head, _, name = entry.name.removeprefix(TEMP_PREFIX).partition("-")
            is_stage = entry.name.startswith(TEMP_PREFIX) and name == self.target.name and len(head) == 16
            if is_stage and entry.is_dir() and not entry.is_symlink():
                with suppress(OSError):
                    lock = _locked(entry)
                    shutil.rmtree(entry, ignore_errors=True)
                    os.close(lock)


def _locked(folder: Path) -> int:
    """Return a descriptor that holds the lock of `folder` until it is closed or the process ends.

    Raises:
        OSError: another process holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _exchange(made: Path, target: Path) -> None:
    """Swap two directories in one step."""
    libc = ctypes.CDLL(None, use_errno=True)
    ours, theirs = os.fsencode(made), os.fsencode(target)
    if libc.renameat2(_AT_FDCWD, ours, _AT_FDCWD, theirs, _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.ENOSYS):
            raise ConfigError(
                f"the file system of {target} cannot replace a directory in one step; remove it first",
                path=str(target),
            )
        raise OSError(code, os.strerror(code))
