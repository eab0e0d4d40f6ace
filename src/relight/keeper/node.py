"""The keeper of one run on one node, without its wires: what each request means, and what each second brings."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from relight.clock import Clock, SystemClock
from relight.errors import ConfigError, KeeperUnavailableError, RelightError
from relight.events import EventLog
from relight.keeper.arena import SlotState
from relight.keeper.drain import Drainer, DrainSettings
from relight.keeper.journal import Journal, SaveRequests
from relight.keeper.ledger import Ledger
from relight.keeper.messages import (
    PROTOCOL,
    RAM_TIER,
    AcquireRequest,
    AttachReply,
    AttachRequest,
    DetachRequest,
    Health,
    HeldSnapshot,
    KeeperStatus,
    SealReply,
    SlotRequest,
    TierPlan,
    WaitReply,
    is_absolute_url,
)
from relight.keeper.readback import ReadBack
from relight.keeper.reports import Reports, events_path
from relight.keeper.roster import Roster
from relight.keeper.slots import SlotId, SlotTable, StepKey, choose_slot, newest_complete
from relight.keeper.status import describe
from relight.keeper.stores import TierStores
from relight.keeper.upkeep import Upkeep
from relight.keeper.watch import LifeAction, LifeFacts, decide_life

__all__ = ["Node", "NodeSettings"]

_log = logging.getLogger("relight.keeper")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """How the keeper lives.

    Attributes:
        linger_seconds: how long snapshots outlive workers that were lost.
        term_grace_seconds: what is left after SIGTERM.
    """

    linger_seconds: float = 600.0
    term_grace_seconds: float = 30.0


class Node:
    """The keeper's whole state. Called from one thread; drains run in threads of their own.

    Args:
        folder: the arena folder; this process holds its lock.
        root_url: the run's root, the tier to drain to when no rank ever said which.
    """

    def __init__(
        self,
        folder: Path,
        root_url: str,
        *,
        version: str = "",
        settings: NodeSettings | None = None,
        drain_settings: DrainSettings | None = None,
        stores: TierStores | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.folder = folder
        self.root_url = root_url
        self.version = version
        self.settings = settings or NodeSettings()
        drain_settings = drain_settings or DrainSettings()
        self.clock = clock or SystemClock()
        self.journal = Journal(folder / "attach.json")
        self.roster = Roster(self.journal)
        self.ledger = Ledger(self.journal, default_tiers=(TierPlan(url=root_url),), clock=self.clock)
        self.slots = SlotTable(folder)
        self.stores = stores or TierStores()
        self.reports = Reports(EventLog(events_path(root_url)), self.ledger, self.clock)
        readback = ReadBack(
            journal=self.journal,
            ledger=self.ledger,
            reports=self.reports,
            stores=self.stores,
            nice=drain_settings.verify_nice,
        )
        self.drainer = Drainer(
            slots=self.slots,
            ledger=self.ledger,
            reports=self.reports,
            stores=self.stores,
            readback=readback,
            settings=drain_settings,
            clock=self.clock,
        )
        self.upkeep = Upkeep(
            journal=self.journal,
            roster=self.roster,
            ledger=self.ledger,
            slots=self.slots,
            drainer=self.drainer,
        )
        self.stop_wish: Literal["no", "drain", "now"] = "no"
        self.save_requests = SaveRequests(folder / "requests")
        self._started_at = self.clock.now()
        self._quiet_since = self.clock.monotonic()
        self._term_deadline: float | None = None
        self._tried_again = False
        self.is_leaving = False
        self.is_closed_clean = False

    def start(self) -> None:
        """Take up the slots that are there, and say that the keeper lives."""
        # In a thread: a root that hangs must not keep the keeper from answering.
        self.drainer.put_aside(
            partial(self.reports.emit, "keeper_started", pid=os.getpid(), root=self.root_url)
        )
        self.roster.note_deaths()
        self.upkeep.rescan()

    # Requests.

    def health(self, *, hold_seconds: float = 0.0) -> Health:
        """Return who answers, and do not leave for lack of work in the next `hold_seconds`."""
        self._quiet_since = max(self._quiet_since, self.clock.monotonic() + hold_seconds)
        return Health(
            protocol=PROTOCOL,
            version=self.version,
            pid=os.getpid(),
            root=self.root_url,
            is_stopping=self.is_stopping,
        )

    @property
    def is_stopping(self) -> bool:
        """Whether the keeper is on its way out."""
        return self.stop_wish != "no" or self.is_terminating or self.is_leaving

    @property
    def may_leave_soon(self) -> bool:
        """Whether nobody is attached and nothing is kept for lost workers, or the keeper is on its way out."""
        return self.is_stopping or not (self.roster.owners() or self.roster.num_lost())

    @property
    def is_terminating(self) -> bool:
        """Whether SIGTERM came."""
        return self._term_deadline is not None

    def attach(self, request: AttachRequest) -> AttachReply:
        """Announce a rank; see `Roster.attach`."""
        if self.is_stopping:
            raise KeeperUnavailableError("the keeper is stopping; start another one")
        if not 0 <= request.rank < request.world_size:
            raise ConfigError(f"rank {request.rank} is not in 0..{request.world_size - 1}", rank=request.rank)
        for plan in request.tiers:
            _check_tier(plan)
        self.roster.attach(request)
        self.roster.note_deaths()
        self.upkeep.rescan()
        self._quiet_since = self.clock.monotonic()
        self._tried_again = False
        return AttachReply(pid=os.getpid(), num_save_requests=self.save_requests.count)

    def acquire(self, request: AcquireRequest) -> int | None:
        """Lend a slot that the rank may overwrite, or return None if there is none now.

        Raises:
            ConfigError: the rank is not attached, or asks for fewer than 2 slots.
        """
        owner = self.roster.owner_of(request.rank)
        if owner is None:
            raise ConfigError(f"rank {request.rank} asks for a slot but is not attached", rank=request.rank)
        if request.num_slots < 2:
            raise ConfigError(
                f"num_slots is {request.num_slots}; the newest snapshot needs one, the next another"
            )
        if request.holding is not None:
            self.roster.keep_leases(owner, request.holding)
        facts = self.upkeep.facts()
        index, reason = choose_slot(
            facts, rank=request.rank, num_slots=request.num_slots, run=self.journal.record.run
        )
        _log.debug("slot for rank %d: %s", request.rank, reason)
        if index is None:
            return None
        slot = SlotId(request.rank, index)
        control = next((fact.control for fact in facts if fact.slot == slot), None)
        self.ledger.forget(slot)
        if control is not None and request.capacity_bytes not in (None, control.capacity_bytes):
            self.slots.remove(slot)
        elif control is not None:
            # A slot that is lent holds nothing: whatever is sealed in it later is new.
            self.slots.free(slot)
        self.roster.lend(slot, owner)
        return index

    def release(self, request: SlotRequest) -> None:
        """Take an unsealed slot back.

        Raises:
            ConfigError: it is sealed, or was not lent.
        """
        slot = SlotId(request.rank, request.slot)
        control = self.slots.control(slot)
        if not self.roster.is_leased(slot):
            raise ConfigError(f"slot {slot.index} is not lent to rank {slot.rank}", rank=slot.rank)
        if control is not None and control.state in (SlotState.SEALED, SlotState.DIGESTED):
            raise ConfigError(
                f"slot {slot.index} of rank {slot.rank} is sealed; it is drained now", rank=slot.rank
            )
        self.slots.free(slot)
        self.roster.take_back(slot)

    def seal(self, request: SlotRequest) -> SealReply:
        """Take in a sealed slot.

        Raises:
            CopyError: the slot holds no sealed snapshot.
        """
        slot = SlotId(request.rank, request.slot)
        key = self.upkeep.take_in(slot)
        return SealReply(step=key.step, generation=key.generation)

    def detach(self, request: DetachRequest) -> None:
        """Let a rank go."""
        self.roster.detach(request.rank, request.pid, clean=request.clean)
        self._quiet_since = self.clock.monotonic()
        self.upkeep.rescan()

    def key(self, step: int, generation: int) -> StepKey:
        """Return the identity of a step of the run that attached last, or of any run when none ever did."""
        run = self.journal.record.run
        if run is None:
            run = next((key.run for key in self.ledger.known_steps() if key[:2] == (generation, step)), 0)
        return StepKey(generation, step, run)

    def state(self, key: StepKey, tier: str | None) -> WaitReply:
        """Return where a step stands on a tier (default: the last one)."""
        state, message = self.ledger.state(key, tier if tier is not None else self.ledger.tiers()[-1].url)
        return WaitReply(state=state, message=message)

    def look_up(self, key: StepKey, tier: str | None) -> WaitReply | None:
        """Return "committed" if the tier itself says so (may block), else None: for steps of an earlier keeper."""
        plans = [plan for plan in self.ledger.tiers() if plan.url == tier] or [self.ledger.tiers()[-1]]
        if plans[0].url == RAM_TIER:
            return None
        with suppress(RelightError):
            if self.stores.open(plans[0]).catalog.commit(key.step, key.generation) is not None:
                return WaitReply(state="committed")
        return None

    def inventory(self) -> tuple[tuple[HeldSnapshot, ...], bool]:
        """Return the snapshots that can be read from memory, and whether all sealed ones have digests."""
        facts = self.upkeep.facts()
        is_whole = not any(
            fact.control is not None and fact.control.state is SlotState.SEALED and not fact.is_drained
            for fact in facts
        )
        held = tuple(
            HeldSnapshot(
                rank=fact.slot.rank,
                slot=fact.slot.index,
                step=fact.key.step,
                generation=fact.key.generation,
                world_size=fact.control.world_size,
                image_bytes=fact.control.image_bytes,
                run_digest=fact.control.run_digest,
            )
            for fact in facts
            if fact.key is not None and fact.control is not None
        )
        return held, is_whole

    def status(self) -> KeeperStatus:
        """Return everything."""
        return describe(
            health=self.health(),
            started_at=self._started_at,
            generation=self.journal.record.generation,
            roster=self.roster,
            ledger=self.ledger,
            facts=self.upkeep.facts(),
        )

    # Every second.

    def tick(self) -> LifeAction:
        """Note deaths, bring the slots in order, and return what to do next."""
        for owner in self.roster.note_deaths():
            _log.warning("rank %d (process %d) is gone without a word", owner.rank, owner.pid)
        self.upkeep.rescan()
        facts = self._life_facts()
        if facts.num_alive:
            self._quiet_since = max(self._quiet_since, self.clock.monotonic())
        action, reason = decide_life(facts)
        if action != "stay":
            _log.info("%s: %s", action, reason)
        if action == "drain_again":
            self._tried_again = True
            self.upkeep.submit_again(self.ledger.reopen(frozenset({"failed"})))
        self.drainer.tick()
        return action

    def terminate(self) -> None:
        """Begin the grace after SIGTERM: what is newest goes first, to every tier."""
        if self._term_deadline is None:
            self._term_deadline = self.clock.monotonic() + self.settings.term_grace_seconds
            self.drainer.prefer_newest()
            newest = newest_complete(self.upkeep.facts(), self.journal.record.run)
            if newest is not None:
                self.upkeep.submit_again(self.ledger.reopen(frozenset({"failed", "skipped"}), newest))

    def is_newest_stored(self) -> bool:
        """Return whether nothing is left to drain, and the newest complete step is committed on the last tier."""
        facts = self.upkeep.facts()
        newest = newest_complete(facts, self.journal.record.run)
        held = [fact for fact in facts if fact.control is not None and fact.control.state is SlotState.SEALED]
        if any(not fact.is_drained for fact in held):
            return False
        return newest is None or self.state(newest, None).state in ("committed", "verified")

    def close(self, *, clean: bool) -> None:
        """End the threads; with `clean` remove the slots too."""
        self.drainer.close()
        if clean:
            for slot in self.slots.ids():
                self.slots.remove(slot)
        self.slots.close()
        self.is_closed_clean = clean
        self.reports.emit("keeper_stopped", pid=os.getpid(), removed_slots=clean)
        self.reports.events.close()

    def _life_facts(self) -> LifeFacts:
        now = self.clock.monotonic()
        facts = self.upkeep.facts()
        owners = self.roster.owners()
        return LifeFacts(
            num_alive=len(owners),
            num_lost=self.roster.num_lost(),
            was_attached=self.journal.record.was_attached,
            quiet_seconds=now - self._quiet_since,
            is_busy=self.drainer.is_busy,
            is_saving=any(
                fact.control is not None and fact.control.state is SlotState.WRITING for fact in facts
            ),
            holds_snapshots=any(fact.holds_snapshot for fact in facts),
            has_failed=self.ledger.has_failed(),
            tried_again=self._tried_again,
            stop=self.stop_wish,
            term_left_seconds=None if self._term_deadline is None else self._term_deadline - now,
            linger_seconds=self.settings.linger_seconds,
        )


def _check_tier(plan: TierPlan) -> None:
    if plan.url != RAM_TIER and not is_absolute_url(plan.url):
        raise ConfigError(
            f"tier {plan.url!r} is relative to the caller; give an absolute path or a URL", tier=plan.url
        )
    if plan.every < 1 or plan.keep < 1:
        raise ConfigError(f"tier {plan.url!r}: every and keep must be at least 1", tier=plan.url)
