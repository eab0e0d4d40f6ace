"""Whole files cut, extended, exchanged or brought in from elsewhere: found by `verify`, never restored."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relight.manifest.catalog import Catalog
from relight.manifest.manifest import BLOCK_BYTES
from relight.manifest.names import (
    generation_name,
    image_name,
    manifest_name,
    marker_name,
    record_name,
    step_dir,
)
from relight.storage.backend import open_backend
from relight.testing.checkpoints import write_checkpoint
from tests.integrity.conftest import Stored

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

IMAGE = image_name(3, 1, 1)
RECORD = record_name(3, 1, 1)
MANIFEST = manifest_name(3, 1)
GENERATION = generation_name(1)


@pytest.fixture
def copy(stored: Stored) -> Iterator[Stored]:
    """The run with files of its own to break, in the same place."""
    whole = stored.base / "whole"
    stored.root.rename(whole)
    shutil.copytree(whole, stored.root)
    yield stored
    shutil.rmtree(stored.root)
    whole.rename(stored.root)


def problems(stored: Stored) -> set[str]:
    found = [*stored.catalog.survey().problems]
    for info in stored.catalog.committed():
        found += stored.catalog.verify(info.step, info.generation)
    return {problem.file for problem in found}


@pytest.mark.parametrize(
    ("name", "size_bytes"),
    [
        (IMAGE, 0),
        (IMAGE, 100),
        (IMAGE, BLOCK_BYTES),
        (IMAGE, -1),
        (RECORD, 0),
        (RECORD, 60),
        (RECORD, -1),
        (MANIFEST, 0),
        (MANIFEST, -1),
    ],
)
def test_a_file_that_was_cut_short_is_found(copy: Stored, name: str, size_bytes: int) -> None:
    path = copy.root / name
    os.truncate(path, size_bytes if size_bytes >= 0 else path.stat().st_size + size_bytes)
    assert name in problems(copy)
    restored = copy.restore()
    assert (restored.step, restored.is_right(), bool(restored.reports)) == (2, True, True)


@pytest.mark.parametrize(("name", "step"), [(IMAGE, 3), (RECORD, 2), (MANIFEST, 2), (GENERATION, 3)])
def test_a_file_that_has_grown_is_found(copy: Stored, name: str, step: int) -> None:
    with (copy.root / name).open("ab") as file:
        file.write(b"\n")
    assert name in problems(copy)
    restored = copy.restore()
    # Bytes behind an image reach no tensor.
    assert (restored.step, restored.is_right()) == (step, True)


@pytest.mark.parametrize("name", [IMAGE, RECORD])
def test_a_file_that_is_gone_is_found(copy: Stored, name: str) -> None:
    (copy.root / name).unlink()
    assert name in problems(copy)
    restored = copy.restore()
    assert (restored.step, restored.is_right(), restored.reports) == (2, True, ["candidate_skipped"])


def exchange(first: Path, second: Path) -> None:
    first.rename(first.with_name("between"))
    second.rename(first)
    first.with_name("between").rename(second)


@pytest.mark.parametrize("kinds", [(image_name,), (record_name,), (image_name, record_name)])
def test_files_of_two_ranks_exchanged_are_found(copy: Stored, kinds: tuple[Callable[..., str], ...]) -> None:
    for kind in kinds:
        exchange(copy.root / kind(3, 1, 0), copy.root / kind(3, 1, 1))
    assert {kind(3, 1, rank) for kind in kinds[-1:] for rank in (0, 1)} <= problems(copy)
    restored = copy.restore()
    assert (restored.step, restored.is_right()) == (2, True)


@pytest.mark.parametrize(
    "names",
    [
        ("rank-00001.safetensors",),
        ("rank-00001.json",),
        ("rank-00001.safetensors", "rank-00001.json"),
        ("manifest.json",),
        ("verified.json",),
    ],
)
def test_files_of_another_step_are_found(copy: Stored, names: tuple[str, ...]) -> None:
    for name in names:
        shutil.copy(copy.root / step_dir(2, 1) / name, copy.root / step_dir(3, 1) / name)
    assert f"{step_dir(3, 1)}/{names[-1]}" in problems(copy)
    restored = copy.restore()
    assert (restored.step, restored.is_right()) == (3 if names == ("verified.json",) else 2, True)
    assert restored.reports


def test_a_directory_of_another_step_is_found(copy: Stored) -> None:
    shutil.copytree(copy.root / step_dir(3, 1), copy.root / step_dir(4, 1))
    assert manifest_name(4, 1) in problems(copy)
    restored = copy.restore()
    assert (restored.step, restored.is_right()) == (3, True)


@pytest.fixture
def other_run(tmp_path: Path) -> Path:
    """A run of somebody else, with good checkpoints of steps 3 and 4 of a later generation too."""
    catalog = Catalog(open_backend(str(tmp_path / "other")))
    catalog.claim(None)
    for step, generation in ((3, 1), (4, 1), (5, 2)):
        write_checkpoint(catalog, step, generation, tensors=[{"big": ("F32", (16,), bytes(64))}] * 2)
    return tmp_path / "other"


def test_a_manifest_of_another_run_is_found(copy: Stored, other_run: Path) -> None:
    shutil.copy(other_run / MANIFEST, copy.root / MANIFEST)
    assert {record_name(3, 1, 0), record_name(3, 1, 1)} <= problems(copy)
    restored = copy.restore()
    assert (restored.step, restored.is_right()) == (2, True)


@pytest.mark.parametrize(("step", "generation"), [(4, 1), (5, 2)])
def test_a_whole_checkpoint_of_another_run_is_not_restored(
    copy: Stored, other_run: Path, step: int, generation: int
) -> None:
    shutil.copytree(other_run / step_dir(step, generation), copy.root / step_dir(step, generation))
    restored = copy.restore()
    assert (restored.step, restored.is_right()) == (3, True)
    assert copy.catalog.fenced_by(1, 3) is None


def test_a_verified_marker_of_another_manifest_does_not_count(copy: Stored, other_run: Path) -> None:
    catalog = Catalog(open_backend(str(other_run)))
    catalog.mark_verified(3, 1)
    shutil.copy(other_run / marker_name(3, 1, "verified"), copy.root / marker_name(3, 1, "verified"))
    assert not copy.catalog.is_verified(3, 1)
    assert marker_name(3, 1, "verified") in problems(copy)
