"""What happens at every step of the training loop: is a save due, begin it, follow it, tell of what went wrong."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from relight.checkpoint.cadence import SavePace
from relight.checkpoint.group import RankGroup
from relight.checkpoint.hooks import LoopWatch
from relight.checkpoint.keeping import Keeping
from relight.checkpoint.replicas import ReplicaMode
from relight.checkpoint.requests import SaveRequests
from relight.checkpoint.run import Run
from relight.checkpoint.saver import Saver
from relight.checkpoint.state import TrainState
from relight.clock import Clock
from relight.errors import ConfigError, SaveFailedError, WaitTimeoutError

__all__ = ["GATHER_TIMEOUT_SECONDS", "Saving"]

log = logging.getLogger("relight.checkpoint")

GATHER_TIMEOUT_SECONDS = 600.0
"""How long the ranks wait for each other in a gather."""

_CLOSE_TIMEOUT_SECONDS = 1800.0
_FAILING_TIMEOUT_SECONDS = 60.0
# Ranks that still run wait for this one in a collective, and notice that it is gone only when it ends; the keeper
# stores what is sealed whoever ends.
_FAILING_RANKS_SECONDS = 3.0
_SEAL_TIMEOUT_SECONDS = 20.0
_NOT_YET = ("pending", "draining", "digested", "sealed", "durable")


class Saving:
    """The saves of one rank, seen from the training thread. Create on every rank.

    Args:
        is_blocking: copy inside the call.
        raises: raise `SaveFailedError` at the next step when a save could not be made durable.
        replica_mode: how replicas are compared at each save.

    Attributes:
        last_stall_seconds: training time that the newest save took.
        num_failed: saves that could not be made durable.
    """

    def __init__(
        self,
        *,
        state: TrainState,
        run: Run,
        group: RankGroup,
        keeping: Keeping,
        clock: Clock,
        pace: SavePace,
        is_blocking: bool,
        raises: bool,
        replica_mode: ReplicaMode,
    ) -> None:
        self._state = state
        self._run = run
        self._group = group
        self._keeping = keeping
        self._clock = clock
        self._pace = pace
        self._is_blocking = is_blocking
        self._raises = raises
        self._replica_mode: ReplicaMode = replica_mode
        self._saver: Saver | None = None
        self._is_deferred = False
        self._step: int | None = None
        self._last_due: int | None = None
        self._last_metrics: dict[str, float] = {}
        self._reported: set[int] = set()
        self._pid = os.getpid()
        self.last_stall_seconds = 0.0
        self.num_failed = 0
        self._watch = LoopWatch(state, self._before_update)
        path = keeping.client.requests_path
        self._requests = SaveRequests(path, timeout_seconds=GATHER_TIMEOUT_SECONDS)
        self._watch.loop_starts()

    @property
    def has_begun(self) -> bool:
        """Whether a first step or save was seen."""
        return self._saver is not None

    @property
    def has_saved(self) -> bool:
        """Whether a save was ever begun."""
        return self._last_due is not None

    @property
    def num_skipped(self) -> int:
        """Saves skipped since the arena was busy."""
        return self._saver.outcomes.num_skipped if self._saver is not None else 0

    def loop_starts(self) -> None:
        """Note that the training loop starts now."""
        self._watch.loop_starts()

    def step(self, step: int, metrics: dict[str, Any]) -> bool:
        """See `Checkpointer.step`."""
        saver = self._boundary(step)
        is_requested = self._requests.is_due(step)
        is_due = self._pace.is_due(step, saver.decide)
        if not (is_due or is_requested or self._is_deferred):
            return False
        return self._begin(saver, step, metrics, must_save=is_requested or self._is_deferred)

    def save(self, step: int, metrics: dict[str, Any]) -> None:
        """See `Checkpointer.save`."""
        self._begin(self._boundary(step), step, metrics, must_save=True)

    def wait(
        self, step: int | None, *, tier: str | None = None, timeout_seconds: float | None = None
    ) -> None:
        """See `Checkpointer.wait`."""
        saver = self._saver
        wanted = step if step is not None else self._last_due
        if saver is None or wanted is None:
            return
        url = None if tier is None else self._keeping.tier_url(tier)
        saver.release()
        patience = timeout_seconds if timeout_seconds is not None else _CLOSE_TIMEOUT_SECONDS
        deadline = self._clock.monotonic() + patience
        outcome, message = saver.outcomes.wait(wanted, patience)
        reached: str | None = outcome
        if outcome in ("sealed", "committed"):
            left = max(0.0, deadline - self._clock.monotonic())
            reply = self._keeping.wait(wanted, tier=url, timeout_seconds=left)
            if reply.state in ("committed", "verified"):
                return
            reached, message = reply.state, reply.message or ""
            if reached == "failed":
                saver.note_lost(wanted, message)
        self._raise_grave()
        if reached in _NOT_YET:
            raise WaitTimeoutError(f"step {wanted} is not durable yet ({reached})", step=wanted, tier=tier)
        raise SaveFailedError(f"step {wanted} is not durable: {reached}: {message}", step=wanted, tier=tier)

    def seal_in_flight(self) -> None:
        """Hand what is in flight to the keeper, which makes it durable without this process."""
        if self._saver is not None:
            job = self._saver.release()
            if job is not None:
                job.done.wait(_SEAL_TIMEOUT_SECONDS)

    def finish(self, *, is_failing: bool) -> None:
        """Wait until the last due step is durable; one that was skipped or torn is saved again.

        After a training error (`is_failing`) the other ranks may be gone: nothing new is begun and the wait is short.

        Raises:
            SaveFailedError, WaitTimeoutError: it is not durable.
        """
        if (
            not is_failing
            and self._saver is not None
            and self._last_due is not None
            and self._step == self._last_due
        ):
            self._saver.release()
            outcome, _ = self._saver.outcomes.wait(self._last_due, _CLOSE_TIMEOUT_SECONDS)
            if outcome in ("skipped", "torn"):
                self._saver.outcomes.forget(self._last_due)
                self._begin(self._saver, self._last_due, self._last_metrics, must_save=True)
        failing_seconds = _FAILING_TIMEOUT_SECONDS if self._group.world_size == 1 else _FAILING_RANKS_SECONDS
        self.wait(None, timeout_seconds=failing_seconds if is_failing else None)

    def close(self) -> None:
        """End the snapshot thread and remove every hook."""
        if self._saver is not None:
            self._saver.close()
        self._report_failures(raises=False)
        self._requests.close()
        self._watch.close()

    def _boundary(self, step: int) -> Saver:
        """Take note of a step boundary, after telling of what went wrong before it."""
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ConfigError(f"step must be the number of optimizer steps done (an int >= 0), got {step!r}")
        self._raise_grave()
        self._report_failures(raises=self._raises)
        if step != self._step:
            self._watch.attach()
            self._watch.boundary()
            self._step = step
            if self._state.data is not None:
                self._state.data.on_step(step)
            self._pace.on_step(step)
        saver = self._ready_saver()
        if not saver.is_prepared:
            saver.prepare(step)
        return saver

    def _begin(self, saver: Saver, step: int, metrics: dict[str, Any], *, must_save: bool) -> bool:
        if self._watch.is_half_done:
            self._is_deferred = True
            self._run.emit("save_deferred", step, reason="inside a gradient accumulation window")
            return False
        if step in saver.outcomes:
            return False
        self._is_deferred = False
        self._last_due = step
        self._last_metrics = {name: _number(value) for name, value in metrics.items()}
        self._report_unclaimed(step)
        self._run.emit("save_requested", step)
        job = saver.begin(
            step,
            self._last_metrics,
            blocking=self._is_blocking,
            guards=self._watch.guards,
            expects_schedule=self._watch.expects_schedule,
            must_save=must_save,
        )
        self.last_stall_seconds = job.stall_seconds
        self._raise_grave()
        return True

    def _ready_saver(self) -> Saver:
        if self._saver is None:
            generation = self._run.claim()
            self._keeping.belong(generation, self._run.protected())
            self._saver = Saver(
                state=self._state,
                group=self._group,
                keeping=self._keeping,
                clock=self._clock,
                root_urls=self._run.durable_urls,
                pace=self._pace,
                emit=self._run.emit,
                generation=generation,
                replica_mode=self._replica_mode,
            )
        return self._saver

    def _before_update(self) -> None:
        if self._saver is not None and os.getpid() == self._pid:
            job = self._saver.release(take_schedule=not self._watch.moves_before_update)
            if job is not None:
                self.last_stall_seconds = job.stall_seconds

    def _raise_grave(self) -> None:
        if self._saver is not None and self._saver.outcomes.failure is not None:
            raise self._saver.outcomes.failure

    def _report_failures(self, *, raises: bool) -> None:
        if self._saver is None:
            return
        for step in self._saver.outcomes.steps("failed"):
            if step not in self._reported:
                self._reported.add(step)
                self.num_failed += 1
                if raises:
                    message = self._saver.outcomes.look(step)[1]
                    raise SaveFailedError(f"step {step} could not be saved: {message}", step=step)

    def _report_unclaimed(self, step: int) -> None:
        for key in self._state.take_unclaimed():
            self._run.emit("part_unclaimed", step, part=key)
            log.warning(
                "relight: the checkpoint holds %s, which this script never gave to the train state", key
            )


def _number(value: Any) -> float:
    return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
