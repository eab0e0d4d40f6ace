"""A sealed snapshot as the drain works on it: what its draft says, its digests, and whether it is still there."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import xxhash

from relight.errors import CopyError, CorruptionError, MissingCopyError
from relight.keeper.arena import ArenaSlot, SlotControl, SlotState
from relight.keeper.messages import TierPlan
from relight.keeper.slots import SlotId, StepKey
from relight.manifest.manifest import BLOCK_BYTES, RecordDraft

__all__ = ["SealedJob", "hash_blocks", "read_draft", "unchanged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedJob:
    """One snapshot to drain: where it is, what it is, where it goes, and its digests once they are there."""

    slot: SlotId
    key: StepKey
    control: SlotControl
    tiers: tuple[TierPlan, ...]
    digests: Future[list[bytes]] = field(default_factory=Future)


def hash_blocks(mapped: ArenaSlot, image_bytes: int) -> list[bytes]:
    """Return the digest of every block of the image; releases the interpreter lock."""
    with mapped.image[:image_bytes] as image:
        return [_hash(image, at) for at in range(0, image_bytes, BLOCK_BYTES)]


def unchanged(mapped: ArenaSlot, job: SealedJob) -> SlotControl:
    """Return the control page.

    Raises:
        MissingCopyError: the slot does not hold the job's snapshot any more.
    """
    now = mapped.control()
    if now.state not in (SlotState.SEALED, SlotState.DIGESTED) or StepKey.of(now) != job.key:
        raise MissingCopyError(f"{mapped.path}: step {job.key.step} was overwritten before it was stored")
    return now


def read_draft(mapped: ArenaSlot, job: SealedJob) -> RecordDraft:
    """Return the record draft.

    Raises:
        CorruptionError: it cannot be read.
        CopyError: it speaks of another snapshot than the control page.
    """
    try:
        draft = msgspec.json.decode(mapped.draft(), type=RecordDraft)
    except msgspec.MsgspecError as error:
        raise CorruptionError(f"{mapped.path}: the record draft cannot be read: {error}") from error
    control = unchanged(mapped, job)
    said = (draft.generation, draft.step, draft.rank, draft.world_size, draft.image_bytes)
    meant = (job.key.generation, job.key.step, job.slot.rank, control.world_size, control.image_bytes)
    if said != meant:
        raise CopyError(f"{mapped.path}: the record draft speaks of another snapshot than the control page")
    return draft


def _hash(image: memoryview, at: int) -> bytes:
    with image[at : at + BLOCK_BYTES] as block:
        return xxhash.xxh3_128_digest(block)
