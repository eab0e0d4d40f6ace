"""Known faults of kind (d), resharding and layout: each made impossible, each a test by its id."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch

from tests.faults import spread
from tests.golden.sharded import train
from tests.kills.test_kills import OF_TRAINER
from tests.running import Home

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize(("ranks", "is_sharded"), [(1, False), (1, True), (2, True), (3, True), (4, True)])
def test_hd01_empty_shards_restore_on_any_number_of_ranks(home: Home, ranks: int, is_sharded: bool) -> None:
    home.live(spread.save_shapes, root=home.root("saved"), world_size=4)
    expected = [
        [100.0 * number + at for at in range(math.prod(shape))] for number, shape in enumerate(spread.SHAPES)
    ]
    for notes in home.live(
        spread.restore_shapes,
        root=home.root("new"),
        source=home.root("saved"),
        world_size=ranks,
        is_sharded=is_sharded,
    ):
        assert notes == [{"values": expected}]


@pytest.mark.parametrize("mode", ["overlap", "blocking"])
def test_hd02_scalars_survive_sharded_saves(home: Home, mode: str) -> None:
    golden = {
        ranks: home.live(
            spread.scalar_run, root=home.root(f"golden-{ranks}"), world_size=ranks, mode=mode, stop=None
        )[0][0]["values"]
        for ranks in (1, 2)
    }
    home.live(spread.scalar_run, root=home.root("run"), world_size=2, mode=mode, stop=2)
    for ranks in (2, 1):
        resumed = home.live(
            spread.scalar_run,
            root=home.root(f"on-{ranks}"),
            source=home.root("run"),
            world_size=ranks,
            mode=mode,
            stop=None,
        )
        for notes in resumed:
            # All ranks see the same rows, so that sums are the same on one rank and on two.
            assert notes[0]["values"] == golden[ranks] == golden[1]


@pytest.mark.parametrize("rows", [12, 10])
def test_hd03_rows_keep_their_order_on_every_mesh(home: Home, rows: int) -> None:
    home.live(spread.save_strided, root=home.root("saved"), world_size=4, rows=rows, mesh_shape=[2, 2])
    for mesh_shape in (None, [1, 1], [2, 1], [1, 2], [4, 1], [1, 4], [2, 2]):
        ranks = math.prod(mesh_shape) if mesh_shape is not None else 1
        for notes in home.live(
            spread.restore_strided,
            root=home.root(f"on-{mesh_shape}"),
            source=home.root("saved"),
            world_size=ranks,
            rows=rows,
            mesh_shape=mesh_shape,
        ):
            assert notes[0]["held"] == notes[0]["wanted"]


def test_hd04_a_cached_plan_serves_uneven_shards(home: Home) -> None:
    golden = home.live(spread.uneven_run, root=home.root("golden"), world_size=3, stop=4)
    home.live(spread.uneven_run, root=home.root("run"), world_size=3, stop=4)
    assert home.steps("run") == [4, 2]
    for ranks in (3, 2, 1):
        for notes in home.live(
            spread.uneven_run,
            root=home.root(f"on-{ranks}"),
            source=home.root("run"),
            world_size=ranks,
            stop=4,
        ):
            assert notes == golden[0]


def test_hd05_replicas_that_differ_after_a_restore_are_named(home: Home) -> None:
    home.live(spread.replicated_run, root=home.root(), world_size=2, stop=2)
    for notes in home.live(spread.corrupted_restore, root=home.root(), world_size=2):
        assert "model/weight (ranks 0, 1)" in notes[0]["error"]


@pytest.mark.parametrize(("world_size", "odd", "named"), [(4, 2, [2]), (2, 1, [0, 1])])
def test_one_flipped_bit_in_a_replica_is_named_at_the_next_save(
    home: Home, world_size: int, odd: int, named: list[int]
) -> None:
    home.live(
        spread.replicated_run,
        root=home.root(),
        world_size=world_size,
        stop=3,
        flip_rank=odd,
        flip_step=3,
    )
    events = home.events(kind="replicas_differ")
    assert len(events) == world_size
    for event in events:
        assert event.step == 3
        assert event.fields["tensors"] == [{"key": "model/weight", "ranks": named}]
    info = next(one for one in home.catalog().committed() if one.step == 3)
    noun = "rank" if len(named) == 1 else "ranks"
    assert list(info.replicas_differ) == [f"model/weight ({noun} {', '.join(map(str, named))})"]
    restored = home.live(spread.replicated_run, root=home.root(), world_size=world_size, stop=4)
    assert [notes[0]["restored"] for notes in restored] == [2] * world_size


def test_state_without_placements_of_a_sharded_parameter_comes_back_to_its_rank(home: Home) -> None:
    home.live(spread.scratch_run, root=home.root(), world_size=2, stop=2)
    told = home.live(spread.scratch_run, root=home.root(), world_size=2, stop=2)
    assert [notes[0] for notes in told] == [
        {"start": 2, "scratch": [0.0] * 3},
        {"start": 2, "scratch": [1.0] * 3},
    ]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_reshard_refuses_state_without_placements_by_name(home: Home, ranks: int) -> None:
    home.live(spread.scratch_run, root=home.root("saved"), world_size=2, stop=2)
    options: dict[str, Any] = {"source": home.root("saved"), "world_size": ranks, "stop": 2}
    for notes in home.live(spread.scratch_run, root=home.root("refused"), **options):
        assert "optimizer/weight/scratch: each of the 2 ranks" in notes[0]["error"]
    allowed = home.live(spread.scratch_run, root=home.root("allowed"), allow=("*/scratch",), **options)
    assert [notes[0]["scratch"][0] for notes in allowed] == [0.0, 1.0, 0.0][:ranks]


@pytest.mark.parametrize("point", OF_TRAINER)
def test_one_rank_of_four_killed_at_each_point_of_a_save_hangs_nobody(home: Home, point: str) -> None:
    home.keeper()
    victim = OF_TRAINER.index(point) % 4
    lives = home.start(
        train,
        root=home.root(),
        world_size=4,
        layout="fsdp",
        kill_step=4,
        kill_point=point,
        kill_rank=victim,
    )
    started = time.monotonic()
    codes = [life.wait() for life in lives]
    # Far below the timeout of a gather (600 s): a peer that is gone is noticed at once.
    assert time.monotonic() - started < 45
    assert codes[victim] == -9
    assert all(codes)
    notes = home.live(train, root=home.root(), world_size=4, layout="fsdp")
    assert {one[0]["restored"] for one in notes} <= {2, 4}
    assert home.steps()[0] == 10


def test_the_hook_flips_one_bit() -> None:
    weight = torch.ones(3, 4)
    spread.flip_bit(weight)
    assert int((weight != 1).sum()) == 1
    assert spread.float_bits(float(weight[1, 2])) == spread.float_bits(1.0) ^ 1
