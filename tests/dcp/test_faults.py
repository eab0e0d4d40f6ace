"""Faults of the stock engine of torch.distributed.checkpoint that relight must not have, each by its name."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from relight.dcp import Reader
from relight.errors import (
    CorruptionError,
    FencedError,
    StateMismatchError,
    StorageFullError,
    UnknownFormatError,
)
from relight.manifest.catalog import Catalog
from relight.manifest.manifest import Parent, RankRecord, decode_file, encode_file
from relight.manifest.names import image_name
from relight.storage.files import Files
from relight.storage.local import LocalBackend, local_path
from relight.testing.files import FullDiskFiles
from tests.dcp.saving import catalog_of, error_of, load, save, steps_of


def filled(value: float) -> dict[str, Any]:
    return {"w": torch.full((64, 64), value), "step": int(value)}


def blank() -> dict[str, Any]:
    return {"w": torch.zeros(64, 64), "step": 0}


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        old = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([old[0] ^ 1]), offset)


# A flipped bit loads


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00000.json", "manifest.json"])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 0.99])
def test_a_flipped_bit_does_not_load(tmp_path: Path, name: str, part: float) -> None:
    save(filled(1.0), tmp_path)
    path = tmp_path / "step-000000000001.g0001" / name
    flip(path, int(path.stat().st_size * part))
    state = blank()
    error = error_of(load, state, tmp_path)
    assert name in str(error)
    assert state["w"].count_nonzero() == 0


def test_a_bad_block_is_named_with_its_file(tmp_path: Path) -> None:
    save({"big": torch.ones(5 * 2**20)}, tmp_path)
    (image,) = tmp_path.glob("step-*/*.safetensors")
    flip(image, 17 * 2**20)
    error = error_of(load, {"big": torch.zeros(5 * 2**20)}, tmp_path)
    assert isinstance(error, CorruptionError)
    assert f"{image}: block 1" in str(error)


def test_an_older_checkpoint_is_not_taken_in_silence_when_the_newest_is_broken(tmp_path: Path) -> None:
    for step in (1, 2):
        save(filled(float(step)), tmp_path, step=step)
    flip(tmp_path / "step-000000000002.g0001" / "manifest.json", 100)
    with pytest.raises(CorruptionError, match=r"step-000000000002\.g0001/manifest\.json"):
        Reader(tmp_path).read_metadata()
    assert load(blank(), tmp_path, step=1)["step"] == 1


# A writer thread's ENOSPC is lost and the save reports success


@pytest.mark.parametrize("at", ["allocate", "write", "sync", "close"])
def test_a_full_disk_fails_the_save_and_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: Any
) -> None:
    save(filled(1.0), tmp_path, step=1)
    with monkeypatch.context() as patch:
        files = FullDiskFiles(9000, at=at)
        patch.setattr(
            "relight.checkpoint.dcp_writer.open_backend", lambda url: LocalBackend(local_path(url), files)
        )
        error = error_of(save, filled(2.0), tmp_path, step=2)
        assert isinstance(error, StorageFullError)
        assert steps_of(tmp_path) == [(1, 1)]
        files.free_space()
        save(filled(3.0), tmp_path, step=3)
    assert load(blank(), tmp_path)["step"] == 3


def test_what_a_failed_save_left_is_gone_before_the_next_one_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("relight.manifest.catalog.Catalog.put_record", _fail)
        error_of(save, filled(1.0), tmp_path, step=1)
    assert list(tmp_path.glob("step-000000000001.g0001/*.safetensors"))
    save(filled(2.0), tmp_path, step=2)
    assert not list(tmp_path.glob("step-000000000001*"))


def _fail(*_: Any) -> None:
    raise StorageFullError("no space")


# Re-saving in place mixes steps


def test_saving_again_in_place_mixes_no_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path, step=1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr("relight.manifest.catalog.Catalog.commit", _fail)
        error_of(save, {"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path, step=1)
    loaded = load({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path)
    assert (loaded["a"].tolist(), loaded["b"].tolist()) == ([1, 1], [1, 1])
    save({"a": torch.full((2,), 3.0)}, tmp_path, step=1)
    assert load({"a": torch.zeros(2)}, tmp_path)["a"].tolist() == [3, 3]
    assert {path: path.read_bytes() for path in before} == before


# Dtype is cast silently


def test_a_dtype_is_not_cast_in_silence(tmp_path: Path) -> None:
    save({"w": torch.full((2,), 1 + 2**-20), "v": torch.ones(2)}, tmp_path)
    state = {"w": torch.zeros(2, dtype=torch.bfloat16), "v": torch.zeros(2)}
    error = error_of(load, state, tmp_path)
    assert isinstance(error, StateMismatchError)
    assert "w: saved torch.float32, target torch.bfloat16" in str(error)
    assert state["v"].tolist() == [0, 0]
    load(state, tmp_path, allow_cast=["w"])
    assert (state["w"].tolist(), state["v"].tolist()) == ([1, 1], [1, 1])


def test_a_shape_that_differs_is_refused_by_name(tmp_path: Path) -> None:
    save({"w": torch.ones(2, 3)}, tmp_path)
    assert "w" in str(error_of(load, {"w": torch.zeros(3, 2)}, tmp_path))


def test_a_value_does_not_take_the_place_of_a_tensor(tmp_path: Path) -> None:
    save({"step": 3}, tmp_path)
    assert isinstance(error_of(load, {"step": torch.tensor(0.0)}, tmp_path), StateMismatchError)


# Extra keys are ignored


def test_extra_keys_are_not_ignored(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(2), "left": torch.ones(2)}, "epoch": 1}, tmp_path)
    state = {"model": {"w": torch.zeros(2)}}
    error = error_of(load, state, tmp_path)
    assert isinstance(error, StateMismatchError)
    assert "2 keys that the state dict does not ask for: epoch, model.left" in str(error)
    assert state["model"]["w"].tolist() == [0, 0]
    load(state, tmp_path, allow_extra=["epoch", "model.l*"])
    assert state["model"]["w"].tolist() == [1, 1]


# Code execution through pickled metadata


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def test_nothing_that_is_stored_is_a_pickle(tmp_path: Path) -> None:
    save({**filled(1.0), "nested": {"tuple": (1, "a")}, "bytes": b"abc"}, tmp_path)
    stored = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in stored} == {".json", ".safetensors"}
    for path in stored:
        if path.suffix == ".json":
            json.loads(path.read_bytes())


def test_a_checkpoint_of_another_hand_executes_nothing(tmp_path: Path) -> None:
    bomb = io.BytesIO()
    torch.save(Bomb(str(tmp_path / "went-off")), bomb)
    save(filled(1.0), tmp_path)
    (folder,) = tmp_path.glob("step-*")
    (folder / ".metadata").write_bytes(bomb.getvalue())
    tampered = {"$object": ["builtins.open", {"$tuple": [str(tmp_path / "went-off"), "w"]}]}
    rewrite(tmp_path, lambda said: said["dcp"]["objects"] | {"step": tampered})
    error = error_of(load, blank(), tmp_path)
    assert isinstance(error, UnknownFormatError)
    assert not (tmp_path / "went-off").exists()


def test_values_of_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    save(filled(1.0), tmp_path)
    rewrite(tmp_path, lambda said: said["dcp"]["objects"] | {"step": {"$future": 1}})
    assert isinstance(error_of(load, blank(), tmp_path), UnknownFormatError)


def rewrite(root: Path, change: Any) -> None:
    """Change rank 0's objects as somebody could who makes all digests right again."""
    (folder,) = root.glob("step-*")
    path = folder / "rank-00000.json"
    record, _ = decode_file(path.read_bytes(), RankRecord, path=str(path))
    said = json.loads(bytes(record.draft.context))
    said["dcp"]["objects"] = change(said)
    draft = msgspec.structs.replace(record.draft, context=msgspec.Raw(json.dumps(said).encode()))
    path.write_bytes(encode_file(msgspec.structs.replace(record, draft=draft)))
    (folder / "manifest.json").unlink()
    assert catalog_of(root).commit(1, 1) is not None


# A plan cached across a dtype change


def test_a_plan_is_not_cached_across_a_dtype_change(tmp_path: Path) -> None:
    for step, dtype in ((1, torch.float32), (2, torch.float64), (3, torch.float64)):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        state = {"w": torch.full((4,), step + 2**-30, dtype=dtype), "step": step}
        save(state, tmp_path, step=step, planner=planner)
        loaded = load({"w": torch.zeros(4, dtype=dtype), "step": 0}, tmp_path)
        assert (loaded["w"].tolist(), loaded["step"]) == (state["w"].tolist(), step)
    assert steps_of(tmp_path) == [(3, 1), (2, 1), (1, 1)]


# A partial load leaves memory uninitialised


def test_a_missing_key_is_an_error_that_names_it(tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, tmp_path)
    state = {"w": torch.zeros(2), "new": torch.zeros(2)}
    assert "new" in str(error_of(load, state, tmp_path))
    assert state["w"].tolist() == [0, 0]


def test_a_partial_load_leaves_what_is_missing_as_it_was_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save({"w": torch.ones(2)}, tmp_path)
    state = {"w": torch.zeros(2), "new": torch.full((2,), 7.0)}
    with caplog.at_level(logging.WARNING, logger="relight"):
        load(state, tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert (state["w"].tolist(), state["new"].tolist()) == ([1, 1], [7, 7])
    assert "stay as they are: new" in caplog.text


def test_a_target_without_memory_is_refused(tmp_path: Path) -> None:
    class Meta(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return super().resolve_tensor(read_item).to("meta")

    save({"w": torch.ones(2)}, tmp_path)
    assert "meta" in str(error_of(load, {"w": torch.zeros(2)}, tmp_path, planner=Meta()))


# Who saves where


def test_a_job_whose_run_another_one_has_taken_over_is_stopped(tmp_path: Path) -> None:
    save(filled(1.0), tmp_path, step=1)
    catalog_of(tmp_path).claim(Parent(step=1, generation=1))
    error = error_of(save, filled(2.0), tmp_path, step=2)
    assert isinstance(error, FencedError)
    assert "generation 2 was claimed by another process" in str(error)
    assert steps_of(tmp_path) == [(1, 1)]


def test_a_place_that_was_removed_is_begun_anew(tmp_path: Path) -> None:
    place = tmp_path / "step-10"
    for value in (1.0, 2.0):
        save(filled(value), place)
        shutil.rmtree(place)
    save(filled(3.0), place)
    assert steps_of(place) == [(10, 1)]
    assert load(blank(), place)["step"] == 3


def test_what_was_written_wrong_is_found_before_the_save_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Flipping(Files):
        def write(self, descriptor: int, data: memoryview, offset_bytes: int) -> int:
            wrong = bytearray(data)
            wrong[-1] ^= 1
            return super().write(descriptor, memoryview(wrong), offset_bytes)

    monkeypatch.setattr(
        "relight.manifest.catalog.Catalog.put_image",
        lambda catalog, *place: Catalog(
            LocalBackend(local_path(catalog.backend.url), Flipping())
        ).backend.put(image_name(*place[:3]), place[3], if_absent=True),
    )
    error = error_of(save, filled(1.0), tmp_path, verify=True)
    assert isinstance(error, CorruptionError)
    assert "read back after writing" in str(error)
    assert steps_of(tmp_path) == []


def test_relight_loads_without_torch_until_dcp_is_asked_for() -> None:
    lines = [
        "import sys, relight",
        "assert 'torch' not in sys.modules",
        "relight.dcp.Writer",
        "from relight.dcp import Reader",
        "assert 'torch' in sys.modules",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=50)
