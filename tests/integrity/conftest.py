"""One stored run of two ranks, with its arena, that every test breaks and mends again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relight.checkpoint.group import RankGroup
from relight.checkpoint.matching import Allowances
from relight.checkpoint.restoring import Restorer
from relight.checkpoint.slot_pool import SlotPool
from relight.keeper.arena import ArenaSlot, arena_dir, list_slots
from relight.keeper.messages import HeldSnapshot
from relight.manifest.catalog import Catalog
from relight.storage.backend import open_backend
from relight.testing.trainers import Trainers
from tests.integrity.filled import Filled


class Stored:
    """The run at `root`; its keeper and trainers are dead, its slots are in `arena`."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.root = base / "root"
        self.arena = arena_dir(f"file://{self.root}", base=base / "arenas")
        self.catalog = Catalog(open_backend(str(self.root)))
        self.live: Filled | None = None

    def restore(self, *, from_memory: bool = False, held: Sequence[HeldSnapshot] | None = None) -> Restoring:
        """Restore what a new life of one rank would, into a poisoned state."""
        if self.live is None:
            self.live = Filled(0)
        self.live.poison()
        told: list[tuple[str, int | None, dict[str, Any]]] = []
        run = SimpleNamespace(emit=lambda kind, step, **fields: told.append((kind, step, fields)))
        restorer = Restorer(
            self.live.state, RankGroup(timeout_seconds=5), Allowances(), run, SimpleNamespace()
        )
        pool = SlotPool(self.arena, 0, num_slots=2, budget_bytes=None) if from_memory else None
        known = list(held if held is not None else self.held()) if from_memory else []
        try:
            found = restorer.restore(
                [self.catalog], known, pool, step=None, parts=frozenset({"model", "extra"})
            )
        finally:
            if pool is not None:
                pool.forget()
        return Restoring(self.live, found, told)

    def held(self) -> list[HeldSnapshot]:
        """Return what a keeper would find in the arena, newest last."""
        found = []
        for path in list_slots(self.arena):
            with ArenaSlot.open(path) as slot:
                control = slot.control()
            found.append(
                HeldSnapshot(
                    rank=control.rank,
                    slot=int(path.name.rpartition("-")[2]),
                    step=control.step,
                    generation=control.generation,
                    world_size=control.world_size,
                    image_bytes=control.image_bytes,
                    run_digest=control.run_digest,
                )
            )
        return sorted(found, key=lambda one: one.step)


class Restoring:
    """What a restore did."""

    def __init__(self, live: Filled, found: Any, told: list[tuple[str, int | None, dict[str, Any]]]) -> None:
        self.step = found.candidate.step if found is not None else None
        self.place = found.place if found is not None else None
        self.live = live
        self.told = told

    @property
    def reports(self) -> list[str]:
        return [kind for kind, _, _ in self.told if kind in ("copy_bad", "candidate_skipped")]

    def is_right(self) -> bool:
        """Whether the tensors are those of the step that was restored, or clean when none was."""
        return self.live.is_clean() if self.step is None else self.live.is_filled(self.step)


@pytest.fixture(scope="session")
def trainers() -> Iterator[Trainers]:
    with Trainers(preload=["tests.integrity.filled"]) as server:
        yield server


@pytest.fixture(scope="session")
def stored(trainers: Trainers) -> Iterator[Stored]:
    base = Path(tempfile.mkdtemp(prefix="relight-test-", dir="/dev/shm"))
    (base / "arenas").mkdir()
    run = Stored(base)
    lives = trainers.start(
        "tests.integrity.filled:write",
        output=base / "life",
        kwargs={"root": str(run.root)},
        env={"RELIGHT_ARENA_DIR": str(base / "arenas"), "RELIGHT_KEEPER_LINGER_SECONDS": "30"},
        world_size=2,
    )
    codes = [life.wait() for life in lives]
    os.kill(json.loads((run.arena / "keeper.json").read_text())["pid"], signal.SIGKILL)
    assert codes == [-9, -9] or [life.notes() for life in lives], lives[0].text()
    run.catalog.pin(3, 1)
    yield run
    shutil.rmtree(base)


@contextmanager
def broken(path: Path, offset: int, mask: int = 1) -> Iterator[None]:
    """Flip bits of one byte for the block."""
    with path.open("r+b") as file:
        old = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([old[0] ^ mask]), offset)
        try:
            yield
        finally:
            os.pwrite(file.fileno(), old, offset)


@pytest.fixture
def arenas() -> Iterator[Path]:
    """A place for arenas that is gone after the test."""
    base = Path(tempfile.mkdtemp(prefix="relight-test-", dir="/dev/shm"))
    yield base
    for published in base.rglob("keeper.json"):
        with suppress(ProcessLookupError):
            os.kill(json.loads(published.read_text())["pid"], signal.SIGKILL)
    shutil.rmtree(base, ignore_errors=True)
