"""The tensors of a committed checkpoint of any layout, read without torch; every block is checked before it is used.

Memory is bounded by two blocks, whatever the size of the checkpoint. Must not know what the tensors are for.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import xxhash

from relight.errors import CorruptionError, MissingCopyError, UnknownFormatError
from relight.manifest.assembly import Assembly, ReadBytes, Tensor
from relight.manifest.catalog import Catalog
from relight.manifest.image import ImageTensor, parse_safetensors, safetensors_header_bytes
from relight.manifest.index import ITEM_BYTES, StoredIndex
from relight.manifest.manifest import BLOCK_BYTES, PER_RANK, Manifest, RankRecord, digest_block
from relight.manifest.names import image_name
from relight.manifest.shard import Box, whole
from relight.storage.backend import StorageBackend

__all__ = ["CheckpointTensors"]

_PART_BYTES = 256 * 2**10


class _Blocks:
    """Reads images block by block; keeps the newest block, and of blocks seen before digests of small parts.

    A block's digest speaks of all of it. Pieces of several images in turn would need each block many times, so when
    one has been checked, digests of its parts are kept; after that, parts are read and checked alone.
    """

    def __init__(self, backend: StorageBackend) -> None:
        self._backend = backend
        self._block = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        self._parts = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        self._held: tuple[str, int] | None = None
        self._part_digests: dict[tuple[str, int], array[int]] = {}

    def read(self, name: str, record: RankRecord, start_bytes: int, target: memoryview) -> None:
        """Fill `target` from image `name` at `start_bytes`; every byte was checked.

        Raises:
            MissingCopyError: the image is not there.
            CorruptionError: a block that it touches is cut short or differs from its digest.
        """
        done = 0
        while done < target.nbytes:
            block, at = divmod(start_bytes + done, BLOCK_BYTES)
            length = min(target.nbytes - done, BLOCK_BYTES - at)
            known = self._part_digests.get((name, block))
            if self._held != (name, block) and known is not None:
                found = self._read_parts((name, block), record, range(at, at + length), known)
            else:
                if known is None:
                    self._read_block(name, block, record)
                found = self._block[at : at + length]
            target[done : done + length] = found
            done += length

    def _read_block(self, name: str, block: int, record: RankRecord) -> None:
        start = block * BLOCK_BYTES
        view = self._block[: min(BLOCK_BYTES, record.draft.image_bytes - start)]
        self._held = None
        self._read_from(name, block, start, view)
        if digest_block(view) != record.digests[block]:
            raise self._differs(name, block)
        starts = range(0, view.nbytes, _PART_BYTES)
        digests = (xxhash.xxh3_64_intdigest(view[one : one + _PART_BYTES]) for one in starts)
        self._part_digests[name, block] = array("Q", digests)
        self._held = (name, block)

    def _read_parts(
        self, place: tuple[str, int], record: RankRecord, wanted: range, known: array[int]
    ) -> memoryview:
        name, block = place
        first = wanted.start // _PART_BYTES
        begin = block * BLOCK_BYTES + first * _PART_BYTES
        after = -(-wanted.stop // _PART_BYTES)
        end = min(block * BLOCK_BYTES + after * _PART_BYTES, record.draft.image_bytes)
        view = self._parts[: end - begin]
        self._read_from(name, block, begin, view)
        for number in range(first, after):
            part = view[(number - first) * _PART_BYTES : (number - first + 1) * _PART_BYTES]
            if xxhash.xxh3_64_intdigest(part) != known[number]:
                raise self._differs(name, block)
        offset = wanted.start - first * _PART_BYTES
        return view[offset : offset + len(wanted)]

    def _read_from(self, name: str, block: int, start_bytes: int, view: memoryview) -> None:
        try:
            self._backend.read_into(name, start_bytes, view)
        except CorruptionError as error:
            raise CorruptionError(
                f"{name}: block {block} is cut short: {error}", path=name, block=block
            ) from error

    def _differs(self, name: str, block: int) -> CorruptionError:
        return CorruptionError(
            f"{self._backend.url}/{name}: block {block} differs from its digest; use another copy or an older step",
            path=name,
            block=block,
        )


@dataclass(frozen=True, slots=True)
class _Image:
    name: str
    record: RankRecord
    tensors: Mapping[str, ImageTensor]


@dataclass(slots=True)
class CheckpointTensors:
    """The tensors of one committed checkpoint.

    Args:
        catalog: of the tier that is read.
        step, generation: which checkpoint.
        rank: whose value to give of tensors of which every rank has its own.

    Raises:
        MissingCopyError: the checkpoint, or `rank` in it, is not there.
        CorruptionError: manifest or records differ from what was written.
        UnknownFormatError: another version of relight wrote it.
    """

    catalog: Catalog
    step: int
    generation: int
    rank: int = 0
    _images: dict[int, _Image] = field(default_factory=dict)
    _blocks: _Blocks = field(init=False)
    _manifest: Manifest = field(init=False)
    _index: StoredIndex = field(init=False)
    aliases: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        manifest = self._manifest = self.catalog.manifest(self.step, self.generation)
        if not 0 <= self.rank < manifest.world_size:
            raise MissingCopyError(
                f"step {self.step} has the ranks 0 to {manifest.world_size - 1}, no rank {self.rank}",
                step=self.step,
                rank=self.rank,
            )
        self._blocks = _Blocks(self.catalog.backend)
        self._index = StoredIndex.of(manifest)
        self.aliases = dict(manifest.aliases)

    def keys(self) -> list[str]:
        """Return the keys of all global tensors and of those that `rank` has of its own, sorted."""
        own = self._record(self.rank).draft.local
        return sorted(own.keys() | {key for key in self._index.entries if not self._is_own(key)})

    def is_per_rank(self, key: str) -> bool:
        """Tell whether each rank has a value of its own of tensor `key`."""
        return key not in self._index.entries or self._is_own(key)

    def tensor(self, key: str) -> Tensor:
        """Return a tensor to be read; the bytes are read and checked later, as they are asked for.

        Raises:
            CorruptionError: the images do not hold what the index says.
            UnknownFormatError: it has a dtype that this relight does not know, or pieces that do not cover it once.
        """
        dtype, shape, pieces = self._pieces(key)
        if dtype not in ITEM_BYTES:
            raise UnknownFormatError(f"{key} has dtype {dtype}, which this relight does not know", path=key)
        item_bytes = ITEM_BYTES[dtype]
        num_bytes = item_bytes * whole(shape).num_elements
        readers: list[tuple[Box, ReadBytes]] = []
        place: tuple[object, ...] = (0, 0)
        for rank, name, box in pieces:
            image, stored = self._entry(rank, name)
            if stored.end_bytes - stored.start_bytes != item_bytes * box.num_elements:
                raise CorruptionError(
                    f"{image.name}: entry {name!r} is not what the index says", path=image.name
                )
            place = place if readers else (rank, stored.start_bytes)
            readers.append((box, partial(self._read, image, stored.start_bytes)))
        read = readers[0][1] if len(readers) == 1 else Assembly(shape, item_bytes, readers).read
        return Tensor(name=key, dtype=dtype, shape=shape, num_bytes=num_bytes, read=read, place=place)

    def _is_own(self, key: str) -> bool:
        return self._index.entries[key].layout == PER_RANK

    def _pieces(self, key: str) -> tuple[str, tuple[int, ...], Iterator[tuple[int, str, Box]]]:
        if self.is_per_rank(key):
            dtype, shape = self._record(self.rank).draft.local[key]
            return dtype, shape, iter([(self.rank, key, whole(shape))])
        entry = self._index.entries[key]
        return entry.dtype, entry.shape, ((p.rank, p.name, p.box) for p in self._index.pieces(key))

    def _read(self, image: _Image, base_bytes: int, start_bytes: int, target: memoryview) -> None:
        self._blocks.read(image.name, image.record, base_bytes + start_bytes, target)

    def _record(self, rank: int) -> RankRecord:
        return self._image(rank).record

    def _entry(self, rank: int, name: str) -> tuple[_Image, ImageTensor]:
        image = self._image(rank)
        if name not in image.tensors:
            raise CorruptionError(f"{image.name} holds no {name!r}, which the index names", path=image.name)
        return image, image.tensors[name]

    def _image(self, rank: int) -> _Image:
        if rank not in self._images:
            record = self.catalog.record(self.step, self.generation, rank, self._manifest)
            name = image_name(self.step, self.generation, rank)
            size_bytes = record.draft.image_bytes
            first = bytearray(8)
            self._blocks.read(name, record, 0, memoryview(first))
            header = bytearray(safetensors_header_bytes(first, size_bytes=size_bytes, path=name))
            self._blocks.read(name, record, 8, memoryview(header))
            tensors = parse_safetensors(header, size_bytes=size_bytes, path=name).tensors
            self._images[rank] = _Image(name, record, tensors)
        return self._images[rank]
