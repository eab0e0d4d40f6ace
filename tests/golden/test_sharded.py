"""The golden rule and any-to-any restores for models that are spread over ranks."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.golden.sharded import TOTAL, restore_each, save_one, train
from tests.running import Home

pytestmark = pytest.mark.multiprocess

Notes = list[dict[str, Any]]

GOLDEN = [
    ("fsdp", 2),
    ("tp", 2),
    ("ddp", 4),
    ("fsdp", 4),
    ("tp", 4),
    ("fsdp_tp", 4),
    ("hsdp", 4),
]

MATRIX = [
    ("plain", 1),
    ("plain", 2),
    ("ddp", 2),
    ("ddp", 3),
    ("ddp", 4),
    ("fsdp", 1),
    ("fsdp", 2),
    ("fsdp", 3),
    ("fsdp", 4),
    ("tp", 2),
    ("tp", 3),
    ("tp", 4),
    ("fsdp_tp", 4),
    ("hsdp", 4),
]
"""Every layout on 1 to 4 ranks, as far as it exists there."""


def run(home: Home, layout: str, world_size: int, name: str = "run", **options: Any) -> list[Notes]:
    return home.live(train, root=home.root(name), world_size=world_size, layout=layout, **options)


@pytest.mark.parametrize(("layout", "world_size"), GOLDEN)
def test_golden_rule_holds_for_every_layout(home: Home, layout: str, world_size: int) -> None:
    home.keeper("golden")
    golden = run(home, layout, world_size, "golden")
    home.keeper()
    lives = [
        run(home, layout, world_size, kill_step=3, kill_rank=world_size - 1, dies=True),
        run(home, layout, world_size, kill_step=6, mode="blocking", dies=True),
        run(home, layout, world_size),
    ]
    assert [notes[0]["restored"] for notes in (life[0] for life in lives)] == [0, 2, 6]
    for life in lives:
        for expected, notes in zip(golden, life, strict=True):
            start = notes[0]["restored"]
            assert notes[1:] == expected[1 + start : start + len(notes)]
    assert lives[-1][0][-1]["step"] == TOTAL


@pytest.fixture(scope="module")
def matrix_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A place that lasts for all restores of the matrix."""
    arena = Path(tempfile.mkdtemp(prefix="relight-test-", dir="/dev/shm"))
    place = Home(tmp_path_factory.mktemp("matrix"), arena)
    yield place
    place.close()
    shutil.rmtree(arena, ignore_errors=True)


@pytest.fixture(scope="module")
def saved(matrix_home: Home) -> dict[str, str]:
    """Every layout saved once: root -> digest of all global tensors."""
    digests: dict[str, str] = {}
    for layout, world_size in MATRIX:
        name = f"{layout}-{world_size}"
        matrix_home.keeper(name)
        notes = matrix_home.live(save_one, root=matrix_home.root(name), world_size=world_size, layout=layout)
        assert len({one[0]["weights"] for one in notes}) == 1
        digests[matrix_home.root(name)] = notes[0][0]["weights"]
        matrix_home.end_keeper(name)
    return digests


@pytest.mark.parametrize(("layout", "world_size"), MATRIX)
def test_any_layout_restores_into_any_other(
    matrix_home: Home, saved: dict[str, str], layout: str, world_size: int
) -> None:
    for notes in matrix_home.live(restore_each, world_size=world_size, layout=layout, sources=list(saved)):
        assert {one["source"]: one["weights"] for one in notes} == saved
        assert {one["step"] for one in notes} == {1}
        assert all(math.isfinite(one["loss"]) for one in notes)
