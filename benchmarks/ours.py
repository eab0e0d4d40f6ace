"""relight behind the verbs of `Method`, through its public names only."""

from __future__ import annotations

import time
from pathlib import Path

import relight
from benchmarks.machine import keepers_of
from benchmarks.methods import Method
from benchmarks.workload import Holder
from relight.events import read_events

__all__ = ["Relight"]


class Relight(Method):
    """relight with its defaults: overlapped snapshots, a slot in RAM and local files."""

    name = "relight"

    def __init__(self, training: Holder, directory: Path) -> None:
        super().__init__(training, directory)
        self.root = directory / "run"
        state = relight.TrainState(model=training.model, optimizer=training.optimizer)
        # Saves are asked for; `step` alone never begins one.
        self.checkpointer = relight.Checkpointer(str(self.root), state, every=10**9, keep=2)

    def begin(self, step: int) -> None:
        self.checkpointer.save(step)

    def after_update(self) -> None:
        self.checkpointer.step(self.training.num_steps)

    def wait(self, step: int) -> None:
        self.checkpointer.wait(step)

    def settle(self, step: int) -> None:
        """Wait for the read-back too, which goes on in the background after the commit."""
        deadline = time.monotonic() + 60
        while not list(self.root.glob(f"step-{step:012d}.g*/verified.json")):
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {step} was not verified within 60 s")
            time.sleep(0.01)

    def restore(self, step: int) -> None:
        restored = self.checkpointer.restore()
        if restored != step:
            raise RuntimeError(f"restored step {restored} instead of {step}")

    restore_fresh = restore

    def source(self) -> str:
        events = [event for event in read_events(self.root / "events") if event.kind == "restore_done"]
        place = str(max(events, key=lambda event: event.at).fields["place"])
        # The kind of place; where this machine has it is nobody's business.
        return place.partition(":")[0]

    def stall_seconds(self) -> float | None:
        return self.checkpointer.last_stall_seconds

    def helpers(self) -> set[int]:
        return keepers_of(self.root)

    def close(self) -> None:
        self.checkpointer.close()
