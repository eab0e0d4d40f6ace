"""How far each step has come on each tier, and whether a slot's snapshot is still needed for that.

All of it may be asked and changed from any thread. What a restarted keeper needs goes to the journal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from relight.clock import Clock
from relight.keeper.journal import Journal, Outcome
from relight.keeper.messages import (
    RAM_TIER,
    FailureStatus,
    RankTierStatus,
    StepStatus,
    TierPlan,
    TierState,
    TierStatus,
)
from relight.keeper.slots import SlotId, StepKey

__all__ = ["FINAL_STATES", "Ledger"]

FINAL_STATES: frozenset[TierState] = frozenset({"committed", "verified", "failed", "skipped"})
"""States that a wait ends with."""

_STEPS_KEPT = 64
_ERRORS_KEPT = 64
_ORDER: tuple[TierState, ...] = ("unknown", "sealed", "digested", "draining", "durable")


@dataclass(slots=True)
class _RankWork:
    state: TierState
    stored_bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _TierWork:
    """A step on one tier; `outcome` is None while it is on its way."""

    outcome: TierState | None = None
    message: str | None = None
    ranks: dict[int, _RankWork] = field(default_factory=dict)
    num_active: int = 0

    @property
    def state(self) -> TierState:
        if self.outcome is not None:
            return self.outcome
        return min((mine.state for mine in self.ranks.values()), key=_ORDER.index, default="unknown")


@dataclass(slots=True)
class _Work:
    world_size: int
    sealed_at: float
    tiers: dict[str, _TierWork] = field(default_factory=dict)


class Ledger:
    """The steps that the keeper works on. Every method is atomic.

    Attributes:
        counters: totals since the start, units in the names.
    """

    def __init__(self, journal: Journal, *, default_tiers: tuple[TierPlan, ...], clock: Clock) -> None:
        self.counters: dict[str, float] = {}
        self._journal = journal
        self._lock = journal.lock
        self._clock = clock
        self._default_tiers = default_tiers
        self._jobs: dict[SlotId, tuple[StepKey, bool]] = {}
        self._works: dict[StepKey, _Work] = {}
        self._errors: list[FailureStatus] = []
        # What an earlier keeper could not store is tried again.
        journal.record.finished = [one for one in journal.record.finished if one.state != "failed"]

    def tiers(self) -> tuple[TierPlan, ...]:
        """Return the tiers to drain to: as attached, else the run's root."""
        with self._lock:
            return self._journal.record.tiers or self._default_tiers

    def begin(self, slot: SlotId, key: StepKey, *, world_size: int, sealed_at: float) -> bool:
        """Take in a sealed snapshot; the first of a step decides on which tiers the step is due.

        Returns:
            False if this snapshot was taken in before.
        """
        with self._journal.changing() as record:
            if slot in self._jobs and self._jobs[slot][0] == key:
                return False
            self._jobs[slot] = (key, False)
            work = self._works.setdefault(key, _Work(world_size=world_size, sealed_at=sealed_at))
            ordinal = self._ordinal(key)
            outcomes = {
                one.tier: one.state for one in record.finished if (one.generation, one.step, one.run) == key
            }
            for plan in self.tiers():
                tier = work.tiers.setdefault(plan.url, _TierWork(outcome=outcomes.get(plan.url)))
                if tier.outcome is None and ordinal % plan.every:
                    tier.outcome = "skipped"
                tier.ranks[slot.rank] = _RankWork(
                    "durable" if tier.outcome in ("committed", "verified") else "sealed"
                )
            self._trim()
            return True

    def reopen(self, outcomes: frozenset[TierState], key: StepKey | None = None) -> list[SlotId]:
        """Take back outcomes (of one step, or of all), and return the slots to submit once more."""
        with self._journal.changing() as record:
            opened = set()
            for known, work in self._works.items():
                for tier in work.tiers.values():
                    if tier.outcome in outcomes and key in (None, known):
                        tier.outcome = tier.message = None
                        opened.add(known)
            record.finished = [
                one
                for one in record.finished
                if one.state not in outcomes or key not in (None, (one.generation, one.step, one.run))
            ]
            again = [slot for slot, (known, _) in self._jobs.items() if known in opened]
            for slot in again:
                del self._jobs[slot]
            return again

    def finish(self, slot: SlotId, key: StepKey) -> None:
        """Note that the snapshot in `slot` is stored wherever it is due, or failed for good."""
        with self._journal.changing():
            if slot in self._jobs and self._jobs[slot][0] == key:
                self._jobs[slot] = (key, True)

    def forget(self, slot: SlotId) -> None:
        """Note that the slot's snapshot is given up to its rank."""
        with self._lock:
            self._jobs.pop(slot, None)

    def is_drained(self, slot: SlotId, key: StepKey) -> bool:
        """Return whether `finish` was called for this snapshot."""
        with self._lock:
            return self._jobs.get(slot) == (key, True)

    def advance(self, key: StepKey, url: str, rank: int, state: TierState, *, stored_bytes: int = 0) -> float:
        """Note how far `rank` has come with the step on a tier (it never goes back).

        Returns:
            Seconds since the step's first snapshot was sealed.
        """
        with self._journal.changing():
            work = self._works.get(key)
            if work is None:
                return 0.0
            mine = self._tier(key, url).ranks.setdefault(rank, _RankWork("sealed"))
            if _ORDER.index(state) > _ORDER.index(mine.state):
                mine.state = state
            seconds = max(0.0, self._clock.now() - work.sealed_at)
            if state == "durable":
                mine.stored_bytes, mine.seconds = stored_bytes, seconds
                self._commit_in_ram(key)
            return seconds

    def settle(self, key: StepKey, url: str, outcome: TierState, message: str | None = None) -> bool:
        """Note the outcome of the step on a tier; return False if it was known already."""
        with self._journal.changing() as record:
            tier = self._tier(key, url)
            if tier.outcome in (outcome, "verified"):
                return False
            tier.outcome, tier.message = outcome, message
            kept = [
                one for one in record.finished if (one.generation, one.step, one.run, one.tier) != (*key, url)
            ]
            settled = Outcome(generation=key.generation, step=key.step, run=key.run, tier=url, state=outcome)
            record.finished = [*kept, settled][-_STEPS_KEPT:]
            return True

    def state(self, key: StepKey, url: str) -> tuple[TierState, str | None]:
        """Return where the step stands on a tier, and why when it failed."""
        with self._lock:
            work = self._works.get(key)
            if work is not None and url in work.tiers:
                return work.tiers[url].state, work.tiers[url].message
            outcomes = {
                one.tier: one.state
                for one in self._journal.record.finished
                if (one.generation, one.step, one.run) == key
            }
            return outcomes.get(url, "unknown"), None

    def num_active(self, key: StepKey, url: str) -> int:
        """Return how many ranks are at work on the step and tier."""
        with self._lock:
            return self._tier(key, url).num_active

    @contextmanager
    def active(self, key: StepKey, url: str) -> Iterator[None]:
        """Count the caller as at work on the step and tier."""
        with self._lock:
            self._tier(key, url).num_active += 1
        try:
            yield
        finally:
            with self._lock:
                self._tier(key, url).num_active -= 1

    def durable_ranks(self, key: StepKey, url: str) -> frozenset[int]:
        """Return the ranks of this node whose image and record are on the tier."""
        with self._lock:
            ranks = self._tier(key, url).ranks.items()
            return frozenset(rank for rank, mine in ranks if mine.state == "durable")

    def unsettled(self, *, max_age_seconds: float) -> list[tuple[StepKey, str]]:
        """Return the (step, tier) pairs that are durable for all known ranks, but not committed; old ones first.

        Those that a newer commit on the tier has superseded, or that were sealed too long ago, are left out.
        """
        with self._lock:
            newest: dict[str, StepKey] = {}
            for key, work in sorted(self._works.items()):
                newest |= {
                    url: key for url, tier in work.tiers.items() if tier.outcome in ("committed", "verified")
                }
            return [
                (key, url)
                for key, work in sorted(self._works.items())
                for url, tier in work.tiers.items()
                if url != RAM_TIER
                and tier.outcome is None
                and tier.state == "durable"
                and (url not in newest or newest[url] < key)
                and self._clock.now() - work.sealed_at < max_age_seconds
            ]

    def known_steps(self) -> list[StepKey]:
        """Return the steps that were taken in, old ones first."""
        with self._lock:
            return sorted(self._works)

    def has_failed(self) -> bool:
        """Return whether a snapshot that is still in memory could not be stored on a tier."""
        with self._lock:
            held = {key for key, _ in self._jobs.values()} & set(self._works)
            return any(tier.outcome == "failed" for key in held for tier in self._works[key].tiers.values())

    def protected(self, url: str) -> frozenset[tuple[int, int]]:
        """Return the (step, generation) pairs that retention must leave on a tier.

        They are what is on its way there, and what the run resumed from until this generation has a verified one.
        """
        with self._lock:
            record = self._journal.record
            started = {
                (key.step, key.generation)
                for key, work in self._works.items()
                if _is_open(work.tiers.get(url))
            }
            is_safe = any(
                (one.tier, one.run, one.state) == (url, record.run, "verified")
                and one.generation >= (record.generation or 0)
                for one in record.finished
            )
            return frozenset(started if is_safe else started | set(record.protect))

    def count(self, name: str, amount: float = 1) -> None:
        """Add `amount` to a counter."""
        with self._lock:
            self.counters[name] = self.counters.get(name, 0) + amount

    def note_error(self, failure: FailureStatus) -> None:
        """Keep an error for the status page (the newest 64)."""
        with self._lock:
            self._errors = [*self._errors, failure][-_ERRORS_KEPT:]

    def errors(self) -> tuple[FailureStatus, ...]:
        """Return the newest errors, old ones first."""
        with self._lock:
            return tuple(self._errors)

    def steps(self) -> tuple[StepStatus, ...]:
        """Return every known step's state, old ones first."""
        with self._lock:
            return tuple(_step_status(key, work) for key, work in sorted(self._works.items()))

    def _ordinal(self, key: StepKey) -> int:
        record = self._journal.record
        for generation, step, run, ordinal in record.ordinals:
            if key == (generation, step, run):
                return ordinal
        ordinal, record.next_ordinal = record.next_ordinal, record.next_ordinal + 1
        record.ordinals = [*record.ordinals, (*key, ordinal)][-_STEPS_KEPT:]
        return ordinal

    def _tier(self, key: StepKey, url: str) -> _TierWork:
        work = self._works.get(key)
        return work.tiers.setdefault(url, _TierWork()) if work is not None else _TierWork()

    def _commit_in_ram(self, key: StepKey) -> None:
        work = self._works[key]
        tier = work.tiers.get(RAM_TIER)
        if tier is None or tier.outcome is not None or tier.state != "durable":
            return
        if tier.ranks.keys() >= set(range(work.world_size)):
            tier.outcome = "committed"

    def _trim(self) -> None:
        busy = {key for key, _ in self._jobs.values()}
        for key in sorted(self._works)[:-_STEPS_KEPT]:
            if key not in busy:
                del self._works[key]


def _is_open(tier: _TierWork | None) -> bool:
    return tier is not None and (tier.outcome is None or tier.num_active > 0)


def _step_status(key: StepKey, work: _Work) -> StepStatus:
    tiers = tuple(
        TierStatus(
            url=url,
            state=tier.state,
            message=tier.message,
            ranks=tuple(
                RankTierStatus(
                    rank=rank, state=mine.state, stored_bytes=mine.stored_bytes, seconds=mine.seconds
                )
                for rank, mine in sorted(tier.ranks.items())
            ),
        )
        for url, tier in work.tiers.items()
    )
    return StepStatus(step=key.step, generation=key.generation, world_size=work.world_size, tiers=tiers)
