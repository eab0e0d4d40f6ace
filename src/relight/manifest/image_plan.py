"""Where each tensor of a rank image stands: a valid safetensors file whose header depends on the layout alone.

File: 8 bytes little-endian header length, JSON header padded with spaces so that the data starts at a multiple
of 64, then the tensors. Entries of 64 bytes and more start at multiples of 64; smaller ones follow, larger items
first, so each stands at its natural alignment. Holes are filled by ``__pad.<n>`` entries (U8), since safetensors
refuses holes. complex128 is stored as F64 with a last dim of 2. See docs/format.md. Must not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

from relight.manifest.image import PAD_PREFIX
from relight.manifest.index import ITEM_BYTES

__all__ = ["ALIGN_BYTES", "STORED_DTYPES", "ImageLayout", "TensorSpec", "layout_fingerprint", "plan_image"]

ALIGN_BYTES = 64

STORED_DTYPES = {
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
}
"""relight's dtype name (as torch spells it) -> the name in a safetensors header."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype name and shape of one entry to be laid out."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the entry's data in bytes."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """Where each entry of an image stands.

    Attributes:
        header: the first bytes of the image, up to the first tensor.
        offsets: byte offset in the image of each spec given to `plan_image`, in their order.
        image_bytes: size of the whole image.
        fingerprint: xxh3-128 (hex) of the header.
        pads: (byte offset in the image, size) of each padding entry.
    """

    header: bytes
    offsets: tuple[int, ...]
    image_bytes: int
    fingerprint: str
    pads: tuple[tuple[int, int], ...]


def plan_image(specs: Sequence[TensorSpec]) -> ImageLayout:
    """Lay out `specs` as one image; equal specs give equal bytes."""
    sizes = [spec.num_bytes for spec in specs]
    order = sorted(
        range(len(specs)),
        key=lambda at: 0 if sizes[at] >= ALIGN_BYTES else 1000 - ITEM_BYTES[specs[at].dtype],
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


def layout_fingerprint(parts: Iterable[str]) -> str:
    """Return the xxh3-128 (hex) of a sequence of strings that together describe a layout."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part.encode("utf-8", "surrogateescape") + b"\0")
    return state.hexdigest()


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
    return {"dtype": STORED_DTYPES[spec.dtype], "shape": shape, "data_offsets": [position, position + size]}
