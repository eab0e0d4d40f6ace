"""What ranks compare at a save: replicated tensors by digest, and which ranks stand out."""

from __future__ import annotations

import pytest
import torch

from relight.checkpoint.replicas import (
    Difference,
    ReplicaCheck,
    device_digest,
    differing_groups,
    equal_kinds,
    find_differences,
    replica_sets,
    summary,
    texts,
)
from relight.checkpoint.save_plan import SavePlan, plan_save
from relight.checkpoint.sharding import on_all_ranks
from relight.checkpoint.state import TrainState
from relight.checkpoint.table import StateTable
from relight.manifest.shard import Layout


def tables_of(*values: float, size: int = 5000) -> tuple[list[StateTable], SavePlan]:
    """Return a table per rank, and the plan of rank 0; the plans of all ranks have the same layouts."""
    tables = []
    for value in values:
        table = StateTable()
        weight = torch.full((size, 3), 1.0)
        weight[-1, -1] = value
        table.put("model/w", weight, on_all_ranks(len(values)))
        table.put("model/b", torch.ones(3), on_all_ranks(len(values)))
        table.put("model/mean", torch.tensor(value), None, "buffer")
        table.put("optimizer/w/step", torch.tensor(7.0), None, "scalar")
        tables.append(table)
    return tables, plan_save(tables[0], rank=0, world_size=len(values))


def compare(*values: float, mode: str = "full") -> tuple[Difference, ...]:
    tables, plan = tables_of(*values)
    check = ReplicaCheck(len(values), mode)  # type: ignore[arg-type]
    digests = [check.digests(table, plan, lambda _: None) for table in tables]
    groups = differing_groups([summary(one) for one in digests], plan.layouts)
    return find_differences(groups, plan.layouts, digests)


@pytest.mark.parametrize("mode", ["full", "sample"])
def test_equal_replicas_pass(mode: str) -> None:
    assert compare(1.0, 1.0, 1.0, mode=mode) == ()


@pytest.mark.parametrize("mode", ["full", "sample"])
def test_with_three_ranks_the_odd_one_is_named(mode: str) -> None:
    assert compare(1.0, 2.0, 1.0, mode=mode) == (Difference("model/w", (1,)),)


def test_with_two_ranks_both_are_named() -> None:
    assert compare(1.0, 2.0) == (Difference("model/w", (0, 1)),)


def test_with_no_majority_all_are_named() -> None:
    assert compare(1.0, 1.0, 2.0, 2.0) == (Difference("model/w", (0, 1, 2, 3)),)


def test_a_sample_misses_what_it_does_not_look_at() -> None:
    tables, plan = tables_of(1.0, 1.0, size=50_000)
    tables[1].tensors[0][10_000, 0] = 5.0
    for mode, differs in (("sample", False), ("full", True)):
        check = ReplicaCheck(2, mode)  # type: ignore[arg-type]
        summaries = [summary(check.digests(table, plan, lambda _: None)) for table in tables]
        assert bool(differing_groups(summaries, plan.layouts)) is differs


def test_values_of_each_rank_are_called_equal_only_when_they_are() -> None:
    for second, expected in ((1.0, {"buffer", "scalar"}), (2.0, {"scalar"})):
        tables, plan = tables_of(1.0, second)
        check = ReplicaCheck(2)
        summaries = [summary(check.digests(table, plan, lambda _: None)) for table in tables]
        assert equal_kinds(summaries) == expected


def test_bytes_that_were_copied_count_for_what_belongs_to_a_rank() -> None:
    tables, plan = tables_of(1.0, 1.0)
    check = ReplicaCheck(2)
    stored = memoryview(b"\0\0\0\0")
    found = check.digests(tables[0], plan, lambda at: stored if plan.keys[at] == "model/mean" else None)
    assert found["buffer"] != check.digests(tables[0], plan, lambda _: None)["buffer"]


def test_only_replicas_of_one_shard_are_compared() -> None:
    hybrid = Layout.on((2, 3), range(6), ((1, 0),))
    assert replica_sets(hybrid) == [[0, 3], [1, 4], [2, 5]]
    shards = [{"0": f"shard {rank % 3}"} for rank in range(6)]
    assert differing_groups(shards, [hybrid]) == []
    shards[4] = {"0": "another"}
    assert differing_groups(shards, [hybrid]) == ["0"]
    answers = [{"0": {"w": one["0"]}} for one in shards]
    assert find_differences(["0"], [hybrid], answers) == (Difference("w", (1, 4)),)


def test_one_rank_and_off_look_at_nothing() -> None:
    tables, plan = tables_of(1.0)
    assert ReplicaCheck(1).digests(tables[0], plan, lambda _: None) == {}
    assert compare(1.0, 2.0, mode="off") == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool])
def test_a_digest_on_the_device_shows_every_flipped_bit(dtype: torch.dtype) -> None:
    flat = torch.arange(37).to(dtype)
    clean = device_digest(flat, sample_bytes=None)
    raw = flat.view(torch.uint8)
    for at in range(raw.numel()):
        for bit in range(8):
            raw[at] ^= 1 << bit
            assert device_digest(flat, sample_bytes=None) != clean
            raw[at] ^= 1 << bit
    assert device_digest(flat, sample_bytes=None) == clean


def test_a_digest_on_the_device_depends_on_the_order() -> None:
    flat = torch.arange(100, dtype=torch.float32)
    assert device_digest(flat, sample_bytes=None) != device_digest(flat.flip(0), sample_bytes=None)


def test_texts_name_the_first_and_count_the_rest() -> None:
    found = [Difference(f"w{at:02}", (1, 2)) for at in range(25)]
    assert texts(found)[0] == "w00 (ranks 1, 2)"
    assert texts(found)[-1] == "and 5 more"
    assert len(texts(found)) == 21


def test_on_several_ranks_a_model_belongs_to_its_rank_unless_something_keeps_it_equal() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = TrainState(model=model, optimizer=optimizer)
    several = state.collect(1, num_ranks=2)
    assert several.layouts == [None] * 8
    assert sorted(set(several.kinds)) == ["plain", "scalar"]
    assert "optimizer" not in several.compared
    assert state.collect(1).layouts == [Layout()] * 8
