"""The files of a stream: which they are, in which order an epoch takes them, and what tells one list from another."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from relight.checkpoint.order import SampleOrder
from relight.checkpoint.rng import derive_seed
from relight.errors import ConfigError

__all__ = ["FilePaths", "FileTable", "open_table"]

FilePaths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""Paths, or glob patterns, or one of them."""

_GLOB_LETTERS = frozenset("*?[")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTable:
    """The files in the order they were given; a glob's are sorted. Sizes are those at the start of the run."""

    paths: tuple[str, ...]
    names: tuple[str, ...]
    """Paths below the folder that all files share, so that a moved folder is the same data."""
    sizes: tuple[int, ...]
    """In bytes."""
    digests: tuple[bytes, ...]
    """Of each file's name and size."""
    fingerprint: str
    """Of the whole list, in its order."""

    def __len__(self) -> int:
        return len(self.paths)

    def describe(self) -> str:
        """Return what a list of files is told from another by: count, bytes, digest of names and sizes."""
        return f"{len(self)} files, {sum(self.sizes)} bytes, names and sizes {self.fingerprint}"

    def order(self, *, seed: int, epoch: int, shuffle: bool) -> tuple[int, ...]:
        """Return the indices of the files in the order in which `epoch` takes them."""
        if not shuffle:
            return tuple(range(len(self)))
        order = SampleOrder(len(self), seed=derive_seed("relight stream files", seed), epoch=epoch)
        return tuple(order.ids_at(np.arange(len(self))))

    def digest_of(self, indices: Sequence[int]) -> str:
        """Return a digest of the names and sizes of some files, in their order."""
        return _digest(self.digests[index] for index in indices)


def open_table(files: FilePaths) -> FileTable:
    """Look the files up.

    Args:
        files: paths, or patterns with ``*``, ``?``, ``[...]`` and ``**``, or one of them. An existing path is never
            taken for a pattern.

    Raises:
        ConfigError: there is no file, or one is missing, no regular file, or cannot be reached.
    """
    given = [files] if isinstance(files, str | os.PathLike) else list(files)
    paths = [path for item in given for path in _expand(os.fspath(item))]
    if not paths:
        raise ConfigError("FileStream: the list of files is empty")
    sizes = tuple(_size_of(path) for path in paths)
    whole = [os.path.abspath(path) for path in paths]
    shared = os.path.commonpath([os.path.dirname(path) for path in whole])
    names = tuple(os.path.relpath(path, shared) for path in whole)
    digests = tuple(_file_digest(name, size) for name, size in zip(names, sizes, strict=True))
    return FileTable(
        paths=tuple(paths), names=names, sizes=sizes, digests=digests, fingerprint=_digest(digests)
    )


def _expand(path: str) -> list[str]:
    if not _GLOB_LETTERS & set(path) or os.path.lexists(path):
        return [path]
    found = sorted(match for match in glob.glob(path, recursive=True) if os.path.isfile(match))
    if not found:
        raise ConfigError(f"FileStream: no file matches {path!r}", path=path)
    return found


def _size_of(path: str) -> int:
    try:
        found = os.stat(path)
    except OSError as error:
        raise ConfigError(f"FileStream: {path}: {error.strerror or error}", path=path) from error
    if not stat.S_ISREG(found.st_mode):
        hint = f"; give its files, such as {os.path.join(path, '*')!r}" if stat.S_ISDIR(found.st_mode) else ""
        raise ConfigError(f"FileStream: {path} is no regular file{hint}", path=path)
    return found.st_size


def _file_digest(name: str, size: int) -> bytes:
    # No file name holds a zero byte.
    return xxhash.xxh3_128_digest(os.fsencode(name) + b"\0" + str(size).encode())


def _digest(digests: Iterable[bytes]) -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(digests))
