"""Verification finds every changed byte of every file, and names file, block, rank and tensor."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from relight.errors import CorruptionError, MissingCopyError
from relight.manifest.catalog import Catalog
from relight.manifest.image import read_image_tensors
from relight.manifest.manifest import BLOCK_BYTES
from relight.manifest.names import generation_name, image_name, manifest_name, marker_name, record_name
from relight.storage.files import Files
from relight.storage.local import LocalBackend
from relight.testing.checkpoints import sample_image, write_checkpoint
from relight.testing.files import UnsyncedFiles

TWO_RANKS = [
    {"a": ("U8", (64,), bytes(range(64))), "b": ("F32", (32,), b"\1" * 128)},
    {"c": ("U8", (64,), b"c" * 64)},
]
LARGE = [
    {
        "first": ("U8", (BLOCK_BYTES,), bytes(BLOCK_BYTES)),
        "second": ("U8", (BLOCK_BYTES,), b"2" * BLOCK_BYTES),
    }
]


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    made = Catalog(LocalBackend(tmp_path / "run", UnsyncedFiles()))
    made.claim(None)
    return made


def path_of(catalog: Catalog, name: str) -> Path:
    return catalog.backend.root / name


def flip(path: Path, at: int, bits: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bits]))


def problem_files(catalog: Catalog, step: int = 10) -> list[str]:
    return sorted({problem.file for problem in catalog.verify(step, 1)})


def test_a_good_checkpoint_has_no_problem_and_every_byte_was_read(catalog: Catalog) -> None:
    write_checkpoint(catalog, 10, tensors=TWO_RANKS, is_verified=True)
    read: list[int] = []
    assert catalog.verify(10, 1, read.append) == []
    assert read == [len(sample_image(tensors)) for tensors in TWO_RANKS]


def test_hb07_every_flipped_byte_of_every_file_is_found_and_its_file_named(catalog: Catalog) -> None:
    write_checkpoint(catalog, 10, tensors=TWO_RANKS, is_verified=True)
    catalog.pin(10, 1)
    root = catalog.backend.root
    names = [file.name for file in catalog.backend.list("step-")]
    assert len(names) == 7
    missed = []
    for name in names:
        for at in range((root / name).stat().st_size):
            flip(root / name, at, bits := 1 << at % 8)
            if problem_files(catalog) != [name]:
                missed.append((name, at))
            flip(root / name, at, bits)
    assert missed == []
    assert catalog.verify(10, 1) == []


def test_every_flipped_byte_of_a_generation_file_is_found(catalog: Catalog) -> None:
    path = path_of(catalog, generation_name(1))
    for at in range(path.stat().st_size):
        flip(path, at)
        assert [problem.file for problem in catalog.survey().problems] == [generation_name(1)]
        flip(path, at)


def test_hb07_flips_in_large_images_name_block_rank_and_tensor(catalog: Catalog) -> None:
    write_checkpoint(catalog, 10, tensors=LARGE)
    path = path_of(catalog, image_name(10, 1, 0))
    rng = random.Random(7)
    size = path.stat().st_size
    for at in [0, 8, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES, size - 1, *rng.sample(range(size), 14)]:
        flip(path, at)
        [problem] = catalog.verify(10, 1)
        assert (problem.file, problem.block) == (image_name(10, 1, 0), at // BLOCK_BYTES)
        assert f"block {at // BLOCK_BYTES} (rank 0" in problem.message
        if at >= 4096:
            held = {0: "first", 1: "first, second", 2: "second"}[at // BLOCK_BYTES]
            assert f"holds {held}" in problem.message
        flip(path, at)


def test_many_tensors_in_a_bad_block_are_counted(catalog: Catalog) -> None:
    write_checkpoint(catalog, 10, tensors=[{f"t{i}": ("U8", (64,), bytes(64)) for i in range(9)}])
    flip(path_of(catalog, image_name(10, 1, 0)), -1 % path_of(catalog, image_name(10, 1, 0)).stat().st_size)
    assert "holds t0, t1, t2 and 6 more" in catalog.verify(10, 1)[0].message


@pytest.mark.parametrize("kind", ["image", "record"])
def test_a_missing_file_is_named(catalog: Catalog, kind: str) -> None:
    write_checkpoint(catalog, 10, tensors=TWO_RANKS)
    name = image_name(10, 1, 1) if kind == "image" else record_name(10, 1, 1)
    path_of(catalog, name).unlink()
    assert problem_files(catalog) == [name]
    assert problem_files(catalog) == sorted({problem.file for problem in catalog.verify_rank(10, 1, 1)})
    assert catalog.verify_rank(10, 1, 0) == []


@pytest.mark.parametrize(
    ("change_bytes", "blocks"), [(-1, [None, 2]), (-BLOCK_BYTES, [None, 1, 2]), (1, [None])]
)
def test_an_image_of_another_length_is_found(
    catalog: Catalog, change_bytes: int, blocks: list[int | None]
) -> None:
    write_checkpoint(catalog, 10, tensors=LARGE)
    path = path_of(catalog, image_name(10, 1, 0))
    os.truncate(path, path.stat().st_size + change_bytes)
    assert [problem.block for problem in catalog.verify(10, 1)] == blocks


def test_with_a_broken_manifest_the_ranks_are_still_checked(catalog: Catalog) -> None:
    write_checkpoint(catalog, 10, tensors=TWO_RANKS)
    flip(path_of(catalog, manifest_name(10, 1)), 50)
    flip(path_of(catalog, image_name(10, 1, 1)), 5)
    assert problem_files(catalog) == sorted([manifest_name(10, 1), image_name(10, 1, 1)])


def test_a_marker_that_speaks_of_another_manifest_is_found(catalog: Catalog) -> None:
    write_checkpoint(catalog, 10, is_verified=True)
    write_checkpoint(catalog, 20)
    marker = path_of(catalog, marker_name(20, 1, "verified"))
    marker.write_bytes(path_of(catalog, marker_name(10, 1, "verified")).read_bytes())
    assert problem_files(catalog, 20) == [marker_name(20, 1, "verified")]


def test_swapped_records_and_images_are_found(catalog: Catalog) -> None:
    same = {"w": ("U8", (64,), bytes(64))}
    write_checkpoint(catalog, 10, tensors=[same, same])
    write_checkpoint(catalog, 20, tensors=[same, same])
    first, second = (path_of(catalog, record_name(step, 1, 0)) for step in (10, 20))
    first.write_bytes(second.read_bytes())
    assert problem_files(catalog) == [record_name(10, 1, 0)]


class BadSector(LocalBackend):
    """A disk that cannot read one block."""

    def read_into(self, name: str, offset_bytes: int, target: memoryview) -> None:
        if name.endswith(".safetensors") and offset_bytes == BLOCK_BYTES:
            with self._mapped("reading", name):
                raise OSError(5, "Input/output error")
        super().read_into(name, offset_bytes, target)


def test_a_block_that_cannot_be_read_is_a_problem_and_the_rest_is_checked(catalog: Catalog) -> None:
    write_checkpoint(catalog, 10, tensors=LARGE)
    flip(path_of(catalog, image_name(10, 1, 0)), 2 * BLOCK_BYTES + 5)
    bad = Catalog(BadSector(catalog.backend.root, Files()))
    assert [problem.block for problem in bad.verify(10, 1)] == [1, 2]
    assert "cannot be read" in bad.verify(10, 1)[0].message


def test_the_header_of_an_image_says_what_stands_where(catalog: Catalog) -> None:
    write_checkpoint(catalog, 10, tensors=TWO_RANKS)
    tensors = read_image_tensors(catalog.backend, image_name(10, 1, 0))
    assert {name: (t.dtype, t.shape, t.end_bytes - t.start_bytes) for name, t in tensors.items()} == {
        "a": ("U8", (64,), 64),
        "b": ("F32", (32,), 128),
    }
    image = catalog.backend.get(image_name(10, 1, 0))
    assert image[tensors["a"].start_bytes : tensors["a"].end_bytes] == bytes(range(64))


@pytest.mark.parametrize(
    "image",
    [
        b"",
        b"short",
        (2**40).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"nope" + bytes(64),
        (55).to_bytes(8, "little") + b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,80]}}  ' + bytes(8),
    ],
)
def test_a_header_that_cannot_be_right_is_refused(catalog: Catalog, image: bytes) -> None:
    catalog.backend.put("odd.safetensors", image)
    with pytest.raises(CorruptionError):
        read_image_tensors(catalog.backend, "odd.safetensors")
    with pytest.raises(MissingCopyError):
        read_image_tensors(catalog.backend, "none.safetensors")
