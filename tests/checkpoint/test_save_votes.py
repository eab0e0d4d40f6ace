"""What ranks compare before a save counts."""

from __future__ import annotations

import pytest
import torch

from relight.checkpoint.save_job import check_votes, sampled_digests
from relight.checkpoint.state import StateTable, TrainState
from relight.errors import OwnershipError


def table_of(value: float) -> StateTable:
    table = StateTable()
    table.put("model/w", torch.full((5000, 3), value))
    table.put("model/mean", torch.tensor(value), per_rank=True)
    return table


def votes_of(*values: float) -> list[dict[str, object]]:
    shared = {"step": 1, "roots": ["/r"], "generation": 1, "layout": "x"}
    return [{**shared, "digests": sampled_digests(table_of(value))} for value in values]


def test_ranks_with_different_models_are_refused_at_the_first_save() -> None:
    with pytest.raises(OwnershipError, match=r"model/w"):
        check_votes(votes_of(1.0, 2.0), is_fresh=True)


def test_replicas_that_part_later_are_named() -> None:
    assert check_votes(votes_of(1.0, 1.0, 2.0)) == ("model/w",)


def test_equal_replicas_and_values_of_one_rank_pass() -> None:
    votes = votes_of(1.0, 1.0)
    assert check_votes(votes, is_fresh=True) == ()
    assert "mean" not in str(votes)


def test_a_change_of_the_last_element_is_seen() -> None:
    left, right = table_of(1.0), table_of(1.0)
    right.tensors[0][-1, -1] = 3.0
    assert sampled_digests(left) != sampled_digests(right)


def test_on_several_ranks_a_model_belongs_to_its_rank_unless_something_keeps_it_equal() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = TrainState(model=model, optimizer=optimizer)
    assert state.collect(1, num_ranks=2).is_per_rank == [True] * 4
    assert state.collect(1).is_per_rank == [False] * 4
    assert "optimizer" not in state.collect(1, num_ranks=2).compared
