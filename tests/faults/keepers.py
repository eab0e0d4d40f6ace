"""What happens to a keeper in these tests: each function is called in the keeper's process before it serves."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any, Literal

from relight import stages
from relight.storage import local
from relight.testing.files import FileCall, FullDiskFiles, LayeredFiles, RecordingFiles
from relight.testing.trainers import block_at, note

__all__ = ["be_late", "be_slow", "fail_files", "fill_disk", "hold_drains", "record_files"]


def hold_drains(gate: str) -> None:
    """Write nothing while the file `gate` exists."""
    block_at("drain.started", gate)


def be_slow(seconds: float) -> None:
    """Take `seconds` longer for each snapshot that is stored."""

    def observe(point: str) -> None:
        if point == "drain.started":
            time.sleep(seconds)

    stages.subscribe(observe)


def _use(layer: LayeredFiles) -> None:
    local.Files = lambda: layer  # type: ignore[assignment,misc]


class _SwitchedFiles(LayeredFiles):
    """Fail with EIO from the n-th call on, while the file `switch` exists, which holds n."""

    def __init__(self, switch: Path) -> None:
        super().__init__()
        self._switch = switch
        self._armed = False
        self._num_calls = 0

    def call(self, operation: str, *args: Any, **options: Any) -> Any:
        if not self._switch.exists():
            self._armed = False
            return super().call(operation, *args, **options)
        if not self._armed:
            self._armed, self._num_calls = True, 0
        self._num_calls += 1
        if self._num_calls <= int(self._switch.read_text() or 0):
            return super().call(operation, *args, **options)
        if operation == "close":
            super().call(operation, *args, **options)
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def fail_files(switch: str) -> None:
    """Let file calls fail while `switch` exists: all after as many as it says."""
    _use(_SwitchedFiles(Path(switch)))


class _FillableFiles(LayeredFiles):
    """Fill the disk when the file `switch` appears, and free it when that goes."""

    def __init__(
        self, switch: Path, after_bytes: int, at: Literal["allocate", "write", "sync", "close"]
    ) -> None:
        super().__init__()
        self._switch = switch
        self._after_bytes = after_bytes
        self._at = at
        self._full: FullDiskFiles | None = None

    def call(self, operation: str, *args: Any, **options: Any) -> Any:
        if not self._switch.exists():
            self._full = None
            return super().call(operation, *args, **options)
        if self._full is None:
            self._full = FullDiskFiles(self._after_bytes, at=self._at)
        return self._full.call(operation, *args, **options)


def fill_disk(switch: str, after_bytes: int, at: Literal["allocate", "write", "sync", "close"]) -> None:
    """Let the disk be full after `after_bytes` while the file `switch` exists."""
    _use(_FillableFiles(Path(switch), after_bytes, at))


class _NotedCalls(RecordingFiles):
    def call(self, operation: str, *args: Any, **options: Any) -> Any:
        result = super().call(operation, *args, **options)
        seen: FileCall = self.calls[-1]
        note(
            operation=seen.operation,
            path=str(seen.path),
            target=str(seen.target) if seen.target is not None else None,
            num_bytes=seen.num_bytes,
        )
        return result


def record_files() -> None:
    """Note every file call."""
    _use(_NotedCalls())


def be_late(seconds: float) -> None:
    """See files of other processes only `seconds` after they are there, as over a network."""
    own: set[str] = set()
    seen_first: dict[str, float] = {}

    class Owned(LayeredFiles):
        def call(self, operation: str, *args: Any, **options: Any) -> Any:
            result = super().call(operation, *args, **options)
            if operation in ("link", "rename"):
                own.add(str(args[1]))
            return result

    _use(Owned())
    backend = local.LocalBackend
    size_bytes, listed = backend.size_bytes, backend.list

    def is_seen(self: local.LocalBackend, name: str) -> bool:
        path = str(self.root / name)
        since = seen_first.setdefault(path, time.monotonic())
        return path in own or time.monotonic() - since >= seconds

    def late_size(self: local.LocalBackend, name: str) -> int | None:
        found = size_bytes(self, name)
        return found if found is not None and is_seen(self, name) else None

    def late_list(self: local.LocalBackend, *args: Any, **options: Any) -> Any:
        return [stored for stored in listed(self, *args, **options) if is_seen(self, stored.name)]

    backend.size_bytes = late_size  # type: ignore[method-assign]
    backend.list = late_list  # type: ignore[method-assign]
