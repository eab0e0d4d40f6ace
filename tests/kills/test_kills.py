"""SIGKILL at every named point of the protocols; after each, a new life finds all that must be there, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import relight
from relight.keeper.drain import POINTS as DRAIN_POINTS
from relight.manifest.catalog import POINTS as CATALOG_POINTS
from relight.manifest.foreign.importing import POINTS as IMPORT_POINTS
from relight.manifest.foreign.staging import POINTS as STAGE_POINTS
from relight.testing.kills import FILE_CALL, announced_points
from tests.kills.chain import Chain

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(180)]

CLAIM = "catalog.generation_claimed"
OF_TRAINER = (
    "slot.writing",
    "snapshot.started",
    "snapshot.copied",
    "seal.draft_written",
    "seal.control_written",
    "seal.sealed",
    "saver.sealed",
)
OF_FAILED_DRAIN = ("drain.failed", "drain.partial_removed")
OF_KEEPER = (
    "seal.digests_written",
    *(point for point in (*DRAIN_POINTS, *CATALOG_POINTS) if point not in (CLAIM, *OF_FAILED_DRAIN)),
)
# Killed in tests/convert.
OF_CONVERSION = (*IMPORT_POINTS, *STAGE_POINTS)
VICTIMS = {"trainer": ("rank-0",), "keeper": ("keeper",), "both": ("keeper", "rank-0")}

MakeChain = Callable[..., Chain]


def shuffled(points: Sequence[str], *seed: object) -> list[str]:
    mixed = list(points)
    random.Random(repr(seed)).shuffle(mixed)
    return mixed


def test_every_point_in_the_source_is_in_the_matrix() -> None:
    found = announced_points(Path(relight.__file__).parent)
    assert found == {CLAIM, *OF_TRAINER, *OF_KEEPER, *OF_FAILED_DRAIN, *OF_CONVERSION}


@pytest.mark.parametrize("victims", VICTIMS)
def test_killed_while_the_trainer_saves(make_chain: MakeChain, victims: str) -> None:
    chain = make_chain()
    for occurrence in (1, 2, 3):
        for point in shuffled(OF_TRAINER, victims, occurrence):
            chain.kill("rank-0", point, occurrence, VICTIMS[victims])
    chain.kill("rank-0", CLAIM, 1, VICTIMS[victims])
    chain.live()
    assert chain.num_kills == 22


@pytest.mark.parametrize("occurrence", [1, 2, 3])
@pytest.mark.parametrize("victims", VICTIMS)
def test_killed_while_the_keeper_stores(make_chain: MakeChain, victims: str, occurrence: int) -> None:
    chain = make_chain()
    chain.live()
    for point in shuffled(OF_KEEPER, victims, occurrence):
        chain.kill("keeper", point, occurrence, VICTIMS[victims])
    chain.live()
    assert chain.num_kills == len(OF_KEEPER) == 20


def test_killed_while_a_full_disk_refuses_the_save(make_chain: MakeChain) -> None:
    chain = make_chain()
    chain.live()
    for point in OF_FAILED_DRAIN:
        for victims in VICTIMS.values():
            chain.kill("keeper", point, 1, victims, is_failing=True)
    chain.live()
    assert chain.num_kills == 6


@pytest.mark.parametrize("victims", ["keeper", "both"])
def test_killed_at_any_file_call_of_the_keeper(make_chain: MakeChain, victims: str) -> None:
    chain = make_chain()
    chain.live()
    for occurrence in range(1, 120, 4):
        chain.kill("keeper", FILE_CALL, occurrence, VICTIMS[victims])
    chain.live()
    assert chain.num_kills == 30


TWO_RANKS = {
    "rank-0": ("rank-0",),
    "rank-1": ("rank-1",),
    "keeper": ("keeper",),
    "all": ("keeper", "rank-0", "rank-1"),
}


@pytest.mark.parametrize("victims", TWO_RANKS)
def test_killed_with_two_ranks(make_chain: MakeChain, victims: str) -> None:
    chain = make_chain(world_size=2)
    chain.live()
    actor = "rank-0" if victims == "all" else victims
    points = shuffled(OF_KEEPER if actor == "keeper" else OF_TRAINER, victims)[:9]
    for at, point in enumerate(points):
        chain.kill(actor, point, 1 + at % 3, TWO_RANKS[victims])
    chain.live()
    assert chain.num_kills == len(points)


@pytest.mark.parametrize("point", ["digest.started", "drain.image_written", "commit.files_found"])
def test_training_goes_on_while_every_keeper_dies(make_chain: MakeChain, point: str) -> None:
    chain = make_chain()
    chain.live()
    chain.endure(point)
    chain.live()
