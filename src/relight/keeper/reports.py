"""What the keeper tells about its work: one call per fact, to events, counters, the status page and the log."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

from relight.clock import Clock
from relight.errors import ConfigError
from relight.events import Event, EventKind, EventLog
from relight.keeper.ledger import Ledger
from relight.keeper.messages import FailureStatus
from relight.keeper.slots import StepKey
from relight.storage.local import local_path

__all__ = ["Reports", "events_path"]

_log = logging.getLogger("relight.keeper")


class Reports:
    """Where facts about saves go; safe from any thread, never raises for I/O."""

    def __init__(self, events: EventLog, ledger: Ledger, clock: Clock) -> None:
        self.events = events
        self._ledger = ledger
        self._clock = clock

    def emit(
        self,
        kind: EventKind,
        key: StepKey | None = None,
        *,
        rank: int | None = None,
        run: str | None = None,
        **fields: object,
    ) -> None:
        """Write one event."""
        self.events.emit(
            Event(
                kind=kind,
                at=self._clock.now(),
                run=run,
                generation=key.generation if key else None,
                rank=rank,
                step=key.step if key else None,
                fields=fields,
            )
        )

    def error(
        self,
        error: BaseException,
        key: StepKey,
        *,
        rank: int | None = None,
        tier: str | None = None,
        is_final: bool,
    ) -> None:
        """Note an error on the status page and in the log, and in the counters."""
        self._ledger.count("failures" if is_final else "retries")
        self._ledger.note_error(
            FailureStatus(
                step=key.step,
                generation=key.generation,
                rank=rank,
                tier=tier,
                error=type(error).__name__,
                message=str(error),
                at=self._clock.now(),
                is_final=is_final,
            )
        )
        level = logging.ERROR if is_final else logging.WARNING
        _log.log(level, "step %d.g%d rank %s, tier %s: %s", key.step, key.generation, rank, tier, error)

    def thread_died(self, name: str, error: BaseException) -> None:
        """Note that a thread ended by an error."""
        _log.critical("thread %s died: %r", name, error)
        self.emit("thread_died", thread=name, error=repr(error))


def events_path(root_url: str) -> Path | None:
    """Return where this process's events go: below a root that is a directory; None for others."""
    try:
        root = local_path(root_url)
    except ConfigError:
        return None
    return root / "events" / f"keeper-{socket.gethostname()}-{os.getpid()}.jsonl"
