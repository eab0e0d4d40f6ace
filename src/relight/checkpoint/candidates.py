"""What can be restored: the steps that are whole somewhere, and one of them opened for reading.

A candidate is a step; its blocks may come from memory and any tier mixed. Rank 0 lists, everyone tries in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from relight.checkpoint import context
from relight.checkpoint.group import RankGroup
from relight.checkpoint.matching import SavedState
from relight.checkpoint.slot_pool import SlotPool
from relight.checkpoint.transfer import Image, ImageCopy, SlotCopy, StoredCopy, Target, load_targets
from relight.errors import ConfigError, CopyError, CorruptionError, MissingCopyError, RetryableError
from relight.keeper.arena import ArenaSlot, slot_path
from relight.keeper.messages import HeldSnapshot
from relight.manifest.catalog import Catalog, Inventory
from relight.manifest.manifest import IndexEntry, Manifest, Piece, RankRecord, RecordDraft
from relight.manifest.names import image_name

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
    catalogs: Sequence[Catalog], held: Sequence[HeldSnapshot], *, step: int | None
) -> list[Candidate]:
    """Return what can be restored, newest first; with `step` only that one, replicas that differ or not.

    Memory counts only for what the newest generation builds on, like any committed step.
    """
    found: dict[tuple[int, int], Candidate] = {}
    surveys: list[Inventory] = []
    for at, catalog in enumerate(catalogs):
        surveys.append(catalog.survey())
        for info in surveys[-1].checkpoints:
            if not info.on_lineage or (info.replicas_differ and step is None):
                continue
            key = (info.generation, info.step)
            tiers = (*found[key].tiers, at) if key in found else (at,)
            found[key] = Candidate(
                step=info.step, generation=info.generation, world_size=info.world_size, tiers=tiers
            )
    lineage = surveys[-1].lineage
    for (generation, held_step), world_size in _complete(held).items():
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
    _index: dict[str, IndexEntry] = field(default_factory=dict)
    _images: dict[int, Image] = field(default_factory=dict)
    _drafts: dict[int, RecordDraft] = field(default_factory=dict)
    _manifests: dict[int, Manifest] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)
    _bad_places: list[str] = field(default_factory=list)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def saved_state(self, rank: int) -> SavedState:
        """Return what it holds for `rank`; a rank that was not there takes rank 0's per-rank values."""
        source = rank if rank < self.candidate.world_size else 0
        draft = self._open(source)
        first = draft if source == 0 else self._open(0)
        self._index = first.index
        specs = {
            key: (entry.dtype, entry.shape)
            for key, entry in first.index.items()
            if entry.ownership == "replicated"
        }
        specs.update(draft.local)
        parts = context.loads(bytes(draft.context))
        return SavedState(
            specs=specs, aliases=first.aliases, parts=parts, fetch=lambda wanted: self._fetch(wanted, source)
        )

    def bad_copies(self) -> list[str]:
        """Return every bad copy that was met and worked around, as text."""
        bad = [block for image in self._images.values() for block in image.bad]
        return self._bad_places + [f"{block.place}: block {block.block}: {block.reason}" for block in bad]

    def place(self) -> str:
        """Return "ram" or the URL of the nearest tier."""
        return "ram" if self.candidate.in_memory else self.catalogs[self.candidate.tiers[0]].backend.url

    def _fetch(self, wanted: list[tuple[str, torch.Tensor]], source: int) -> None:
        targets: list[Target] = []
        for key, tensor in wanted:
            targets += self._locate(key, tensor, source)
        self.bytes_read += load_targets(targets)

    def _locate(self, key: str, tensor: torch.Tensor, source: int) -> list[Target]:
        entry = self._index.get(key)
        if entry is None or entry.ownership == "per-rank":
            pieces: tuple[Piece, ...] = (Piece(source, key, (0,) * tensor.dim(), tuple(tensor.shape)),)
        else:
            pieces = entry.pieces
        row_bytes = tensor.element_size()
        for size in tensor.shape[1:]:
            row_bytes *= size
        targets = []
        for piece in pieces:
            image = self._image(piece.rank)
            stored = image.entries().get(piece.name)
            num_bytes = row_bytes * (piece.sizes[0] if piece.sizes else 1)
            if stored is None or stored.data_offsets[1] - stored.data_offsets[0] != num_bytes:
                raise CorruptionError(
                    f"{image.place}: entry {piece.name!r} is not {num_bytes} bytes as the index says",
                    path=image.place,
                )
            start = piece.offsets[0] * row_bytes if piece.offsets else 0
            targets.append(Target(image, stored.data_offsets[0], stored.data_offsets[1], tensor, start))
        return targets

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
        for at in self.candidate.tiers:
            backend = self.catalogs[at].backend
            try:
                record = self._record(at, rank)
            except (CopyError, RetryableError) as error:
                self._bad_places.append(str(error))
                continue
            theirs = [bytes.fromhex(digest) for digest in record.digests]
            if draft is None:
                draft, digests = record.draft, theirs
            elif theirs != digests:
                self._bad_places.append(
                    f"{backend.url}: digests of rank {rank} differ from the copy in memory"
                )
                continue
            copies.append(
                StoredCopy(backend, image_name(self.candidate.step, self.candidate.generation, rank))
            )
        if draft is None:
            raise MissingCopyError(
                f"step {self.candidate.step}: no good copy of rank {rank}: {'; '.join(self._bad_places[-3:])}",
                step=self.candidate.step,
                rank=rank,
            )
        self._drafts[rank] = draft
        self._images[rank] = Image(image_bytes=draft.image_bytes, digests=digests, copies=copies)
        return draft

    def _record(self, at: int, rank: int) -> RankRecord:
        catalog, step, generation = self.catalogs[at], self.candidate.step, self.candidate.generation
        if at not in self._manifests:
            self._manifests[at] = catalog.manifest(step, generation)
        return catalog.record(step, generation, rank, self._manifests[at])

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
