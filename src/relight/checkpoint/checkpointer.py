"""The facade: restore, step, save, wait, close; the only file that knows the order of the stages."""

from __future__ import annotations

import atexit
import logging
import os
import signal
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Self

import torch

from relight.checkpoint.cadence import SavePace
from relight.checkpoint.group import RankGroup
from relight.checkpoint.hooks import LoopWatch
from relight.checkpoint.keeping import Keeping
from relight.checkpoint.matching import Allowances
from relight.checkpoint.requests import SaveRequests
from relight.checkpoint.restoring import Restorer
from relight.checkpoint.run import Run
from relight.checkpoint.saver import Saver
from relight.checkpoint.signals import SignalHook, leave_with_failure
from relight.checkpoint.state import PARTS, TrainState
from relight.clock import Clock, SystemClock
from relight.errors import (
    ConfigError,
    MissingCopyError,
    RelightError,
    SaveFailedError,
    StopError,
    WaitTimeoutError,
)
from relight.keeper.messages import TierPlan
from relight.manifest.catalog import Catalog
from relight.manifest.manifest import Parent
from relight.policy.checkpoint import parse_every
from relight.spec import DEFAULT_FAILURE_PRIOR
from relight.storage.backend import open_backend
from relight.storage.tiers import Tier, parse_tiers
from relight.units import parse_bytes

__all__ = ["Checkpointer"]

log = logging.getLogger("relight.checkpoint")

_GATHER_TIMEOUT_SECONDS = 600.0
_CLOSE_TIMEOUT_SECONDS = 1800.0
_SEAL_TIMEOUT_SECONDS = 20.0


class Checkpointer:
    """Saves a `TrainState` while training runs, and brings it back.

    Create it on every rank, after `torch.distributed.init_process_group` if there are several.

    Args:
        tiers: where checkpoints go: a path, a URL, a `Tier`, or a list of them, nearest first. One path means
            ``["ram", path]``.
        state: what is saved.
        every: how often `step` saves: a number of optimizer steps, a duration ("10m"), or "auto" (Young's interval
            from the measured cost of a save and a stated prior of the time between failures).
        keep: newest checkpoints that stay, for tiers given as plain paths or URLs.
        allow_missing, allow_extra, allow_changed: shell patterns of keys that may be in the train state only, in
            the checkpoint only, or (settings) changed; each use is recorded as an event.
        on_save_error: "warn" (log, count, go on) or "raise" when a save could not be made durable.
        mode: "overlap" (copy during the next forward and backward) or "blocking" (copy inside the call).
        ram_budget: bytes (or "8GiB") that this rank's snapshots may take in shared memory; None: what there is.
        keep_best: (metric, "min" | "max"): the best checkpoint by a metric passed to `step` also stays.

    Attributes:
        last_stall_seconds: training time that the newest save took: the call and the wait in the optimizer's hook.
        num_failed: saves that could not be made durable. num_skipped: saves skipped since the arena was busy.

    Raises:
        ConfigError: an argument is wrong, or ranks were given different roots.
    """

    def __init__(
        self,
        tiers: str | os.PathLike[str] | Tier | Sequence[str | os.PathLike[str] | Tier],
        state: TrainState,
        *,
        every: int | str = "auto",
        keep: int = 3,
        allow_missing: Sequence[str] = (),
        allow_extra: Sequence[str] = (),
        allow_changed: Sequence[str] = (),
        on_save_error: Literal["warn", "raise"] = "warn",
        mode: Literal["overlap", "blocking"] = "overlap",
        ram_budget: int | str | None = None,
        keep_best: tuple[str, Literal["min", "max"]] | None = None,
        clock: Clock | None = None,
    ) -> None:
        if on_save_error not in ("warn", "raise"):
            raise ConfigError(f'on_save_error must be "warn" or "raise", got {on_save_error!r}')
        if mode not in ("overlap", "blocking"):
            raise ConfigError(f'mode must be "overlap" or "blocking", got {mode!r}')
        self._clock = clock or SystemClock()
        self._state = state
        self._tiers = parse_tiers(tiers, keep=keep)
        self._allow = Allowances(missing=allow_missing, extra=allow_extra, changed=allow_changed)
        self._on_save_error = on_save_error
        self._mode = mode
        self._group = RankGroup(timeout_seconds=_GATHER_TIMEOUT_SECONDS)
        self.rank, self.world_size = self._group.rank, self._group.world_size
        self._run = Run(self._tiers, self._group, self._clock)
        self._pace = SavePace(
            parse_every(every),
            clock=self._clock,
            mtbf_seconds=DEFAULT_FAILURE_PRIOR.job_mtbf_seconds(self.world_size),
        )
        self._saver: Saver | None = None
        self._deferred = False
        self._step: int | None = None
        self._last_due: int | None = None
        self._last_metrics: dict[str, Any] = {}
        self._reported: set[int] = set()
        self._closed = False
        self._pid = os.getpid()
        self.last_stall_seconds = 0.0
        self.num_failed = 0
        self._keeping = Keeping(
            root_url=self._run.root_url,
            rank=self.rank,
            world_size=self.world_size,
            tiers=tuple(
                TierPlan(url=tier.url, every=tier.every, keep=tier.keep, keep_every=tier.keep_every)
                for tier in self._tiers
            ),
            num_slots=2,
            budget_bytes=parse_bytes(ram_budget) if isinstance(ram_budget, str) else ram_budget,
            keep_best=keep_best,
            on_restart=lambda reason: self._run.emit("keeper_lost", self._step, reason=reason),
            cuda=torch.cuda if torch.cuda.is_available() else None,
        )
        self._watch = LoopWatch(state, self._before_update)
        self._requests = SaveRequests(
            self._keeping.client.requests_path, timeout_seconds=_GATHER_TIMEOUT_SECONDS
        )
        self._watch.loop_starts()
        self._terminate = SignalHook(signal.SIGTERM, self._seal_in_flight, is_final=True)
        atexit.register(self._at_exit)

    # -- restore --------------------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        *,
        source: str | os.PathLike[str] | None = None,
        parts: Sequence[str] | None = None,
    ) -> int:
        """Put the newest good checkpoint into the train state, and return the step to go on from. Call on every rank.

        Blocks until the state is in place. Every byte is checked against its digest before it reaches a tensor; a
        bad block is taken from another copy, and a step without a whole copy is passed over for the next older one,
        by all ranks together. Make data iterators afterwards.

        Args:
            step: restore exactly this step; None: the newest.
            source: root of another run to start from (a fork). It counts only while this run has no checkpoint of
                its own, so that a restarted fork goes on instead of starting over.
            parts: restore these parts alone (a warm start), such as ``("model",)``; names as in `PARTS`.

        Returns:
            Optimizer steps done; 0 when there is nothing to restore, or for a warm start from `source`.

        Raises:
            StateMismatchError, SettingsChangedError: saved and live state differ; nothing was changed.
            MissingCopyError: `step` or `source` was given and nothing good is there.
        """
        wanted = self._check_parts(parts)
        if self._saver is not None:
            raise ConfigError("restore() must come before the first step() or save()")
        started = self._clock.monotonic()
        self._run.emit("restore_started", step)
        restorer = Restorer(self._state, self._group, self._allow, self._run.emit)
        held, slots = self._keeping.inventory(), self._keeping.slots
        own_step = step if source is None else None
        found = restorer.restore(self._run.catalogs, held, slots, step=own_step, parts=wanted)
        origin = None
        if found is None and source is not None:
            origin = os.fspath(source)
            found = restorer.restore([Catalog(open_backend(origin))], (), None, step=step, parts=wanted)
        if found is None and (step is not None or source is not None):
            where = origin or ", ".join(self._run.durable_urls)
            raise MissingCopyError(
                f"nothing to restore{f' at step {step}' if step is not None else ''} in {where}"
            )
        self._run.is_restored = True
        self._watch.loop_starts()
        if found is None:
            self._run.parent = None
            self._run.claim()
            return 0
        candidate = found.candidate
        self._run.parent = Parent(step=candidate.step, generation=candidate.generation, source=origin)
        if parts is None:
            self._run.claim()
        first_step = 0 if origin is not None and parts is not None else candidate.step
        if self._state.data is not None and "data" not in wanted:
            self._state.data.rebase(first_step)
        self._run.emit(
            "restore_done",
            candidate.step,
            seconds=self._clock.monotonic() - started,
            place=found.place,
            bytes_read=found.bytes_read,
            parts=sorted(wanted),
        )
        log.info("relight: restored step %d from %s", candidate.step, found.place)
        return first_step

    # -- during training ------------------------------------------------------------------------------------

    def step(self, step: int, **metrics: Any) -> bool:
        """Tell that `step` optimizer steps are done; saves when it is due. Call on every rank, after each step.

        Call it last in the loop body, after `scheduler.step()` (the other order is noticed and handled). Metrics
        are kept with a checkpoint, by value; they are read only when one is saved.

        Returns:
            True if a save began.

        Raises:
            ConfigError, StopError: an earlier save met a mistake that must be fixed (ranks at different steps, ...).
            SaveFailedError: an earlier save failed and `on_save_error="raise"`.
        """
        self._boundary(step)
        requested = self._requests.is_due(step)
        due = self._pace.is_due(step, self._ask_decision)
        if not (due or requested or self._deferred):
            return False
        return self._save(step, metrics, must_save=requested or self._deferred)

    def save(self, step: int, **metrics: Any) -> None:
        """Begin a save of the state after `step` optimizer steps now; waits for a free slot, not for storage.

        Inside a gradient accumulation window the save is put off to the next step boundary, and an event says so.
        """
        self._boundary(step)
        self._save(step, metrics, must_save=True)

    def wait(self, step: int | None = None, *, tier: str | None = None, timeout: float | None = None) -> None:
        """Return once `step` (default: the newest save) is durable on `tier` (default: the last one).

        After it, the step survives what that tier survives.

        Args:
            step: number of a step that was saved.
            tier: URL of a tier of this run, or "ram".
            timeout: seconds; None waits for as long as it takes.

        Raises:
            WaitTimeoutError: not durable in time. SaveFailedError: it will not become durable.
        """
        saver = self._saver
        wanted = step if step is not None else self._last_due
        if saver is None or wanted is None:
            return
        saver.release()
        deadline = self._clock.monotonic() + (timeout if timeout is not None else _CLOSE_TIMEOUT_SECONDS)
        outcome, message = saver.outcomes.wait(wanted, deadline - self._clock.monotonic())
        reached: str | None = outcome
        if outcome in ("sealed", "committed"):
            left = max(0.0, deadline - self._clock.monotonic())
            reply = self._keeping.wait(wanted, tier=tier, timeout_seconds=left)
            if reply.state in ("committed", "verified"):
                return
            reached, message = reply.state, reply.message or ""
        self._raise_grave()
        if reached in ("pending", "draining", "digested", "sealed", "durable"):
            raise WaitTimeoutError(f"step {wanted} is not durable yet ({reached})", step=wanted, tier=tier)
        raise SaveFailedError(f"step {wanted} is not durable: {reached}: {message}", step=wanted, tier=tier)

    def close(self) -> None:
        """Wait for saves in flight, leave the keeper, remove hooks. Called by `with`, and at interpreter exit.

        A last due step that was skipped or torn is saved again if nothing was updated since.

        Raises:
            SaveFailedError: the last due step is not durable.
        """
        self._close(is_failing=False)

    def _close(self, *, is_failing: bool) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        failure: Exception | None = None
        try:
            self._closed = False
            if not is_failing:
                self._retry_last()
            self.wait()
        except (SaveFailedError, WaitTimeoutError, ConfigError, StopError) as error:
            failure = error
        self._closed = True
        if self._saver is not None:
            self._saver.close()
        self._requests.close()
        self._terminate.remove()
        self._watch.close()
        self._run.emit("run_closed", self._step, num_failed=self.num_failed, is_durable=failure is None)
        self._keeping.detach(clean=failure is None)
        self._run.events.close()
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self._close(is_failing=True)
        except (SaveFailedError, WaitTimeoutError, ConfigError, StopError) as later:
            # The training error stays the one that is seen; this one is told beside it.
            log.error("relight: %s", later)  # noqa: TRY400 - the training error's trace is the one to show
            error.add_note(f"relight: and the last checkpoint is not durable: {later}")

    @property
    def num_skipped(self) -> int:
        """Saves skipped since the arena was busy with earlier ones."""
        return self._saver.outcomes.num_skipped if self._saver is not None else 0

    # -- inside ---------------------------------------------------------------------------------------------

    def _boundary(self, step: int) -> None:
        if self._closed:
            raise ConfigError("the Checkpointer is closed")
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ConfigError(f"step must be the number of optimizer steps done (an int >= 0), got {step!r}")
        self._raise_grave()
        self._report_failures()
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

    def _save(self, step: int, metrics: dict[str, Any], *, must_save: bool) -> bool:
        saver = self._ready_saver()
        if self._watch.is_half_done:
            self._deferred = True
            self._run.emit("save_deferred", step, reason="inside a gradient accumulation window")
            return False
        if step in saver.outcomes:
            return False
        self._deferred = False
        self._last_due, self._last_metrics = step, metrics
        self._report_unclaimed(step)
        self._run.emit("save_requested", step)
        job = saver.begin(
            step,
            {name: _number(value) for name, value in metrics.items()},
            blocking=self._mode == "blocking",
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
            self._keeping.attach(generation, self._run.protected())
            self._saver = Saver(
                state=self._state,
                group=self._group,
                keeping=self._keeping,
                clock=self._clock,
                root_urls=self._run.durable_urls,
                pace=self._pace,
                emit=self._run.emit,
                generation=generation,
            )
        return self._saver

    def _ask_decision(self, step: int) -> None:
        self._ready_saver().decide(step)

    def _before_update(self) -> None:
        if self._saver is not None and os.getpid() == self._pid:
            job = self._saver.release(take_schedule=not self._watch.moves_before_update)
            if job is not None:
                self.last_stall_seconds = job.stall_seconds

    def _retry_last(self) -> None:
        if self._saver is None or self._last_due is None or self._step != self._last_due:
            return
        self._saver.release()
        outcome, _ = self._saver.outcomes.wait(self._last_due, _CLOSE_TIMEOUT_SECONDS)
        if outcome in ("skipped", "torn"):
            self._saver.outcomes.forget(self._last_due)
            self._save(self._last_due, self._last_metrics, must_save=True)

    def _raise_grave(self) -> None:
        if self._saver is not None and self._saver.outcomes.failure is not None:
            raise self._saver.outcomes.failure

    def _report_failures(self) -> None:
        if self._saver is None:
            return
        for step in self._saver.outcomes.steps("failed"):
            if step not in self._reported:
                self._reported.add(step)
                self.num_failed += 1
                if self._on_save_error == "raise":
                    message = self._saver.outcomes.look(step)[1]
                    raise SaveFailedError(f"step {step} could not be saved: {message}", step=step)

    def _report_unclaimed(self, step: int) -> None:
        for key in self._state.take_unclaimed():
            self._run.emit("part_unclaimed", step, part=key)
            log.warning(
                "relight: the checkpoint holds %s, which this script never gave to the train state", key
            )

    def _check_parts(self, parts: Sequence[str] | None) -> frozenset[str]:
        if parts is None:
            return frozenset(PARTS)
        unknown = sorted(set(parts) - set(PARTS)) if not isinstance(parts, str) else [parts]
        if unknown:
            raise ConfigError(f"parts must be a tuple of {', '.join(PARTS)}; unknown: {', '.join(unknown)}")
        return frozenset(parts)

    def _seal_in_flight(self) -> None:
        """On SIGTERM: hand what is in flight to the keeper, which makes it durable without this process."""
        if self._saver is not None:
            job = self._saver.release()
            if job is not None:
                job.done.wait(_SEAL_TIMEOUT_SECONDS)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        try:
            self.close()
        except RelightError as error:
            log.error("relight: %s", error)
            leave_with_failure()


def _number(value: Any) -> float:
    return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
