"""The slot files of a node as the keeper sees them: cached mappings, their states, and which one may be overwritten.

The control pages are the truth; nothing here remembers a state. The choices are pure functions of what was seen.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from relight.errors import CorruptionError, MissingCopyError
from relight.keeper.arena import ArenaSlot, SlotControl, SlotState, list_slots, slot_path

__all__ = ["SlotFact", "SlotId", "SlotTable", "StepKey", "choose_slot", "newest_complete"]

_NAME = re.compile(r"rank-(\d{5,})\.slot-(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class SlotId:
    """Slot `index` of `rank`."""

    rank: int
    index: int


class StepKey(NamedTuple):
    """A checkpoint's identity; those of one run sort from old to new. `run` is as in the control page."""

    generation: int
    step: int
    run: int

    @classmethod
    def of(cls, control: SlotControl) -> Self:
        """Return the identity of the snapshot that a control page speaks of."""
        return cls(control.generation, control.step, control.run_digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFact:
    """What is known of one slot at one instant.

    Attributes:
        slot: which.
        control: its control page; None when the file is broken or half made.
        is_leased: a living rank was told to write to it, and has not sealed it yet.
        is_drained: its snapshot, if it holds one, is stored on every tier where it is due, or failed for good.
    """

    slot: SlotId
    control: SlotControl | None
    is_leased: bool
    is_drained: bool

    @property
    def holds_snapshot(self) -> bool:
        """Whether a whole snapshot is in it, with digests or not yet."""
        return self.control is not None and self.control.state in (SlotState.SEALED, SlotState.DIGESTED)

    @property
    def key(self) -> StepKey | None:
        """The checkpoint that can be read from this slot now, or None."""
        if self.control is None or self.is_leased or self.control.state is not SlotState.DIGESTED:
            return None
        return StepKey.of(self.control)


def newest_complete(facts: Iterable[SlotFact], run: int | None) -> StepKey | None:
    """Return the newest checkpoint (of `run`, if given) of which every rank's snapshot can be read from memory."""
    ranks: dict[StepKey, set[int]] = {}
    world_sizes: dict[StepKey, int] = {}
    for fact in facts:
        if fact.key is not None and fact.control is not None and run in (None, fact.key.run):
            ranks.setdefault(fact.key, set()).add(fact.slot.rank)
            world_sizes[fact.key] = fact.control.world_size
    return max((key for key, seen in ranks.items() if seen >= set(range(world_sizes[key]))), default=None)


def choose_slot(
    facts: Iterable[SlotFact], *, rank: int, num_slots: int, run: int | None = None
) -> tuple[int | None, str]:
    """Return the index of the slot that `rank` (of `run`) may overwrite now, or None, and why.

    An empty one first, then one still to be made, then the oldest snapshot that is neither the newest complete
    one nor still needed by a drain.
    """
    facts = list(facts)
    kept = newest_complete(facts, run)
    mine = {fact.slot.index: fact for fact in facts if fact.slot.rank == rank}
    old: list[tuple[StepKey, int]] = []
    held = []
    missing = [index for index in range(num_slots) if index not in mine]
    for index, fact in sorted(mine.items()):
        control = fact.control
        if index >= num_slots or fact.is_leased or control is None:
            held.append(f"slot {index} is in use" if fact.is_leased else f"slot {index} is broken")
        elif control.state is SlotState.FREE:
            return index, f"slot {index} is free"
        elif control.state is SlotState.WRITING:
            held.append(f"slot {index} is being written")
        elif not fact.is_drained:
            held.append(f"step {control.step} in slot {index} is not stored yet")
        elif fact.key is not None and fact.key == kept:
            held.append(f"step {control.step} in slot {index} is the newest complete one")
        else:
            old.append((StepKey.of(control), index))
    if missing:
        return missing[0], f"slot {missing[0]} is still to be made"
    if old:
        return min(old)[1], f"step {min(old)[0].step} in slot {min(old)[1]} is the oldest that is stored"
    return None, "; ".join(held)


class SlotTable:
    """The slots in `folder`, mapped once each and kept mapped: mapping 1 GB anew costs more than hashing it.

    Safe from several threads. A file that was removed or made anew under the same name is mapped again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._open: dict[SlotId, tuple[ArenaSlot, tuple[int, int]]] = {}
        self._users: dict[int, int] = {}
        self._stale: list[ArenaSlot] = []

    def ids(self) -> list[SlotId]:
        """Return the slots whose files are there, sorted."""
        found = (_NAME.fullmatch(path.name) for path in list_slots(self.folder))
        return sorted(SlotId(int(match[1]), int(match[2])) for match in found if match)

    def path(self, slot: SlotId) -> Path:
        """Return the file of `slot`."""
        return slot_path(self.folder, slot.rank, slot.index)

    @contextmanager
    def use(self, slot: SlotId) -> Iterator[ArenaSlot]:
        """Give the mapped slot, which stays mapped at least until the block ends.

        Raises:
            MissingCopyError, CorruptionError: as `ArenaSlot.open`.
        """
        with self._lock:
            mapped = self._mapped(slot)
            self._users[id(mapped)] = self._users.get(id(mapped), 0) + 1
        try:
            yield mapped
        finally:
            with self._lock:
                self._users[id(mapped)] -= 1
                self._close_stale()

    def control(self, slot: SlotId) -> SlotControl | None:
        """Return the control page of `slot`, or None when the file is gone, broken or half made."""
        try:
            with self.use(slot) as mapped:
                return mapped.control()
        except (MissingCopyError, CorruptionError):
            return None

    def facts(self, *, leased: set[SlotId], is_drained: Callable[[SlotId, StepKey], bool]) -> list[SlotFact]:
        """Return what is known of every slot, those included that were lent but are still to be made."""
        found = []
        for slot in sorted({*self.ids(), *leased}):
            control = self.control(slot)
            key = StepKey.of(control) if control is not None else None
            found.append(
                SlotFact(
                    slot=slot,
                    control=control,
                    is_leased=slot in leased,
                    is_drained=key is not None and is_drained(slot, key),
                )
            )
        return found

    def free(self, slot: SlotId) -> None:
        """Mark the slot FREE; a slot that is gone or broken is left alone."""
        with suppress(MissingCopyError, CorruptionError), self.use(slot) as mapped:
            mapped.free()

    def remove(self, slot: SlotId) -> None:
        """Remove the slot's file, and give its memory back once nobody uses the mapping."""
        with suppress(FileNotFoundError):
            self.path(slot).unlink()
        self.drop_stale()

    def drop_stale(self) -> None:
        """Unmap slots whose files were removed or made anew: their memory is theirs until then."""
        with self._lock:
            for slot, (mapped, identity) in list(self._open.items()):
                if _identity(mapped.path) != identity:
                    self._stale.append(mapped)
                    del self._open[slot]
            self._close_stale()

    def close(self) -> None:
        """Unmap everything that is not in use."""
        with self._lock:
            self._stale += [mapped for mapped, _ in self._open.values()]
            self._open.clear()
            self._close_stale()

    def _mapped(self, slot: SlotId) -> ArenaSlot:
        path = self.path(slot)
        identity = _identity(path)
        known = self._open.get(slot)
        if known is not None and known[1] == identity:
            return known[0]
        if known is not None:
            self._stale.append(known[0])
            del self._open[slot]
        mapped = ArenaSlot.open(path)
        if identity is not None and _identity(path) == identity:
            self._open[slot] = (mapped, identity)
        else:
            self._stale.append(mapped)
        return mapped

    def _close_stale(self) -> None:
        for mapped in [one for one in self._stale if not self._users.get(id(one))]:
            self._stale.remove(mapped)
            self._users.pop(id(mapped), None)
            mapped.close()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        seen = path.stat()
    except FileNotFoundError:
        return None
    return seen.st_dev, seen.st_ino
