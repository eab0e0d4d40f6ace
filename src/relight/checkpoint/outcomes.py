"""What became of each save of this rank, for the training thread to wait on and to report."""

from __future__ import annotations

import threading

from relight.checkpoint.save_job import Outcome
from relight.errors import RelightError

__all__ = ["Outcomes"]

_REMEMBERED_STEPS = 256


class Outcomes:
    """Step -> outcome, of the newest saves; safe from several threads.

    Attributes:
        changed: notified at every change; hold it to look at several things at once.
        failure: a mistake or desync that training must be told of, or None.
        num_skipped: saves skipped so far.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.failure: RelightError | None = None
        self.num_skipped = 0
        self._outcomes: dict[int, Outcome] = {}
        self._messages: dict[int, str] = {}

    def __contains__(self, step: int) -> bool:
        return step in self._outcomes

    def __len__(self) -> int:
        return len(self._outcomes)

    def settle(self, step: int, outcome: Outcome, message: str = "") -> None:
        """Record what became of `step`."""
        with self.changed:
            self._outcomes[step] = outcome
            self._messages[step] = message
            if outcome == "skipped":
                self.num_skipped += 1
            for old in list(self._outcomes)[:-_REMEMBERED_STEPS]:
                del self._outcomes[old]
                del self._messages[old]
            self.changed.notify_all()

    def forget(self, step: int) -> None:
        """Take `step` as never begun, so that it can be saved again."""
        with self.changed:
            if self._outcomes.pop(step, None) == "skipped":
                self.num_skipped -= 1
            self._messages.pop(step, None)

    def fail(self, error: RelightError) -> None:
        """Record an error that training must be told of; the first one stays."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def look(self, step: int) -> tuple[Outcome | None, str]:
        """Return the outcome of `step` (None: never begun, or forgotten) and its message."""
        with self.changed:
            return self._outcomes.get(step), self._messages.get(step, "")

    def steps(self, outcome: Outcome) -> list[int]:
        """Return the steps with this outcome, in the order of their saves."""
        with self.changed:
            return [step for step, now in self._outcomes.items() if now == outcome]

    def wait(self, step: int, timeout_seconds: float) -> tuple[Outcome | None, str]:
        """Return as `look`, once the snapshot of `step` is no longer pending, or the time is up."""
        with self.changed:
            self.changed.wait_for(
                lambda: self.failure is not None or self._outcomes.get(step) != "pending",
                timeout=timeout_seconds,
            )
        return self.look(step)
