"""The protocol of the keeper on one tier, stopped at every file call, with and without a loss of power."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from relight.manifest.catalog import Catalog
from relight.manifest.names import image_name
from relight.manifest.retention import RetentionRule
from relight.storage.local import LocalBackend
from relight.testing.checkpoints import sample_image, sample_record
from relight.testing.files import Killed, KillingFiles, PowerLossFiles, UnsyncedFiles

STEPS = (10, 20, 30)
KEEP = 1
RANKS = range(2)
ENDLESS = 10**9


@dataclass
class Told:
    """What the keeper told others: it must hold whatever happens afterwards."""

    run: str = ""
    generation: int = 0
    committed: list[int] = field(default_factory=list)


def image_of(step: int, rank: int) -> bytes:
    return sample_image({"w": ("U8", (4160,), random.Random(f"{step} {rank}").randbytes(4160))})


def drain(catalog: Catalog, told: Told) -> None:
    """Do what the keeper does with the snapshots it holds; those it did not report as stored are still there."""
    told.committed += [step for step, _ in catalog.tidy()]
    if not told.generation:
        claim(catalog, told)
    for info in catalog.committed():
        if not info.verified:
            read_back(catalog, info.step, info.generation)
    catalog.apply_retention(RetentionRule(keep=KEEP))
    for step in STEPS:
        if step in told.committed:
            continue
        put_files(catalog, told, step)
        assert catalog.commit(step, told.generation) is not None
        told.committed.append(step)
        read_back(catalog, step, told.generation)
        catalog.apply_retention(RetentionRule(keep=KEEP))


def claim(catalog: Catalog, told: Told) -> None:
    claimed = catalog.claim(None)
    told.run, told.generation = claimed.run, claimed.generation


def put_files(catalog: Catalog, told: Told, step: int) -> None:
    if not told.generation:
        claim(catalog, told)
    for rank in RANKS:
        image = image_of(step, rank)
        catalog.put_image(step, told.generation, rank, image)
        record = sample_record(
            image, step=step, generation=told.generation, rank=rank, world_size=len(RANKS), run=told.run
        )
        catalog.put_record(record)


def read_back(catalog: Catalog, step: int, generation: int) -> None:
    assert catalog.verify(step, generation) == []
    catalog.mark_verified(step, generation)


def check(root: Path, told: Told) -> None:
    """What was told still holds, and all that exists is whole; then a new life goes on to the end."""
    catalog = Catalog(LocalBackend(root, files=UnsyncedFiles()))
    survey = catalog.survey()
    assert survey.problems == ()
    stored = [info.step for info in survey.checkpoints]
    # Retention may have run for a newer one whose commit this process did not live to report.
    for step in told.committed[-KEEP:]:
        assert step in stored or sum(newer > step for newer in stored) >= KEEP
    if told.generation:
        assert told.generation in [one.generation for one in catalog.generations()]
    for info in survey.checkpoints:
        assert info.on_lineage
        assert catalog.verify(info.step, info.generation) == []
        for rank in RANKS:
            name = image_name(info.step, info.generation, rank)
            assert catalog.backend.get(name) == image_of(info.step, rank)
    drain(catalog, told)
    assert [info.step for info in catalog.committed()] == sorted(STEPS, reverse=True)[:KEEP]
    assert all(info.verified for info in catalog.committed())
    # A name of a marker may be left of a process that died; no image is.
    assert [name for name in catalog.backend.unfinished("step-") if name.endswith(".safetensors")] == []


class Disk:
    """A tree whose loss of power is modelled, and the lives that work on it."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.root = root
        self.power = PowerLossFiles(root, inner=UnsyncedFiles())
        self.told = Told()

    def live(self, num_calls: int = ENDLESS) -> int:
        """Live until the `num_calls`-th file call, which does not happen; return how many there were."""
        return self.act(num_calls, lambda catalog: drain(catalog, self.told))

    def act(self, num_calls: int, act: Callable[[Catalog], object]) -> int:
        killing = KillingFiles(num_calls, die=lambda: None, inner=self.power)
        with suppress(Killed):
            act(Catalog(LocalBackend(self.root, files=killing)))
        return killing.num_calls


@pytest.fixture
def disks() -> Iterator[Iterator[Disk]]:
    with tempfile.TemporaryDirectory(prefix="relight-test-", dir="/dev/shm") as folder:
        yield (Disk(Path(folder) / str(number)) for number in range(ENDLESS))


def num_calls_of(disk: Disk, before: int = 0) -> int:
    if before:
        disk.live(before)
    return disk.live()


def test_killed_at_any_file_call_nothing_told_is_lost(disks: Iterator[Disk]) -> None:
    num_calls = num_calls_of(next(disks))
    assert num_calls > 60
    for at in range(num_calls):
        disk = next(disks)
        disk.live(at)
        check(disk.root, disk.told)


def test_power_lost_at_any_file_call_nothing_told_is_lost(disks: Iterator[Disk]) -> None:
    for at in range(num_calls_of(next(disks))):
        disk = next(disks)
        disk.live(at)
        disk.power.cut_power()
        check(disk.root, disk.told)


@pytest.mark.parametrize("seed", range(3))
def test_power_lost_with_some_of_the_unsynced_changes_kept(disks: Iterator[Disk], seed: int) -> None:
    for at in range(num_calls_of(next(disks))):
        disk = next(disks)
        disk.live(at)
        disk.power.cut_power(random.Random(f"{seed} {at}"))
        check(disk.root, disk.told)


def test_killed_then_restarted_then_power_lost(disks: Iterator[Disk]) -> None:
    """What the second process finds may not be durable, although it sees it."""
    rng = random.Random(5)
    num_calls = num_calls_of(next(disks))
    for at in range(num_calls):
        disk = next(disks)
        disk.live(at)
        disk.live(rng.choice([at % 7, rng.randrange(num_calls)]))
        disk.power.cut_power(rng if at % 2 else None)
        check(disk.root, disk.told)


def test_a_manifest_that_another_finder_stored_is_durable_before_it_counts(disks: Iterator[Disk]) -> None:
    """A keeper that died between the name of the manifest and the directory's fsync leaves a manifest that is seen."""
    found_early = 0
    for at in range(40):
        disk = next(disks)
        whole = Catalog(LocalBackend(disk.root, files=disk.power))
        put_files(whole, disk.told, 10)
        disk.act(at, lambda catalog: catalog.commit(10, 1))
        found_early += whole.is_committed(10, 1)
        assert whole.commit(10, 1) is not None
        disk.power.cut_power()
        assert Catalog(LocalBackend(disk.root)).is_committed(10, 1), f"killed at file call {at}"
    assert 30 < found_early < 40
