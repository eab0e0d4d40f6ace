"""The header of a safetensors file, such as a rank image, read without torch: which tensor stands where.

See docs/format.md.
"""

from __future__ import annotations

import msgspec

from relight.errors import CorruptionError
from relight.storage.backend import StorageBackend

__all__ = [
    "PAD_PREFIX",
    "ImageTensor",
    "SafetensorsHeader",
    "parse_safetensors",
    "read_image_tensors",
    "safetensors_header_bytes",
]

PAD_PREFIX = "__pad."
"""Entries of these names fill holes and are no tensors."""

_METADATA = "__metadata__"
_MAX_HEADER_BYTES = 100_000_000


class ImageTensor(msgspec.Struct, frozen=True):
    """One entry of an image: stored dtype ("F32", ...), shape, and byte range within the file (half-open)."""

    dtype: str
    shape: tuple[int, ...]
    start_bytes: int
    end_bytes: int


class SafetensorsHeader(msgspec.Struct, frozen=True):
    """What a safetensors file holds: its tensors by name in stored order, without padding, and its text notes."""

    tensors: dict[str, ImageTensor]
    metadata: dict[str, str]


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
    header = bytearray(safetensors_header_bytes(head, size_bytes=size_bytes, path=name))
    backend.read_into(name, 8, memoryview(header))
    return parse_safetensors(header, size_bytes=size_bytes, path=name).tensors


def safetensors_header_bytes(first: bytes | bytearray, *, size_bytes: int, path: str) -> int:
    """Return the length of the JSON header, which follows the first 8 bytes `first` of a file of `size_bytes`.

    Raises:
        CorruptionError: the length cannot be right.
    """
    header_bytes = int.from_bytes(first, "little")
    if header_bytes > min(_MAX_HEADER_BYTES, size_bytes - 8):
        raise CorruptionError(f"{path}: header length {header_bytes} does not fit the file", path=path)
    return header_bytes


def parse_safetensors(header: bytes | bytearray, *, size_bytes: int, path: str) -> SafetensorsHeader:
    """Return what the JSON `header` of a safetensors file of `size_bytes` says.

    Raises:
        CorruptionError: it cannot be read, or an entry lies outside the file.
    """
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        notes = raw.pop(_METADATA, msgspec.Raw(b"{}"))
        metadata = msgspec.json.decode(notes, type=dict[str, str])
        entries = {key: msgspec.json.decode(value, type=_Entry) for key, value in raw.items()}
    except msgspec.MsgspecError as error:
        raise CorruptionError(f"{path}: header cannot be read: {error}", path=path) from error
    base = 8 + len(header)
    for key, entry in entries.items():
        start, end = entry.data_offsets
        if not 0 <= start <= end <= size_bytes - base:
            raise CorruptionError(f"{path}: entry {key!r} lies outside the file", path=path)
    tensors = {
        key: ImageTensor(entry.dtype, entry.shape, base + entry.data_offsets[0], base + entry.data_offsets[1])
        for key, entry in entries.items()
        if not key.startswith(PAD_PREFIX)
    }
    return SafetensorsHeader(tensors, metadata)
