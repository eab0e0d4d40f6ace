from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from relight import Checkpointer, PerRank, TrainState
from relight.errors import ConfigError, SettingsChangedError, StateMismatchError
from tests.running import Home, restore_once, save_once

pytestmark = pytest.mark.multiprocess


@pytest.fixture(autouse=True)
def _kept(home: Home) -> None:
    home.keeper()


def net(**layers: int) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(size, size) for name, size in layers.items()})


def trained(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_every_difference_is_listed_with_both_sides_and_nothing_is_changed(home: Home) -> None:
    save_once(home, TrainState(model=net(a=2, b=3, c=4)))
    model = net(a=2, b=5, d=4)
    model["a"].weight.data = model["a"].weight.data.double()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(StateMismatchError) as caught:
        restore_once(home, TrainState(model=model))
    text = str(caught.value)
    for line in (
        "model/a.weight: saved float32 [2, 2], live float64 [2, 2]",
        "model/b.weight: saved float32 [3, 3], live float32 [5, 5]",
        "model/d.weight: in the model (float32 [4, 4]), not in the checkpoint",
        "model/c.bias: in the checkpoint, not in the model",
    ):
        assert line in text
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_allowed_keys_may_be_missing_or_extra_and_are_recorded(home: Home) -> None:
    saved = net(body=2, old=3)
    save_once(home, TrainState(model=saved, optimizer=trained(saved)))
    model = net(body=2, head=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    options = {"allow_missing": ("head.*",), "allow_extra": ("old.*",)}
    assert restore_once(home, TrainState(model=model, optimizer=optimizer), **options) == 1
    assert torch.equal(model["body"].weight, saved["body"].weight)
    assert torch.equal(
        optimizer.state[model["body"].weight]["momentum_buffer"], torch.ones_like(model["body"].weight)
    )
    assert model["head"].weight not in optimizer.state
    told = {event.fields["what"].partition(":")[0] for event in home.events(kind="mismatch_allowed")}
    assert {"model/head.weight", "model/head.bias", "model/old.weight", "model/old.bias"} <= told


def test_a_changed_shape_cannot_be_allowed(home: Home) -> None:
    save_once(home, TrainState(model=net(a=2)))
    with pytest.raises(StateMismatchError, match=r"model/a\.weight"):
        restore_once(
            home, TrainState(model=net(a=3)), allow_changed=("*",), allow_missing=("*",), allow_extra=("*",)
        )


def test_another_kind_of_optimizer_is_refused(home: Home) -> None:
    model = net(a=2)
    save_once(home, TrainState(model=model, optimizer=trained(model)))
    fresh = torch.optim.Adam(model.parameters())
    with pytest.raises(StateMismatchError, match="saved by SGD, live Adam"):
        restore_once(home, TrainState(model=model, optimizer=fresh))


def test_each_changed_setting_is_named_unless_allowed(home: Home) -> None:
    save_once(home, TrainState(model=net(a=1), settings={"total": 5, "seed": 1, "data": "x"}))
    state = TrainState(model=net(a=1), settings={"total": 6, "seed": 2, "data": "x"})
    with pytest.raises(SettingsChangedError, match="seed 1 -> 2, total 5 -> 6"):
        restore_once(home, state)
    with pytest.raises(SettingsChangedError) as caught:
        restore_once(home, state, allow_changed=("seed",))
    assert caught.value.details["changes"] == {"total": (5, 6)}
    assert restore_once(home, state, allow_changed=("seed", "total")) == 1


def test_ties_and_untied_weights_do_not_mix(home: Home) -> None:
    tied = net(a=2, b=2)
    tied["b"].weight = tied["a"].weight
    save_once(home, TrainState(model=tied))
    fresh = net(a=2, b=2)
    fresh["b"].weight = fresh["a"].weight
    restore_once(home, TrainState(model=fresh))
    assert fresh["b"].weight is fresh["a"].weight
    assert torch.equal(fresh["a"].weight, tied["a"].weight)
    # Untied, both get the value that both had.
    untied = net(a=2, b=2)
    restore_once(home, TrainState(model=untied))
    assert torch.equal(untied["b"].weight, tied["a"].weight)
    assert torch.equal(untied["a"].weight, tied["a"].weight)


def test_a_model_that_is_tied_now_but_was_not_is_refused(home: Home) -> None:
    save_once(home, TrainState(model=net(a=2, b=2)))
    tied = net(a=2, b=2)
    tied["b"].weight = tied["a"].weight
    with pytest.raises(StateMismatchError, match=r"model/b\.weight: tied in the model"):
        restore_once(home, TrainState(model=tied))


def test_the_extra_state_of_a_module_comes_back(home: Home) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = {"n": 0, "t": torch.zeros(2)}

        def get_extra_state(self) -> Any:
            return self.seen

        def set_extra_state(self, state: Any) -> None:
            self.seen = state

    module = nn.Sequential(Counting())
    module[0].seen = {"n": 3, "t": torch.ones(2)}
    save_once(home, TrainState(model=module))
    fresh = nn.Sequential(Counting())
    restore_once(home, TrainState(model=fresh))
    assert fresh[0].seen["n"] == 3
    assert fresh[0].seen["t"].tolist() == [1, 1]
    with pytest.raises(StateMismatchError, match="extra state in the checkpoint"):
        restore_once(home, TrainState(model=nn.Sequential(nn.Identity())))


def test_per_rank_on_one_side_only_is_refused(home: Home) -> None:
    save_once(home, TrainState(model=net(a=1), extra={"pos": PerRank(1)}))
    with pytest.raises(StateMismatchError, match="per-rank on one side only"):
        restore_once(home, TrainState(model=net(a=1), extra={"pos": 1}))


# -- parts that come late -----------------------------------------------------------------------------------


def test_parts_may_join_after_the_restore_in_any_order(home: Home) -> None:
    model = net(a=2)
    optimizer = trained(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4)
    optimizer.step()
    scheduler.step()
    ema = net(a=2)
    values = {"best": 0.25}
    save_once(
        home,
        TrainState(
            model=model, optimizer=optimizer, scheduler=scheduler, extra={"ema": ema, "values": values}
        ),
    )
    fresh = net(a=2)
    state = TrainState(model=fresh)
    with Checkpointer(home.root(), state) as checkpointer:
        checkpointer.restore()
        late_ema, late_values = net(a=2), {"best": 0.0}
        state.add("ema", late_ema)
        sgd = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
        state.add("optimizer", sgd)
        state.add("values", late_values)
        late = torch.optim.lr_scheduler.LinearLR(sgd, 0.5, total_iters=4)
        state.add("scheduler", late)
        assert torch.equal(late_ema["a"].weight, ema["a"].weight)
        assert late_values == values
        buffer = sgd.state[fresh["a"].weight]["momentum_buffer"]
        assert torch.equal(buffer, optimizer.state[model["a"].weight]["momentum_buffer"])
        assert sgd.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        assert late.state_dict() == scheduler.state_dict()
        checkpointer.save(2)
        assert not home.events(kind="part_unclaimed")


def test_a_part_that_the_checkpoint_does_not_hold_cannot_join_unless_allowed(home: Home) -> None:
    save_once(home, TrainState(model=net(a=1)))
    state = TrainState(model=net(a=1))
    with Checkpointer(home.root(), state, allow_missing=("extra.new",)) as checkpointer:
        checkpointer.restore()
        with pytest.raises(StateMismatchError, match=r"extra\.other: added after restore"):
            state.add("other", 1)
        state.add("new", 5)
        assert state.extra["new"] == 5


def test_a_saved_part_that_nobody_claims_is_reported_at_the_first_save(home: Home) -> None:
    model = net(a=1)
    save_once(home, TrainState(model=model, optimizer=trained(model), extra={"gone": 1}))
    with Checkpointer(home.root(), TrainState(model=net(a=1))) as checkpointer:
        checkpointer.restore()
        checkpointer.save(2)
    assert [event.fields["part"] for event in home.events(kind="part_unclaimed")] == [
        "extra.gone",
        "optimizer",
    ]


# -- warm starts --------------------------------------------------------------------------------------------


def test_a_warm_start_takes_the_chosen_parts_alone(home: Home) -> None:
    saved = net(a=2)
    save_once(home, TrainState(model=saved, optimizer=trained(saved, lr=0.7), extra={"n": {"x": 1}}), step=9)
    model = net(a=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    extra = {"n": {"x": 0}}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    home.keeper("other")
    state = TrainState(model=model, optimizer=optimizer, extra=extra)
    with Checkpointer(home.root("other"), state) as checkpointer:
        assert checkpointer.restore(source=home.root(), parts=("model",)) == 0
    assert torch.equal(model["a"].weight, saved["a"].weight)
    assert (optimizer.param_groups[0]["lr"], dict(optimizer.state), extra) == (0.1, {}, {"n": {"x": 0}})
    assert torch.equal(torch.get_rng_state(), before)


def test_unknown_parts_are_refused(home: Home) -> None:
    with Checkpointer(home.root(), TrainState(model=net(a=1))) as checkpointer:
        for parts in (("weights",), "model"):
            with pytest.raises(ConfigError, match="parts"):
                checkpointer.restore(parts=parts)
