"""Corruption, atomicity, retention: the reports about stored bytes and full disks."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from relight import Checkpointer, TrainState
from relight.checkpoint.group import RankGroup
from relight.checkpoint.matching import Allowances
from relight.checkpoint.restoring import Restored, Restorer
from relight.checkpoint.state import PARTS
from relight.errors import RelightError, SaveFailedError
from relight.manifest.catalog import Catalog
from relight.storage.backend import open_backend
from relight.testing.trainers import note
from tests.faults.keepers import fill_disk, record_files
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


def newest(catalog: Catalog) -> tuple[int, int]:
    """Return (step, generation) of the newest checkpoint."""
    info = catalog.committed()[0]
    return info.step, info.generation


# -- B07: flipped bits --------------------------------------------------------------------------------------


def restored_from_files(root: str, state: TrainState) -> Restored | None:
    """Restore the newest good checkpoint from the files alone; no generation is claimed."""
    run = SimpleNamespace(emit=lambda *_, **__: None)
    restorer = Restorer(state, RankGroup(timeout_seconds=1), Allowances(), run, None)
    return restorer.restore([Catalog(open_backend(root))], (), None, step=None, parts=frozenset(PARTS))


def test_b07_no_flipped_bit_is_ever_loaded(home: Home) -> None:
    home.keeper()
    extra = {"note": "kept", "table": torch.arange(5)}
    save_once(home, TrainState(model=filled(3.0), extra=extra), step=3)
    eventually(lambda: home.catalog().is_verified(3, 1))
    home.end_keeper()
    step, generation = newest(home.catalog())
    folder = next(Path(home.root()).glob("step-*"))
    chance = random.Random(7)
    files = sorted(path for path in folder.iterdir() if path.name != "verified.json")
    assert [path.name for path in files] == ["manifest.json", "rank-00000.json", "rank-00000.safetensors"]
    for trial in range(200):
        path = files[trial % 3]
        content = bytearray(path.read_bytes())
        at = chance.randrange(len(content))
        content[at] ^= 1 << chance.randrange(8)
        with flipped(path, bytes(content)):
            problems = verify(home.catalog(), step, generation)
            assert problems, f"{path.name} byte {at}"
            assert any(path.name in problem for problem in problems), f"{path.name} byte {at}: {problems}"
            model = filled(0.0)
            state = TrainState(
                model=model, extra={"note": "fresh", "table": torch.zeros(5, dtype=torch.int64)}
            )
            try:
                found = restored_from_files(home.root(), state)
            except RelightError:
                found = None
            assert found is None, f"{path.name} byte {at}"


class flipped:  # noqa: N801 - used like a function
    """Give a file another content for the block."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path, self._content, self._before = path, content, path.read_bytes()

    def __enter__(self) -> None:
        self._path.write_bytes(self._content)

    def __exit__(self, *exc: object) -> None:
        self._path.write_bytes(self._before)


def verify(catalog: Catalog, step: int, generation: int) -> list[str]:
    """Return what is wrong, as text."""
    try:
        return [str(problem) for problem in catalog.verify(step, generation)]
    except RelightError as error:
        return [str(error)]


def test_b07_an_older_step_is_taken_and_the_record_names_the_file(home: Home) -> None:
    home.keeper()
    model = filled(1.0)
    with Checkpointer(home.root(), TrainState(model=model), every=10**6) as checkpointer:
        checkpointer.restore()
        for step in (1, 2):
            fill(model, step)
            checkpointer.save(step)
            checkpointer.wait()
    home.end_keeper()
    home.keeper()
    image = next(Path(home.root()).glob("step-*2.g*/*.safetensors"))
    content = bytearray(image.read_bytes())
    content[-1] ^= 1
    image.write_bytes(content)
    assert restore_once(home, TrainState(model=model)) == 1
    assert value_of(model) == 1
    (event,) = home.events(kind="candidate_skipped")
    assert event.step == 2
    assert image.name in event.fields["reason"]


# -- B08: order of calls ------------------------------------------------------------------------------------


def test_b08_everything_is_synced_before_it_gets_its_name_and_the_manifest_is_last(home: Home) -> None:
    keeper = home.keeper(setup=record_files)
    save_once(home, TrainState(model=filled(1.0)), step=1)
    eventually(lambda: home.catalog().is_verified(1, 1) and keeper.notes()[-1]["operation"] == "sync_dir")
    calls = keeper.notes()
    named = [call for call in calls if call["operation"] in ("link", "rename")]
    names = [Path(call["target"]).name for call in named]
    assert names == ["rank-00000.safetensors", "rank-00000.json", "manifest.json", "verified.json"]
    for call in named:
        at = calls.index(call)
        of_temp = [c["operation"] for c in calls[:at] if c["path"] == call["path"]]
        assert of_temp[0] == "create"
        last_change = max(i for i, name in enumerate(of_temp) if name in ("write", "truncate", "allocate"))
        assert "sync" in of_temp[last_change:]
        after = [c for c in calls[at:] if c["operation"] == "sync_dir"]
        assert after[0]["path"] == str(Path(call["target"]).parent)
        follower = next((i for i, c in enumerate(calls) if i > at and c["operation"] == "create"), len(calls))
        assert calls.index(after[0]) < follower
    finals = {call["target"] for call in named}
    assert not [call for call in calls if call["operation"] == "unlink" and call["path"] in finals]


# -- B09: disk full -----------------------------------------------------------------------------------------


def b09_train(root: str, switch: str) -> None:
    """Save step 1, step 2 on a full disk, step 3 after space was freed."""
    torch.manual_seed(0)
    import torch.distributed as dist

    model = filled(0.0)
    with Checkpointer(root, TrainState(model=model), every=10**6, keep=5) as checkpointer:
        checkpointer.restore()
        for step in (1, 2, 3):
            if step == 2:
                Path(switch).touch()
            if step == 3:
                dist.barrier()
                Path(switch).unlink(missing_ok=True)
                dist.barrier()
            fill(model, step)
            checkpointer.save(step)
            try:
                checkpointer.wait(step)
                note(durable=step)
            except SaveFailedError as error:
                note(failed=step, message=str(error))
            dist.barrier()


@pytest.mark.parametrize(
    ("at", "after_bytes"),
    [("write", 0), ("write", 700), ("write", 1400), ("allocate", 0), ("sync", 0), ("close", 0)],
)
def test_b09_a_full_disk_leaves_older_checkpoints_whole(home: Home, at: str, after_bytes: int) -> None:
    switch = home.path / "switch"
    home.keeper(setup=fill_disk, switch=str(switch), after_bytes=after_bytes, at=at)
    ranks = home.live(b09_train, root=home.root(), switch=str(switch), world_size=2)
    for notes in ranks:
        assert [entry.get("durable", entry.get("failed")) for entry in notes] == [1, 2, 3]
        assert set(notes[1]) == {"failed", "message"}
        assert "no space" in notes[1]["message"]
    assert home.steps() == [3, 1]
    eventually(lambda: not home.catalog().backend.unfinished() and not home.catalog().incomplete())
    assert {event.step for event in home.events(kind="save_failed")} == {2}
    assert [home.catalog().verify(step, 1) for step in (1, 3)] == [[], []]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        if os.environ.get("CI") == "1":
            pytest.fail(f"cannot mount a tmpfs: {mounted.stderr.decode()}")
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_b09_a_real_disk_that_is_full(home: Home, small_disk: Path) -> None:
    home.path = small_disk
    home.lives_path = small_disk.parent
    home.keeper()
    model = nn.Linear(100, 500)
    hog = small_disk / "hog"
    with Checkpointer(home.root(), TrainState(model=model), every=10**6, keep=2) as checkpointer:
        checkpointer.restore()
        fill(model, 1)
        checkpointer.save(1)
        checkpointer.wait()
        hog.write_bytes(bytes(700_000))
        fill(model, 2)
        checkpointer.save(2)
        with pytest.raises(SaveFailedError, match=r"needs \d+ bytes, \d+ are free"):
            checkpointer.wait()
        assert home.steps() == [1]
        eventually(lambda: not home.catalog().incomplete())
        hog.unlink()
        fill(model, 3)
        checkpointer.save(3)
        checkpointer.wait()
        assert checkpointer.num_failed == 1
    assert home.steps() == [3, 1]
    shutil.rmtree(home.root())


# -- B10: one rank's part is bad ----------------------------------------------------------------------------


def b10_train(root: str, num: int) -> None:
    torch.manual_seed(0)
    model = filled(0.0)
    with Checkpointer(root, TrainState(model=model), every=10**6) as checkpointer:
        note(restored=checkpointer.restore(), value=value_of(model))
        for step in range(1, num + 1):
            fill(model, step)
            checkpointer.save(step)
            checkpointer.wait()


def test_b10_all_ranks_fall_back_to_the_newest_step_that_is_good_for_each(home: Home) -> None:
    home.keeper()
    home.live(b10_train, root=home.root(), num=3, world_size=4)
    home.end_keeper()
    home.keeper()
    bad = next(Path(home.root()).glob("step-*3.g*/rank-00002.safetensors"))
    content = bytearray(bad.read_bytes())
    content[len(content) // 2] ^= 16
    bad.write_bytes(content)
    next(Path(home.root()).glob("step-*2.g*/rank-00001.safetensors")).unlink()
    found = home.live(b10_train, root=home.root(), num=0, world_size=4)
    assert found == [[{"restored": 1, "value": 1.0}]] * 4
    reasons = {event.step: event.fields["reason"] for event in home.events(kind="candidate_skipped")}
    assert set(reasons) == {2, 3}
    assert bad.name in reasons[3]
    assert "rank-00001" in reasons[2]
