"""The narrow protocol that every storage backend fulfils, and the way from a URL to a backend.

Names are relative, "/"-separated and opaque to the backend: no globbing, no normalisation, no "..".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from relight.errors import ConfigError

__all__ = ["StorageBackend", "StoredFile", "open_backend"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One stored file: its `name` relative to the backend's root and its `size_bytes`."""

    name: str
    size_bytes: int


class StorageBackend(Protocol):
    """A place that holds whole, immutable files.

    Every method may raise `StorageUnavailableError`, `put` also `StorageFullError`; reading a name that is
    not there raises `MissingCopyError`. All methods may be called from several threads at once.
    """

    url: str

    def put(self, name: str, data: memoryview | bytes, *, if_absent: bool = False) -> bool:
        """Store `data` under `name`; after return it is whole and durable, never partial at any instant.

        With `if_absent` at most one of several concurrent writers wins; the others get False and change nothing.
        Without it an existing file of that name is replaced atomically.

        Returns:
            True if this call stored the file.
        """
        ...

    def put_blocks(
        self, name: str, size_bytes: int, blocks: Iterable[memoryview], *, if_absent: bool = False
    ) -> bool:
        """Store `blocks`, one behind the other, as `put` would; one at a time is in memory.

        Args:
            name: of the file.
            size_bytes: what the blocks have together.
            blocks: the content; one may be overwritten when the next is asked for. What it raises leaves nothing.
            if_absent: as for `put`.
        """
        ...

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        """Return the whole file; more than `max_bytes` raises `CorruptionError` before reading on."""
        ...

    def read_into(self, name: str, offset_bytes: int, target: memoryview) -> None:
        """Fill `target` from the file starting at `offset_bytes`; a shorter file raises `CorruptionError`."""
        ...

    def list(self, prefix: str = "") -> list[StoredFile]:
        """Return every stored file whose name starts with `prefix`, sorted by name, without unfinished writes."""
        ...

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Return the names up to the next "/" behind `prefix`, sorted: the directories, whatever is in them.

        Does not look into them, so its cost does not grow with the files that they hold.
        """
        ...

    def size_bytes(self, name: str) -> int | None:
        """Return the size of a stored file, or None if it is not there."""
        ...

    def delete(self, name: str) -> None:
        """Remove a file, or with a trailing "/" everything below that prefix (unfinished writes too).

        Absence is no error. The removal is durable after return.
        """
        ...

    def unfinished(self, prefix: str = "") -> Sequence[str]:
        """Return what writes that never ended left below `prefix`: names that `delete` takes, sorted.

        Temporary files by their names, directories without any file with a trailing "/". Deleting one that is
        still being written makes its `put` begin again, or return False if the file was stored meanwhile.
        """
        ...


def open_backend(url: str, *, bandwidth: float | None = None) -> StorageBackend:
    """Return the backend for `url`: a path or ``file:///path`` gives local files.

    Args:
        url: where the files are.
        bandwidth: limit for writing in bytes per second; None for no limit.

    Raises:
        ConfigError: the scheme is not known.
    """
    from relight.storage.local import LocalBackend, local_path
    from relight.storage.pacing import PacedFiles

    scheme, separator, _ = url.partition("://")
    if not separator or scheme == "file":
        return LocalBackend(local_path(url), PacedFiles(bandwidth) if bandwidth is not None else None)
    raise ConfigError(f"no storage backend for {url!r}: use a path or file:///path", tier=url)
