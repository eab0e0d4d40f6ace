"""A save, its commit, verification and retention, interrupted at every file call and every announced point."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relight import stages
from relight.clock import ManualClock
from relight.errors import StorageFullError, StorageUnavailableError
from relight.manifest.catalog import POINTS, Catalog
from relight.manifest.names import image_name, manifest_name, record_name
from relight.policy.checkpoint import RetentionRule
from relight.storage.files import Files
from relight.storage.local import LocalBackend
from relight.testing.checkpoints import write_checkpoint
from relight.testing.files import (
    FailingFiles,
    FullDiskFiles,
    Killed,
    KillingFiles,
    LayeredFiles,
    PowerLossFiles,
    RecordingFiles,
    UnsyncedFiles,
)

RANKS = [{"a": ("U8", (640,), bytes(640))}, {"b": ("U8", (640,), b"b" * 640)}]
KEEP_ONE = RetentionRule(keep=1)


def catalog_of(root: Path, files: Files | None = None) -> Catalog:
    # A clock that stands still: a mark's time has more or fewer digits, and a save always has as many bytes.
    return Catalog(LocalBackend(root, files if files is not None else UnsyncedFiles()), ManualClock())


def started(root: Path) -> Path:
    """Make a run with step 1 committed and verified, and something unfinished of an older step."""
    catalog = catalog_of(root)
    catalog.claim(None)
    write_checkpoint(catalog, 1, tensors=RANKS, is_verified=True)
    catalog.put_image(0, 1, 0, b"left by a dead rank")
    return root


def save(catalog: Catalog, step: int) -> None:
    """Save `step` from start to end: store, commit, read back, mark, retain."""
    write_checkpoint(catalog, step, tensors=RANKS)
    assert catalog.verify(step, 1) == []
    catalog.mark_verified(step, 1)
    catalog.apply_retention(KEEP_ONE)


def check_restorable(root: Path, allowed: set[int]) -> int:
    """Assert that the newest candidate is one of `allowed` and whole; return its step."""
    catalog = catalog_of(root)
    newest = catalog.candidates()[0]
    assert newest.step in allowed
    assert catalog.survey().problems == ()
    for info in catalog.candidates():
        assert catalog.verify(info.step, info.generation) == []
    return newest.step


def check_next_save(root: Path) -> None:
    """Assert that a new process commits what is complete, saves step 3, and leaves nothing else behind."""
    catalog = catalog_of(root)
    for step, generation in catalog.incomplete():
        catalog.commit(step, generation)
    save(catalog, 3)
    assert [info.step for info in catalog.committed()] == [3]
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*"))
    assert [name for name in names if "/" not in name] == ["generations", "step-000000000003.g0001"]
    assert [name for name in names if ".tmp-" in name] == []


def at_every_call(tmp_path: Path, interrupt: Callable[[Path, int], bool]) -> int:
    """Run `interrupt(root, n)` for n = 0, 1, ... on fresh runs until it says that no n-th call came."""
    at = 0
    while interrupt(started(tmp_path / str(at)), at):
        at += 1
    return at


def killed_at(root: Path, at: int, cut_power: Callable[[PowerLossFiles], None]) -> bool:
    power = PowerLossFiles(root, UnsyncedFiles())
    files = KillingFiles(at, die=lambda: None, inner=power)
    is_done = False
    try:
        save(catalog_of(root, files), 2)
        is_done = True
    except Killed:
        pass
    cut_power(power)
    check_restorable(root, {2} if is_done else {1, 2})
    check_next_save(root)
    return files.is_dead


def test_hb04_death_at_any_file_call_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    assert at_every_call(tmp_path, lambda root, at: killed_at(root, at, lambda _: None)) > 60


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_loss_of_power_at_any_file_call_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, seed: int | None
) -> None:
    def cut(power: PowerLossFiles) -> None:
        power.cut_power(None if seed is None else random.Random(seed))

    assert at_every_call(tmp_path, lambda root, at: killed_at(root, at, cut)) > 60


def test_hb02_a_failure_of_any_file_call_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    def failing_at(root: Path, at: int) -> bool:
        files = FailingFiles(at, inner=UnsyncedFiles())
        try:
            save(catalog_of(root, files), 2)
        except StorageUnavailableError:
            check_restorable(root, {1, 2})
            assert [path for path in root.rglob(".tmp-*") if "step-000000000002" in str(path)] == []
        check_next_save(root)
        return files.num_calls > at

    assert at_every_call(tmp_path, failing_at) > 60


class Watching(LayeredFiles):
    """Look before every file call how many restorable, verified checkpoints there are."""

    def __init__(self, root: Path) -> None:
        super().__init__(UnsyncedFiles())
        self.root = root
        self.counts: list[int] = []

    def call(self, operation: str, *args: Any, **options: Any) -> Any:
        catalog = catalog_of(self.root)
        whole = [i for i in catalog.candidates() if i.verified and catalog.verify(i.step, i.generation) == []]
        self.counts.append(len(whole))
        return super().call(operation, *args, **options)


def test_hb02_with_keep_one_there_is_never_a_moment_without_a_verified_checkpoint(tmp_path: Path) -> None:
    root = started(tmp_path / "run")
    watching = Watching(root)
    for step in (2, 3):
        save(catalog_of(root, watching), step)
    assert min(watching.counts) == 1
    assert max(watching.counts) == 2


@pytest.mark.parametrize("at", ["write", "sync", "close"])
def test_hb09_a_disk_that_fills_up_at_any_byte_of_a_save_costs_only_that_save(
    tmp_path: Path, at: str
) -> None:
    recording = RecordingFiles(UnsyncedFiles())
    save(catalog_of(started(tmp_path / "size"), recording), 2)
    total = sum(call.num_bytes for call in recording.calls)
    for fits in [0, 1, *range(100, total, total // 12), total - 1]:
        root = started(tmp_path / str(fits))
        files = FullDiskFiles(fits, at=at, inner=UnsyncedFiles())
        with pytest.raises(StorageFullError, match=r"needs \d+ bytes, \d+ are free"):
            save(catalog_of(root, files), 2)
        check_restorable(root, {1, 2})
        assert list(root.rglob(".tmp-*")) == []
        files.free_space()
        save(catalog_of(root, files), 2)
        assert check_restorable(root, {2}) == 2


def test_hb08_a_save_makes_each_file_durable_before_the_next_one_and_the_manifest_last(
    tmp_path: Path,
) -> None:
    root = started(tmp_path / "run")
    files = RecordingFiles(UnsyncedFiles())
    write_checkpoint(catalog_of(root, files), 2, tensors=RANKS)
    published = [call.target.relative_to(root).as_posix() for call in files.calls if call.operation == "link"]
    assert published == [
        image_name(2, 1, 0),
        record_name(2, 1, 0),
        image_name(2, 1, 1),
        record_name(2, 1, 1),
        manifest_name(2, 1),
    ]
    operations = files.operations()
    first = operations.index("create")
    one_file = ["create", "allocate", "write", "sync", "close", "link", "unlink", "sync_dir"]
    assert operations[first:] == one_file * 5


def test_hb08_a_removal_is_durable_before_the_next_file_goes(tmp_path: Path) -> None:
    root = started(tmp_path / "run")
    files = RecordingFiles(UnsyncedFiles())
    catalog_of(root, files).remove(1, 1)
    folder = root / "step-000000000001.g0001"
    assert [(call.operation, call.path) for call in files.calls][:4] == [
        ("unlink", root / manifest_name(1, 1)),
        ("sync_dir", folder),
        ("unlink", root / record_name(1, 1, 0)),
        ("sync_dir", folder),
    ]
    assert [(call.operation, call.path) for call in files.calls][-2:] == [
        ("remove_dir", folder),
        ("sync_dir", root),
    ]


def test_every_announced_point_is_passed(tmp_path: Path) -> None:
    seen: list[str] = []
    stages.subscribe(seen.append)
    try:
        root = tmp_path / "run"
        catalog_of(root).claim(None)
        for step in (1, 2):
            save(catalog_of(root), step)
    finally:
        stages.unsubscribe(seen.append)
    assert set(seen) >= set(POINTS)
    assert [point for point in seen if point not in POINTS] == []


@pytest.mark.parametrize("point", POINTS)
def test_death_at_any_announced_point_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, point: str
) -> None:
    root = started(tmp_path / "run")

    def die(reached: str) -> None:
        if reached == point:
            raise Killed(reached)

    stages.subscribe(die)
    try:
        save(catalog_of(root), 2)
    except Killed:
        pass
    finally:
        stages.unsubscribe(die)
    check_restorable(root, {1, 2})
    check_next_save(root)


KILLED_SAVE = """
import sys
from pathlib import Path
from relight.manifest.catalog import Catalog
from relight.storage.local import LocalBackend
from relight.testing.checkpoints import write_checkpoint
from relight.testing.files import KillingFiles

backend = LocalBackend(Path(sys.argv[1]), KillingFiles(int(sys.argv[2])))
write_checkpoint(Catalog(backend), 2)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("after_calls", [3, 11, 18])
def test_hb04_a_process_that_is_really_killed_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, after_calls: int
) -> None:
    root = started(tmp_path / "run")
    command = [sys.executable, "-c", KILLED_SAVE, str(root), str(after_calls)]
    assert subprocess.run(command, check=False, timeout=50).returncode == -9
    check_restorable(root, {1, 2})
    check_next_save(root)
