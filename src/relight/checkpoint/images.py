"""Rank images with every copy of them: in a slot of memory or stored, read block by block, each digest checked.

A block that cannot be read or does not match its digest is taken from the next copy of the same image; only when
no copy is left does the read fail.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from relight.checkpoint.format import ImageEntry, header_bytes, parse_header
from relight.errors import CopyError, CorruptionError, RetryableError
from relight.keeper.arena import ArenaSlot
from relight.manifest.manifest import BLOCK_BYTES
from relight.storage.backend import StorageBackend

__all__ = ["BadBlock", "Image", "ImageCopy", "SlotCopy", "StoredCopy"]

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
        self._parts: dict[str, ImageEntry] | None = None
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

    def part_of(self, key: str) -> ImageEntry | None:
        """Return the one box of tensor `key` that the image holds; None where it holds none, or all of it."""
        if self._parts is None:
            self._parts = {
                name.rpartition("@")[0]: entry for name, entry in self.entries().items() if "@" in name
            }
        return self._parts.get(key)
