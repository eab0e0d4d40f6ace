"""Corruption, atomicity, retention: every public report of this kind, as a test named after its id."""

from __future__ import annotations

import hashlib
import os
import random
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from relight import Checkpointer, Tier, TrainState
from relight.errors import ConfigError, DesyncError, SaveFailedError
from relight.manifest.catalog import Catalog
from relight.testing.trainers import kill_at, note
from tests.faults.keepers import be_late, fail_files
from tests.running import Home, eventually, restore_once, save_once

pytestmark = pytest.mark.multiprocess


def filled(value: float) -> nn.Module:
    """Return a model whose every element is `value`."""
    model = nn.Linear(16, 16)
    fill(model, value)
    return model


def fill(model: nn.Module, value: float) -> None:
    """Set every element of `model`."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def value_of(model: nn.Module) -> float:
    """Return the value that every element of `model` has."""
    values = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).unique()
    assert values.numel() == 1
    return values.item()


def tree(root: str) -> dict[str, tuple[int, str]]:
    """Return what is below `root`: name -> mode, digest of the content."""
    return {
        str(path.relative_to(root)): (
            path.stat().st_mode,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in sorted(Path(root).rglob("*"))
    }


# -- B01 to B03: retention ----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [(98, 99, 100, 101), (8, 9, 10), (10**12 - 1, 10**12, 10**12 + 1)])
def test_b01_retention_and_latest_order_steps_as_numbers(home: Home, steps: tuple[int, ...]) -> None:
    home.keeper()
    model = filled(0.0)
    with Checkpointer(home.root(), TrainState(model=model), every=10**15, keep=2) as checkpointer:
        checkpointer.restore()
        for step in steps:
            fill(model, step % 1000)
            checkpointer.save(step)
            checkpointer.wait(step)
    assert eventually(lambda: len(found := home.steps()) == 2 and found) == [steps[-1], steps[-2]]
    home.end_keeper()
    home.keeper()
    assert restore_once(home, TrainState(model=model)) == steps[-1]
    assert value_of(model) == steps[-1] % 1000


def test_b02_an_old_copy_goes_only_after_the_new_one_is_safe(home: Home) -> None:
    """With keep=1, the write of each next step fails from its n-th call on, for every n."""
    switch = home.path / "switch"
    home.keeper(setup=fail_files, retry_seconds=0.0, switch=str(switch))
    model = filled(1.0)
    least: list[int] = []
    failed: list[int] = []
    newest = 1
    with Checkpointer(home.root(), TrainState(model=model), every=10**6, keep=1) as checkpointer:
        checkpointer.restore()
        checkpointer.save(1)
        checkpointer.wait()
        with watching(home.catalog(), least):
            for step in range(2, 42):
                switch.write_text(str(step - 2))
                fill(model, step)
                checkpointer.save(step)
                try:
                    checkpointer.wait(step)
                    newest = step
                except SaveFailedError:
                    failed.append(step)
                switch.unlink()
                found = home.steps()
                # A call that fails after the commit leaves a checkpoint that is as good as any.
                assert found[0] in (newest, step)
                newest = found[0]
            fill(model, 42)
            checkpointer.save(42)
            checkpointer.wait()
    assert len(failed) > 10
    assert min(least) >= 1
    home.end_keeper()
    home.keeper()
    assert restore_once(home, TrainState(model=model)) == 42
    assert value_of(model) == 42


@contextmanager
def watching(catalog: Catalog, counts: list[int]) -> Iterator[None]:
    """Count the complete checkpoints all the time."""
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.002):
            counts.append(len(catalog.committed()))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


@pytest.mark.parametrize("keep", [0, -1])
def test_b02_keeping_nothing_is_refused(home: Home, keep: int) -> None:
    with pytest.raises(ConfigError, match="keep"):
        Checkpointer(home.root(), TrainState(model=filled(0.0)), keep=keep)
    with pytest.raises(ConfigError, match="keep"):
        Tier(home.root(), keep=keep)


@pytest.mark.parametrize("is_read_only", [False, True])
def test_b03_retention_leaves_the_run_that_a_fork_came_from_alone(home: Home, is_read_only: bool) -> None:
    """A fork is made by `restore(source=...)`; the run writes to a root of its own."""
    home.keeper("old")
    home.keeper("new")
    save_once(home, TrainState(model=filled(7.0)), step=7, name="old")
    home.end_keeper("old")
    if is_read_only:
        for path in (Path(home.root("old")), *Path(home.root("old")).rglob("*")):
            path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    before = tree(home.root("old"))
    model = filled(0.0)
    with Checkpointer(home.root("new"), TrainState(model=model), every=10**6, keep=1) as checkpointer:
        assert checkpointer.restore(source=home.root("old")) == 7
        assert value_of(model) == 7
        for step in range(8, 13):
            checkpointer.save(step)
            checkpointer.wait()
    assert eventually(lambda: len(found := home.steps("new")) == 1 and found) == [12]
    assert tree(home.root("old")) == before
    for path in Path(home.root("old")).rglob("*"):
        path.chmod(0o700)


# -- B04: killed while writing ------------------------------------------------------------------------------

TRAINER_POINTS = (
    "snapshot.started",
    "slot.writing",
    "snapshot.copied",
    "seal.draft_written",
    "seal.control_written",
    "seal.sealed",
    "saver.sealed",
)


def b04_train(root: str, victim: int, point: str | None, nth: int) -> None:
    """Check what is restored, then fill the model with the step's number and save, until killed."""
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    model = filled(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.0)
    with Checkpointer(root, TrainState(model=model, optimizer=optimizer), every=1, keep=2) as checkpointer:
        start = checkpointer.restore()
        note(restored=start, value=value_of(model))
        if point is not None and rank == victim:
            kill_at(point, nth=nth)
        for step in range(start + 1, start + 30):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, -1.0)
            optimizer.step()
            checkpointer.save(step)
            note(begun=step)
            if point is None:
                break
            if step % 2 == 0:
                checkpointer.wait(step)
                note(durable=step)


@pytest.mark.parametrize("loses_memory", [False, True], ids=["slots-survive", "slots-lost"])
def test_b04_killed_at_any_point_of_a_save_every_rank_restores_the_same_step(
    home: Home, loses_memory: bool
) -> None:
    chance = random.Random(4)
    durable = 0
    for trial in range(12):
        home.keeper()
        point = TRAINER_POINTS[(trial + 3 * loses_memory) % len(TRAINER_POINTS)]
        notes = home.live(
            b04_train,
            root=home.root(),
            victim=chance.randrange(2),
            point=point,
            nth=chance.randrange(2, 6),
            world_size=2,
            dies=True,
        )
        restored = {rank[0]["restored"] for rank in notes}
        assert len(restored) == 1
        start = restored.pop()
        assert all(rank[0]["value"] == start for rank in notes)
        assert start >= durable
        durable = max([durable, *(entry.get("durable", 0) for rank in notes for entry in rank)])
        if loses_memory:
            home.end_keeper()
        else:
            home.kill_keeper()
    assert home.catalog().verify(*newest(home.catalog())) == []


def newest(catalog: Catalog) -> tuple[int, int]:
    """Return (step, generation) of the newest checkpoint."""
    info = catalog.committed()[0]
    return info.step, info.generation


# -- B05 and B06: several ranks -----------------------------------------------------------------------------


def b05_train(root: str, num: int, arenas: list[str]) -> None:
    rank = int(os.environ["RANK"])
    # Two ranks of each of two nodes, which have a keeper each.
    os.environ["RELIGHT_ARENA_DIR"] = arenas[rank // 2]
    torch.manual_seed(0)
    model = filled(0.0)
    with Checkpointer(root, TrainState(model=model), every=1, keep=1) as checkpointer:
        checkpointer.restore()
        for step in range(1, num + 1):
            fill(model, step)
            checkpointer.save(step)
            if arenas[0] != arenas[-1]:
                checkpointer.wait(step)


@pytest.mark.parametrize(("num_nodes", "num", "late_seconds"), [(1, 50, 0.0), (2, 3, 0.3)])
def test_b05_many_ranks_commit_and_remove_without_a_clash(
    home: Home, num_nodes: int, num: int, late_seconds: float
) -> None:
    """One keeper acts for all ranks of a node; those of two nodes may see each other's files late."""
    arenas = [home.arena, home.arena / "other"][:num_nodes]
    for arena in arenas:
        arena.mkdir(exist_ok=True)
        home.keeper(setup=be_late, seconds=late_seconds, arena=arena)
    home.live(b05_train, root=home.root(), num=num, arenas=[str(arenas[0]), str(arenas[-1])], world_size=4)
    assert eventually(lambda: len(found := home.steps()) == 1 and found) == [num]
    assert home.catalog().verify(*newest(home.catalog())) == []
    assert not home.events(kind="save_failed")
    left = [f"step-{num:012d}.g0001"]
    assert eventually(
        lambda: (found := [path.name for path in Path(home.root()).glob("step-*")]) == left and found
    )


def b06_train(roots: list[str], steps: list[int]) -> None:
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    try:
        checkpointer = Checkpointer(roots[rank], TrainState(model=filled(0.0)))
    except ConfigError as error:
        note(error=type(error).__name__, message=str(error))
        return
    checkpointer.restore()
    try:
        checkpointer.save(steps[rank])
        checkpointer.wait()
    except DesyncError as error:
        note(error=type(error).__name__, message=str(error))
    try:
        checkpointer.close()
    except DesyncError:
        note(closed="raised")


def test_b06_ranks_that_were_given_different_roots_are_told_so(home: Home) -> None:
    roots = [home.root("a"), home.root("b")]
    for notes in home.live(b06_train, roots=roots, steps=[1, 1], world_size=2):
        assert notes[0]["error"] == "ConfigError"
        assert all(root in notes[0]["message"] for root in roots)
    assert not Path(roots[0]).exists()
    assert not Path(roots[1]).exists()


def test_b06_ranks_that_save_different_steps_are_told_so(home: Home) -> None:
    home.keeper()
    for notes in home.live(b06_train, roots=[home.root()] * 2, steps=[1, 2], world_size=2):
        assert notes[0]["error"] == "DesyncError"
        assert "rank 0: 1; rank 1: 2" in notes[0]["message"]
        assert notes[1] == {"closed": "raised"}
    assert home.steps() == []
