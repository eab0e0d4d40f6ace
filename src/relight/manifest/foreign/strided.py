"""Tensors that are not contiguous where they are stored, such as transposed ones, read in row-major order."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from relight.errors import CorruptionError, UnknownFormatError
from relight.storage.backend import StorageBackend
from relight.storage.local import local_path, storage_error

__all__ = ["StridedView", "is_contiguous"]

_WORDS: Mapping[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Tell whether elements of `shape`, none of it 0, lie in row-major order without gaps; strides in elements."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class StridedView:
    """A tensor in file `name` of `backend` whose first element is at `base_bytes`; strides are in elements."""

    backend: StorageBackend
    name: str
    base_bytes: int
    item_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def read(self, start_bytes: int, target: memoryview) -> None:
        """Fill `target` with row-major bytes from `start_bytes` on; both must be at elements.

        Reads through a mapping of the file, which the system may drop at any time and which is given up at the end.

        Raises:
            UnknownFormatError: the file is not on this machine.
            CorruptionError: it is too short.
        """
        if not self.backend.url.startswith("file://"):
            raise UnknownFormatError(
                f"{self.backend.url}/{self.name} holds tensors that are not contiguous; copy it to this machine first",
                path=self.name,
            )
        path = local_path(self.backend.url) / self.name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._read_from(descriptor, start_bytes, target)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise storage_error(error, url=self.backend.url, name=self.name, doing="reading") from error

    def _read_from(self, descriptor: int, start_bytes: int, target: memoryview) -> None:
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)) + 1
        end_bytes = self.base_bytes + reach * self.item_bytes
        if os.fstat(descriptor).st_size < end_bytes:
            raise CorruptionError(f"{self.name} has fewer than {end_bytes} bytes by now", path=self.name)
        skip = self.base_bytes % mmap.ALLOCATIONGRANULARITY
        length, offset = end_bytes - self.base_bytes + skip, self.base_bytes - skip
        with (
            mmap.mmap(descriptor, length, access=mmap.ACCESS_READ, offset=offset) as mapped,
            memoryview(mapped) as whole,
            whole[skip:] as viewed,
        ):
            self._copy(viewed, start_bytes, target)

    def _copy(self, viewed: memoryview, start_bytes: int, target: memoryview) -> None:
        shape, strides, item_bytes = self.shape, self.strides, self.item_bytes
        if item_bytes == 16:
            # No machine word is that large: each element is two, side by side.
            shape, strides, item_bytes = (*shape, 2), (*(2 * stride for stride in strides), 1), 8
        word = _WORDS[item_bytes]
        out = target.cast(word)
        first = start_bytes // item_bytes
        done = 0
        with viewed.cast(word) as items:
            for at, count, stride in _runs(shape, strides, first, first + len(out)):
                if stride == 0 and count > 1:
                    out[done : done + count] = memoryview(bytes(items[at : at + 1]) * count).cast(word)
                else:
                    step = max(stride, 1)
                    out[done : done + count] = items[at : at + (count - 1) * step + 1 : step]
                done += count


def _runs(
    shape: tuple[int, ...], strides: tuple[int, ...], first: int, after: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (first element in storage, count, stride) of each run along the last dim, for elements [first, after)."""
    width, stride = shape[-1], strides[-1]
    row, column = divmod(first, width)
    left = after - first
    while left > 0:
        at, rest = 0, row
        for size, step in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
            rest, index = divmod(rest, size)
            at += index * step
        count = min(left, width - column)
        yield at + column * stride, count, stride
        left -= count
        row, column = row + 1, 0
