"""When `Checkpointer.step` saves: a count of steps, a duration, or the interval policy; the same on every rank.

A count needs no talk. The other two are decided by rank 0, with every save and in between, and told in a gather
that runs in the background; the step decided on is at least two ahead, so every rank knows it in time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from relight.clock import Clock
from relight.errors import DesyncError
from relight.policy.checkpoint import Cadence, CadenceFacts, SaveDecision, decide_next_save

__all__ = ["SavePace"]

_WAIT_SECONDS = 600.0
_SMOOTHING = 0.2
_AHEAD_STEPS = 2


class SavePace:
    """Decides which steps are due.

    Args:
        cadence: what the user asked for.
        mtbf_seconds: stated prior of the time between failures of the job.
    """

    def __init__(self, cadence: Cadence, *, clock: Clock, mtbf_seconds: float) -> None:
        self._cadence = cadence
        self._clock = clock
        self._mtbf_seconds = mtbf_seconds
        self._known = threading.Condition()
        self._next: SaveDecision | None = None
        self._is_asked = False
        self._last_at = clock.monotonic()
        self._last_step: int | None = None
        self._step_seconds: float | None = None
        self._num_measured_steps = 0
        self._saved_at = clock.monotonic()
        self._stall_seconds: float | None = None
        self._drain_seconds: float | None = None
        self.reason = ""

    def on_step(self, step: int) -> None:
        """Learn how long steps take."""
        now = self._clock.monotonic()
        if self._last_step is not None and step > self._last_step:
            seconds = (now - self._last_at) / (step - self._last_step)
            old = self._step_seconds
            self._step_seconds = seconds if old is None else old + _SMOOTHING * (seconds - old)
            self._num_measured_steps += 1
        if self._next is None and self._cadence.steps is None:
            self._next = SaveDecision(step=step + _AHEAD_STEPS, is_save=False)
        self._last_at, self._last_step = now, step

    def is_due(self, step: int, ask: Callable[[int], None]) -> bool:
        """Return whether `step` is to be saved; `ask(step)` starts a gather that ends in `accept` on every rank.

        Raises:
            DesyncError: rank 0's decision did not come.
        """
        if self._cadence.steps is not None:
            return step % self._cadence.steps == 0
        decision = self._decision()
        if decision is None or step < decision.step:
            return False
        if decision.is_save:
            self._is_asked = True
            self._saved_at = self._clock.monotonic()
            return True
        self._is_asked = True
        ask(step)
        return False

    def learn(self, *, stall_seconds: float | None = None, drain_seconds: float | None = None) -> None:
        """Take in what a save has cost."""
        if stall_seconds is not None:
            self._stall_seconds = stall_seconds
        if drain_seconds is not None:
            self._drain_seconds = drain_seconds

    def propose(self, step: int) -> Any:
        """Return what this rank would decide (rank 0's counts), as JSON; None when nothing needs deciding."""
        if self._cadence.steps is not None:
            return None
        now = self._last_step if self._last_step is not None else step
        facts = CadenceFacts(
            step=max(step, now),
            num_measured_steps=self._num_measured_steps,
            step_seconds=self._step_seconds,
            save_cost_seconds=self._stall_seconds,
            drain_seconds=self._drain_seconds,
            mtbf_seconds=self._mtbf_seconds,
            seconds_since_save=self._clock.monotonic() - self._saved_at,
        )
        decision, reason = decide_next_save(self._cadence, facts)
        ahead = max(decision.step, facts.step + _AHEAD_STEPS)
        return {"step": ahead, "is_save": decision.is_save, "reason": reason}

    def accept(self, proposal: Any) -> None:
        """Take rank 0's decision."""
        if proposal is None:
            return
        with self._known:
            self._next = SaveDecision(step=proposal["step"], is_save=proposal["is_save"])
            self.reason = proposal["reason"]
            self._is_asked = False
            self._known.notify_all()

    def give_up(self) -> None:
        """Stop waiting for decisions: the talk between ranks has failed."""
        with self._known:
            self._next = None
            self._is_asked = False
            self._known.notify_all()

    def _decision(self) -> SaveDecision | None:
        with self._known:
            asked_at = self._next.step if self._next is not None else 0
            if self._is_asked and self._last_step is not None and self._last_step < asked_at + _AHEAD_STEPS:
                return None
            if not self._known.wait_for(lambda: not self._is_asked, timeout=_WAIT_SECONDS):
                raise DesyncError("rank 0's decision on the next save did not come")
            return self._next
