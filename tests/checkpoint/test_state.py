from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from relight import PerRank, TrainState
from relight.checkpoint import context
from relight.checkpoint.save_plan import plan_save
from relight.errors import ConfigError, StateMismatchError, UnknownFormatError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(2))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner


def names_of(model: nn.Module) -> list[str]:
    return TrainState(model=model).collect(0).keys


def test_wrappers_leave_no_trace_in_names() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wrapped = nn.DataParallel(Wrapper(nn.Sequential(Wrapper(plain[0]), plain[1])))
    assert names_of(wrapped) == names_of(plain)
    assert names_of(torch.compile(plain, backend="eager")) == names_of(plain)


def test_a_module_of_the_users_that_is_called_module_keeps_its_name() -> None:
    holder = nn.Module()
    holder.module = nn.Linear(1, 1)
    assert names_of(holder) == ["model/module.weight", "model/module.bias"]


def test_tied_tensors_are_stored_once_and_named_twice() -> None:
    table = TrainState(model=Tied()).collect(0)
    assert table.keys == ["model/embed.weight", "model/mask"]
    assert table.aliases == {"model/head.weight": "model/embed.weight"}


def test_several_models_and_optimizers_have_names_of_their_own() -> None:
    gen, dis = nn.Linear(1, 1), nn.Linear(1, 1)
    state = TrainState(
        model={"gen": gen, "dis": dis},
        optimizer={"g": torch.optim.SGD(gen.parameters(), 0.1), "d": torch.optim.SGD(dis.parameters(), 0.1)},
    )
    table = state.collect(0)
    assert table.keys[0] == "model.gen/weight"
    assert table.owners == [0, 0, 1, 1]
    assert {"optimizer.g", "optimizer.d"} <= set(table.parts)


def test_reading_the_state_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters())
    called: list[str] = []
    model.register_state_dict_post_hook(lambda *_: called.append("model"))
    optimizer.register_state_dict_post_hook(lambda *_: called.append("optimizer"))
    optimizer.register_step_pre_hook(lambda *_: called.append("step"))
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())  # noqa: NPY002
    state = TrainState(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1),
        extra={"generator": torch.Generator(), "values": {"a": [1]}},
    )
    called.clear()
    for step in range(3):
        state.collect(step)
    assert called == []
    assert dict(optimizer.state) == {}
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])  # noqa: NPY002


def test_the_table_holds_the_live_tensors_and_values_of_the_instant() -> None:
    model = nn.Linear(2, 2)
    extra = {"values": {"list": [1]}, "array": np.zeros(2)}
    table = TrainState(model=model, extra=extra).collect(0)
    assert table.tensors[0] is model.weight
    extra["values"]["list"].append(2)
    extra["array"][0] = 9
    found = [
        context.decode(
            table.parts[f"extra.{name}"]["plain"], tensors=lambda key: table.tensors[table.keys.index(key)]
        )
        for name in ("values", "array")
    ]
    assert found[0] == {"list": [1]}
    assert found[1].tolist() == [0, 0]


def test_a_marked_value_is_not_compared_between_ranks() -> None:
    table = TrainState(model=nn.Linear(1, 1), extra={"mine": PerRank(torch.ones(1)), "ours": 1}).collect(0)
    assert "extra.ours" in table.compared
    assert "extra.mine" not in table.compared
    assert dict(zip(table.keys, table.layouts, strict=True))["extra.mine/"] is None


def test_a_plan_does_not_fit_a_table_whose_ownership_changed() -> None:
    extra = {"value": torch.ones(4)}
    state = TrainState(model=nn.Linear(1, 1), extra=extra)
    plan = plan_save(state.collect(0), rank=0, world_size=2)
    assert plan.matches(state.collect(1), 2)
    extra["value"] = PerRank(torch.ones(4))
    assert not plan.matches(state.collect(2), 2)


@pytest.mark.parametrize("change", ["shape", "dtype", "names", "ranks"])
def test_a_plan_does_not_fit_another_layout(change: str) -> None:
    extra = {"value": torch.ones(4)}
    state = TrainState(model=nn.Linear(1, 1), extra=extra)
    plan = plan_save(state.collect(0), rank=0, world_size=1)
    if change == "shape":
        extra["value"] = torch.ones(5)
    elif change == "dtype":
        extra["value"] = torch.ones(4, dtype=torch.int32)
    elif change == "names":
        extra["other"] = torch.ones(4)
    assert not plan.matches(state.collect(1), 2 if change == "ranks" else 1)


@pytest.mark.parametrize(
    "arguments",
    [
        {"model": [nn.Linear(1, 1)]},
        {"model": {"a/b": nn.Linear(1, 1)}},
        {"extra": {"a.b": 1}},
        {"extra": {"": 1}},
        {"extra": {"model": 1}},
        {"optimizer": object()},
        {"data": 3},
    ],
    ids=str,
)
def test_what_cannot_be_saved_is_refused_at_once(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        TrainState(**{"model": nn.Linear(1, 1), **arguments})


def test_an_optimizer_of_parameters_without_a_name_is_refused() -> None:
    stranger = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(stranger.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="belongs to no model"):
        TrainState(model=nn.Linear(1, 1), optimizer=optimizer)


def test_names_given_to_the_optimizer_count_where_no_model_owns_the_parameter() -> None:
    stranger = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(stranger.named_parameters(), lr=0.1, momentum=0.9)
    stranger(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    keys = TrainState(model=nn.Linear(1, 1), optimizer=optimizer).collect(0).keys
    assert "optimizer/weight/momentum_buffer" in keys


def test_a_part_cannot_be_added_twice() -> None:
    state = TrainState(model=nn.Linear(1, 1), extra={"a": 1})
    with pytest.raises(ConfigError, match="already"):
        state.add("a", 2)


def test_a_lazy_parameter_is_refused_with_advice() -> None:
    with pytest.raises(StateMismatchError, match="run one forward"):
        TrainState(model=nn.LazyLinear(2)).collect(0)


def test_a_sparse_tensor_is_refused_by_name() -> None:
    table = TrainState(model=nn.Linear(1, 1), extra={"s": torch.eye(2).to_sparse()}).collect(0)
    with pytest.raises(UnknownFormatError, match=r"extra\.s"):
        plan_save(table, rank=0, world_size=1)
