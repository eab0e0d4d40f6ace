"""The rank image: one rank's tensors as a valid safetensors file whose header depends on the layout alone.

File: 8 bytes little-endian header length, JSON header padded with spaces so that the data starts at a multiple
of 64, then the tensors. Entries of 64 bytes and more start at multiples of 64; smaller ones follow, larger items
first, so each stands at its natural alignment. Holes are filled by ``__pad.<n>`` entries (U8), since safetensors
refuses holes. complex128 is stored as F64 with a last dim of 2. See docs/format.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import torch
import xxhash

from relight.errors import CorruptionError, UnknownFormatError

__all__ = ["DTYPES", "ImageEntry", "ImageLayout", "TensorSpec", "dtype_name", "parse_header", "plan_image"]

ALIGN_BYTES = 64
PAD_PREFIX = "__pad."
MAX_HEADER_BYTES = 100_000_000

_STORED: dict[str, tuple[torch.dtype, str]] = {
    name: (getattr(torch, name), stored)
    for name, stored in {
        "float64": "F64",
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
        "float8_e8m0fnu": "F8_E8M0",
        "int64": "I64",
        "int32": "I32",
        "int16": "I16",
        "int8": "I8",
        "uint64": "U64",
        "uint32": "U32",
        "uint16": "U16",
        "uint8": "U8",
        "bool": "BOOL",
        "complex64": "C64",
        "complex128": "F64",
    }.items()
    if hasattr(torch, name)
}

DTYPES: dict[str, torch.dtype] = {name: dtype for name, (dtype, _) in _STORED.items()}
"""relight's dtype name (as torch spells it) -> torch dtype, for every dtype that can be stored."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""The other way round."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return relight's name of `dtype`.

    Raises:
        UnknownFormatError: it cannot be stored.
    """
    try:
        return DTYPE_NAMES[dtype]
    except KeyError:
        raise UnknownFormatError(
            f"tensors of dtype {dtype} cannot be stored; known: {', '.join(DTYPES)}"
        ) from None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype name and shape of one entry to be laid out."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the entry's data in bytes."""
        num = DTYPES[self.dtype].itemsize
        for size in self.shape:
            num *= size
        return num


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """Where each entry of an image stands.

    Attributes:
        header: the first bytes of the image, up to the first tensor.
        offsets: byte offset in the image of each spec given to `plan_image`, in their order.
        image_bytes: size of the whole image.
        fingerprint: xxh3-128 (hex) of the header.
    """

    header: bytes
    offsets: tuple[int, ...]
    image_bytes: int
    fingerprint: str
    pads: tuple[tuple[int, int], ...]


class ImageEntry(msgspec.Struct, frozen=True, gc=False):
    """One entry of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        """Size of the entry's data."""
        return self.data_offsets[1] - self.data_offsets[0]


def plan_image(specs: Sequence[TensorSpec]) -> ImageLayout:
    """Lay out `specs` as one image; equal specs give equal bytes."""
    sizes = [spec.num_bytes for spec in specs]
    order = sorted(
        range(len(specs)),
        key=lambda at: 0 if sizes[at] >= ALIGN_BYTES else 1000 - DTYPES[specs[at].dtype].itemsize,
    )
    header: dict[str, object] = {}
    starts = [0] * len(specs)
    pads: list[tuple[int, int]] = []
    position = 0
    is_small = False
    for at in order:
        # The first small entry is aligned like a large one; those after it follow by falling item size.
        if position % ALIGN_BYTES and (sizes[at] >= ALIGN_BYTES or not is_small):
            position = _pad(header, pads, position)
        is_small = sizes[at] < ALIGN_BYTES
        starts[at] = position
        header[specs[at].name] = _header_entry(specs[at], position, sizes[at])
        position += sizes[at]
    encoded = json.dumps(header, separators=(",", ":")).encode("ascii")
    encoded += b" " * (-(8 + len(encoded)) % ALIGN_BYTES)
    head = len(encoded).to_bytes(8, "little") + encoded
    return ImageLayout(
        header=head,
        offsets=tuple(start + len(head) for start in starts),
        image_bytes=len(head) + position,
        fingerprint=xxhash.xxh3_128_hexdigest(head),
        pads=tuple((start + len(head), size) for start, size in pads),
    )


def _pad(header: dict[str, object], pads: list[tuple[int, int]], position: int) -> int:
    size = -position % ALIGN_BYTES
    header[f"{PAD_PREFIX}{len(pads)}"] = {
        "dtype": "U8",
        "shape": [size],
        "data_offsets": [position, position + size],
    }
    pads.append((position, size))
    return position + size


def _header_entry(spec: TensorSpec, position: int, size: int) -> dict[str, object]:
    shape = list(spec.shape) + ([2] if spec.dtype == "complex128" else [])
    return {"dtype": _STORED[spec.dtype][1], "shape": shape, "data_offsets": [position, position + size]}


_HEADER = msgspec.json.Decoder(dict[str, ImageEntry])


def header_bytes(first: bytes | memoryview, *, image_bytes: int, path: str) -> int:
    """Return how many bytes of the image come before the first tensor, from its first 8 bytes.

    Raises:
        CorruptionError: the length cannot be right.
    """
    if len(first) < 8:
        raise CorruptionError(f"{path}: too short for an image", path=path)
    length = int.from_bytes(first[:8], "little")
    if length > min(MAX_HEADER_BYTES, image_bytes - 8):
        raise CorruptionError(f"{path}: header length {length} does not fit the image", path=path)
    return 8 + length


def parse_header(header: bytes, *, path: str) -> dict[str, ImageEntry]:
    """Return the entries of an image by name, their `data_offsets` counted from the end of the header.

    The offsets are as written: whoever uses them checks that they lie in the image.

    Raises:
        CorruptionError: the header is not what `plan_image` writes.
    """
    try:
        entries = _HEADER.decode(header[8:])
    except msgspec.MsgspecError as error:
        raise CorruptionError(f"{path}: image header cannot be read: {error}", path=path) from error
    return entries


def layout_fingerprint(parts: Iterable[str]) -> str:
    """Return the xxh3-128 (hex) of a sequence of strings that together describe a layout."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part.encode("utf-8", "surrogateescape") + b"\0")
    return state.hexdigest()
