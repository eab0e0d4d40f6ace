"""State dicts of several ranks: any layout to any layout, values of single ranks, and what goes wrong on one."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from relight.cli import main
from tests.dcp import ranks
from tests.running import Home

pytestmark = pytest.mark.multiprocess

LOADS = {1: ["plain"], 2: ["plain", "0", "1", "copies"], 3: ["0", "1"], 4: ["0", "grid", "hsdp"]}
"""Number of ranks -> the layouts that are loaded on them."""


def all_notes(found: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [one for notes in found for one in notes]


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [("plain", 1), ("copies", 2), ("0", 3), ("0", 4), ("1", 4), ("grid", 4), ("hsdp", 4)],
)
def test_h_d01_tensors_of_awkward_shapes_go_from_any_layout_to_any_other(
    home: Home, layout: str, world_size: int
) -> None:
    home.live(ranks.save_spread, world_size=world_size, root=home.root(), layout=layout)
    assert main(["verify", home.root()]) == 0
    for size, layouts in LOADS.items():
        found = home.live(ranks.load_spread, world_size=size, root=home.root(), layouts=layouts)
        expected = [{"layout": one, "wrong": [], "scalar": 0.5, "count": 3} for one in layouts]
        assert found == [expected] * size


def test_h_d03_rows_that_two_axes_cut_come_back_in_order(home: Home) -> None:
    found = home.live(ranks.save_strided, world_size=4, root=home.root())
    # Rank 1 holds rows from behind those of rank 2: the order of the ranks is not the order of the rows.
    assert found[1][0]["local"] > found[2][0]["local"]
    for size, layouts in {1: ["plain"], 2: ["0", "1"], 4: ["0", "grid"]}.items():
        found = home.live(ranks.load_strided, world_size=size, root=home.root(), layouts=layouts)
        assert found == [[{"layout": one, "is_right": True} for one in layouts]] * size


@pytest.mark.parametrize("how", ["save", "thread", "process"])
def test_h_d02_fsdp_models_go_on_on_any_number_of_ranks(home: Home, how: str) -> None:
    saved = home.live(
        ranks.fsdp_save, world_size=2, root=home.root(), how=how, env={"MASTER_ADDR": "127.0.0.1"}
    )
    golden = saved[0][0]["weights"]
    for size in (1, 2, 3) if how == "save" else (2,):
        found = home.live(ranks.fsdp_load, world_size=size, root=home.root())
        assert all_notes(found) == [{"weights": golden, "epoch": 3}] * size


def test_sharded_tensors_of_fsdp1_come_back(home: Home) -> None:
    found = home.live(ranks.sharded_tensors, world_size=3, root=home.root())
    assert all_notes(found) == [{"same": [True]}] * 3


def test_h_a15_values_that_differ_under_one_key_are_refused_with_key_and_ranks(home: Home) -> None:
    found = home.live(ranks.collapse, world_size=2, root=home.root())
    for failed in all_notes(found):
        kind, text = failed["failed"]["0"]
        assert kind == "OwnershipError"
        assert "pos (ranks 0, 1); w (ranks 0, 1)" in text
        assert "same" not in text
    assert home.steps() == []


def test_h_a15_values_marked_as_each_ranks_own_come_back_to_their_rank(home: Home) -> None:
    found = home.live(ranks.own_values, world_size=3, root=home.root())
    assert all_notes(found) == [
        {"tensor": [float(rank)] * 3, "pos": 220 + rank, "w": [1.0, 1.0]} for rank in range(3)
    ]
    (failed,) = all_notes(home.live(ranks.load_own_values, world_size=1, root=home.root()))
    assert failed["failed"]["0"][0] == "StateMismatchError"
    assert "rng: each of 3 ranks saved a value of its own" in failed["failed"]["0"][1]


def test_h_a14_every_rank_gets_its_own_random_generators_back(home: Home) -> None:
    found = all_notes(home.live(ranks.generators, world_size=4, root=home.root()))
    assert [one["second"] for one in found] == [one["first"] for one in found]
    assert len({tuple(one["first"]) for one in found}) == 4


def test_one_flipped_bit_in_a_replica_is_refused_and_the_odd_rank_named(home: Home) -> None:
    found = home.live(ranks.one_flipped_bit, world_size=3, root=home.root(), mark=False)
    kind, text = found[0][0]["failed"]["0"]
    assert (kind, "copies (rank 2); plain (rank 2)" in text) == ("OwnershipError", True)
    assert home.steps() == []


def test_replicas_that_differ_are_marked_when_asked_and_then_not_chosen(home: Home) -> None:
    found = home.live(ranks.one_flipped_bit, world_size=3, root=home.root(), mark=True)
    assert all_notes(found) == [{"failed": {}}] * 3
    (info,) = home.catalog().committed()
    assert info.replicas_differ == ("copies", "plain")
    assert home.catalog().candidates() == []


@pytest.mark.parametrize("steps", [[], [1, 2]])
def test_h_b06_ranks_that_save_to_different_places_are_told_so(home: Home, steps: list[int]) -> None:
    found = all_notes(home.live(ranks.apart, world_size=2, root=home.root(), steps=steps))
    for failed in found:
        kind, text = failed["failed"]["0"]
        assert kind == "DesyncError"
        assert (f"{home.root()}-0" in text and f"{home.root()}-1" in text) or (
            "step 1" in text and "step 2" in text
        )


def test_h_f06_a_place_that_is_not_shared_is_an_error(home: Home) -> None:
    found = all_notes(home.live(ranks.unseen, world_size=2, root=home.root()))
    kind, text = found[0]["failed"]["0"]
    assert kind == "SaveFailedError"
    assert "rank-00001.safetensors, rank-00001.json cannot be seen" in text


def test_a_full_disk_on_one_rank_fails_the_save_on_all(home: Home) -> None:
    found = all_notes(home.live(ranks.full_disk, world_size=2, root=home.root()))
    assert [list(one["failed"]) for one in found] == [["1"], ["1"]]
    assert found[0]["failed"]["1"][0] == "StorageFullError"
    assert home.steps() == [3, 1]
    assert home.catalog().incomplete() == []


def test_h_c01_what_changes_after_an_asynchronous_save_returned_is_not_saved(home: Home) -> None:
    (found,) = all_notes(home.live(ranks.staged, world_size=1, root=home.root()))
    assert found == {
        "w": [1, 1, 1],
        "scalar": 1,
        "array": [1, 1, 1],
        "list": [1, 2],
        "dict": {"n": 1},
        "in_tuple": [{"n": 1}, [1, 1]],
    }


@pytest.mark.parametrize(
    ("point", "loaded"),
    [
        ("catalog.image_stored", 1),
        ("catalog.record_stored", 1),
        ("commit.files_found", 2),
        ("commit.records_read", 2),
        ("commit.manifest_stored", 2),
    ],
)
def test_h_b04_a_rank_that_dies_in_the_middle_of_a_save_leaves_the_old_or_the_new_checkpoint(
    home: Home, point: str, loaded: int
) -> None:
    home.live(ranks.killed, world_size=2, root=home.root(), point=point, dies=True)
    copy = home.root("copy")
    shutil.copytree(home.root(), copy)
    found = all_notes(home.live(ranks.go_on, world_size=2, root=home.root()))
    # A step that is stored whole but for its manifest counts once the next generation has tidied up.
    seen = {one["loaded"] for one in found}
    assert seen <= {1, loaded}
    assert all(one["is_right"] for one in found)
    again = all_notes(home.live(ranks.go_on, world_size=3, root=home.root()))
    assert {one["loaded"] for one in again} == {max(seen) + 1}


def test_a_killed_writer_process_breaks_no_later_save(home: Home) -> None:
    found = home.live(
        ranks.background_killed, world_size=2, root=home.root(), env={"MASTER_ADDR": "127.0.0.1"}
    )
    assert found == [[{"saved": 1}, {"saved": 2}, {"saved": 3}]] * 2
    assert home.steps() == [3, 2, 1]


def test_h_d04_a_cached_plan_does_not_outlive_shapes_and_dtypes(home: Home) -> None:
    found = home.live(ranks.cached_plans, world_size=3, root=home.root())
    assert found == [[{"step": step, "is_right": True} for step in range(4)]] * 3


def test_a_tensor_of_which_parts_are_missing_is_not_saved(home: Home) -> None:
    for failed in all_notes(home.live(ranks.alone, world_size=2, root=home.root())):
        kind, text = failed["failed"]["0"]
        assert kind == "StateMismatchError"
        assert "w: the ranks' pieces do not cover the tensor of shape (6, 2) exactly once" in text
