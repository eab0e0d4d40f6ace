"""Comparison of two checkpoints of any world sizes, read as files: no torch, one tensor in memory at a time."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from relight.cli.runs import plain
from relight.errors import CorruptionError, UnknownFormatError
from relight.manifest.catalog import Catalog, CheckpointInfo
from relight.manifest.image import ImageTensor, read_image_tensors
from relight.manifest.index import ITEM_BYTES, StoredIndex
from relight.manifest.manifest import PER_RANK, Manifest, RankRecord
from relight.manifest.names import image_name
from relight.manifest.shard import Box, whole

__all__ = ["Difference", "Side", "compare"]

_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One difference: a tensor or context entry that is only right ("added") or left ("removed"), or "changed"."""

    kind: Literal["added", "removed", "changed"]
    key: str
    message: str


@dataclass(slots=True, kw_only=True)
class Side:
    """One of the two checkpoints; reads what is asked for and keeps headers only."""

    url: str
    catalog: Catalog
    info: CheckpointInfo
    _records: dict[int, RankRecord] = field(default_factory=dict)
    _images: dict[int, Mapping[str, ImageTensor]] = field(default_factory=dict)
    _manifest: Manifest | None = None
    _index: StoredIndex | None = None

    @property
    def manifest(self) -> Manifest:
        """The manifest, read once."""
        if self._manifest is None:
            self._manifest = self.catalog.manifest(self.info.step, self.info.generation)
        return self._manifest

    def record(self, rank: int) -> RankRecord:
        """Return the record of a rank, checked against the manifest."""
        if rank not in self._records:
            place = (self.info.step, self.info.generation, rank)
            self._records[rank] = self.catalog.record(*place, self.manifest)
        return self._records[rank]

    def specs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of every tensor; those that each rank has of its own are named ``key [rank n]``."""
        found = {
            key: (entry.dtype, entry.shape)
            for key, entry in self._tensors().entries.items()
            if entry.layout != PER_RANK
        }
        for rank in range(self.manifest.world_size):
            own = self.record(rank).draft.local
            # What all ranks have and is equal stands there once already.
            found |= {f"{key} [rank {rank}]": spec for key, spec in own.items() if key not in found}
        return found

    def content(self, key: str) -> bytearray:
        """Return all bytes of a tensor that `specs` names, put together from its pieces.

        Raises:
            CorruptionError: the pieces are not there, or are not what the index says.
            UnknownFormatError: the tensor has a dtype that this relight does not know.
        """
        index = self._tensors()
        entry = index.entries.get(key)
        if entry is None or entry.layout == PER_RANK:
            name, _, rank = key.removesuffix("]").rpartition(" [rank ")
            return self._read(int(rank), name)
        if entry.dtype not in ITEM_BYTES:
            raise UnknownFormatError(
                f"{key} has dtype {entry.dtype}, which this relight does not know", path=key
            )
        item_bytes = ITEM_BYTES[entry.dtype]
        content = bytearray(whole(entry.shape).num_elements * item_bytes)
        for piece in index.pieces(key):
            data = self._read(piece.rank, piece.name)
            if len(data) != piece.box.num_elements * item_bytes:
                raise CorruptionError(f"{key}: the piece {piece.name!r} is not what the index says", path=key)
            if piece.sizes == entry.shape:
                return data
            _place(content, entry.shape, piece.box, data, item_bytes)
        return content

    def _tensors(self) -> StoredIndex:
        if self._index is None:
            self._index = StoredIndex.of(self.manifest)
        return self._index

    def _read(self, rank: int, name: str) -> bytearray:
        image = image_name(self.info.step, self.info.generation, rank)
        if rank not in self._images:
            self._images[rank] = read_image_tensors(self.catalog.backend, image)
        try:
            tensor = self._images[rank][name]
        except KeyError:
            raise CorruptionError(
                f"{image} holds no {name!r}, which the manifest names", path=image
            ) from None
        data = bytearray(tensor.end_bytes - tensor.start_bytes)
        self.catalog.backend.read_into(image, tensor.start_bytes, memoryview(data))
        return data


def compare(left: Side, right: Side, advance: Callable[[int], None]) -> list[Difference]:
    """Return every difference between two checkpoints, tensors first; `advance` is told the bytes that were read."""
    ours, theirs = left.specs(), right.specs()
    found = list(_presence(ours, theirs))
    for key in ours.keys() & theirs.keys() if ours else ():
        (dtype, shape), (other_dtype, other_shape) = ours[key], theirs[key]
        if (dtype, shape) != (other_dtype, other_shape):
            message = f"{dtype} {list(shape)} -> {other_dtype} {list(other_shape)}"
            found.append(Difference(kind="changed", key=key, message=message))
            continue
        before, after = left.content(key), right.content(key)
        advance(len(before) + len(after))
        if before != after:
            found.append(Difference(kind="changed", key=key, message=f"{dtype} {list(shape)}: other content"))
    found.sort(key=lambda difference: difference.key)
    return [*found, *_compare_contexts(left, right)]


def _presence(
    ours: Mapping[str, tuple[str, tuple[int, ...]]], theirs: Mapping[str, tuple[str, tuple[int, ...]]]
) -> Iterator[Difference]:
    for key, (dtype, shape) in ours.items():
        if key not in theirs:
            yield Difference(kind="removed", key=key, message=f"{dtype} {list(shape)}")
    for key, (dtype, shape) in theirs.items():
        if key not in ours:
            yield Difference(kind="added", key=key, message=f"{dtype} {list(shape)}")


def _compare_contexts(left: Side, right: Side) -> Iterator[Difference]:
    sizes = (left.manifest.world_size, right.manifest.world_size)
    if sizes[0] != sizes[1]:
        yield Difference(kind="changed", key="world size", message=f"{sizes[0]} -> {sizes[1]}")
    for rank in range(min(sizes)):
        before, after = (msgspec.json.decode(side.record(rank).draft.context) for side in (left, right))
        yield from _walk(f"context of rank {rank}", before, after)


def _walk(path: str, before: Any, after: Any) -> Iterator[Difference]:
    if before == after and type(before) is type(after):
        return
    if not (isinstance(before, dict) and isinstance(after, dict)) or _is_typed(before) or _is_typed(after):
        yield Difference(kind="changed", key=path, message=f"{_short(before)} -> {_short(after)}")
        return
    for key in sorted(before.keys() | after.keys()):
        if key not in after:
            yield Difference(kind="removed", key=f"{path}/{key}", message=_short(before[key]))
        elif key not in before:
            yield Difference(kind="added", key=f"{path}/{key}", message=_short(after[key]))
        else:
            yield from _walk(f"{path}/{key}", before[key], after[key])


def _is_typed(value: Mapping[str, Any]) -> bool:
    return len(value) == 1 and next(iter(value)).startswith("$")


def _short(value: Any) -> str:
    text = json.dumps(plain(value))
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _place(content: bytearray, shape: tuple[int, ...], box: Box, data: bytearray, item_bytes: int) -> None:
    """Copy a box of a row-major tensor to its place, by the longest runs that are contiguous there."""
    if not data:
        return
    split = len(shape) - 1
    while split > 0 and box.sizes[split] == shape[split]:
        split -= 1
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    run_bytes = math.prod(box.sizes[split:]) * item_bytes
    base = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    for number, outer in enumerate(itertools.product(*(range(size) for size in box.sizes[:split]))):
        at = (
            base + sum(index * stride for index, stride in zip(outer, strides[:split], strict=True))
        ) * item_bytes
        content[at : at + run_bytes] = data[number * run_bytes : (number + 1) * run_bytes]
