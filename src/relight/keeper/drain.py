"""From a sealed slot to a checkpoint: digests, image, record and commit on each tier in turn, nearest first.

The image is written while it is hashed; nothing is copied but by the file system. Read-back and retention follow in
`relight.keeper.readback`. Must not import torch; knows no HTTP.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from relight.clock import Clock, SystemClock
from relight.errors import (
    CopyError,
    FencedError,
    MissingCopyError,
    RelightError,
    StorageFullError,
    StorageUnavailableError,
)
from relight.keeper.arena import ArenaSlot, SlotState
from relight.keeper.crew import Crew
from relight.keeper.ledger import FINAL_STATES, Ledger
from relight.keeper.messages import RAM_TIER, TierPlan
from relight.keeper.readback import ReadBack
from relight.keeper.reports import Reports
from relight.keeper.sealed import SealedJob, hash_blocks, read_draft, unchanged
from relight.keeper.slots import SlotId, SlotTable, StepKey
from relight.keeper.stores import TierStore, TierStores
from relight.manifest.manifest import RankRecord, RecordDraft
from relight.stages import reached

__all__ = ["POINTS", "DrainSettings", "Drainer"]

POINTS = (
    "digest.started",
    "digest.done",
    "drain.started",
    "drain.image_written",
    "drain.record_written",
    "drain.committed",
    "drain.failed",
    "drain.partial_removed",
    "verify.started",
    "verify.done",
    "retention.removed",
)
"""Every point that drain, read-back and retention announce in the keeper, in the order of a save."""

_QUIET_SECONDS = 5.0

_log = logging.getLogger("relight.keeper")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainSettings:
    """How the keeper drains.

    Attributes:
        num_drain_threads: snapshots written at once.
        num_digest_threads: snapshots hashed at once.
        digest_nice, verify_nice: added to the nice value of hashing and read-back threads.
        retry_seconds: how long a tier that does not answer is tried again.
        backoff_seconds, backoff_max_seconds: first and longest wait between tries, before jitter.
        recheck_seconds: how often a step that is durable but not committed is looked at again.
        recheck_max_seconds: for how long.
    """

    num_drain_threads: int = 4
    num_digest_threads: int = 2
    digest_nice: int = 0
    verify_nice: int = 10
    retry_seconds: float = 60.0
    backoff_seconds: float = 0.1
    backoff_max_seconds: float = 5.0
    recheck_seconds: float = 2.0
    recheck_max_seconds: float = 600.0


class Drainer:
    """The threads that make sealed snapshots durable. `close` it."""

    def __init__(
        self,
        *,
        slots: SlotTable,
        ledger: Ledger,
        reports: Reports,
        stores: TierStores,
        readback: ReadBack,
        settings: DrainSettings | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.settings = settings or DrainSettings()
        self._slots = slots
        self._ledger = ledger
        self._reports = reports
        self._stores = stores
        self._readback = readback
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()  # noqa: S311 - jitter
        self._closing = threading.Event()
        self._recheck_at = 0.0
        self._drains = self._crew("relight-drain", self.settings.num_drain_threads)
        self._hashes = self._crew(
            "relight-digest", self.settings.num_digest_threads, nice=self.settings.digest_nice
        )
        readback.quiet = partial(self._drains.wait_idle, _QUIET_SECONDS)

    @property
    def is_busy(self) -> bool:
        """Whether anything is queued or at work, read-back and retention included."""
        return self._drains.is_busy or self._hashes.is_busy or self._readback.is_busy

    def submit(self, slot: SlotId) -> StepKey:
        """Digest and drain the snapshot in `slot`; a snapshot that was submitted before is left alone.

        Raises:
            CopyError: the slot is gone or broken, or holds no sealed snapshot.
        """
        with self._slots.use(slot) as mapped:
            control = mapped.control()
        if control.state not in (SlotState.SEALED, SlotState.DIGESTED):
            raise MissingCopyError(
                f"{self._slots.path(slot)} is {control.state.name}, not sealed", rank=slot.rank
            )
        key = StepKey.of(control)
        if self._ledger.begin(slot, key, world_size=control.world_size, sealed_at=control.sealed_at):
            job = SealedJob(slot=slot, key=key, control=control, tiers=self._ledger.tiers())
            self._hashes.put(partial(self._digest, job))
            self._drains.put(partial(self._drain, job))
        return key

    def put_aside(self, task: Callable[[], None]) -> None:
        """Do something small beside, which may block."""
        self._readback.crew.put(task)

    def prefer_newest(self) -> None:
        """Take the newest snapshot first from now on: little time is left."""
        self._drains.newest_first = True

    def tick(self) -> None:
        """Look again at steps that are durable but not committed; call about once a second."""
        now = self._clock.monotonic()
        if now < self._recheck_at:
            return
        self._recheck_at = now + self.settings.recheck_seconds
        for key, url in self._ledger.unsettled(max_age_seconds=self.settings.recheck_max_seconds):
            if not self._ledger.num_active(key, url):
                self._drains.put(partial(self._recheck, key, url))

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Return True once nothing is left to do, False when that takes longer than `timeout_seconds`."""
        deadline = time.monotonic() + timeout_seconds
        crews = (self._hashes, self._drains, self._readback.crew)
        while self.is_busy and time.monotonic() < deadline:
            for crew in crews:
                crew.wait_idle(max(0.0, deadline - time.monotonic()))
        return not self.is_busy

    def close(self, *, timeout_seconds: float = 5.0) -> bool:
        """End the threads after what they are doing; return whether all have ended."""
        self._closing.set()
        deadline = time.monotonic() + timeout_seconds
        crews = (self._hashes, self._drains, self._readback.crew)
        ended = [crew.close(timeout_seconds=max(0.0, deadline - time.monotonic())) for crew in crews]
        return all(ended)

    def _crew(self, name: str, num_threads: int, *, nice: int = 0) -> Crew:
        def on_error(thread: str, error: Exception) -> None:
            self._reports.thread_died(thread, error)

        return Crew(name, num_threads, nice=nice, on_error=on_error, on_death=self._reports.thread_died)

    def _digest(self, job: SealedJob) -> None:
        try:
            digests = self._digests_of(job)
        except Exception as error:  # noqa: BLE001 - the thread that waits for the digests records it
            job.digests.set_exception(
                error if isinstance(error, RelightError) else CopyError(f"digests: {error!r}")
            )
            return
        job.digests.set_result(digests)
        for plan in job.tiers:
            self._ledger.advance(job.key, plan.url, job.slot.rank, "digested")
        if any(plan.url == RAM_TIER for plan in job.tiers):
            num_bytes = job.control.image_bytes
            self._ledger.advance(job.key, RAM_TIER, job.slot.rank, "durable", stored_bytes=num_bytes)

    def _digests_of(self, job: SealedJob) -> list[bytes]:
        started = time.monotonic()
        with self._slots.use(job.slot) as mapped:
            now = unchanged(mapped, job)
            if now.state is SlotState.DIGESTED:
                return mapped.digests()
            reached("digest.started")
            digests = hash_blocks(mapped, now.image_bytes)
            unchanged(mapped, job)
            mapped.write_digests(digests)
        reached("digest.done")
        self._ledger.count("digested_bytes", now.image_bytes)
        self._ledger.count("digest_seconds", time.monotonic() - started)
        return digests

    def _drain(self, job: SealedJob) -> None:
        reached("drain.started")
        try:
            with self._slots.use(job.slot) as mapped:
                draft = read_draft(mapped, job)
                for plan in job.tiers:
                    if plan.url != RAM_TIER:
                        self._drain_tier(mapped, job, plan, draft)
                job.digests.result()  # raises what went wrong, for the tiers that are still open
        except Exception as error:  # noqa: BLE001 - the boundary of a snapshot's drain; every tier is told
            for plan in job.tiers:
                if self._ledger.state(job.key, plan.url)[0] not in FINAL_STATES:
                    with self._ledger.active(job.key, plan.url):
                        self._fail(job, plan.url, error)
                        self._remove_partial(job, plan.url)
        finally:
            # The slot may be overwritten from here on, so nobody may be hashing it any more.
            job.digests.exception()
            self._ledger.finish(job.slot, job.key)

    def _drain_tier(self, mapped: ArenaSlot, job: SealedJob, plan: TierPlan, draft: RecordDraft) -> None:
        outcome, _ = self._ledger.state(job.key, plan.url)
        if outcome == "committed":
            self._readback.put(plan, job.key, job.control.world_size)
        if outcome in FINAL_STATES:
            return
        with self._ledger.active(job.key, plan.url):
            self._ledger.advance(job.key, plan.url, job.slot.rank, "draining")
            try:
                self._retrying(job, plan, lambda store: self._store(store, mapped, job, draft))
            except RelightError as error:
                self._fail(job, plan.url, error)
            if self._ledger.state(job.key, plan.url)[0] == "failed":
                self._remove_partial(job, plan.url)

    def _store(self, store: TierStore, mapped: ArenaSlot, job: SealedJob, draft: RecordDraft) -> None:
        step, generation, rank, num_bytes = draft.step, draft.generation, draft.rank, draft.image_bytes
        if self._ledger.state(job.key, store.plan.url)[0] == "failed":
            return
        known = store.catalog.run()
        if known is not None and known != draft.run:
            raise FencedError(
                f"{store.plan.url} belongs to another run by now", step=step, tier=store.plan.url
            )
        newer = store.catalog.fenced_by(generation, step)
        if newer is not None:
            raise FencedError(
                f"generation {newer} exists and does not build on step {step} of {generation}", step=step
            )
        started = time.monotonic()
        with mapped.image[:num_bytes] as image:
            is_new = store.catalog.put_image(step, generation, rank, image)
        write_seconds = time.monotonic() - started
        reached("drain.image_written")
        digests = tuple(digest.hex() for digest in job.digests.result())
        unchanged(mapped, job)
        store.catalog.put_record(RankRecord(draft=draft, digests=digests))
        reached("drain.record_written")
        seconds = self._ledger.advance(job.key, store.plan.url, rank, "durable", stored_bytes=num_bytes)
        self._ledger.count("saves_durable")
        self._ledger.count("stored_bytes", num_bytes if is_new else 0)
        self._ledger.count("store_seconds", write_seconds)
        self._reports.emit(
            "save_durable",
            job.key,
            rank=rank,
            run=draft.run,
            tier=store.plan.url,
            image_bytes=num_bytes,
            seconds=seconds,
            write_seconds=write_seconds,
        )
        self._commit(store, job.key, draft.run)

    def _commit(self, store: TierStore, key: StepKey, run: str | None) -> None:
        manifest = store.catalog.commit(key.step, key.generation)
        if manifest is None:
            return
        reached("drain.committed")
        if self._ledger.settle(key, store.plan.url, "committed"):
            self._ledger.count("saves_committed")
            seconds = max(0.0, self._clock.now() - manifest.saved_at)
            num_bytes = sum(rank.image_bytes for rank in manifest.ranks)
            self._reports.emit(
                "save_committed", key, run=run, tier=store.plan.url, image_bytes=num_bytes, seconds=seconds
            )
            self._readback.put(store.plan, key, manifest.world_size)

    def _recheck(self, key: StepKey, url: str) -> None:
        plan = next((plan for plan in self._ledger.tiers() if plan.url == url), TierPlan(url=url))
        with self._ledger.active(key, url):
            try:
                self._commit(self._stores.open(plan), key, None)
            except RelightError as error:
                self._reports.error(error, key, tier=url, is_final=False)

    def _retrying(self, job: SealedJob, plan: TierPlan, stage: Callable[[TierStore], None]) -> None:
        deadline = self._clock.monotonic() + self.settings.retry_seconds
        pause_seconds = self.settings.backoff_seconds
        made_room = False
        while True:
            try:
                return stage(self._stores.open(plan))
            except StorageFullError as error:
                if made_room:
                    raise
                made_room = True
                self._reports.error(error, job.key, rank=job.slot.rank, tier=plan.url, is_final=False)
                self._readback.apply_retention(plan)
            except StorageUnavailableError as error:
                wait_seconds = pause_seconds * self._rng.uniform(0.5, 1.0)
                if self._clock.monotonic() + wait_seconds >= deadline:
                    raise
                self._reports.error(error, job.key, rank=job.slot.rank, tier=plan.url, is_final=False)
                if self._closing.wait(wait_seconds):
                    raise
                pause_seconds = min(2 * pause_seconds, self.settings.backoff_max_seconds)

    def _fail(self, job: SealedJob, url: str, error: Exception) -> None:
        message = str(error) if isinstance(error, RelightError) else repr(error)
        is_stored = self._ledger.state(job.key, url)[0] in ("committed", "verified")
        is_first = not is_stored and self._ledger.settle(job.key, url, "failed", message)
        self._reports.error(error, job.key, rank=job.slot.rank, tier=url, is_final=True)
        reached("drain.failed")
        if is_first:
            self._ledger.count("saves_failed")
            kind = type(error).__name__
            self._reports.emit(
                "save_failed",
                job.key,
                rank=job.slot.rank,
                tier=url,
                stage="drain",
                error=kind,
                message=message,
            )

    def _remove_partial(self, job: SealedJob, url: str) -> None:
        """Remove what a failed step left on a tier, once no other rank of this node writes there any more."""
        if url == RAM_TIER or self._ledger.num_active(job.key, url) > 1:
            return
        if self._ledger.durable_ranks(job.key, url) >= set(range(job.control.world_size)):
            # Every record is there, so somebody may be committing it; the next start does if nobody is.
            return
        try:
            store = self._stores.open(TierPlan(url=url))
            if not store.catalog.is_committed(job.key.step, job.key.generation):
                store.remove_step(job.key)
                reached("drain.partial_removed")
        except RelightError as error:
            _log.warning("what is left of step %d on %s stays there for now: %s", job.key.step, url, error)
