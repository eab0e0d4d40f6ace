"""After the commit: read every block back and compare digests, mark the checkpoint verified, then apply retention.

Low in priority, newest checkpoint first. A checkpoint that reads back badly is never marked, so older ones stay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from relight.errors import CorruptionError, MissingCopyError, RelightError
from relight.keeper.crew import Crew
from relight.keeper.journal import Journal
from relight.keeper.ledger import Ledger
from relight.keeper.messages import TierPlan
from relight.keeper.reports import Reports
from relight.keeper.slots import StepKey
from relight.keeper.stores import TierStore, TierStores
from relight.policy.checkpoint import RetentionRule
from relight.stages import reached

__all__ = ["ReadBack"]

_log = logging.getLogger("relight.keeper")


class ReadBack:
    """One thread that verifies committed checkpoints and removes those that retention allows to go.

    Args:
        quiet: waits a while for drains to pause; a read-back must not slow them.
    """

    def __init__(
        self, *, journal: Journal, ledger: Ledger, reports: Reports, stores: TierStores, nice: int = 10
    ) -> None:
        self.quiet: Callable[[], object] = lambda: None
        self._journal = journal
        self._ledger = ledger
        self._reports = reports
        self._stores = stores
        self.crew = Crew(
            "relight-verify",
            1,
            nice=nice,
            newest_first=True,
            on_error=reports.thread_died,
            on_death=reports.thread_died,
        )

    @property
    def is_busy(self) -> bool:
        """Whether a read-back or retention is queued or at work."""
        return self.crew.is_busy

    def put(self, plan: TierPlan, key: StepKey, world_size: int) -> None:
        """Queue the read-back of a committed checkpoint."""
        self.crew.put(lambda: self._verify(plan, key, world_size))

    def apply_retention(self, plan: TierPlan) -> None:
        """Remove what the tier's rule does not keep; errors are noted and change nothing else."""
        # The ranks may have attached with another rule since this plan was made.
        plan = next((now for now in self._ledger.tiers() if now.url == plan.url), plan)
        with self._journal.lock:
            keep_best = self._journal.record.keep_best
        rule = RetentionRule(keep=plan.keep, keep_every=plan.keep_every, keep_best=keep_best)
        try:
            store = self._stores.open(plan)
            for removed in store.catalog.apply_retention(rule, protect=self._ledger.protected(plan.url)):
                key = StepKey(removed.generation, removed.step, 0)
                reached("retention.removed")
                self._ledger.count("checkpoints_removed")
                self._reports.emit("checkpoint_removed", key, tier=plan.url)
        except RelightError as error:
            _log.warning("retention on %s: %s", plan.url, error)
            self._ledger.count("retention_errors")

    def _verify(self, plan: TierPlan, key: StepKey, world_size: int) -> None:
        started = time.monotonic()
        try:
            store = self._stores.open(plan)
            if not store.catalog.is_committed(key.step, key.generation):
                return
            if not store.catalog.is_verified(key.step, key.generation):
                reached("verify.started")
                self._read_all(store, key, world_size)
                store.catalog.mark_verified(key.step, key.generation)
                reached("verify.done")
        except MissingCopyError as error:
            # Retention, or somebody's `prune`, was faster.
            _log.info("step %d on %s went away before its read-back ended: %s", key.step, plan.url, error)
            return
        except RelightError as error:
            self._note_bad(plan, key, error)
            return
        if self._ledger.settle(key, plan.url, "verified"):
            self._ledger.count("saves_verified")
            self._reports.emit("save_verified", key, tier=plan.url, seconds=time.monotonic() - started)
        self.apply_retention(plan)

    def _read_all(self, store: TierStore, key: StepKey, world_size: int) -> None:
        for rank in range(world_size):
            self.quiet()
            problems = store.catalog.verify_rank(key.step, key.generation, rank)
            if problems:
                raise CorruptionError(
                    f"read-back found: {problems[0]}", step=key.step, rank=rank, tier=store.plan.url
                )

    def _note_bad(self, plan: TierPlan, key: StepKey, error: RelightError) -> None:
        self._reports.error(error, key, tier=plan.url, is_final=isinstance(error, CorruptionError))
        if isinstance(error, CorruptionError) and self._ledger.settle(key, plan.url, "failed", str(error)):
            self._ledger.count("saves_failed")
            self._reports.emit(
                "save_failed",
                key,
                tier=plan.url,
                stage="verify",
                error=type(error).__name__,
                message=str(error),
            )
