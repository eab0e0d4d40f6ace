"""Silent wrong resume: every public report of this kind, as a test named after its id (values and containers)."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, StepLR

from relight import Checkpointer, TrainState
from relight.errors import SettingsChangedError, StateMismatchError
from tests.running import Home, restore_once, save_once

pytestmark = pytest.mark.multiprocess


@pytest.fixture(autouse=True)
def _kept(home: Home) -> None:
    """Every test here saves by a keeper that is there already."""
    home.keeper()


def update(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> str:
    """Train one step on data that `seed` gives, and return the loss's bits."""
    parameter = next(model.parameters())
    data = torch.randn(4, parameter.shape[-1], generator=torch.Generator().manual_seed(seed))
    loss = model(data.to(parameter.dtype)).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item().hex()


def two_linears(first: str = "a", second: str = "b") -> nn.ModuleDict:
    """Return two layers of the same shape, initialised by their names."""
    layers = {}
    for name in (first, second):
        torch.manual_seed(ord(name))
        layers[name] = nn.Linear(4, 4)
    return nn.ModuleDict(layers)


def raw(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Return a tensor's dtype, shape and bits."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return tensor.dtype, tuple(tensor.shape), data


def test_a01_plain_python_values_are_restored(home: Home) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    model, optimizer = build()
    progress = {"epoch": 20, "name": "x", "flag": True, "none": None, "t": (1, 2), "raw": b"\0\xff"}
    update(model, optimizer, 0)
    optimizer.param_groups[0]["lr"] = 1e-5
    save_once(home, TrainState(model=model, optimizer=optimizer, extra={"progress": progress}))
    golden = update(model, optimizer, 1)

    model, optimizer = build()
    mine = {"epoch": 0}
    assert restore_once(home, TrainState(model=model, optimizer=optimizer, extra={"progress": mine})) == 1
    assert mine == progress
    assert [type(value) for value in mine.values()] == [type(value) for value in progress.values()]
    assert optimizer.param_groups[0]["lr"] == 1e-5
    assert update(model, optimizer, 1) == golden


def test_a02_a_field_that_a_scheduler_adds_to_the_optimizer_stays(home: Home) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.5)
    for group in optimizer.param_groups:
        group["my_tag"] = "wd0"
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    save_once(home, TrainState(model=model, optimizer=optimizer, scheduler=scheduler), step=3)

    fresh = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.5)
    assert restore_once(home, TrainState(model=model, optimizer=fresh)) == 3
    assert [(group["initial_lr"], group["my_tag"]) for group in fresh.param_groups] == [(0.5, "wd0")] * 2

    def curve(optimizer: torch.optim.Optimizer, scheduler: StepLR) -> list[float]:
        rates = []
        for _ in range(5):
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[1]["lr"])
        return rates

    rebuilt = StepLR(fresh, step_size=2, gamma=0.1, last_epoch=2)
    assert curve(fresh, rebuilt) == curve(optimizer, scheduler)


def test_a03_optimizer_state_follows_the_name_of_its_parameter(home: Home) -> None:
    model = two_linears("a", "b")
    optimizer = torch.optim.Adam(model.parameters())
    for seed, name in enumerate("ab"):
        update(model[name], optimizer, seed)
    save_once(home, TrainState(model=model, optimizer=optimizer))

    turned = two_linears("b", "a")
    fresh = torch.optim.Adam(turned.parameters())
    restore_once(home, TrainState(model=turned, optimizer=fresh))
    for name in "ab":
        for kind in ("weight", "bias"):
            live, saved = getattr(turned[name], kind), getattr(model[name], kind)
            assert torch.equal(live, saved)
            assert torch.equal(fresh.state[live]["exp_avg"], optimizer.state[saved]["exp_avg"])


def test_a03_groups_may_be_listed_in_another_order(home: Home) -> None:
    model = two_linears()

    def grouped(names: str) -> torch.optim.Optimizer:
        return torch.optim.Adam(
            [{"params": list(model[name].parameters()), "lr": ord(name) / 1000} for name in names]
        )

    optimizer = grouped("ab")
    update(model["a"], optimizer, 0)
    optimizer.param_groups[0]["lr"] = 0.5
    save_once(home, TrainState(model=model, optimizer=optimizer))
    fresh = grouped("ba")
    restore_once(home, TrainState(model=model, optimizer=fresh))
    weight = model["a"].weight
    assert fresh.param_groups[1]["lr"] == 0.5
    assert torch.equal(fresh.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg"])
    assert model["b"].weight not in fresh.state


def test_a03_parameters_that_moved_to_another_group_are_refused_by_name(home: Home) -> None:
    model = two_linears()
    a, b = model["a"], model["b"]
    groups = [{"params": [a.weight, a.bias]}, {"params": [b.weight, b.bias], "lr": 0.1}]
    save_once(home, TrainState(model=model, optimizer=torch.optim.SGD(groups, lr=1.0)))
    moved = [{"params": [a.weight]}, {"params": [b.weight, b.bias, a.bias], "lr": 0.1}]
    state = TrainState(model=model, optimizer=torch.optim.SGD(moved, lr=1.0))
    with pytest.raises(StateMismatchError, match=r"a\.bias: saved in group 0, live in group 1"):
        restore_once(home, state)


@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_a04_optimizer_state_keeps_its_dtype(
    home: Home, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"s": nn.Linear(4, 4, bias=False), "a": nn.Linear(4, 4, bias=False)}).to(dtype)
        sgd = torch.optim.SGD(model["s"].parameters(), lr=0.1, momentum=0.9, foreach=False)
        return model, sgd, torch.optim.Adam(model["a"].parameters())

    model, sgd, adam = build()
    values = torch.full((4, 4), 1 + 2**-20, dtype=torch.float32).to(state_dtype)
    sgd.state[model["s"].weight]["momentum_buffer"] = values.clone()
    adam.state[model["a"].weight] = {
        "step": torch.tensor(3.0, dtype=torch.float64),
        "exp_avg": values.clone(),
        "exp_avg_sq": values.clone(),
    }
    save_once(home, TrainState(model=model, optimizer={"sgd": sgd, "adam": adam}))
    saved = {name: raw(value) for name, value in adam.state[model["a"].weight].items()}
    saved["momentum_buffer"] = raw(sgd.state[model["s"].weight]["momentum_buffer"])
    golden = [update(model["s"], sgd, 1), raw(model["s"].weight)]

    model, sgd, adam = build()
    restore_once(home, TrainState(model=model, optimizer={"sgd": sgd, "adam": adam}))
    found = {name: raw(value) for name, value in adam.state[model["a"].weight].items()}
    found["momentum_buffer"] = raw(sgd.state[model["s"].weight]["momentum_buffer"])
    assert found == saved
    assert [update(model["s"], sgd, 1), raw(model["s"].weight)] == golden


SCHEDULES = {
    "LambdaLR": partial(LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "LinearLR": partial(LinearLR, start_factor=0.1, total_iters=12),
}


@pytest.mark.parametrize("is_late", [False, True], ids=["built-before", "built-after"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a05_building_the_scheduler_does_not_reset_the_rate(home: Home, name: str, is_late: bool) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    scheduler = SCHEDULES[name](optimizer)

    def rates(optimizer: torch.optim.Optimizer, scheduler: LambdaLR, num: int) -> list[float]:
        found = []
        for _ in range(num):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    rates(optimizer, scheduler, 7)
    save_once(home, TrainState(model=model, optimizer=optimizer, scheduler=scheduler), step=7)
    golden = rates(optimizer, scheduler, 5)

    fresh = torch.optim.SGD(model.parameters(), lr=0.3)
    if is_late:
        state = TrainState(model=model, optimizer=fresh)
        with Checkpointer(home.root(), state) as checkpointer:
            assert checkpointer.restore() == 7
            late = SCHEDULES[name](fresh)
            state.add("scheduler", late)
    else:
        late = SCHEDULES[name](fresh)
        restore_once(home, TrainState(model=model, optimizer=fresh, scheduler=late))
    assert late.get_last_lr() == [fresh.param_groups[0]["lr"]]
    assert rates(fresh, late, 5) == golden


def test_a06_a_changed_length_of_the_run_is_refused_unless_allowed(home: Home) -> None:
    """Allowed, the saved rate stays until the next `scheduler.step()`, which follows the new schedule."""

    def build(total: int) -> tuple[torch.optim.Optimizer, LambdaLR, TrainState]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
        settings = {"total_steps": total, "warm_up": 2}
        return (
            optimizer,
            scheduler,
            TrainState(model=model, optimizer=optimizer, scheduler=scheduler, settings=settings),
        )

    optimizer, scheduler, state = build(10)
    for _ in range(10):
        optimizer.step()
        scheduler.step()
    save_once(home, state, step=10)

    optimizer, scheduler, state = build(15)
    with pytest.raises(SettingsChangedError, match="total_steps 10 -> 15") as caught:
        restore_once(home, state)
    assert caught.value.details["changes"] == {"total_steps": (10, 15)}

    optimizer, scheduler, state = build(15)
    assert restore_once(home, state, allow_changed=("total_steps",)) == 10
    assert [event.fields["what"] for event in home.events(kind="mismatch_allowed")] == [
        "settings total_steps: 10 -> 15"
    ]
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == [0.0, *(1 - step / 15 for step in range(11, 15))]
