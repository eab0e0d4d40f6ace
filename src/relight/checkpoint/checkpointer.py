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
from relight.checkpoint.keeping import Keeping
from relight.checkpoint.matching import Allowances
from relight.checkpoint.replicas import ReplicaMode
from relight.checkpoint.restoring import Restorer
from relight.checkpoint.run import Run
from relight.checkpoint.saving import GATHER_TIMEOUT_SECONDS, Saving
from relight.checkpoint.signals import SignalHook, leave_with_failure
from relight.checkpoint.state import PARTS, TrainState
from relight.clock import Clock, SystemClock
from relight.errors import ConfigError, RelightError, SaveFailedError, StopError, WaitTimeoutError
from relight.keeper.messages import TierPlan
from relight.policy.checkpoint import parse_every
from relight.spec import DEFAULT_FAILURE_PRIOR
from relight.storage.tiers import Tier, parse_tiers
from relight.units import parse_bytes

__all__ = ["Checkpointer"]

log = logging.getLogger("relight.checkpoint")

_NUM_SLOTS = 2


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
        replica_check: how replicated tensors are compared between ranks at each save and after a restore: "full"
            (every byte), "sample" (some 12 KB of each tensor, cheaper; misses a change in what is not looked at), or
            "off". Where replicas differ the save goes on, but a restore does not choose it unless asked to.

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
        replica_check: ReplicaMode = "full",
        clock: Clock | None = None,
    ) -> None:
        if on_save_error not in ("warn", "raise"):
            raise ConfigError(f'on_save_error must be "warn" or "raise", got {on_save_error!r}')
        if mode not in ("overlap", "blocking"):
            raise ConfigError(f'mode must be "overlap" or "blocking", got {mode!r}')
        if replica_check not in ("full", "sample", "off"):
            raise ConfigError(f'replica_check must be "full", "sample" or "off", got {replica_check!r}')
        cadence = parse_every(every)
        allow = Allowances(missing=allow_missing, extra=allow_extra, changed=allow_changed)
        self._pid = os.getpid()
        self._is_closed = False
        self._clock = clock or SystemClock()
        group = RankGroup(timeout_seconds=GATHER_TIMEOUT_SECONDS)
        self.rank, self.world_size = group.rank, group.world_size
        parsed = parse_tiers(tiers, keep=keep)
        self._run = Run(parsed, group, self._clock)
        budget_bytes = parse_bytes(ram_budget) if isinstance(ram_budget, str) else ram_budget
        self._keeping = self._start_keeping(parsed, budget_bytes, keep_best)
        mtbf_seconds = DEFAULT_FAILURE_PRIOR.job_mtbf_seconds(self.world_size)
        self._saving = Saving(
            state=state,
            run=self._run,
            group=group,
            keeping=self._keeping,
            clock=self._clock,
            pace=SavePace(cadence, clock=self._clock, mtbf_seconds=mtbf_seconds),
            is_blocking=mode == "blocking",
            raises=on_save_error == "raise",
            replica_mode=replica_check,
        )
        self._restorer = Restorer(state, group, allow, self._run, self._keeping, replica_mode=replica_check)
        self._terminate = SignalHook(signal.SIGTERM, self._saving.seal_in_flight, is_final=True)
        atexit.register(self._at_exit)

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
        wanted = _check_parts(parts)
        if self._saving.has_begun:
            raise ConfigError("restore() must come before the first step() or save()")
        started = self._clock.monotonic()
        self._run.emit("restore_started", step)
        first_step, restored = self._restorer.start(
            step=step, source=None if source is None else os.fspath(source), parts=wanted
        )
        self._saving.loop_starts()
        if restored is not None:
            self._run.emit(
                "restore_done",
                restored.candidate.step,
                seconds=self._clock.monotonic() - started,
                place=restored.place,
                bytes_read=restored.bytes_read,
                parts=sorted(wanted),
            )
            seconds = self._clock.monotonic() - started
            log.info("relight: restored step %d from %s in %.2f s", first_step, restored.place, seconds)
        return first_step

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
        self._check_open()
        return self._saving.step(step, metrics)

    def save(self, step: int, **metrics: Any) -> None:
        """Begin a save of the state after `step` optimizer steps now; waits for a free slot, not for storage.

        Inside a gradient accumulation window the save is put off to the next step boundary, and an event says so.
        """
        self._check_open()
        self._saving.save(step, metrics)

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
        self._saving.wait(step, tier=tier, timeout_seconds=timeout)

    def close(self) -> None:
        """Wait for saves in flight, leave the keeper, remove hooks. Called by `with`, and at interpreter exit.

        A last due step that was skipped or torn is saved again if nothing was updated since.

        Raises:
            SaveFailedError: the last due step is not durable.
        """
        self._close(is_failing=False)

    @property
    def last_stall_seconds(self) -> float:
        """Training time that the newest save took: the call and the wait in the optimizer's hook."""
        return self._saving.last_stall_seconds

    @property
    def num_failed(self) -> int:
        """Saves that could not be made durable, as far as `step` or `save` have been told."""
        return self._saving.num_failed

    @property
    def num_skipped(self) -> int:
        """Saves skipped since the arena was busy with earlier ones."""
        return self._saving.num_skipped

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
        except RelightError as later:
            # The training error stays the one that is seen; this one is told beside it.
            log.error("relight: %s", later)  # noqa: TRY400 - the training error's trace is the one to show
            error.add_note(f"relight: and the last checkpoint is not durable: {later}")

    def _start_keeping(
        self,
        tiers: Sequence[Tier],
        budget_bytes: int | None,
        keep_best: tuple[str, Literal["min", "max"]] | None,
    ) -> Keeping:
        return Keeping(
            root_url=self._run.root_url,
            rank=self.rank,
            world_size=self.world_size,
            tiers=tuple(
                TierPlan(
                    url=tier.url,
                    every=tier.every,
                    keep=tier.keep,
                    keep_every=tier.keep_every,
                    bandwidth=tier.bandwidth,
                )
                for tier in tiers
            ),
            num_slots=_NUM_SLOTS,
            budget_bytes=budget_bytes,
            keep_best=keep_best,
            on_restart=lambda reason: self._run.emit("keeper_lost", None, reason=reason),
            cuda=torch.cuda if torch.cuda.is_available() else None,
        )

    def _close(self, *, is_failing: bool) -> None:
        if self._is_closed or os.getpid() != self._pid:
            return
        atexit.unregister(self._at_exit)
        failure: RelightError | None = None
        try:
            self._saving.finish(is_failing=is_failing)
        except (SaveFailedError, WaitTimeoutError, ConfigError, StopError) as error:
            failure = error
        self._is_closed = True
        self._terminate.remove()
        self._saving.close()
        is_durable = failure is None and self._saving.has_saved
        self._run.emit("run_closed", None, num_failed=self.num_failed, is_durable=is_durable)
        self._keeping.detach(clean=failure is None)
        self._run.events.close()
        if failure is not None:
            raise failure

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("the Checkpointer is closed")

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        try:
            self.close()
        except RelightError as error:
            log.error("relight: %s", error)  # noqa: TRY400 - no trace at exit
            leave_with_failure()


def _check_parts(parts: Sequence[str] | None) -> frozenset[str]:
    if parts is None:
        return frozenset(PARTS)
    unknown = sorted(set(parts) - set(PARTS)) if not isinstance(parts, str) else [parts]
    if unknown:
        raise ConfigError(f"parts must be a tuple of {', '.join(PARTS)}; unknown: {', '.join(unknown)}")
    return frozenset(parts)
