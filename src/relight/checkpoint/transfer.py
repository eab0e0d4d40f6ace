"""From stored or mapped rank images into tensors: block by block, each digest checked before a byte goes on.

Any stored box goes into any part that a rank holds. Blocks are handled by a few threads; hashing, reading and copying
release the interpreter lock. No second full copy of the state is made.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import threading
from dataclasses import dataclass, field

import numpy as np
import torch

from relight.checkpoint.images import Image
from relight.errors import CorruptionError
from relight.manifest.manifest import BLOCK_BYTES
from relight.manifest.shard import Box

__all__ = ["LoadPlan", "Move", "Rows"]

MAPPED_THREADS = 2
READ_THREADS = 3
_SMALL_BYTES = 64 * 1024


@dataclass(slots=True)
class _Staging:
    """A destination that cannot be written byte-wise: gathered on the host, then copied as a whole."""

    tensor: torch.Tensor
    missing_bytes: int
    host: torch.Tensor | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def address(self) -> int:
        with self.lock:
            if self.host is None:
                self.host = torch.empty(self.tensor.shape, dtype=self.tensor.dtype)
            return self.host.data_ptr()

    def arrived(self, num_bytes: int) -> None:
        with self.lock:
            self.missing_bytes -= num_bytes
            if self.missing_bytes == 0 and self.host is not None:
                with torch.no_grad():
                    self.tensor.copy_(self.host)
                self.host = None


Move = tuple[int, int, int, _Staging | None]
"""Offset in the block, bytes, and the address to go to (or, with a staging, the offset in it)."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Many equal runs of bytes at even distances, within one block and within one destination."""

    offset: int
    address: int
    num: int
    run_bytes: int
    source_stride: int
    target_stride: int
    staging: _Staging | None

    def copy(self, data: memoryview) -> None:
        """Copy out of a block; releases the interpreter lock."""
        base = self.address + (self.staging.address() if self.staging is not None else 0)
        span = (self.num - 1) * self.target_stride + self.run_bytes
        shape = (self.num, self.run_bytes)
        source = np.ndarray(shape, np.uint8, data, self.offset, (self.source_stride, 1))
        target = np.ndarray(
            shape,
            np.uint8,
            memoryview((ctypes.c_ubyte * span).from_address(base)),
            0,
            (self.target_stride, 1),
        )
        np.copyto(target, source)
        if self.staging is not None:
            self.staging.arrived(self.num * self.run_bytes)


@dataclass(slots=True)
class _Block:
    """One block of an image, and what goes where out of it."""

    image: Image
    index: int
    moves: list[Move] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)


class LoadPlan:
    """Which bytes of which images go where, block by block; blocks that nothing needs are not read."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], _Block] = {}
        self._stagings: dict[int, _Staging] = {}

    def moves(self, image: Image, index: int) -> list[Move]:
        """Return the list of moves out of block `index` of `image`, to add to."""
        return self._block(image, index).moves

    def _block(self, image: Image, index: int) -> _Block:
        key = (id(image), index)
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = _Block(image, index)
        return block

    def add(self, image: Image, start: int, stop: int, tensor: torch.Tensor, start_bytes: int = 0) -> None:
        """Fill `tensor` from bytes [start, stop) of `image`, beginning `start_bytes` into its contiguous order."""
        if stop <= start:
            return
        _check_inside(image, start, stop)
        staging, address = self._destination(tensor)
        address += start_bytes
        index = start // BLOCK_BYTES
        while start < stop:
            border = (index + 1) * BLOCK_BYTES
            end = min(border, stop)
            self.moves(image, index).append((start - border + BLOCK_BYTES, end - start, address, staging))
            address += end - start
            start = end
            index += 1

    def add_box(self, image: Image, start: int, piece: Box, tensor: torch.Tensor, held: Box) -> int:
        """Fill the part of `tensor` that a stored piece has.

        Args:
            image: that holds the piece.
            start: where its bytes begin, in row-major order.
            piece: what is stored there, in the global tensor.
            tensor: what this rank holds of it.
            held: the box that `tensor` is.

        Returns:
            Number of elements that this fills.
        """
        common = piece.overlap(held)
        if common is None:
            return 0
        item_bytes = tensor.element_size()
        first = len(common.sizes)
        # Dims that are whole on both sides make one run together with the first that is not.
        while first > 0 and piece.sizes[first - 1] == held.sizes[first - 1] == common.sizes[first - 1]:
            first -= 1
        split = max(0, first - 1)
        run_bytes = math.prod(common.sizes[split:]) * item_bytes
        steps_there, steps_here = _strides(piece.sizes, item_bytes), _strides(held.sizes, item_bytes)
        there = start + _distance(common, piece, steps_there)
        here = _distance(common, held, steps_here)
        if not split:
            self.add(image, there, there + run_bytes, tensor, here)
            return common.num_elements
        for outer in itertools.product(*map(range, common.sizes[: split - 1])):
            source = there + sum(map(int.__mul__, outer, steps_there))
            target = here + sum(map(int.__mul__, outer, steps_here))
            num, strides = common.sizes[split - 1], (steps_there[split - 1], steps_here[split - 1])
            self._add_rows(image, source, tensor, target, num=num, run_bytes=run_bytes, strides=strides)
        return common.num_elements

    def _add_rows(
        self,
        image: Image,
        start: int,
        tensor: torch.Tensor,
        start_bytes: int,
        *,
        num: int,
        run_bytes: int,
        strides: tuple[int, int],
    ) -> None:
        """Add `num` runs; those that a border of blocks cuts go one by one."""
        source_stride, target_stride = strides
        _check_inside(image, start, start + (num - 1) * source_stride + run_bytes)
        staging, address = self._destination(tensor)
        row = 0
        while row < num:
            at = start + row * source_stride
            low = at - at % BLOCK_BYTES
            fits = (
                (low + BLOCK_BYTES - run_bytes - at) // source_stride + 1 if run_bytes <= BLOCK_BYTES else 0
            )
            if fits < 1:
                self.add(image, at, at + run_bytes, tensor, start_bytes + row * target_stride)
                row += 1
                continue
            many = min(fits, num - row)
            there = address + start_bytes + row * target_stride
            rows = Rows(at - low, there, many, run_bytes, source_stride, target_stride, staging)
            self._block(image, low // BLOCK_BYTES).rows.append(rows)
            row += many

    def _destination(self, tensor: torch.Tensor) -> tuple[_Staging | None, int]:
        """Return the address of a tensor that takes bytes as they are; else a staging, and 0."""
        if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj():
            return None, tensor.data_ptr()
        size = tensor.numel() * tensor.element_size()
        return self._stagings.setdefault(id(tensor), _Staging(tensor, size)), 0

    def run(self, *, num_neighbours: int = 1) -> int:
        """Fill every target.

        Args:
            num_neighbours: ranks of this node that load at the same time, and share its processors and its disk.

        Returns:
            Number of bytes of images read.

        Raises:
            CorruptionError: a block has no good copy; targets may be partly filled, with verified bytes only.
        """
        order = {id(block.image): at for at, block in enumerate(self._blocks.values())}
        blocks = sorted(self._blocks.values(), key=lambda block: (order[id(block.image)], block.index))
        if not blocks:
            return 0
        is_mapped = all(block.image.is_mapped for block in blocks)
        threads = max(1, (MAPPED_THREADS if is_mapped else READ_THREADS) // num_neighbours)
        num_moves = sum(len(block.moves) for block in blocks)
        if is_mapped and len(blocks) * BLOCK_BYTES < num_moves * _SMALL_BYTES:
            # Many small moves spend their time in the interpreter, which threads would only fight for.
            threads = 1
        work = _Work(blocks, is_mapped=is_mapped)
        workers = [
            threading.Thread(target=work.run, name=f"relight-load-{at}")
            for at in range(min(threads, len(blocks)) - 1)
        ]
        for worker in workers:
            worker.start()
        work.run()
        for worker in workers:
            worker.join()
        if work.failures:
            raise work.failures[0]
        return work.num_bytes


class _Work:
    """Blocks that several threads take one after the other."""

    def __init__(
        self,
        blocks: list[_Block],
        *,
        is_mapped: bool,
    ) -> None:
        self.failures: list[BaseException] = []
        self.num_bytes = 0
        self._pending = iter(blocks)
        self._is_mapped = is_mapped
        self._lock = threading.Lock()

    def run(self) -> None:
        bounce = None if self._is_mapped else _bounce_buffer()
        while not self.failures:
            with self._lock:
                job = next(self._pending, None)
            if job is None:
                return
            try:
                num_bytes = _handle(job, bounce)
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
                self.failures.append(error)
                return
            with self._lock:
                self.num_bytes += num_bytes


def _handle(block: _Block, bounce: memoryview | None) -> int:
    data = block.image.verified_block(block.index, bounce)
    base = ctypes.addressof(ctypes.c_char.from_buffer(data))
    move = ctypes.memmove
    for offset, num_bytes, address, staging in block.moves:
        if staging is None:
            move(address, base + offset, num_bytes)
        else:
            move(staging.address() + address, base + offset, num_bytes)
            staging.arrived(num_bytes)
    for rows in block.rows:
        rows.copy(data)
    return len(data)


def _check_inside(image: Image, start: int, stop: int) -> None:
    if start < 0 or stop > image.image_bytes:
        raise CorruptionError(
            f"{image.place}: bytes {start} to {stop} lie outside the image", path=image.place
        )


def _strides(sizes: tuple[int, ...], item_bytes: int) -> list[int]:
    """Return the bytes from one index to the next in each dim of a dense box."""
    strides = [item_bytes] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    return strides


def _distance(inner: Box, outer: Box, strides: list[int]) -> int:
    """Return how many bytes into `outer` the first element of `inner` lies."""
    return sum(
        (ours - theirs) * step
        for ours, theirs, step in zip(inner.offsets, outer.offsets, strides, strict=True)
    )


def _bounce_buffer() -> memoryview:
    area = mmap.mmap(-1, BLOCK_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(area)
