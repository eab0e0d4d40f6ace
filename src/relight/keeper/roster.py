"""Who is attached to the keeper, and which slots they were lent."""

from __future__ import annotations

from collections.abc import Callable, Collection

from relight.errors import ConfigError
from relight.keeper.arena import run_digest
from relight.keeper.journal import Journal, Lease, Owner
from relight.keeper.messages import AttachRequest, TierPlan
from relight.keeper.slots import SlotId
from relight.keeper.watch import is_alive, started_ticks

__all__ = ["Roster"]


class Roster:
    """Attached processes and their leases. Every method is atomic and may be called from any thread."""

    def __init__(self, journal: Journal, *, lives: Callable[[int, int], bool] = is_alive) -> None:
        self._journal = journal
        self._lives_at = lives

    def attach(self, request: AttachRequest) -> None:
        """Take note of a rank; a newer generation replaces the plans and forgets the losses of older ones.

        Raises:
            ConfigError: no such process, or another rank of this generation gave other tiers.
        """
        started = started_ticks(request.pid)
        if started is None:
            raise ConfigError(
                f"rank {request.rank} attaches as process {request.pid}, which does not run here"
            )
        with self._journal.changing() as record:
            others = [
                one
                for one in record.owners
                if one.generation == request.generation and one.rank != request.rank and self._lives(one)
            ]
            if others and record.generation == request.generation and record.tiers != request.tiers:
                raise ConfigError(
                    f"rank {request.rank} gives the tiers {_urls(request.tiers)}, rank {others[0].rank} gave "
                    f"{_urls(record.tiers)}, or other settings for them; they must be the same on every rank",
                    rank=request.rank,
                )
            # A new life within the same process holds nothing of its old one; the same one keeps what it was lent.
            mine = [one for one in record.owners if one.pid == request.pid]
            record.owners = [one for one in record.owners if one.pid != request.pid]
            if any((one.rank, one.generation) != (request.rank, request.generation) for one in mine):
                record.leases = [one for one in record.leases if one.pid != request.pid]
            record.owners.append(
                Owner(
                    rank=request.rank,
                    pid=request.pid,
                    started=started,
                    world_size=request.world_size,
                    generation=request.generation,
                )
            )
            record.was_attached = True
            record.lost.pop(request.rank, None)
            record.lost = {rank: seen for rank, seen in record.lost.items() if seen >= request.generation}
            if record.generation is None or request.generation >= record.generation:
                record.run = run_digest(request.run)
                record.tiers = request.tiers
                record.generation = request.generation
                record.keep_best = request.keep_best
                record.protect = list(request.protect)

    def detach(self, rank: int, pid: int, *, clean: bool) -> None:
        """Forget a rank's process; without `clean` it counts as lost."""
        with self._journal.changing() as record:
            self._forget([one for one in record.owners if (one.rank, one.pid) == (rank, pid)], lost=not clean)

    def note_deaths(self) -> list[Owner]:
        """Forget the attached processes that have ended, and return them."""
        dead = [one for one in self.owners() if not self._lives(one)]
        if dead:
            with self._journal.changing():
                self._forget(dead, lost=True)
        return dead

    def owners(self) -> list[Owner]:
        """Return the attached processes as last noted."""
        with self._journal.lock:
            return list(self._journal.record.owners)

    def owner_of(self, rank: int) -> Owner | None:
        """Return the process that attached last as `rank`."""
        return next((one for one in reversed(self.owners()) if one.rank == rank), None)

    def num_lost(self) -> int:
        """Return how many ranks ended without a clean detach and were not replaced."""
        with self._journal.lock:
            return len(self._journal.record.lost)

    def is_owned(self, slot: SlotId, pid: int | None = None) -> bool:
        """Return whether a process that attached as the slot's rank (`pid`, if given) still runs."""
        return any(
            one.rank == slot.rank and pid in (None, one.pid) and self._lives(one) for one in self.owners()
        )

    def lend(self, slot: SlotId, owner: Owner) -> None:
        """Note that `owner` may write to `slot` from now on."""
        with self._journal.changing() as record:
            lease = Lease(rank=slot.rank, index=slot.index, pid=owner.pid, started=owner.started)
            record.leases = [*_without(record.leases, slot), lease]

    def take_back(self, slot: SlotId) -> None:
        """Note that nobody may write to `slot` now."""
        with self._journal.changing() as record:
            record.leases = _without(record.leases, slot)

    def keep_leases(self, owner: Owner, indexes: Collection[int]) -> None:
        """Note that `owner` may write to none of its slots but these."""
        with self._journal.changing() as record:
            record.leases = [
                one
                for one in record.leases
                if (one.rank, one.pid) != (owner.rank, owner.pid) or one.index in indexes
            ]

    def is_leased(self, slot: SlotId) -> bool:
        """Return whether a running process may write to `slot`."""
        return slot in self.leased()

    def leased(self) -> set[SlotId]:
        """Return the slots that running processes may write to."""
        with self._journal.lock:
            leases = list(self._journal.record.leases)
        return {SlotId(one.rank, one.index) for one in leases if self._lives_at(one.pid, one.started)}

    def _lives(self, owner: Owner) -> bool:
        return self._lives_at(owner.pid, owner.started)

    def _forget(self, gone: list[Owner], *, lost: bool) -> None:
        record = self._journal.record
        pids = {one.pid for one in gone}
        record.owners = [one for one in record.owners if one not in gone]
        record.leases = [one for one in record.leases if one.pid not in pids]
        if lost:
            replaced = {one.rank for one in record.owners}
            record.lost |= {one.rank: one.generation for one in gone if one.rank not in replaced}


def _without(leases: list[Lease], slot: SlotId) -> list[Lease]:
    return [one for one in leases if SlotId(one.rank, one.index) != slot]


def _urls(tiers: tuple[TierPlan, ...]) -> str:
    return ", ".join(plan.url for plan in tiers)
