"""How a file is cut into records: by lines, by a fixed length, or by the user's splitter.

Each format can do two things: find where records end without keeping them, and read one whose place is known.
Nothing here knows about orders, ranks or epochs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from relight.checkpoint.stream_files import FileTable
from relight.errors import ConfigError, CorruptionError, StorageUnavailableError

__all__ = ["OpenFiles", "RecordFormat", "Splitter", "record_format"]

Splitter = Callable[[BinaryIO], Any]
"""Called with a file that stands at the start of a record; reads exactly that record and returns it."""

_Stops = npt.NDArray[np.int64]

_CHUNK_BYTES = 1 << 20
_AHEAD_BYTES = 8 << 20
_CHUNK_RECORDS = 1 << 16
_NEWLINE = 10
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")


class OpenFiles:
    """The files that this process read last, kept open; a forked or spawned process starts with none."""

    def __init__(self, limit: int = 16) -> None:
        self._limit = limit
        self._files: dict[str, BinaryIO] = {}
        self._pid = os.getpid()

    def get(self, path: str) -> BinaryIO:
        """Return `path` opened for reading, at any position."""
        if self._pid != os.getpid():
            # A forked process shares the position of what it inherited.
            self.close()
            self._pid = os.getpid()
        file = self._files.pop(path, None)
        if file is None:
            file = _open(path)
            if len(self._files) >= self._limit:
                self._files.pop(next(iter(self._files))).close()
        self._files[path] = file
        return file

    def close(self) -> None:
        """Close all."""
        while self._files:
            self._files.popitem()[1].close()

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[int]]:
        return OpenFiles, (self._limit,)


class RecordFormat(Protocol):
    """What a file's records are. Records follow one another without a gap from a file's first byte to its last."""

    @property
    def label(self) -> str | int:
        """What the run's settings say about the format."""
        ...

    def count(self, size: int) -> int | None:
        """Return the number of records in a file of `size` bytes; None if it must be read to know."""
        ...

    def stops(self, path: str, size: int, offset: int) -> Iterator[_Stops]:
        """Yield where the records from byte `offset` on end, in non-empty pieces (int64, shape (n,)).

        Raises:
            StorageUnavailableError: the file cannot be read.
            CorruptionError: it has become shorter than `size` bytes.
        """
        ...

    def read(self, files: OpenFiles, path: str, start: int, stop: int) -> Any:
        """Return the record in the bytes [start, stop).

        Raises:
            StorageUnavailableError, CorruptionError: as `stops`.
        """
        ...


def record_format(records: str | int | Splitter, table: FileTable) -> RecordFormat:
    """Return the format that the user's `records` stands for, checked against the files as far as sizes tell.

    Raises:
        ConfigError: it stands for nothing, a file's size is no multiple of the record length, or a file is compressed.
    """
    if callable(records):
        return SplitRecords(records)
    if records != "lines" and (type(records) is not int or records < 1):
        raise ConfigError(
            'FileStream: records must be "lines", a length in bytes, or a function that reads one record from a'
            f" binary file, not {records!r}"
        )
    for path, size in zip(table.paths, table.sizes, strict=True):
        if path.endswith(_COMPRESSED):
            raise ConfigError(
                f"FileStream: {path} is compressed, so that no record can be found without reading all before it;"
                " decompress the files, or compress each record and pass a splitter",
                path=path,
            )
        if isinstance(records, int) and size % records:
            raise ConfigError(
                f"FileStream: {path} has {size} bytes, which is no multiple of records of {records} bytes",
                path=path,
            )
    return FixedRecords(records) if isinstance(records, int) else LineRecords()


@dataclass(frozen=True, slots=True)
class LineRecords:
    """A record is a line without its newline byte; the last line may have none. Carriage returns are kept."""

    label: str = "lines"

    def count(self, size: int) -> int | None:
        """Return 0 for an empty file, else None."""
        return None if size else 0

    def stops(self, path: str, size: int, offset: int) -> Iterator[_Stops]:
        """Yield where lines end, a megabyte of the file at a time."""
        with _opened(path) as file:
            while offset < size:
                data = _read_some(file, path, min(_CHUNK_BYTES, size - offset), offset)
                found = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE) + (offset + 1)
                offset += len(data)
                if offset == size and data[-1] != _NEWLINE:
                    found = np.append(found, size)
                if found.size:
                    yield found.astype(np.int64, copy=False)

    def read(self, files: OpenFiles, path: str, start: int, stop: int) -> bytes:
        """Return the line in the bytes [start, stop)."""
        return _read_all(files, path, start, stop).removesuffix(b"\n")


@dataclass(frozen=True, slots=True)
class FixedRecords:
    """A record is `label` bytes. Finding records reads nothing."""

    label: int

    def count(self, size: int) -> int | None:
        """Return the number of records in `size` bytes."""
        return size // self.label

    def stops(self, path: str, size: int, offset: int) -> Iterator[_Stops]:  # noqa: ARG002 (a format's signature)
        """Yield where records end."""
        piece = _CHUNK_RECORDS * self.label
        for start in range(offset, size, piece):
            yield np.arange(start + self.label, min(start + piece, size) + 1, self.label, dtype=np.int64)

    def read(self, files: OpenFiles, path: str, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop)."""
        return _read_all(files, path, start, stop)


@dataclass(frozen=True, slots=True)
class SplitRecords:
    """A record is what the user's splitter reads in one call."""

    split: Splitter

    @property
    def label(self) -> str:
        """The splitter's name."""
        return str(getattr(self.split, "__qualname__", type(self.split).__qualname__))

    def count(self, size: int) -> int | None:
        """Return 0 for an empty file, else None."""
        return None if size else 0

    def stops(self, path: str, size: int, offset: int) -> Iterator[_Stops]:
        """Yield where records end, a thousand or about a megabyte of them at a time."""
        with _opened(path) as file:
            file.seek(offset)
            while offset < size:
                found: list[int] = []
                limit = min(size, offset + _CHUNK_BYTES)
                while offset < limit and len(found) < 1024:
                    _, offset = self._take(file, path, size, offset)
                    found.append(offset)
                yield np.array(found, dtype=np.int64)

    def read(self, files: OpenFiles, path: str, start: int, stop: int) -> Any:
        """Return the record in the bytes [start, stop)."""
        file = files.get(path)
        file.seek(start)
        record, end = self._take(file, path, stop, start)
        if end != stop:
            raise ConfigError(
                f"FileStream: {self.label} read the bytes {start} to {end} of {path} as a record, and {start} to"
                f" {stop} before; a splitter must read the same record from the same place each time",
                path=path,
            )
        return record

    def _take(self, file: BinaryIO, path: str, size: int, offset: int) -> tuple[Any, int]:
        try:
            record = self.split(file)
        except Exception as error:
            error.add_note(f"in the record at byte {offset} of {path}")
            raise
        stop = file.tell()
        if not offset < stop <= size:
            raise ConfigError(
                f"FileStream: {self.label} went from byte {offset} to {stop} of {path}, of {size}; it must read"
                " exactly one record, of at least one byte, in each call",
                path=path,
            )
        return record, stop


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    file = _open(path)
    try:
        yield file
    finally:
        file.close()


def _open(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise _unreadable(path, 0, error) from error


def _read_some(file: BinaryIO, path: str, num_bytes: int, offset: int) -> bytes:
    """Return up to `num_bytes` from `offset`, at least one, and let the kernel fetch what will be asked for soon."""
    try:
        data = os.pread(file.fileno(), num_bytes, offset)
        os.posix_fadvise(file.fileno(), offset + _AHEAD_BYTES, num_bytes, os.POSIX_FADV_WILLNEED)
    except OSError as error:
        raise _unreadable(path, offset, error) from error
    if not data:
        raise _shrunk(path, offset)
    return data


def _read_all(files: OpenFiles, path: str, start: int, stop: int) -> bytes:
    descriptor = files.get(path).fileno()
    pieces: list[bytes] = []
    while start < stop:
        try:
            data = os.pread(descriptor, stop - start, start)
        except OSError as error:
            raise _unreadable(path, start, error) from error
        if not data:
            raise _shrunk(path, start)
        pieces.append(data)
        start += len(data)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _unreadable(path: str, offset: int, error: OSError) -> StorageUnavailableError:
    return StorageUnavailableError(
        f"FileStream: cannot read {path} at byte {offset}: {error.strerror or error}; once it can be read again, start"
        " the run again: it goes on from its newest checkpoint, with the same records",
        path=path,
    )


def _shrunk(path: str, offset: int) -> CorruptionError:
    return CorruptionError(
        f"FileStream: {path} ends at byte {offset}, before the end that it had when the run began; files must not"
        " change while they are read: put the former one back and start the run again",
        path=path,
    )
