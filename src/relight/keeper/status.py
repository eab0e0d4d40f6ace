"""The keeper's state as others see it."""

from __future__ import annotations

from collections.abc import Sequence

from relight.keeper.ledger import Ledger
from relight.keeper.messages import Health, KeeperStatus, RankStatus, SlotStatus
from relight.keeper.roster import Roster
from relight.keeper.slots import SlotFact, SlotId

__all__ = ["describe"]


def describe(
    *,
    health: Health,
    started_at: float,
    generation: int | None,
    roster: Roster,
    ledger: Ledger,
    facts: Sequence[SlotFact],
) -> KeeperStatus:
    """Return everything that the status page shows."""
    ranks = tuple(
        RankStatus(
            rank=owner.rank,
            pid=owner.pid,
            generation=owner.generation,
            is_alive=roster.is_owned(SlotId(owner.rank, 0), owner.pid),
        )
        for owner in roster.owners()
    )
    return KeeperStatus(
        health=health,
        started_at=started_at,
        tiers=ledger.tiers(),
        generation=generation,
        ranks=ranks,
        slots=tuple(_slot_status(fact) for fact in facts),
        steps=ledger.steps(),
        counters=dict(ledger.counters),
        errors=ledger.errors(),
    )


def _slot_status(fact: SlotFact) -> SlotStatus:
    control = fact.control
    return SlotStatus(
        rank=fact.slot.rank,
        slot=fact.slot.index,
        state=control.state.name.lower() if control is not None else "broken",
        step=control.step if control is not None else -1,
        generation=control.generation if control is not None else -1,
        world_size=control.world_size if control is not None else 0,
        image_bytes=control.image_bytes if control is not None else 0,
        capacity_bytes=control.capacity_bytes if control is not None else 0,
        is_leased=fact.is_leased,
        is_drained=fact.is_drained,
    )
