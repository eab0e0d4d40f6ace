"""Fault layers for `LocalBackend`: record its file calls, fill the disk, fail or stop at the n-th call, cut the power.

Each layer is a `Files` around another one, so they combine: ``KillingFiles(7, inner=PowerLossFiles(root))``.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from relight.storage.files import Files

__all__ = [
    "FailingFiles",
    "FileCall",
    "FullDiskFiles",
    "Killed",
    "KillingFiles",
    "LayeredFiles",
    "PowerLossFiles",
    "RecordingFiles",
    "UnsyncedFiles",
]


class LayeredFiles(Files):
    """Pass every call on to `inner`; a subclass overrides `call`, which sees all of them."""

    def __init__(self, inner: Files | None = None) -> None:
        self.inner = inner if inner is not None else Files()

    def call(self, operation: str, *args: Any, **options: Any) -> Any:
        """Carry out one call; `operation` is the name of a method of `Files`."""
        return getattr(self.inner, operation)(*args, **options)

    def create(self, path: Path, *, direct: bool) -> int:
        """See `Files.create`."""
        descriptor: int = self.call("create", path, direct=direct)
        return descriptor

    def allocate(self, descriptor: int, num_bytes: int) -> None:
        """See `Files.allocate`."""
        self.call("allocate", descriptor, num_bytes)

    def write(self, descriptor: int, data: memoryview, offset_bytes: int) -> int:
        """See `Files.write`."""
        taken: int = self.call("write", descriptor, data, offset_bytes)
        return taken

    def truncate(self, descriptor: int, num_bytes: int) -> None:
        """See `Files.truncate`."""
        self.call("truncate", descriptor, num_bytes)

    def sync(self, descriptor: int) -> None:
        """See `Files.sync`."""
        self.call("sync", descriptor)

    def close(self, descriptor: int) -> None:
        """See `Files.close`."""
        self.call("close", descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """See `Files.rename`."""
        self.call("rename", source, target)

    def link(self, source: Path, target: Path) -> None:
        """See `Files.link`."""
        self.call("link", source, target)

    def unlink(self, path: Path) -> None:
        """See `Files.unlink`."""
        self.call("unlink", path)

    def make_dir(self, path: Path) -> None:
        """See `Files.make_dir`."""
        self.call("make_dir", path)

    def remove_dir(self, path: Path) -> None:
        """See `Files.remove_dir`."""
        self.call("remove_dir", path)

    def sync_dir(self, path: Path) -> None:
        """See `Files.sync_dir`."""
        self.call("sync_dir", path)


class UnsyncedFiles(Files):
    """Real calls without the waits for the disk: for tests whose loss of power is simulated anyway."""

    def sync(self, descriptor: int) -> None:
        """Return at once: `descriptor` counts as synced."""

    def sync_dir(self, path: Path) -> None:
        """Return at once; a directory that is not there is an error, as ever."""
        path.stat()


@dataclass(frozen=True, slots=True)
class FileCall:
    """One recorded call: the operation, the file it concerns, the second path of a link or rename, bytes written."""

    operation: str
    path: Path
    target: Path | None = None
    num_bytes: int = 0


class RecordingFiles(LayeredFiles):
    """Keep every call that succeeded in `calls`, in order; descriptors are shown as the paths they stand for."""

    def __init__(self, inner: Files | None = None) -> None:
        super().__init__(inner)
        self.calls: list[FileCall] = []
        self._paths: dict[int, Path] = {}
        self._lock = threading.Lock()

    def call(self, operation: str, *args: Any, **options: Any) -> Any:
        """Carry out the call, then record it."""
        first = args[0]
        path = self._paths.get(first, Path("?")) if isinstance(first, int) else first
        result = super().call(operation, *args, **options)
        with self._lock:
            if operation == "create":
                self._paths[result] = path
            target = args[1] if operation in ("link", "rename") else None
            num_bytes = result if operation == "write" else 0
            self.calls.append(FileCall(operation, path, target, num_bytes))
        return result

    def operations(self) -> list[str]:
        """Return the names of the recorded operations, in order."""
        return [call.operation for call in self.calls]


class FullDiskFiles(LayeredFiles):
    """Let the disk be full after `after_bytes` written bytes, until `free_space` is called.

    Args:
        after_bytes: how many bytes still fit.
        at: which call notices. "write" takes what fits and then refuses; "allocate" refuses before anything is
            written; "sync" and "close" refuse late, as network file systems do.
        inner: what carries the calls out.
    """

    def __init__(
        self,
        after_bytes: int,
        *,
        at: Literal["allocate", "write", "sync", "close"] = "write",
        inner: Files | None = None,
    ) -> None:
        super().__init__(inner)
        self.num_refused = 0
        self._left_bytes: int | None = after_bytes
        self._at = at
        self._lock = threading.Lock()

    def free_space(self) -> None:
        """Let everything fit from now on."""
        with self._lock:
            self._left_bytes = None

    def call(self, operation: str, *args: Any, **options: Any) -> Any:
        """Carry out the call unless the disk is full."""
        with self._lock:
            if self._left_bytes is None:
                return super().call(operation, *args, **options)
            if operation == "allocate":
                if self._at == "allocate" and args[1] > self._left_bytes:
                    self._refuse()
                # Space reserved for real would hide that the write meets a full disk.
                return None
            if operation == "write":
                return self._write(*args)
            result = super().call(operation, *args, **options)
            if operation == self._at and self._left_bytes <= 0:
                self._refuse()
            return result

    def _write(self, descriptor: int, data: memoryview, offset_bytes: int) -> Any:
        left = self._left_bytes if self._left_bytes is not None else data.nbytes
        if self._at == "write":
            if left <= 0:
                self._refuse()
            data = data[:left]
        taken = super().call("write", descriptor, data, offset_bytes)
        self._left_bytes = left - taken
        return taken

    def _refuse(self) -> NoReturn:
        self.num_refused += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FailingFiles(LayeredFiles):
    """Let the `at`-th call (counted from 0) fail with `code`, and no other; counts all calls in `num_calls`."""

    def __init__(self, at: int, *, code: int = errno.EIO, inner: Files | None = None) -> None:
        super().__init__(inner)
        self.num_calls = 0
        self._at = at
        self._code = code

    def call(self, operation: str, *args: Any, **options: Any) -> Any:
        """Carry out the call unless its turn has come; a failing `close` still closes."""
        number = self.num_calls
        self.num_calls += 1
        if number == self._at:
            if operation == "close":
                super().call(operation, *args, **options)
            raise OSError(self._code, os.strerror(self._code))
        return super().call(operation, *args, **options)


class Killed(BaseException):
    """The process of a test was "killed" at this point; nothing after it may touch the disk."""


def _kill_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class KillingFiles(LayeredFiles):
    """Let `after_calls` calls happen, then die.

    Args:
        after_calls: how many calls are still carried out.
        die: what ends the process; SIGKILL by default. Anything that returns makes this and every later call raise
            `Killed`, so that clean-up code of the "dead" process cannot touch the disk.
        inner: what carries the calls out.
    """

    def __init__(
        self, after_calls: int, *, die: Callable[[], None] = _kill_process, inner: Files | None = None
    ) -> None:
        super().__init__(inner)
        self.num_calls = 0
        self._after_calls = after_calls
        self._die = die

    @property
    def is_dead(self) -> bool:
        """Whether death came."""
        return self.num_calls > self._after_calls

    def call(self, operation: str, *args: Any, **options: Any) -> Any:
        """Carry out the call, or die instead of it."""
        self.num_calls += 1
        if not self.is_dead:
            return super().call(operation, *args, **options)
        if operation == "close":
            # The kernel closes what a dead process held open.
            super().call(operation, *args, **options)
        self._die()
        raise Killed(operation)


@dataclass(slots=True, eq=False)
class _File:
    durable: bytes | None = None


@dataclass(slots=True, eq=False)
class _Dir:
    durable: dict[str, _File | _Dir] = field(default_factory=dict)
    current: dict[str, _File | _Dir] = field(default_factory=dict)


class PowerLossFiles(LayeredFiles):
    """Know what of the tree below `root` a loss of power would leave.

    That is content that was fsynced, under names whose directory was fsynced since. What is there at the start
    counts as durable.
    """

    def __init__(self, root: Path, inner: Files | None = None) -> None:
        super().__init__(inner)
        self.root = root
        self._top = _adopt(root)
        self._open: dict[int, _File] = {}
        self._lock = threading.Lock()

    def call(self, operation: str, *args: Any, **options: Any) -> Any:
        """Carry out the call and note what it makes durable and what not."""
        with self._lock:
            result = super().call(operation, *args, **options)
            match operation:
                case "create":
                    self._open[result] = _File()
                    self._names(args[0])[args[0].name] = self._open[result]
                case "sync":
                    self._open[args[0]].durable = Path(f"/proc/self/fd/{args[0]}").read_bytes()
                case "close":
                    del self._open[args[0]]
                case "link":
                    self._names(args[1])[args[1].name] = self._names(args[0])[args[0].name]
                case "rename":
                    self._names(args[1])[args[1].name] = self._names(args[0]).pop(args[0].name)
                case "unlink" | "remove_dir":
                    del self._names(args[0])[args[0].name]
                case "make_dir":
                    self._names(args[0])[args[0].name] = _Dir()
                case "sync_dir":
                    if args[0].is_relative_to(self.root):
                        folder = self._dir(args[0])
                        folder.durable = dict(folder.current)
            return result

    def cut_power(self, rng: random.Random | None = None) -> None:
        """Turn the tree into what is left after a loss of power.

        Without `rng` only what is guaranteed is left. With it each change that was not made durable is, by chance,
        there or not, and content that was not fsynced is cut at a random place: what a real disk may do.
        """
        with self._lock:
            _clear(self.root)
            _rebuild(self.root, self._top, rng)
            self._top = _adopt(self.root)
            self._open.clear()

    def _dir(self, path: Path) -> _Dir:
        node: _File | _Dir = self._top
        for part in path.relative_to(self.root).parts:
            node = node.current[part] if isinstance(node, _Dir) else _Dir()
        if not isinstance(node, _Dir):
            raise NotADirectoryError(path)
        return node

    def _names(self, path: Path) -> dict[str, _File | _Dir]:
        if not path.is_relative_to(self.root) or path == self.root:
            # Above the root nothing is modelled.
            return {path.name: _File()}
        return self._dir(path.parent).current


def _adopt(folder: Path) -> _Dir:
    node = _Dir()
    known: dict[int, _File] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir():
            node.current[path.name] = _adopt(path)
        else:
            node.current[path.name] = known.setdefault(path.stat().st_ino, _File(path.read_bytes()))
    node.durable = dict(node.current)
    return node


def _clear(folder: Path) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir():
            _clear(path)
            path.rmdir()
        else:
            path.unlink()


def _rebuild(folder: Path, node: _Dir, rng: random.Random | None) -> None:
    for name in sorted(node.durable.keys() | node.current.keys()):
        child = node.durable.get(name)
        if rng is not None and rng.random() < 0.5:
            child = node.current.get(name)
        path = folder / name
        if isinstance(child, _Dir):
            path.mkdir()
            _rebuild(path, child, rng)
        elif child is not None:
            content = child.durable
            if content is None:
                content = b"" if rng is None else rng.randbytes(rng.randrange(64))
            path.write_bytes(content)
