"""From stored or mapped rank images into tensors: block by block, each digest checked before a byte goes on.

A block that cannot be read or does not match its digest is taken from the next copy of the same image; only when
no copy is left does the load fail. Blocks are handled by a few threads; hashing, reading and copying release the
interpreter lock. No second full copy of the state is made.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import xxhash

from relight.checkpoint.format import ImageEntry, header_bytes, parse_header
from relight.errors import CopyError, CorruptionError, RetryableError
from relight.keeper.arena import ArenaSlot
from relight.manifest.manifest import BLOCK_BYTES
from relight.storage.backend import StorageBackend

__all__ = ["BadBlock", "Image", "ImageCopy", "LoadPlan", "Move", "SlotCopy", "StoredCopy"]

MAPPED_THREADS = 2
READ_THREADS = 3
_SMALL_BYTES = 64 * 1024
_BAD = (CopyError, RetryableError)


@dataclass(frozen=True, slots=True)
class BadBlock:
    """A block that one copy could not give: which, where, and why."""

    place: str
    block: int
    reason: str


class ImageCopy(Protocol):
    """One copy of a rank image."""

    place: str
    is_mapped: bool

    def block(self, start: int, stop: int, bounce: memoryview | None) -> memoryview:
        """Return bytes [start, stop) of the image, read into `bounce` unless the copy is mapped."""
        ...


class SlotCopy:
    """The image in a slot of this node's arena; nothing is read, blocks are views."""

    is_mapped = True

    def __init__(self, slot: ArenaSlot) -> None:
        self.place = str(slot.path)
        self._slot = slot

    def block(self, start: int, stop: int, bounce: memoryview | None) -> memoryview:  # noqa: ARG002 - of the protocol
        """Return a view of the slot."""
        return self._slot.image[start:stop]


class StoredCopy:
    """The image as a stored file."""

    is_mapped = False

    def __init__(self, backend: StorageBackend, name: str) -> None:
        self.place = f"{backend.url}/{name}"
        self._backend = backend
        self._name = name

    def block(self, start: int, stop: int, bounce: memoryview | None) -> memoryview:
        """Read into `bounce`."""
        target = bounce[: stop - start] if bounce is not None else memoryview(bytearray(stop - start))
        self._backend.read_into(self._name, start, target)
        return target


class Image:
    """A rank image with its digests and every copy of it, nearest first.

    Args:
        more: gives the further copies, when the first turns out bad; asked once.
    """

    def __init__(
        self,
        *,
        image_bytes: int,
        digests: Sequence[bytes],
        copies: Sequence[ImageCopy],
        more: Callable[[], Sequence[ImageCopy]] | None = None,
    ) -> None:
        self.image_bytes = image_bytes
        self.digests = digests
        self.copies = list(copies)
        self._more = more
        self._more_lock = threading.Lock()
        self.bad: list[BadBlock] = []
        self.data_start = 0
        self._entries: dict[str, ImageEntry] | None = None
        self._checked: set[int] = set()
        if len(digests) != -(-image_bytes // BLOCK_BYTES):
            raise CorruptionError(
                f"{self.place}: {len(digests)} digests do not fit {image_bytes} bytes", path=self.place
            )

    @property
    def place(self) -> str:
        """The nearest copy's place, for messages."""
        return self.copies[0].place if self.copies else "no copy"

    @property
    def is_mapped(self) -> bool:
        """Whether the nearest copy needs no reading."""
        return bool(self.copies) and self.copies[0].is_mapped

    def verified_block(self, index: int, bounce: memoryview | None) -> memoryview:
        """Return block `index` with its digest checked, from the nearest copy that has it whole.

        Raises:
            CorruptionError: no copy is left.
        """
        start = index * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, self.image_bytes)
        reasons = []
        for copy in self._all_copies():
            try:
                data = copy.block(start, stop, bounce)
                # A sealed slot does not change, so a mapped block that was checked stays checked.
                if copy.is_mapped and index in self._checked:
                    return data
                if xxhash.xxh3_128_digest(data) == self.digests[index]:
                    if copy.is_mapped:
                        self._checked.add(index)
                    return data
                reason = "bytes differ from their digest"
            except _BAD as error:
                reason = str(error)
            self.bad.append(BadBlock(copy.place, index, reason))
            reasons.append(f"{copy.place}: block {index}: {reason}")
        raise CorruptionError("; ".join(reasons) or "no copy", path=self.place, block=index)

    def _all_copies(self) -> Iterator[ImageCopy]:
        yield from self.copies[:1]
        with self._more_lock:
            more, self._more = self._more, None
            if more is not None:
                self.copies += more()
        yield from self.copies[1:]

    def entries(self) -> dict[str, ImageEntry]:
        """Return the image's entries by name; their offsets count from `data_start`, which is known afterwards."""
        if self._entries is None:
            block = self.verified_block(0, None) if self.image_bytes else memoryview(b"")
            length = header_bytes(block[:8], image_bytes=self.image_bytes, path=self.place)
            header = bytes(block[:length])
            for index in range(1, -(-length // BLOCK_BYTES)):
                header += bytes(self.verified_block(index, None)[: length - len(header)])
            self.data_start = length
            self._entries = parse_header(header, path=self.place)
        return self._entries


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


class LoadPlan:
    """Which bytes of which images go where, block by block; blocks that nothing needs are not read."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], tuple[Image, int, list[Move]]] = {}
        self._stagings: dict[int, _Staging] = {}

    def moves(self, image: Image, index: int) -> list[Move]:
        """Return the list of moves out of block `index` of `image`, to add to."""
        key = (id(image), index)
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = (image, index, [])
        return block[2]

    def add(self, image: Image, start: int, stop: int, tensor: torch.Tensor, start_bytes: int = 0) -> None:
        """Fill `tensor` from bytes [start, stop) of `image`, beginning `start_bytes` into its contiguous order."""
        if stop <= start:
            return
        if start < 0 or stop > image.image_bytes:
            raise CorruptionError(
                f"{image.place}: bytes {start} to {stop} lie outside the image", path=image.place
            )
        staging: _Staging | None = None
        if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj():
            address = tensor.data_ptr() + start_bytes
        else:
            whole = tensor.numel() * tensor.element_size()
            staging = self._stagings.setdefault(id(tensor), _Staging(tensor, whole))
            address = start_bytes
        index = start // BLOCK_BYTES
        while start < stop:
            border = (index + 1) * BLOCK_BYTES
            end = min(border, stop)
            self.moves(image, index).append((start - border + BLOCK_BYTES, end - start, address, staging))
            address += end - start
            start = end
            index += 1

    def run(self, *, num_threads: int | None = None) -> int:
        """Fill every target.

        Args:
            num_threads: None for what suits the images.

        Returns:
            Number of bytes of images read.

        Raises:
            CorruptionError: a block has no good copy; targets may be partly filled, with verified bytes only.
        """
        blocks = list(self._blocks.values())
        if not blocks:
            return 0
        is_mapped = all(image.is_mapped for image, _, _ in blocks)
        threads = num_threads or (MAPPED_THREADS if is_mapped else READ_THREADS)
        num_moves = sum(len(moves) for _, _, moves in blocks)
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
        blocks: list[tuple[Image, int, list[Move]]],
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
                num_bytes = _handle(*job, bounce)
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
                self.failures.append(error)
                return
            with self._lock:
                self.num_bytes += num_bytes


def _handle(image: Image, index: int, moves: list[Move], bounce: memoryview | None) -> int:
    data = image.verified_block(index, bounce)
    base = ctypes.addressof(ctypes.c_char.from_buffer(data))
    move = ctypes.memmove
    for offset, num_bytes, address, staging in moves:
        if staging is None:
            move(address, base + offset, num_bytes)
        else:
            move(staging.address() + address, base + offset, num_bytes)
            staging.arrived(num_bytes)
    return len(data)


def _bounce_buffer() -> memoryview:
    area = mmap.mmap(-1, BLOCK_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(area)
