"""Saves asked for from outside: SIGUSR1 to any rank, or `relight save RUN`; all ranks save the same step.

The request is a counter in a small shared file that every rank of the node maps: looking at it costs no call. A
rank that sees it change tells its step to the others in the background and goes on; one step later it waits for
their answer. Since a rank enters before it waits, and the others have seen the counter by the time that they can
wait for this rank in a collective of their own, nobody waits for ever.
"""

from __future__ import annotations

import mmap
import os
import signal
import threading
from pathlib import Path

from relight.checkpoint.group import RankGroup
from relight.checkpoint.signals import SignalHook
from relight.errors import DesyncError

__all__ = ["SaveRequests"]

_PAGE_BYTES = 4096


class SaveRequests:
    """This rank's view of the counter of requested saves. Create on every rank.

    Args:
        path: the shared file; made if it is not there.
        timeout_seconds: how long the ranks may take to agree on a step.
    """

    def __init__(self, path: Path, *, timeout_seconds: float) -> None:
        self._group = RankGroup(timeout_seconds=timeout_seconds)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(descriptor).st_size < _PAGE_BYTES:
                os.ftruncate(descriptor, _PAGE_BYTES)
            self._map = mmap.mmap(descriptor, _PAGE_BYTES)
        finally:
            os.close(descriptor)
        self.seen = self._count()
        self._entered_at: int | None = None
        self._target: int | None = None
        self._error: DesyncError | None = None
        self._talk: threading.Thread | None = None
        self._hook = SignalHook(signal.SIGUSR1, self._ask, is_final=False)

    def is_due(self, step: int) -> bool:
        """Return whether a requested save is due after `step`; call once per step, on every rank.

        Raises:
            DesyncError: the ranks could not agree on a step.
        """
        if self._entered_at is None:
            if self._count() == self.seen:
                return False
            self._enter(step)
            if self._group.world_size > 1:
                return False
        if self._talk is not None and (step > self._entered_at_or(step) or self._group.world_size == 1):
            self._talk.join()
            self._talk = None
        if self._error is not None:
            raise self._error
        if self._target is not None and step >= self._target:
            self._entered_at = self._target = None
            return True
        return False

    def close(self) -> None:
        """Put the previous signal handler back and let go of the file."""
        self._hook.remove()
        if self._talk is not None:
            self._talk.join()
        self._map.close()

    def _entered_at_or(self, step: int) -> int:
        return self._entered_at if self._entered_at is not None else step

    def _enter(self, step: int) -> None:
        self._entered_at = step
        count = self._count()

        def talk() -> None:
            try:
                answers = self._group.gather({"step": step, "count": count})
            except DesyncError as error:
                self._error = error
                return
            self.seen = max(answer["count"] for answer in answers)
            late = 1 if self._group.world_size > 1 else 0
            self._target = max(answer["step"] for answer in answers) + late

        self._talk = threading.Thread(target=talk, name="relight-save-request", daemon=True)
        self._talk.start()

    def _count(self) -> int:
        return int.from_bytes(self._map[:8], "little")

    def _ask(self) -> None:
        self._map[:8] = (self._count() + 1).to_bytes(8, "little")
