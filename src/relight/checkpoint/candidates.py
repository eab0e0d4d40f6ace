"""What can be restored: the steps that are whole somewhere, and one of them opened for reading.

A candidate is a step; its blocks may come from memory and any tier mixed. Rank 0 lists, everyone tries in order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

import msgspec
import torch

from relight.checkpoint import context
from relight.checkpoint.group import RankGroup
from relight.checkpoint.images import Image, ImageCopy, SlotCopy, StoredCopy
from relight.checkpoint.matching import SavedState
from relight.checkpoint.sharding import LayoutBook, is_dtensor, local_box, local_part
from relight.checkpoint.slot_pool import SlotPool
from relight.checkpoint.transfer import LoadPlan
from relight.errors import ConfigError, CopyError, CorruptionError, MissingCopyError, RetryableError
from relight.keeper.arena import ArenaSlot, run_digest, slot_path
from relight.keeper.messages import HeldSnapshot
from relight.manifest.catalog import Catalog, Inventory
from relight.manifest.index import StoredIndex
from relight.manifest.manifest import (
    BLOCK_BYTES,
    EQUAL,
    IN_PIECES,
    PER_RANK,
    IndexEntry,
    Manifest,
    RankRecord,
    RecordDraft,
)
from relight.manifest.names import image_name
from relight.manifest.shard import Piece, whole

__all__ = ["Candidate", "Checkpoint", "list_candidates", "try_candidates"]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A step that may be restored.

    Attributes:
        tiers: positions (in the list of catalogs) where it is committed.
        in_memory: whether every rank's snapshot is in the arena of this node.
    """

    step: int
    generation: int
    world_size: int
    tiers: tuple[int, ...] = ()
    in_memory: bool = False


def list_candidates(
    catalogs: Sequence[Catalog],
    held: Sequence[HeldSnapshot],
    *,
    step: int | None,
    on_problem: Callable[[str], None] = lambda _: None,
) -> list[Candidate]:
    """Return what can be restored, newest first; with `step` only that one, replicas that differ or not.

    Memory counts only for what the newest generation builds on, like any committed step. What cannot be read on a
    tier is told to `on_problem`: a step that is passed over for it must not go unnoticed.
    """
    found: dict[tuple[int, int], Candidate] = {}
    surveys: list[Inventory] = []
    for at, catalog in enumerate(catalogs):
        surveys.append(catalog.survey())
        for problem in surveys[-1].problems:
            on_problem(f"{catalog.backend.url}: {problem.message}")
        for info in surveys[-1].checkpoints:
            if not info.on_lineage or (info.replicas_differ and step is None):
                continue
            key = (info.generation, info.step)
            tiers = (*found[key].tiers, at) if key in found else (at,)
            found[key] = Candidate(
                step=info.step, generation=info.generation, world_size=info.world_size, tiers=tiers
            )
    lineage = surveys[-1].lineage
    ours = [one for one in held if one.run_digest == run_digest(surveys[-1].run or "")]
    for (generation, held_step), world_size in _complete(ours).items():
        if lineage.holds(held_step, generation):
            old = found.get((generation, held_step))
            found[generation, held_step] = Candidate(
                step=held_step,
                generation=generation,
                world_size=world_size,
                tiers=old.tiers if old is not None else (),
                in_memory=True,
            )
    ordered = sorted(found.values(), key=lambda one: (one.step, one.generation), reverse=True)
    return [one for one in ordered if step is None or one.step == step]


def _complete(held: Sequence[HeldSnapshot]) -> dict[tuple[int, int], int]:
    ranks: dict[tuple[int, int], set[int]] = {}
    sizes: dict[tuple[int, int], int] = {}
    for one in held:
        ranks.setdefault((one.generation, one.step), set()).add(one.rank)
        sizes[one.generation, one.step] = one.world_size
    return {key: sizes[key] for key, seen in ranks.items() if seen >= set(range(sizes[key]))}


@dataclass(slots=True)
class Checkpoint:
    """One candidate, opened for reading: its index, a rank's context, and every copy of every image it needs.

    Use it as a context manager: it maps slots. This rank's own come from `slots`, which keeps them mapped for the
    saves to come.
    """

    candidate: Candidate
    catalogs: Sequence[Catalog]
    folder: Path | None
    held: Sequence[HeldSnapshot]
    slots: SlotPool | None = None
    bytes_read: int = 0
    _index: StoredIndex = field(default_factory=lambda: StoredIndex({}, ()))
    _images: dict[int, Image] = field(default_factory=dict)
    _drafts: dict[int, RecordDraft] = field(default_factory=dict)
    _manifests: dict[int, Manifest] = field(default_factory=dict)
    _records: dict[tuple[int, int], RankRecord] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)
    _bad_places: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def saved_state(self, book: LayoutBook) -> SavedState:
        """Return what it holds for the rank of `book`; a rank that was not there takes rank 0's per-rank values."""
        source = book.rank if book.rank < self.candidate.world_size else 0
        draft = self._open(source)
        first = draft if source == 0 else self._open(0)
        self._index = StoredIndex.of(first)
        specs = dict(self._index.entries)
        for key, (dtype, shape) in draft.local.items():
            if key not in specs or specs[key].layout == PER_RANK:
                specs[key] = IndexEntry(dtype, shape, PER_RANK)
        return SavedState(
            specs=specs,
            aliases=first.aliases,
            parts=context.loads(bytes(draft.context)),
            fetch=lambda wanted: self._fetch(wanted, source, book),
            replicas_differ=first.replicas_differ,
            world_size=self.candidate.world_size,
            rank=book.rank,
            is_resized=self.candidate.world_size != book.world_size,
        )

    def bad_copies(self) -> list[str]:
        """Return every bad copy that was met and worked around, as text."""
        bad = [block for image in self._images.values() for block in image.bad]
        texts = [f"{block.place}: block {block.block}: {block.reason}" for block in bad]
        return list(dict.fromkeys([*self._bad_places, *texts]))

    def place(self) -> str:
        """Return "ram" or the URL of the nearest tier."""
        return "ram" if self.candidate.in_memory else self.catalogs[self.candidate.tiers[0]].backend.url

    def _fetch(self, wanted: list[tuple[str, torch.Tensor]], source: int, book: LayoutBook) -> None:
        """Fill the wanted tensors. Written for many small ones: no call per tensor where none is needed."""
        plan = LoadPlan()
        homes = self._homes(source)
        home_now, low, high = -1, 0, 0
        for key, tensor in wanted:
            home = homes.get(key, source)
            if home is None or is_dtensor(tensor):
                self._add_pieces(plan, key, tensor, source, book)
                continue
            if home != home_now:
                image = self._image(home)
                entries, base, limit = image.entries(), image.data_start, image.image_bytes
                home_now, low, high = home, 0, 0
            stored = entries.get(key) or image.part_of(key)
            start, stop = stored.data_offsets if stored is not None else (0, -1)
            if stop - start != tensor.nbytes or start < 0 or base + stop > limit:
                raise _not_as_indexed(image, key, tensor.nbytes)
            if start == stop:
                continue
            start += base
            stop += base
            if not low <= start < high:
                low = start - start % BLOCK_BYTES
                high = low + BLOCK_BYTES
                append = plan.moves(image, low // BLOCK_BYTES).append
            if stop <= high and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj():
                append((start - low, stop - start, tensor.data_ptr(), None))
            else:
                plan.add(image, start, stop, tensor)
        # Every thread touches a new buffer of a block, which costs more than to read it.
        num_neighbours = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", book.world_size)))
        self.bytes_read += plan.run(num_neighbours=num_neighbours)

    def _homes(self, source: int) -> dict[str, int | None]:
        """Return by tensor the rank whose image holds all of it under its key; None where pieces must be found."""
        whole_on = [layout.base if not layout.mesh else None for layout in self._index.layouts]
        return {
            key: whole_on[entry.layout]
            if entry.layout >= 0
            else (None if entry.layout == IN_PIECES else source)
            for key, entry in self._index.entries.items()
        }

    def _add_pieces(
        self, plan: LoadPlan, key: str, tensor: torch.Tensor, source: int, book: LayoutBook
    ) -> None:
        entry = self._index.entries.get(key)
        held = local_part(tensor)
        if entry is None or entry.layout == PER_RANK:
            box, shape = whole(tuple(held.shape)), tuple(held.shape)
            pieces: Sequence[Piece] = (Piece(source, key, *box),)
        else:
            shape = entry.shape
            box = (
                local_box(book.layout(key, tensor), shape, book.rank) if is_dtensor(tensor) else whole(shape)
            )
            own = (Piece(source, key, *whole(shape)),)
            pieces = own if entry.layout == EQUAL else self._index.pieces(key, box)
        filled = 0
        for piece in pieces:
            image = self._image(piece.rank)
            stored = image.entries().get(piece.name)
            num_bytes = piece.box.num_elements * held.element_size()
            if stored is None or stored.num_bytes != num_bytes:
                raise _not_as_indexed(image, piece.name, num_bytes)
            filled += plan.add_box(image, image.data_start + stored.data_offsets[0], piece.box, held, box)
        if filled != held.numel():
            raise CorruptionError(
                f"step {self.candidate.step}: the stored pieces of {key} cover {filled} of the {held.numel()} elements "
                f"that rank {book.rank} needs",
                step=self.candidate.step,
                path=key,
            )

    def _image(self, rank: int) -> Image:
        if rank not in self._images:
            self._open(rank)
        return self._images[rank]

    def _open(self, rank: int) -> RecordDraft:
        """Open every copy of a rank's image; the record comes from the nearest good one, and all must agree with it."""
        if rank in self._drafts:
            return self._drafts[rank]
        copies: list[ImageCopy] = []
        draft: RecordDraft | None = None
        digests: list[bytes] = []
        if self.candidate.in_memory:
            try:
                slot, draft, digests = self._open_slot(rank)
                copies.append(SlotCopy(slot))
            except CopyError as error:
                self._bad_places.append(str(error))
        more = None
        if draft is None:
            draft, digests, copies = self._open_stored(rank)
        else:
            more = partial(self._stored_copies, rank, digests)
        if draft is None:
            raise MissingCopyError(
                f"step {self.candidate.step}: no good copy of rank {rank}: {'; '.join(self._bad_places[-3:])}",
                step=self.candidate.step,
                rank=rank,
            )
        self._drafts[rank] = draft
        self._images[rank] = Image(image_bytes=draft.image_bytes, digests=digests, copies=copies, more=more)
        return draft

    def _open_stored(self, rank: int) -> tuple[RecordDraft | None, list[bytes], list[ImageCopy]]:
        for at in self.candidate.tiers:
            try:
                record = self._record(at, rank)
            except (CopyError, RetryableError) as error:
                self._bad_places.append(str(error))
                continue
            digests = [bytes.fromhex(digest) for digest in record.digests]
            return record.draft, digests, self._stored_copies(rank, digests)
        return None, [], []

    def _stored_copies(self, rank: int, digests: list[bytes]) -> list[ImageCopy]:
        """Return the stored copies of a rank's image; one whose record has other digests is no copy of it."""
        copies: list[ImageCopy] = []
        for at in self.candidate.tiers:
            backend = self.catalogs[at].backend
            try:
                theirs = [bytes.fromhex(digest) for digest in self._record(at, rank).digests]
            except (CopyError, RetryableError) as error:
                self._bad_places.append(str(error))
                continue
            if theirs == digests:
                name = image_name(self.candidate.step, self.candidate.generation, rank)
                copies.append(StoredCopy(backend, name))
            else:
                self._bad_places.append(
                    f"{backend.url}: rank {rank}'s digests differ from those of the nearer copy"
                )
        return copies

    def _record(self, at: int, rank: int) -> RankRecord:
        catalog, step, generation = self.catalogs[at], self.candidate.step, self.candidate.generation
        if at not in self._manifests:
            self._manifests[at] = catalog.manifest(step, generation)
        if (at, rank) not in self._records:
            self._records[at, rank] = catalog.record(step, generation, rank, self._manifests[at])
        return self._records[at, rank]

    def _open_slot(self, rank: int) -> tuple[ArenaSlot, RecordDraft, list[bytes]]:
        wanted = (rank, self.candidate.step, self.candidate.generation)
        for one in self.held:
            if self.folder is not None and (one.rank, one.step, one.generation) == wanted:
                slot = (
                    self.slots.mapped(one.slot)
                    if self.slots is not None and rank == self.slots.rank
                    else None
                )
                if slot is None:
                    slot = ArenaSlot.open(slot_path(self.folder, rank, one.slot))
                    self._stack.callback(slot.close)
                control = slot.control()
                if (control.rank, control.step, control.generation) != wanted:
                    raise MissingCopyError(f"{slot.path} holds another snapshot by now", path=str(slot.path))
                digests = slot.digests()
                return slot, msgspec.json.decode(slot.draft(), type=RecordDraft), digests
        raise MissingCopyError(f"rank {rank} of step {self.candidate.step} is not in memory", rank=rank)


def _not_as_indexed(image: Image, name: str, num_bytes: int) -> CorruptionError:
    message = f"{image.place}: entry {name!r} is not {num_bytes} bytes as the index says"
    return CorruptionError(message, path=image.place)


def try_candidates(
    candidates: Sequence[Candidate],
    group: RankGroup,
    load: Callable[[Candidate], None],
    on_skip: Callable[[Candidate, str], None],
) -> Candidate | None:
    """Load the first candidate that every rank can load; all ranks take the same one.

    Raises:
        ConfigError, and whatever `load` raises beyond `CopyError` and `RetryableError`: on every rank at once.
    """
    for candidate in candidates:
        grave: BaseException | None = None
        reason = ""
        try:
            load(candidate)
        except (CopyError, RetryableError) as error:
            reason = str(error)
        except BaseException as error:  # noqa: BLE001 - told to the other ranks, then raised again
            grave = error
        answers = group.gather({"reason": reason, "grave": str(grave) if grave is not None else ""})
        if grave is not None:
            raise grave
        theirs = [(rank, answer["grave"]) for rank, answer in enumerate(answers) if answer["grave"]]
        if theirs:
            raise ConfigError(f"restore failed on rank {theirs[0][0]}: {theirs[0][1]}", rank=theirs[0][0])
        failed = [(rank, answer["reason"]) for rank, answer in enumerate(answers) if answer["reason"]]
        if not failed:
            return candidate
        on_skip(candidate, "; ".join(f"rank {rank}: {text}" for rank, text in failed))
    return None
