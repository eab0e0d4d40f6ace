"""A tensor that is stored in boxes, read as one run of row-major bytes; any range of it, with bounded memory.

Must not know where boxes are stored: each comes with a function that reads it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from relight.manifest.shard import Box

__all__ = ["CHUNK_BYTES", "Assembly", "ReadBytes", "Tensor"]

CHUNK_BYTES = 8 * 2**20
"""How much of a tensor is handled at once by whoever copies one."""

ReadBytes = Callable[[int, memoryview], None]
"""Called as read(start_bytes, target): fills `target` with the row-major bytes from `start_bytes` on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor to be read, wherever it is stored.

    Attributes:
        name: what its holder calls it.
        dtype: relight's dtype name.
        shape: global shape.
        num_bytes: size of all its elements.
        read: fills a buffer from any byte of it on; a range that ends inside an element is allowed.
        place: where it is stored, to sort by: neighbours in storage follow each other.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    read: ReadBytes
    place: tuple[Any, ...] = ()


class Assembly:
    """A row-major tensor that lies in boxes which cover it once.

    Args:
        shape: of the whole tensor.
        item_bytes: size of an element.
        pieces: (box, function that reads the box's own row-major bytes).
    """

    def __init__(
        self, shape: tuple[int, ...], item_bytes: int, pieces: Sequence[tuple[Box, ReadBytes]]
    ) -> None:
        self._runs = [_Runs(shape, item_bytes, box, read) for box, read in pieces if box.num_elements]

    def read(self, start_bytes: int, target: memoryview) -> None:
        """Fill `target` with the bytes of the tensor from `start_bytes` on.

        Besides `target` it takes at most as much memory again.
        """
        for runs in self._runs:
            runs.fill(start_bytes, target)


class _Runs:
    """The runs of one box that are contiguous in the whole tensor: all of one length, in rising order."""

    def __init__(self, shape: tuple[int, ...], item_bytes: int, box: Box, read: ReadBytes) -> None:
        split = max(len(shape) - 1, 0)
        while split > 0 and box.sizes[split] == shape[split]:
            split -= 1
        strides = [math.prod(shape[dim + 1 :]) * item_bytes for dim in range(len(shape))]
        self._read = read
        self._outer = tuple(zip(box.sizes[:split], strides[:split], strict=True))
        self._run_bytes = math.prod(box.sizes[split:]) * item_bytes
        self._num_runs = math.prod(box.sizes[:split])
        self._base = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))

    def fill(self, start_bytes: int, target: memoryview) -> None:
        """Put what the box has of [start_bytes, start_bytes + length of target) to its place in `target`."""
        stop_bytes, run_bytes = start_bytes + target.nbytes, self._run_bytes
        if self._base >= stop_bytes or self._offset(self._num_runs - 1) + run_bytes <= start_bytes:
            return
        numbers = range(self._num_runs)
        first = bisect_right(numbers, start_bytes - run_bytes, key=self._offset)
        after = bisect_left(numbers, stop_bytes, key=self._offset)
        if first >= after:
            return
        head = max(0, start_bytes - self._offset(first))
        tail = max(0, self._offset(after - 1) + run_bytes - stop_bytes)
        local, length = first * run_bytes + head, (after - first) * run_bytes - head - tail
        if after - first == 1:
            at = self._offset(first) + head - start_bytes
            self._read(local, target[at : at + length])
            return
        found = memoryview(bytearray(length))
        self._read(local, found)
        done = 0
        for number in range(first, after):
            begin = max(self._offset(number), start_bytes)
            end = min(self._offset(number) + run_bytes, stop_bytes)
            target[begin - start_bytes : end - start_bytes] = found[done : done + end - begin]
            done += end - begin

    def _offset(self, number: int) -> int:
        """Return where run `number` begins in the whole tensor."""
        at = self._base
        for size, stride in reversed(self._outer):
            number, index = divmod(number, size)
            at += index * stride
        return at
