"""The golden rule: run to the end == run, be killed, restore in a new process, run to the end; bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.golden.scenario import OPTIMIZERS, SCHEDULERS, TOTAL, train
from tests.kills.test_kills import OF_TRAINER
from tests.running import Home

pytestmark = pytest.mark.multiprocess

Notes = list[dict[str, Any]]


def golden_run(home: Home, world_size: int = 1, **options: Any) -> list[Notes]:
    """Return what each rank of an undisturbed run tells."""
    home.keeper("golden")
    ranks = home.live(train, root=home.root("golden"), world_size=world_size, **options)
    for notes in ranks:
        assert notes[0] == {"restored": 0}
        assert [entry["step"] for entry in notes[1:]] == list(range(1, TOTAL + 1))
    return [notes[1:] for notes in ranks]


def check(home: Home, *kills: dict[str, Any], world_size: int = 1, **options: Any) -> None:
    """Run with the given kills, one per life, and compare every life with the golden run."""
    golden = golden_run(home, world_size, **options)
    home.keeper()
    for kill in kills:
        compare(
            golden, home.live(train, root=home.root(), world_size=world_size, dies=True, **options, **kill)
        )
    last = home.live(train, root=home.root(), world_size=world_size, **options)
    compare(golden, last)
    assert last[0][-1]["step"] == TOTAL


def compare(golden: list[Notes], ranks: list[Notes]) -> None:
    starts = {notes[0]["restored"] for notes in ranks}
    assert len(starts) == 1
    start = starts.pop()
    for expected, notes in zip(golden, ranks, strict=True):
        told = notes[1:]
        assert told == expected[start : start + len(told)]


MIDDLE_AND_END = ({"kill_step": 4}, {"kill_step": 12})
"""In the middle of the first epoch, and at the end of the second."""

TWICE_IN_A_ROW = ({"kill_step": 6}, {"kill_step": 7}, {"kill_step": 7})
"""At the end of an epoch, and twice one step later, before another save."""


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_schedule(home: Home, scheduler: str) -> None:
    check(home, *MIDDLE_AND_END, scheduler=scheduler, every=2)


@pytest.mark.parametrize("scheduler", ["LinearLR", "OneCycleLR", "SequentialLR", "ReduceLROnPlateau"])
def test_schedules_that_move_after_the_save_was_asked_for(home: Home, scheduler: str) -> None:
    check(home, {"kill_step": 5}, {"kill_step": 12}, scheduler=scheduler, schedule_last=True, every=2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(home: Home, optimizer: str) -> None:
    check(home, *TWICE_IN_A_ROW, optimizer=optimizer, scheduler="CosineAnnealingLR", every=3)


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 2},
        {"accumulate": 4},
        {"accumulate": 4, "workers": 2, "scaled": True},
        {"scaled": True, "optimizer": "AdamW-fused"},
        {"mode": "blocking"},
        {"data": "plain"},
        {"data": "plain", "accumulate": 4},
        {"data": "plain", "scaled": True},
    ],
    ids=str,
)
def test_every_way_to_feed_and_scale(home: Home, options: dict[str, Any]) -> None:
    check(home, *MIDDLE_AND_END, scheduler="StepLR", every=2, **options)


@pytest.mark.parametrize("kill_step", [5, 6])
def test_killed_without_waiting_for_the_save(home: Home, kill_step: int) -> None:
    check(home, {"kill_step": kill_step, "is_durable": False}, {"kill_step": 13, "is_durable": False})


@pytest.mark.parametrize("point", OF_TRAINER)
def test_killed_in_the_middle_of_a_save(home: Home, point: str) -> None:
    check(home, {"kill_step": 5, "kill_point": point}, {"kill_step": 11, "kill_point": point})


@pytest.mark.parametrize(
    "options",
    [
        {"scheduler": "CosineAnnealingLR"},
        {"scheduler": "LinearLR", "workers": 2},
        {"scheduler": "OneCycleLR", "accumulate": 2, "scaled": True, "optimizer": "AdamW-fused"},
        {"scheduler": "SequentialLR", "schedule_last": True, "optimizer": "SGD"},
        {"scheduler": "ReduceLROnPlateau", "data": "plain"},
    ],
    ids=str,
)
def test_two_ranks(home: Home, options: dict[str, Any]) -> None:
    check(
        home,
        {"kill_step": 5, "kill_rank": 1},
        {"kill_step": 12, "kill_rank": 0},
        world_size=2,
        every=2,
        **options,
    )


@pytest.mark.parametrize("point", ["snapshot.copied", "seal.sealed"])
def test_two_ranks_killed_in_the_middle_of_a_save(home: Home, point: str) -> None:
    check(
        home,
        {"kill_step": 5, "kill_point": point, "kill_rank": 1},
        {"kill_step": 11, "kill_point": point, "kill_rank": 0},
        world_size=2,
    )


def test_memory_lost_between_lives(home: Home) -> None:
    """As when the machine was restarted: the disk alone gives the same."""
    golden = golden_run(home, scheduler="StepLR")
    for kill_step in (4, 9):
        home.keeper()
        compare(
            golden, home.live(train, root=home.root(), dies=True, scheduler="StepLR", kill_step=kill_step)
        )
        home.end_keeper()
    home.keeper()
    compare(golden, home.live(train, root=home.root(), scheduler="StepLR"))


def test_saving_changes_nothing(home: Home) -> None:
    """A run that saves at each step is bit for bit the run that never saves."""
    options = {"scheduler": "StepLR", "optimizer": "Adam"}
    often = golden_run(home, **options)
    home.keeper()
    (never,) = home.live(train, root=home.root(), every=10**6, **options)
    assert never[1:] == often[0]
