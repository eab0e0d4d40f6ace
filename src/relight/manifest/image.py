"""The header of a rank image, read without torch: which tensor stands where. See docs/format.md."""

from __future__ import annotations

import msgspec

from relight.errors import CorruptionError
from relight.storage.backend import StorageBackend

__all__ = ["PAD_PREFIX", "ImageTensor", "read_image_tensors"]

PAD_PREFIX = "__pad."
"""Entries of these names fill holes and are no tensors."""

_MAX_HEADER_BYTES = 100_000_000


class ImageTensor(msgspec.Struct, frozen=True):
    """One entry of an image: stored dtype ("F32", ...), shape, and byte range within the file (half-open)."""

    dtype: str
    shape: tuple[int, ...]
    start_bytes: int
    end_bytes: int


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_image_tensors(backend: StorageBackend, name: str) -> dict[str, ImageTensor]:
    """Return the tensors of the image `name` by their names, in stored order, without the padding.

    The header is trusted only as far as its block's digest was checked.

    Raises:
        MissingCopyError: the image is not there.
        CorruptionError: the header cannot be read, or an entry lies outside the file.
    """
    size_bytes = backend.size_bytes(name) or 0
    head = bytearray(8)
    backend.read_into(name, 0, memoryview(head))
    header_bytes = int.from_bytes(head, "little")
    if header_bytes > min(_MAX_HEADER_BYTES, size_bytes - 8):
        raise CorruptionError(f"{name}: header length {header_bytes} does not fit the file", path=name)
    header = bytearray(header_bytes)
    backend.read_into(name, 8, memoryview(header))
    try:
        entries = msgspec.json.decode(header, type=dict[str, _Entry])
    except msgspec.MsgspecError as error:
        raise CorruptionError(f"{name}: header cannot be read: {error}", path=name) from error
    base = 8 + header_bytes
    for key, entry in entries.items():
        start, end = entry.data_offsets
        if not 0 <= start <= end <= size_bytes - base:
            raise CorruptionError(f"{name}: entry {key!r} lies outside the file", path=name)
    return {
        key: ImageTensor(entry.dtype, entry.shape, base + entry.data_offsets[0], base + entry.data_offsets[1])
        for key, entry in entries.items()
        if not key.startswith(PAD_PREFIX)
    }
