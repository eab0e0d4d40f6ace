"""The global index of a checkpoint, opened: which ranks' images hold which boxes of a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relight.errors import UnknownFormatError
from relight.manifest.manifest import (
    EQUAL,
    IN_PIECES,
    PER_RANK,
    IndexEntry,
    Manifest,
    RecordDraft,
    decode_index,
)
from relight.manifest.shard import Box, Layout, Piece, Spread, cover_once, whole

__all__ = ["ITEM_BYTES", "StoredIndex"]

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of an element by relight's dtype name."""


class StoredIndex:
    """The tensors of a checkpoint by key, and where their bytes are.

    Args:
        entries: as `decode_index` gives them.
        layouts: those beside the index.

    Raises:
        UnknownFormatError: an entry speaks of a layout that is not there.
    """

    def __init__(self, entries: Mapping[str, IndexEntry], layouts: Sequence[Layout]) -> None:
        self.entries = entries
        self.layouts = tuple(layouts)
        self._spreads: dict[int, Spread] = {}
        self._covered: set[str] = set()
        if any(not EQUAL <= entry.layout < len(self.layouts) for entry in entries.values()):
            raise UnknownFormatError(
                f"the index speaks of more than the {len(self.layouts)} layouts beside it"
            )

    @classmethod
    def of(cls, holder: Manifest | RecordDraft) -> StoredIndex:
        """Return the index that a manifest or a rank 0's record carries."""
        return cls(decode_index(holder.index), holder.layouts)

    def pieces(self, key: str, wanted: Box | None = None) -> Sequence[Piece]:
        """Return the stored pieces of tensor `key` that have part of the box `wanted` (default: all of it).

        Together they cover it once. There are none of a per-rank tensor, whose value is in every rank's image.

        Raises:
            UnknownFormatError: the pieces that the index lists do not cover the tensor once, or a tensor of the layout
                has a dtype that is not known.
        """
        entry = self.entries[key]
        if entry.layout == PER_RANK:
            return ()
        if entry.layout == EQUAL:
            return (Piece(0, key, *whole(entry.shape)),)
        if entry.layout == IN_PIECES:
            self._check_cover(key, entry)
            if wanted is None:
                return entry.pieces
            return [piece for piece in entry.pieces if piece.box.overlap(wanted) is not None]
        return self._spread(entry.layout).holders(key, wanted)

    def home(self, key: str) -> int | None:
        """Return the rank whose image holds all of tensor `key` under its name, where the layout has one rank only."""
        number = self.entries[key].layout
        return self.layouts[number].base if number >= 0 and not self.layouts[number].mesh else None

    def _check_cover(self, key: str, entry: IndexEntry) -> None:
        if key in self._covered:
            return
        if not cover_once(entry.shape, (piece.box for piece in entry.pieces)):
            raise UnknownFormatError(f"{key}: the pieces in the index do not cover the tensor once", path=key)
        self._covered.add(key)

    def _spread(self, number: int) -> Spread:
        spread = self._spreads.get(number)
        if spread is None:
            tensors = [
                (key, _item_bytes(key, entry.dtype), entry.shape)
                for key, entry in self.entries.items()
                if entry.layout == number
            ]
            spread = self._spreads[number] = Spread(self.layouts[number], tensors)
        return spread


def _item_bytes(key: str, dtype: str) -> int:
    try:
        return ITEM_BYTES[dtype]
    except KeyError:
        raise UnknownFormatError(
            f"{key} has dtype {dtype}, which this relight does not know", path=key
        ) from None
