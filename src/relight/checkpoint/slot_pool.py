"""This rank's slots in the node's arena: made, touched and handed out ahead of need, by the snapshot thread."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from pathlib import Path
from typing import Any

from relight.errors import CorruptionError, KeeperUnavailableError, MemoryBudgetError, MissingCopyError
from relight.keeper.arena import ArenaSlot, slot_path
from relight.units import format_bytes

__all__ = ["SlotPool", "check_memory"]

_MADV_POPULATE_WRITE = 23
_TOUCH_BYTES = 64 * 2**20
_libc = ctypes.CDLL(None, use_errno=True)


class SlotPool:
    """Slots of one rank. Not thread-safe: only the snapshot thread uses it.

    Args:
        folder: arena folder of the run.
        num_slots: slots of this rank, at least 2.
        budget_bytes: memory this rank's slots may take, or None for what the machine has.
        is_pinned: register slots with CUDA, so that device copies are asynchronous.
    """

    def __init__(
        self, folder: Path, rank: int, *, num_slots: int, budget_bytes: int | None, cuda: Any = None
    ) -> None:
        self.folder = folder
        self.rank = rank
        self.num_slots = num_slots
        self.budget_bytes = budget_bytes
        self._cuda = cuda
        self._open: dict[int, ArenaSlot] = {}

    def prepare(self, index: int, image_bytes: int) -> ArenaSlot:
        """Return slot `index`, large enough and with its memory touched; an old one of another size is replaced.

        Raises:
            MemoryBudgetError: it does not fit; says what is needed and what there is.
        """
        slot = self.mapped(index)
        if slot is not None and slot.capacity_bytes == image_bytes:
            return slot
        path = slot_path(self.folder, self.rank, index)
        if slot is not None:
            self._close(index, slot)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        held = sum(slot.capacity_bytes for slot in self._open.values())
        check_memory(
            self.folder,
            image_bytes,
            held_bytes=held,
            num_slots=self.num_slots,
            budget_bytes=self.budget_bytes,
        )
        try:
            slot = ArenaSlot.create(path, image_bytes, owner_pid=os.getpid())
        except FileNotFoundError as error:
            raise KeeperUnavailableError(
                f"the arena {self.folder} was removed", path=str(self.folder)
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise _too_large(self.folder, image_bytes, self.num_slots, _free_bytes(self.folder)) from error
        _touch(slot)
        if self._cuda is not None:
            _register(self._cuda, slot)
        self._open[index] = slot
        return slot

    def mapped(self, index: int) -> ArenaSlot | None:
        """Return slot `index` as it is, mapped from here on; None if there is none."""
        slot = self._open.get(index)
        if slot is not None and slot.is_stale():
            self._close(index, slot)
            slot = None
        slot = slot or self._reopen(index)
        if slot is not None:
            self._open[index] = slot
        return slot

    def forget(self) -> None:
        """Unmap everything; the files stay."""
        for index, slot in list(self._open.items()):
            self._close(index, slot)

    def _reopen(self, index: int) -> ArenaSlot | None:
        try:
            slot = ArenaSlot.open(slot_path(self.folder, self.rank, index))
        except (MissingCopyError, CorruptionError):
            return None
        if self._cuda is not None:
            _register(self._cuda, slot)
        return slot

    def _close(self, index: int, slot: ArenaSlot) -> None:
        if self._cuda is not None:
            self._cuda.cudart().cudaHostUnregister(slot.address())
        slot.close()
        self._open.pop(index, None)


def check_memory(
    folder: Path, image_bytes: int, *, held_bytes: int, num_slots: int, budget_bytes: int | None
) -> None:
    """Check that one more slot of `image_bytes` fits, before anything is allocated.

    Raises:
        MemoryBudgetError: over the budget, the shared-memory mount, the container's limit or the machine's memory.
    """
    needed = image_bytes * num_slots
    if budget_bytes is not None and needed > budget_bytes:
        raise _too_large(folder, image_bytes, num_slots, budget_bytes)
    free = _free_bytes(folder)
    if image_bytes > free:
        raise _too_large(folder, image_bytes, num_slots, free + held_bytes)


def _too_large(folder: Path, image_bytes: int, num_slots: int, available: int) -> MemoryBudgetError:
    needed = image_bytes * num_slots
    return MemoryBudgetError(
        f"{num_slots} snapshots of {format_bytes(image_bytes)} need {format_bytes(needed)} of shared memory in "
        f"{folder.parent.parent}, there is room for {format_bytes(available)}: raise ram_budget or the size of the "
        "mount (docker run --shm-size), or set RELIGHT_ARENA_DIR to a larger tmpfs",
        path=str(folder),
        needed_bytes=needed,
        budget_bytes=available,
    )


def _free_bytes(folder: Path) -> int:
    """Return the memory that a new slot may take: the least of mount, machine and container."""
    mount = os.statvfs(folder)
    free = [mount.f_bavail * mount.f_frsize, _available_memory()]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            free.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
    return min(free)


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise MemoryBudgetError("/proc/meminfo does not say how much memory is available")


def _touch(slot: ArenaSlot) -> None:
    """Make every page of the mapping present, so that no copy pays for first touch; does not hold the interpreter."""
    base = slot.address()
    for start in range(0, slot.capacity_bytes, _TOUCH_BYTES):
        size = min(_TOUCH_BYTES, slot.capacity_bytes - start)
        if _libc.madvise(ctypes.c_void_p(base + start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
            ctypes.memset(base + start, 0, size)


def _register(cuda: Any, slot: ArenaSlot) -> None:
    # Failing to pin only makes the copies synchronous; the result is the same.
    cuda.cudart().cudaHostRegister(slot.address(), slot.capacity_bytes, 0)
