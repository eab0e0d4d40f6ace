"""A disk that is full in the middle of a save: training goes on and says so, nothing older is lost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.events import read_events
from relight.manifest.catalog import Catalog
from relight.manifest.names import step_dir
from relight.storage.backend import open_backend
from relight.testing.trainers import Trainers

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

MEBIBYTE = 2**20
BIG_ROWS = 1500


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=48m", "tmpfs"]
    made = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs: {made.stderr}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("left_bytes", [0, 64 * 1024, 4 * MEBIBYTE])
def test_a_full_disk_costs_only_the_save_it_meets(
    trainers: Trainers, small_disk: Path, arenas: Path, tmp_path: Path, left_bytes: int
) -> None:
    root = small_disk / "run"
    (life,) = trainers.start(
        "tests.integrity.filled:outgrow",
        output=tmp_path / "life",
        kwargs={
            "root": str(root),
            "ballast": str(small_disk / "ballast"),
            "left_bytes": left_bytes,
            "big_rows": BIG_ROWS,
        },
        env={"RELIGHT_ARENA_DIR": str(arenas), "RELIGHT_KEEPER_LINGER_SECONDS": "1"},
    )
    assert life.wait() == 0, life.text()
    failed, counted, saved = life.notes()
    assert failed["failed"] == 3
    assert "no space" in failed["why"]
    assert (counted, saved) == ({"num_failed": 1}, {"saved": 6})

    catalog = Catalog(open_backend(str(root)))
    assert [info.step for info in catalog.committed()] == [6, 2, 1]
    assert [catalog.verify(step, 1) for step in (1, 2, 6)] == [[], [], []]
    assert not (root / step_dir(3, 1)).exists()
    assert catalog.incomplete() == []
    assert list(catalog.backend.unfinished("step-")) == []

    told = [event for event in read_events(root / "events") if event.kind == "save_failed"]
    by_keeper = [event for event in told if event.fields.get("stage") == "drain"]
    assert [(event.step, event.fields["error"]) for event in by_keeper] == [(3, "StorageFullError")]
    assert "needs " in by_keeper[0].fields["message"]
    assert "are free" in by_keeper[0].fields["message"]
