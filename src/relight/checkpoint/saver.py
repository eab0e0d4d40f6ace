"""One rank's saves: the snapshot thread, the agreement of all ranks, sealing, and what became of each step.

The training thread only collects, copies the small unguarded part and enqueues (`begin`), and waits in the
optimizer's pre-step hook for what is left (`before_update`); both together are the stall. All else - copying,
agreeing, sealing, slots, the keeper - happens in the snapshot thread.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial

import msgspec

from relight.checkpoint.agreement import Agreement
from relight.checkpoint.cadence import SavePace
from relight.checkpoint.group import RankGroup
from relight.checkpoint.keeping import Keeping
from relight.checkpoint.outcomes import Outcomes
from relight.checkpoint.overlap import Overlap
from relight.checkpoint.replicas import ReplicaMode
from relight.checkpoint.save_job import Outcome, SaveJob, compared_digests
from relight.checkpoint.save_plan import SavePlan, plan_save
from relight.checkpoint.snapshot import Snapshot
from relight.checkpoint.state import TrainState
from relight.checkpoint.table import StateTable
from relight.clock import Clock
from relight.errors import ConfigError, KeeperUnavailableError, RelightError, StopError, StorageFullError
from relight.keeper.arena import ArenaSlot
from relight.manifest.manifest import Generation
from relight.stages import reached

__all__ = ["Saver"]

log = logging.getLogger("relight.checkpoint")

_IDLE_SECONDS = 0.2
_ACQUIRE_SECONDS = 0.2
_WAIT_FOR_SLOT_SECONDS = 600.0
# Long enough for the loops of small models to keep every save, short against what a busy disk would cost.
_PATIENCE_SECONDS = 0.25


class Saver:
    """Owns the snapshot thread of one rank.

    Args:
        pace: asked for the next save with every agreement.
        emit: records an event: kind, step, fields.
    """

    def __init__(
        self,
        *,
        state: TrainState,
        group: RankGroup,
        keeping: Keeping,
        clock: Clock,
        root_urls: tuple[str, ...],
        pace: SavePace,
        emit: Callable[..., None],
        generation: Generation,
        replica_mode: ReplicaMode,
    ) -> None:
        self._state = state
        self._group = group
        self._keeping = keeping
        self._clock = clock
        self._pace = pace
        self._emit = emit
        self._plan: SavePlan | None = None
        self._agreement = Agreement(
            group, roots=root_urls, generation=generation, pace=pace, mode=replica_mode, emit=emit
        )
        self._jobs: queue.Queue[SaveJob | tuple[str, int] | None] = queue.Queue()
        self._ready: tuple[int, ArenaSlot] | None = None
        self._wanted_bytes = 0
        self._current: SaveJob | None = None
        self._overlap = Overlap()
        self._has_no_keeper = False
        self._sealed_at: dict[int, float] = {}
        self.outcomes = Outcomes()
        self.generation = generation
        self._thread = threading.Thread(target=self._work, name="relight-snapshot", daemon=True)
        self._thread.start()

    # -- training thread ------------------------------------------------------------------------------------

    def prepare(self, step: int) -> None:
        """Have a slot made and touched in the background for the state as it is now."""
        table = self._collect(step)
        self._wanted_bytes = self._plan_for(table).image.image_bytes
        self._jobs.put(("acquire", 0))

    @property
    def is_prepared(self) -> bool:
        """Whether slots have been asked for."""
        return self._wanted_bytes > 0

    def begin(
        self,
        step: int,
        metrics: dict[str, float],
        *,
        blocking: bool,
        guards: Callable[[int], bool],
        expects_schedule: bool,
        must_save: bool,
    ) -> SaveJob:
        """Begin a save of the state as it is now; the training thread, between two steps.

        With `must_save` a busy arena is waited for; without, the save is skipped on all ranks and counted.
        """
        self.release()
        started = self._clock.monotonic()
        table = self._collect(step)
        plan = self._plan_for(table)
        self._wanted_bytes = plan.image.image_bytes
        index, slot = self._take_slot(plan.image.image_bytes, wait=must_save)
        job = SaveJob(
            step=step,
            saved_at=self._clock.now(),
            metrics=metrics,
            table=table,
            plan=plan,
            snapshot=None,
            slot=slot,
            slot_index=index,
            is_blocking=self._overlap.take_block() or blocking,
            schedule_counts=self._state.schedule_counts(),
            digests=compared_digests(table) if self._group.world_size > 1 else {},
        )
        self.outcomes.settle(step, "pending")
        if slot is not None:
            self._start_snapshot(job, slot, guards)
        self._current = job
        self._jobs.put(job)
        if job.is_blocking or job.snapshot is None or not job.snapshot.is_overlapped:
            job.copied.wait()
            if not expects_schedule:
                job.released.set()
        job.stall_seconds = self._clock.monotonic() - started
        return job

    def release(self, *, take_schedule: bool = True) -> SaveJob | None:
        """Let the current snapshot be sealed, once it no longer needs the live tensors; the pre-step hook calls this.

        With `take_schedule`, schedulers that moved since the call (`scheduler.step()` after the checkpointer's) and
        the parameter groups they changed are taken as they are now.

        Returns:
            The save that was released, with its stall final; None if there was none.
        """
        job, self._current = self._current, None
        if job is None or job.released.is_set():
            return job
        started = self._clock.monotonic()
        if job.snapshot is not None:
            if job.snapshot.is_copied_by_host:
                job.copied.wait()
            job.snapshot.guard()
        if take_schedule and self._state.schedule_counts() != job.schedule_counts:
            job.schedule = self._state.collect_schedule()
        job.stall_seconds += self._clock.monotonic() - started
        job.released.set()
        return job

    def note_lost(self, step: int, message: str) -> None:
        """Record that the keeper could not store `step`; from any thread, once for each step."""
        with self.outcomes.changed:
            if step in self.outcomes.steps("failed"):
                return
            self.outcomes.settle(step, "failed", message)
        self._emit("save_failed", step, error=message)
        log.warning("relight: step %d could not be stored: %s", step, message)

    def decide(self, step: int) -> None:
        """Have all ranks hear rank 0's decision on the next save; in the background. Call on every rank."""
        self._jobs.put(("decide", step))

    def close(self) -> None:
        """End the snapshot thread after the jobs it has."""
        self.release()
        self._jobs.put(None)
        self._thread.join()

    def _collect(self, step: int) -> StateTable:
        return self._state.collect(step, rank=self._group.rank, num_ranks=self._group.world_size)

    def _plan_for(self, table: StateTable) -> SavePlan:
        if self._plan is None or not self._plan.matches(table, self._group.world_size):
            self._plan = plan_save(table, rank=self._group.rank, world_size=self._group.world_size)
        return self._plan

    def _start_snapshot(self, job: SaveJob, slot: ArenaSlot, guards: Callable[[int], bool]) -> None:
        can = () if job.is_blocking else tuple(guards(at) for at in range(len(self._state.optimizers)))
        parts = self._overlap.parts(job.plan, job.table, can)
        slot.begin(
            step=job.step,
            generation=self.generation.generation,
            rank=self._group.rank,
            world_size=self._group.world_size,
            image_bytes=job.plan.image.image_bytes,
            run=self.generation.run,
        )
        job.snapshot = Snapshot(slot, job.plan, job.table, parts, seed=job.step)
        job.snapshot.start()

    def _take_slot(self, image_bytes: int, *, wait: bool) -> tuple[int, ArenaSlot | None]:
        with self.outcomes.changed:
            if self._ready is None or self._ready[1].capacity_bytes != image_bytes:
                self._jobs.put(("acquire", 0))
            self._has_no_keeper = self._has_no_keeper and not wait
            # The first save never has a slot at hand if steps are faster than memory is touched: it waits.
            patience = _WAIT_FOR_SLOT_SECONDS if wait or not len(self.outcomes) else _PATIENCE_SECONDS
            self.outcomes.changed.wait_for(
                lambda: (
                    self.outcomes.failure is not None
                    or self._has_no_keeper
                    or (self._ready is not None and self._ready[1].capacity_bytes == image_bytes)
                ),
                timeout=patience,
            )
            ready = self._ready
            if ready is None or ready[1].capacity_bytes != image_bytes:
                return -1, None
            self._ready = None
            return ready

    # -- snapshot thread ------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            try:
                item = self._jobs.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                self._guarded(self._idle)
                continue
            if item is None:
                return
            if isinstance(item, SaveJob):
                self._guarded(partial(self._finish, item), item)
            elif item[0] == "decide":
                self._guarded(partial(self._decide, item[1]))
            self._guarded(self._acquire)

    def _guarded(self, act: Callable[[], None], job: SaveJob | None = None) -> None:
        """Run one piece of work; whatever goes wrong is kept for the training thread, and no one is left waiting."""
        try:
            act()
        except RelightError as error:
            self._failed(error, job)
        except Exception as error:  # noqa: BLE001 - boundary of the snapshot thread: recorded, raised in training
            self._emit("thread_died", None, error=f"{type(error).__name__}: {error}")
            wrapped = StopError(f"the snapshot thread failed: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            self._failed(wrapped, job)
        finally:
            if job is not None:
                job.copied.set()
                job.done.set()

    def _failed(self, error: RelightError, job: SaveJob | None) -> None:
        # The mistake itself comes first: whoever waits for the step must be told of it, not of "failed".
        if isinstance(error, ConfigError | StopError):
            self.outcomes.fail(error)
            self._pace.give_up()
        if job is not None:
            self._conclude(job, "failed", str(error))
            self._emit("save_failed", job.step, error=f"{type(error).__name__}: {error}")
            self._give_back(job)
        else:
            with self.outcomes.changed:
                self._has_no_keeper = isinstance(error, KeeperUnavailableError)
                self.outcomes.changed.notify_all()
        log.warning("relight: %s", error)

    def _finish(self, job: SaveJob) -> None:
        torn: list[str] = []
        if job.snapshot is not None:
            job.snapshot.run()
            torn = job.snapshot.torn_keys()
            self._agreement.look(job)
        job.copied.set()
        everyone = self._agreement.reach(job, is_ok=job.snapshot is not None and not torn)
        job.released.wait()
        if job.snapshot is not None and not torn:
            torn = job.snapshot.torn_keys()
        if torn:
            self._drop_torn(job, torn)
        elif not everyone:
            self._drop(job, "skipped", "another rank could not take part, or the arena was busy")
        elif job.slot is not None:
            self._seal(job, job.slot)

    def _decide(self, step: int) -> None:
        self._pace.accept(self._group.gather(self._pace.propose(step))[0])

    def _seal(self, job: SaveJob, slot: ArenaSlot) -> None:
        draft = job.draft(self.generation, rank=self._group.rank, world_size=self._group.world_size)
        try:
            slot.seal(msgspec.json.encode(draft), sealed_at=self._clock.now())
        except OSError as error:
            raise StorageFullError(
                f"{slot.path}: no room for the record of step {job.step}: {error}"
            ) from error
        job.is_sealed = True
        self._keeping.seal(job.slot_index)
        reached("saver.sealed")
        self._pace.learn(stall_seconds=job.stall_seconds)
        self._sealed_at[job.step] = self._clock.monotonic()
        self._conclude(job, "sealed")
        self._emit(
            "save_sealed",
            job.step,
            stall_seconds=job.stall_seconds,
            image_bytes=job.plan.image.image_bytes,
            is_overlapped=job.snapshot is not None and job.snapshot.is_overlapped,
            metrics=job.metrics,
        )

    def _drop_torn(self, job: SaveJob, torn: list[str]) -> None:
        self._overlap.note_torn(torn)
        self._emit("save_torn", job.step, tensors=torn[:20], num_tensors=len(torn))
        log.warning(
            "relight: step %d was changed while it was copied (%s); snapshot dropped", job.step, torn[0]
        )
        self._drop(job, "torn", f"{torn[0]} changed while it was copied, outside of the optimizer's step")

    def _drop(self, job: SaveJob, outcome: Outcome, message: str) -> None:
        self._give_back(job)
        self._conclude(job, outcome, message)
        if outcome == "skipped":
            self._emit("save_skipped", job.step, reason=message, num_skipped=self.outcomes.num_skipped)

    def _give_back(self, job: SaveJob) -> None:
        """Keep a slot whose snapshot was dropped for the next save; nothing readable is left in it."""
        if job.slot is not None and not job.is_sealed:
            job.slot.free()
            with self.outcomes.changed:
                self._ready = (job.slot_index, job.slot)
                self.outcomes.changed.notify_all()

    def _conclude(self, job: SaveJob, outcome: Outcome, message: str = "") -> None:
        job.outcome = outcome
        job.message = message
        self.outcomes.settle(job.step, outcome, message)

    def _acquire(self) -> None:
        """Have the next slot ready before it is needed: handed out by the keeper, made, touched."""
        with self.outcomes.changed:
            wanted = self._wanted_bytes
            ready = self._ready
        if (
            not wanted
            or self.outcomes.failure is not None
            or (ready is not None and ready[1].capacity_bytes == wanted)
        ):
            return
        if ready is not None:
            self._keeping.release(ready[0])
        ready = self._keeping.acquire(wanted, timeout_seconds=_ACQUIRE_SECONDS)
        with self.outcomes.changed:
            self._ready = ready
            self._has_no_keeper = False
            self.outcomes.changed.notify_all()

    def _idle(self) -> None:
        self._acquire()
        self._follow()

    def _follow(self) -> None:
        """Learn from the keeper what became of sealed steps."""
        for step in self.outcomes.steps("sealed"):
            reply = self._keeping.look(step)
            if reply.state in ("committed", "verified"):
                self.outcomes.settle(step, "committed")
                seconds = self._clock.monotonic() - self._sealed_at.pop(step, self._clock.monotonic())
                self._pace.learn(drain_seconds=seconds)
                self._emit("save_committed", step, seconds=seconds)
            elif reply.state == "failed":
                self.note_lost(step, reply.message or "")
