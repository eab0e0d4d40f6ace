"""What must outlive the keeper's process beside the slots.

A small file, replaced as a whole at each change; and the count of requested saves, which ranks read without a call.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from relight.keeper.messages import TierPlan, TierState

__all__ = ["Journal", "Lease", "Outcome", "Owner", "Record", "SaveRequests"]

_log = logging.getLogger("relight.keeper")

_REQUESTS_BYTES = 4096


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """An attached process: `pid` that started at `started` ticks, as `rank` of `world_size` in `generation`."""

    rank: int
    pid: int
    started: int
    world_size: int
    generation: int


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Slot `index` of `rank` was given to the process `pid` that started at `started` ticks, to write to."""

    rank: int
    index: int
    pid: int
    started: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a step (of the run with that digest) ended on a tier."""

    generation: int
    step: int
    run: int
    tier: str
    state: TierState


class Record(msgspec.Struct, kw_only=True):
    """The content of the journal.

    Attributes:
        owners: attached processes, the newest last.
        leases: slots that may be written to now.
        lost: rank -> generation of processes that ended without a clean detach and were not replaced.
        was_attached: whether anyone ever attached.
        run: digest of the run's identifier, as in control pages; snapshots of others are never restored.
        tiers, generation, keep_best, protect: as the newest attach said.
        next_ordinal: number of the next checkpoint.
        ordinals: numbers given so far: (generation, step, run, ordinal).
        finished: outcomes, the newest last.
    """

    owners: list[Owner] = []
    leases: list[Lease] = []
    lost: dict[int, int] = {}
    was_attached: bool = False
    run: int | None = None
    tiers: tuple[TierPlan, ...] = ()
    generation: int | None = None
    keep_best: tuple[str, Literal["min", "max"]] | None = None
    protect: list[tuple[int, int]] = []
    next_ordinal: int = 0
    ordinals: list[tuple[int, int, int, int]] = []
    finished: list[Outcome] = []


class Journal:
    """The record, its file, and the lock that guards it and what belongs with it.

    Attributes:
        record: read and change it inside `changing` or under `lock` only.
        on_change: called outside the lock after every change.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.RLock()
        self.record = _read(path)
        self.on_change: Callable[[], None] = lambda: None
        self._saved = b""

    @contextmanager
    def changing(self) -> Iterator[Record]:
        """Hold the lock, then write the file if the record is not as it was, then tell of the change."""
        with self.lock:
            yield self.record
            self._save()
        self.on_change()

    def _save(self) -> None:
        encoded = msgspec.json.encode(self.record)
        if encoded == self._saved:
            return
        temp = self.path.with_suffix(".tmp")
        try:
            descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, encoded)
            finally:
                os.close(descriptor)
            os.replace(temp, self.path)
        except OSError as error:
            # Full shared memory must not stop a drain; a restarted keeper then knows less.
            _log.warning("%s cannot be written: %s", self.path, error)
            return
        self._saved = encoded


class SaveRequests:
    """How many saves were requested from outside: the first 8 bytes (little endian) of a file that ranks map."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, _REQUESTS_BYTES)
            self._map = mmap.mmap(descriptor, _REQUESTS_BYTES)
        finally:
            os.close(descriptor)

    @property
    def count(self) -> int:
        """How many there were."""
        return int.from_bytes(self._map[0:8], "little")

    def add(self) -> int:
        """Request one more, and return how many there were."""
        count = self.count + 1
        self._map[0:8] = count.to_bytes(8, "little")
        return count


def _read(path: Path) -> Record:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except FileNotFoundError:
        return Record()
    except msgspec.MsgspecError as error:
        _log.warning("%s cannot be read and is not used: %s", path, error)
        return Record()
