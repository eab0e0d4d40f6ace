"""The arena: shared-memory slots, each one rank's snapshot laid out as the file that will be stored.

A slot file is: one 4 KiB control page; the image region (a safetensors image, page aligned); the digests of its
blocks; the record draft. Slots are plain files in a 0700 directory under /dev/shm, so they outlive every process.

Who may write: the trainer rank that owns the slot while its state is FREE or WRITING; the keeper afterwards
(digests, state). A sealed image is never written again. Must not import torch.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import xxhash

from relight.errors import ConfigError, CorruptionError, MissingCopyError
from relight.manifest.manifest import BLOCK_BYTES
from relight.stages import reached

__all__ = [
    "ArenaSlot",
    "SlotControl",
    "SlotState",
    "arena_dir",
    "check_private",
    "list_slots",
    "run_digest",
    "slot_path",
]

PAGE_BYTES = 4096
_MAGIC = b"RLSLOT02"
_FIELDS = struct.Struct("<qqIIQQQQIId")
_STATE_AT = 8
_FIELDS_AT = 64
_SUM_AT = 56
_CONTROL_READS = 20


class SlotState(enum.IntEnum):
    """What a slot holds: nothing, a snapshot being made, a sealed one, one with digests."""

    FREE = 0
    WRITING = 1
    SEALED = 2
    DIGESTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotControl:
    """The control page of a slot, checked by its own checksum."""

    state: SlotState
    step: int
    generation: int
    rank: int
    world_size: int
    image_bytes: int
    capacity_bytes: int
    record_bytes: int
    run_digest: int
    owner_pid: int
    num_blocks: int
    sealed_at: float


def arena_dir(root_url: str, *, base: Path | None = None) -> Path:
    """Return (and make, mode 0700) the directory that holds the slots and the keeper's socket of the run at `root_url`.

    Raises:
        ConfigError: the directory is not ours alone (another owner, a link, open permissions).
    """
    shared = base if base is not None else Path(os.environ.get("RELIGHT_ARENA_DIR", "/dev/shm"))  # noqa: S108
    mine = shared / f"relight-{os.getuid()}"
    for folder in (mine, mine / xxhash.xxh3_64_hexdigest(root_url.encode("utf-8", "surrogateescape"))):
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            check_private(folder)
    return folder


def check_private(folder: Path) -> None:
    """Check that `folder` is a directory of this user that nobody else may enter.

    Raises:
        ConfigError: it is not.
    """
    seen = folder.lstat()
    if not os.path.isdir(folder) or folder.is_symlink() or seen.st_uid != os.getuid() or seen.st_mode & 0o077:
        raise ConfigError(
            f"{folder} must be a directory of this user with mode 0700; remove it or set RELIGHT_ARENA_DIR",
            path=str(folder),
        )


def run_digest(run: str) -> int:
    """Return what the control page says of a run: two runs may use one root, one after the other."""
    return xxhash.xxh3_64_intdigest(run.encode())


def slot_path(folder: Path, rank: int, index: int) -> Path:
    """Return the path of slot `index` of `rank`."""
    return folder / f"rank-{rank:05d}.slot-{index}"


def list_slots(folder: Path) -> list[Path]:
    """Return the slot files in `folder`, sorted by name."""
    return sorted(folder.glob("rank-*.slot-*"))


def _page_up(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _record_at(capacity_bytes: int) -> int:
    return PAGE_BYTES + _page_up(capacity_bytes) + _page_up(16 * max(1, -(-capacity_bytes // BLOCK_BYTES)))


class ArenaSlot:
    """One mapped slot. Close it, or use it as a context manager.

    Attributes:
        path: the slot file.
        capacity_bytes: size of the image region.
        image: writable view of the whole image region (page aligned); slice it to `image_bytes`.
    """

    def __init__(self, path: Path, descriptor: int, capacity_bytes: int) -> None:
        self.path = path
        self.capacity_bytes = capacity_bytes
        self._descriptor = descriptor
        self._digests_at = PAGE_BYTES + _page_up(capacity_bytes)
        self._record_at = _record_at(capacity_bytes)
        self._map = mmap.mmap(descriptor, self._record_at, flags=mmap.MAP_SHARED)
        self._view = memoryview(self._map)
        self.image = self._view[PAGE_BYTES : PAGE_BYTES + capacity_bytes]

    @classmethod
    def create(cls, path: Path, capacity_bytes: int, *, owner_pid: int) -> ArenaSlot:
        """Make a new FREE slot with memory for `capacity_bytes` reserved.

        Raises:
            FileExistsError: there is one already.
            OSError: ENOSPC when the shared memory cannot hold it; nothing is left behind then.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _record_at(capacity_bytes))
            slot = cls(path, descriptor, capacity_bytes)
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        slot._write_control(SlotState.FREE, (-1, -1, 0, 0, 0, capacity_bytes, 0, 0, owner_pid, 0, 0.0))
        slot._view[0:8] = _MAGIC
        return slot

    @classmethod
    def open(cls, path: Path) -> ArenaSlot:
        """Map an existing slot.

        Raises:
            MissingCopyError: there is none.
            CorruptionError: it is not a slot, or was cut short while it was made.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise MissingCopyError(f"no slot {path}", path=str(path)) from error
        page = os.pread(descriptor, PAGE_BYTES, 0)
        if len(page) < PAGE_BYTES or page[:8] != _MAGIC:
            os.close(descriptor)
            raise CorruptionError(f"{path} is not a finished slot", path=str(path))
        capacity_bytes = _FIELDS.unpack_from(page, _FIELDS_AT)[5]
        if os.fstat(descriptor).st_size < _record_at(capacity_bytes):
            os.close(descriptor)
            raise CorruptionError(f"{path} is shorter than its control page says", path=str(path))
        return cls(path, descriptor, capacity_bytes)

    def control(self) -> SlotControl:
        """Return the control page.

        Raises:
            CorruptionError: its checksum does not match (torn by a crash, or overwritten).
        """
        for attempt in range(_CONTROL_READS):
            raw = bytes(self._view[_FIELDS_AT : _FIELDS_AT + _FIELDS.size])
            state = int.from_bytes(self._view[_STATE_AT : _STATE_AT + 4], "little")
            if bytes(self._view[_SUM_AT : _SUM_AT + 8]) == xxhash.xxh3_64_digest(raw) and state in set(
                SlotState
            ):
                break
            # Its owner may be writing it right now, which takes microseconds.
            time.sleep(0.0002 * (attempt > 0))
        else:
            raise CorruptionError(
                f"{self.path}: control page does not match its checksum", path=str(self.path)
            )
        step, generation, rank, world, image, capacity, record, run, pid, blocks, sealed = _FIELDS.unpack(raw)
        return SlotControl(
            state=SlotState(state),
            step=step,
            generation=generation,
            rank=rank,
            world_size=world,
            image_bytes=image,
            capacity_bytes=capacity,
            record_bytes=record,
            run_digest=run,
            owner_pid=pid,
            num_blocks=blocks,
            sealed_at=sealed,
        )

    def begin(
        self, *, step: int, generation: int, rank: int, world_size: int, image_bytes: int, run: str = ""
    ) -> None:
        """Take the slot for a new snapshot of `run`; whatever it held is gone from here on."""
        # Not WRITING before the page says whose: with a dead owner's number the keeper would free it.
        self._set_state(SlotState.FREE)
        values = (
            step,
            generation,
            rank,
            world_size,
            image_bytes,
            self.capacity_bytes,
            0,
            run_digest(run),
            os.getpid(),
            0,
            0.0,
        )
        self._write_control(SlotState.WRITING, values)
        reached("slot.writing")

    def seal(self, draft: bytes, *, sealed_at: float) -> None:
        """Make the snapshot readable: store the record draft, then the state, which is the last byte to change."""
        now = self.control()
        os.ftruncate(self._descriptor, self._record_at + _page_up(len(draft)))
        os.pwrite(self._descriptor, draft, self._record_at)
        reached("seal.draft_written")
        values = (
            now.step,
            now.generation,
            now.rank,
            now.world_size,
            now.image_bytes,
            self.capacity_bytes,
            len(draft),
            now.run_digest,
            now.owner_pid,
            -(-now.image_bytes // BLOCK_BYTES),
            sealed_at,
        )
        self._write_control(SlotState.WRITING, values)
        reached("seal.control_written")
        self._set_state(SlotState.SEALED)
        reached("seal.sealed")

    def draft(self) -> bytes:
        """Return the record draft of a sealed slot."""
        return os.pread(self._descriptor, self.control().record_bytes, self._record_at)

    def write_digests(self, digests: list[bytes]) -> None:
        """Store the digests (16 bytes each) of a sealed image's blocks and mark the slot DIGESTED."""
        joined = b"".join([*digests, xxhash.xxh3_128_digest(b"".join(digests) + self.draft())])
        os.pwrite(self._descriptor, joined[:-16], self._digests_at)
        end = self._record_at + _page_up(self.control().record_bytes)
        os.ftruncate(self._descriptor, end + PAGE_BYTES)
        os.pwrite(self._descriptor, joined[-16:], end)
        reached("seal.digests_written")
        self._set_state(SlotState.DIGESTED)

    def digests(self) -> list[bytes]:
        """Return the block digests of a DIGESTED slot.

        Raises:
            CorruptionError: digests or record draft differ from what the keeper saw at seal time.
        """
        now = self.control()
        joined = os.pread(self._descriptor, 16 * now.num_blocks, self._digests_at)
        end = self._record_at + _page_up(now.record_bytes)
        if os.pread(self._descriptor, 16, end) != xxhash.xxh3_128_digest(joined + self.draft()):
            raise CorruptionError(
                f"{self.path}: digests or record differ from the sealed ones", path=str(self.path)
            )
        return [joined[at : at + 16] for at in range(0, len(joined), 16)]

    def free(self) -> None:
        """Give the slot back: its snapshot is no longer readable."""
        self._set_state(SlotState.FREE)

    def address(self) -> int:
        """Return the memory address of the image region, for copies that release the interpreter lock."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + PAGE_BYTES

    def is_stale(self) -> bool:
        """Return whether the file under this path is gone or another one by now."""
        try:
            return not os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self._descriptor))
        except FileNotFoundError:
            return True

    def close(self) -> None:
        """Unmap the slot; the file stays."""
        if self._descriptor >= 0:
            try:
                self.image.release()
                self._view.release()
                self._map.close()
            except BufferError:
                # A tensor, a slice or a buffer made by `address` still points into the mapping; it goes with that.
                pass
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _write_control(self, state: SlotState, values: tuple[int | float, ...]) -> None:
        raw = _FIELDS.pack(*values)
        self._view[_FIELDS_AT : _FIELDS_AT + _FIELDS.size] = raw
        self._view[_SUM_AT : _SUM_AT + 8] = xxhash.xxh3_64_digest(raw)
        self._set_state(state)

    def _set_state(self, state: SlotState) -> None:
        self._view[_STATE_AT : _STATE_AT + 4] = int(state).to_bytes(4, "little")
