"""A committed checkpoint as torch.distributed.checkpoint sees it: which one, what it holds, and its images."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from relight.checkpoint import context
from relight.checkpoint.dcp_place import Root, parse_root
from relight.checkpoint.dcp_writer import CONTEXT_KEY
from relight.checkpoint.format import DTYPES
from relight.checkpoint.images import Image, StoredCopy
from relight.errors import CorruptionError, MissingCopyError, StateMismatchError, UnknownFormatError
from relight.manifest.catalog import Catalog
from relight.manifest.index import StoredIndex
from relight.manifest.inventory import CheckpointInfo, Inventory
from relight.manifest.manifest import PER_RANK, IndexEntry, RankRecord
from relight.manifest.names import image_name, manifest_name, parse_step_dir, step_dir
from relight.manifest.shard import Piece
from relight.storage.backend import open_backend

__all__ = ["Source", "has_checkpoint", "open_source"]

_KNOWN = {"inner", "objects", "per_rank", "per_rank_names", "planner"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a checkpoint holds beside tensors.

    Attributes:
        objects: name -> typed JSON.
        inner: names of tensors that lie within objects and are no entries of the state dict.
        per_rank: names of the values of which each rank has its own.
        planner: what the planner that saved it left for the one that loads.
    """

    objects: Mapping[str, Any]
    inner: frozenset[str]
    per_rank: frozenset[str]
    planner: Any


class Source:
    """One committed checkpoint, opened for reading."""

    def __init__(self, catalog: Catalog, info: CheckpointInfo) -> None:
        self.catalog = catalog
        self.step, self.generation = info.step, info.generation
        self.manifest_digest = info.manifest_digest
        self.manifest = catalog.manifest(info.step, info.generation)
        self.index = StoredIndex.of(self.manifest)
        self.place = f"{catalog.backend.url}/{step_dir(info.step, info.generation)}"
        self._records: dict[int, RankRecord] = {}
        self._images: dict[int, Image] = {}
        self._contents: Contents | None = None
        self._pieces: dict[str, dict[tuple[int, ...], Piece]] = {}

    @property
    def contents(self) -> Contents:
        """What it holds beside tensors; nothing of that for a checkpoint that DCP did not save."""
        if self._contents is None:
            said = self._said(0)
            self._contents = Contents(
                objects=said.get("objects", {}),
                inner=frozenset(said.get("inner", ())),
                per_rank=frozenset(said.get("per_rank_names", ())),
                planner=context.decode(said["planner"]) if "planner" in said else None,
            )
        return self._contents

    def metadata(self, load_id: str) -> Metadata:
        """Return what planners may know of the checkpoint.

        Raises:
            UnknownFormatError: a tensor has a dtype that this torch does not have, or pieces that do not make it up.
        """
        return Metadata(
            state_dict_metadata={
                name: self._tensor_metadata(name) if self._is_tensor(name) else BytesStorageMetadata()
                for name in self.names()
            },
            planner_data=self.contents.planner,
            storage_meta=StorageMeta(checkpoint_id=self.place, load_id=load_id),
        )

    def names(self) -> list[str]:
        """Return the keys that the state dict had, flattened."""
        tensors = {
            name
            for name, entry in self.index.entries.items()
            if entry.layout != PER_RANK and name not in self.contents.inner
        }
        return sorted(
            tensors | self.manifest.aliases.keys() | self.contents.objects.keys() | self.contents.per_rank
        )

    def is_empty(self, name: str) -> bool:
        """Tell whether `name` is a tensor without elements, of which there is nothing to read."""
        return self._is_tensor(name) and 0 in self.entry(name).shape

    def entry(self, name: str) -> IndexEntry:
        """Return the index entry of a tensor, tied ones under the name that is stored."""
        found = self.index.entries.get(self.manifest.aliases.get(name, name))
        if found is None:
            raise UnknownFormatError(f"{self.place} speaks of {name}, which is not in its index", path=name)
        return found

    def piece(self, name: str, offsets: tuple[int, ...]) -> Piece:
        """Return the stored piece of a tensor that begins at `offsets`."""
        pieces = self._pieces.get(name)
        if pieces is None:
            found = self.index.pieces(self.manifest.aliases.get(name, name))
            pieces = self._pieces[name] = {piece.offsets: piece for piece in found}
        return pieces[offsets]

    def pieces(self, name: str) -> list[Piece]:
        """Return all stored pieces of a tensor."""
        return list(self.index.pieces(self.manifest.aliases.get(name, name)))

    def image(self, rank: int) -> Image:
        """Return a rank's image."""
        if rank not in self._images:
            record = self.record(rank)
            self._images[rank] = Image(
                image_bytes=record.draft.image_bytes,
                digests=[bytes.fromhex(digest) for digest in record.digests],
                copies=[StoredCopy(self.catalog.backend, image_name(self.step, self.generation, rank))],
            )
        return self._images[rank]

    def start_bytes(self, rank: int, entry: str, num_bytes: int) -> int:
        """Return where in a rank's image the bytes of `entry` begin.

        Raises:
            CorruptionError: the image does not hold it, or not that much of it.
        """
        image = self.image(rank)
        found = image.entries().get(entry)
        if found is None or found.num_bytes != num_bytes:
            held = "no such entry" if found is None else f"{found.num_bytes} bytes"
            raise CorruptionError(
                f"{image.place}: {entry!r} should have {num_bytes} bytes; there is {held}",
                path=image.place,
                rank=rank,
            )
        return image.data_start + found.data_offsets[0]

    def own_value(self, name: str, rank: int) -> Any:
        """Return the typed JSON of a rank's own value.

        Raises:
            StateMismatchError: that rank saved none.
        """
        own = self._said(rank).get("per_rank", {}) if rank < self.manifest.world_size else {}
        if name not in own:
            raise StateMismatchError(
                f"{name}: every rank has a value of its own in {self.place}, but rank {rank} saved none",
                path=name,
                rank=rank,
            )
        return own[name]

    def record(self, rank: int) -> RankRecord:
        """Return a rank's record, checked against the manifest."""
        if rank not in self._records:
            self._records[rank] = self.catalog.record(self.step, self.generation, rank, self.manifest)
        return self._records[rank]

    def _said(self, rank: int) -> dict[str, Any]:
        said = context.loads(bytes(self.record(rank).draft.context))
        found = said.get(CONTEXT_KEY, {}) if isinstance(said, dict) else {}
        if not isinstance(found, dict) or not found.keys() <= _KNOWN:
            raise UnknownFormatError(f"{self.place}: rank {rank}'s record speaks of DCP in an unknown way")
        return found

    def _is_tensor(self, name: str) -> bool:
        return name not in self.contents.objects and name not in self.contents.per_rank

    def _tensor_metadata(self, name: str) -> TensorStorageMetadata:
        entry = self.entry(name)
        if entry.dtype not in DTYPES:
            raise UnknownFormatError(
                f"{name} has dtype {entry.dtype}, which this torch does not have", path=name
            )
        chunks = [
            ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
            for piece in self.pieces(name)
        ]
        return TensorStorageMetadata(
            TensorProperties(dtype=DTYPES[entry.dtype]), torch.Size(entry.shape), chunks
        )


def open_source(root: Root, step: int | None) -> Source:
    """Open the newest checkpoint at `root` that a reader may choose, or the one that is asked for.

    Raises:
        MissingCopyError: there is none.
        CorruptionError: files of one that is newer than what could be chosen cannot be read.
    """
    catalog = Catalog(open_backend(root.url))
    return Source(catalog, choose(catalog.survey(), root, step))


def choose(inventory: Inventory, root: Root, step: int | None) -> CheckpointInfo:
    """Return which checkpoint to read; see `open_source`."""
    # A name such as step-1000 says what was meant to be there; what is there decides.
    wanted = step if step is not None or root.generation is None else root.step
    fitting = [
        info
        for info in inventory.checkpoints
        if wanted in (None, info.step) and root.generation in (None, info.generation)
    ]
    counting = [
        info for info in fitting if info.on_lineage and (wanted is not None or not info.replicas_differ)
    ]
    chosen = next(iter(counting or (fitting if wanted is not None else [])), None)
    for problem in inventory.problems:
        place = parse_step_dir(problem.file.partition("/")[0])
        is_manifest = place is not None and problem.file == manifest_name(*place)
        if place is None or not is_manifest or wanted not in (None, place[0]):
            continue
        if chosen is None or place > (chosen.step, chosen.generation):
            raise CorruptionError(
                f"{root.url}/{problem.message}; this is the newest checkpoint: choose an older one by "
                "Reader(step=...)",
                path=problem.file,
                step=place[0],
            )
    if chosen is None:
        known = ", ".join(str(info.step) for info in inventory.checkpoints[:5]) or "none"
        what = "no checkpoint is committed" if wanted is None else f"step {wanted} is not committed"
        begun = (
            f"; unfinished: {', '.join(str(one) for one, _ in inventory.incomplete[-5:])}"
            if inventory.incomplete
            else ""
        )
        raise MissingCopyError(
            f"{root.url}: {what}; committed steps: {known}{begun}", step=wanted, path=root.url
        )
    return chosen


def has_checkpoint(place: str | os.PathLike[str]) -> bool:
    """Tell whether a committed checkpoint is at `place`: the root of a run, or one checkpoint's directory."""
    root = parse_root(place)
    return any(
        root.generation in (None, info.generation) and (root.generation is None or root.step == info.step)
        for info in Catalog(open_backend(root.url)).committed()
    )
