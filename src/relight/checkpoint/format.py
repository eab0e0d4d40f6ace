"""The rank image as torch meets it: dtypes by name, and the header of an image that is read.

The layout itself is in `relight.manifest.image_plan`. See docs/format.md.
"""

from __future__ import annotations

import msgspec
import torch

from relight.errors import CorruptionError, UnknownFormatError
from relight.manifest.image_plan import (
    STORED_DTYPES,
    ImageLayout,
    TensorSpec,
    layout_fingerprint,
    plan_image,
)

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "ImageEntry",
    "ImageLayout",
    "TensorSpec",
    "dtype_name",
    "header_bytes",
    "layout_fingerprint",
    "parse_header",
    "plan_image",
]

MAX_HEADER_BYTES = 100_000_000

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in STORED_DTYPES if hasattr(torch, name)
}
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


class ImageEntry(msgspec.Struct, frozen=True, gc=False):
    """One entry of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        """Size of the entry's data."""
        return self.data_offsets[1] - self.data_offsets[0]


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
