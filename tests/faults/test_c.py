"""Async hazards: every public report of this kind, as a test named after its id."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from relight import Checkpointer, TrainState, stages
from relight.errors import SaveFailedError
from relight.testing.trainers import note
from tests.faults.keepers import be_slow, fail_files, hold_drains
from tests.running import Home, eventually, restore_once

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A file that holds up the writer while it exists."""
    path = tmp_path / "gate"
    path.touch()
    return path


def filled(value: float, num: int = 64) -> nn.Module:
    """Return a model whose every element is `value`."""
    model = nn.Linear(num, num)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def value_of(model: nn.Module) -> float:
    """Return the value that every element of `model` has."""
    values = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).unique()
    assert values.numel() == 1
    return values.item()


# -- C01 and C02 --------------------------------------------------------------------------------------------


def test_c01_what_changes_after_the_call_does_not_reach_the_checkpoint(home: Home, gate: Path) -> None:
    home.keeper(setup=hold_drains, gate=str(gate))
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    extra: dict[str, Any] = {"list": [1], "dict": {"a": 1}, "array": np.ones(3), "tensor": torch.ones(3)}

    def update() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()

    with Checkpointer(
        home.root(), TrainState(model=model, optimizer=optimizer, extra=extra), every=10**6
    ) as checkpointer:
        checkpointer.restore()
        for step in (1, 2):
            # The second save is overlapped: the optimizer's hook has been seen.
            update()
            expected = {name: value.clone() for name, value in model.state_dict().items()}
            moments = [entry["exp_avg"].clone() for entry in optimizer.state.values()]
            steps = [entry["step"].item() for entry in optimizer.state.values()]
            checkpointer.step(step)
            checkpointer.save(step)
        assert home.steps() == []
        for _ in range(3):
            update()
        extra["list"].append(2)
        extra["dict"]["a"] = 2
        extra["array"][:] = 2
        extra["tensor"].fill_(2)
        gate.unlink()
        checkpointer.wait(2)

    fresh = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    adam = torch.optim.Adam(fresh.parameters())
    mine: dict[str, Any] = {"list": [], "dict": {}, "array": np.zeros(3), "tensor": torch.zeros(3)}
    assert restore_once(home, TrainState(model=fresh, optimizer=adam, extra=mine)) == 2
    assert all(torch.equal(value, expected[name]) for name, value in fresh.state_dict().items())
    assert all(torch.equal(a["exp_avg"], b) for a, b in zip(adam.state.values(), moments, strict=True))
    assert [entry["step"].item() for entry in adam.state.values()] == steps
    assert (mine["list"], mine["dict"], mine["array"].tolist()) == ([1], {"a": 1}, [1, 1, 1])
    assert mine["tensor"].tolist() == [1, 1, 1]


def test_c02_step_and_metrics_are_those_of_the_call(home: Home, gate: Path) -> None:
    home.keeper(setup=hold_drains, gate=str(gate))
    metrics = {"loss": torch.tensor(1.0)}
    trainer = {"step": 10}
    with Checkpointer(home.root(), TrainState(model=filled(1.0), extra={"trainer": trainer})) as checkpointer:
        checkpointer.restore()
        checkpointer.save(trainer["step"], **metrics)
        trainer["step"] = 14
        metrics["loss"].fill_(9.0)
        gate.unlink()
        checkpointer.wait()
    (info,) = home.catalog().committed()
    assert (info.step, dict(info.metrics)) == (10, {"loss": 1.0})
    mine = {"step": 0}
    assert restore_once(home, TrainState(model=filled(0.0), extra={"trainer": mine})) == 10
    assert mine == {"step": 10}


# -- C03 ----------------------------------------------------------------------------------------------------


def c03_train(root: str, gate: str) -> None:
    """Save step 1 for good, begin step 2 while the writer is held up, and die."""
    model = filled(1.0)
    checkpointer = Checkpointer(root, TrainState(model=model), keep=1, every=10**6)
    checkpointer.restore()
    checkpointer.save(1)
    checkpointer.wait()
    Path(gate).touch()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2.0)
    sealed = threading.Event()
    stages.subscribe(lambda point: sealed.set() if point == "saver.sealed" else None)
    checkpointer.save(2)
    checkpointer.step(3)
    assert sealed.wait(20)
    note(sealed=2)
    signal.pause()


@pytest.mark.parametrize("loses_memory", [False, True], ids=["process-killed", "machine-lost"])
def test_c03_what_is_not_durable_is_neither_latest_nor_a_reason_to_delete(
    home: Home, loses_memory: bool
) -> None:
    """Killed processes alone lose nothing: the sealed snapshot of step 2 is still in memory."""
    gate = home.path / "gate"
    keeper = home.keeper(setup=hold_drains, gate=str(gate))
    (life,) = home.start(c03_train, root=home.root(), gate=str(gate))
    eventually(life.notes)
    (info,) = home.catalog().committed()
    assert info.step == 1
    assert home.catalog().verify(1, info.generation) == []
    life.end()
    keeper.end()
    if loses_memory:
        home.end_keeper()
    gate.unlink()
    model = filled(0.0)
    expected = 1 if loses_memory else 2
    assert restore_once(home, TrainState(model=model)) == expected
    assert value_of(model) == expected


# -- C04 ----------------------------------------------------------------------------------------------------


def c04_train(root: str, switch: str, policy: str, last: int, is_closed: bool) -> None:
    """Save at each step up to `last` with a writer that fails at step 2."""
    model = filled(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    state = TrainState(model=model, optimizer=optimizer)
    checkpointer = Checkpointer(root, state, every=1, on_save_error=policy)
    checkpointer.restore()
    for step in range(1, last + 1):
        if step == 2:
            Path(switch).write_text("0")
        optimizer.step()
        checkpointer.step(step)
        try:
            checkpointer.wait(step)
        except SaveFailedError:
            note(failed=step)
            Path(switch).unlink()
    note(num_failed=checkpointer.num_failed)
    if is_closed:
        checkpointer.close()


def test_c04_a_failed_save_is_counted_and_training_goes_on(home: Home) -> None:
    switch = home.path / "switch"
    home.keeper(setup=fail_files, switch=str(switch))
    (notes,) = home.live(
        c04_train, root=home.root(), switch=str(switch), policy="warn", last=4, is_closed=True
    )
    assert notes == [{"failed": 2}, {"num_failed": 1}]
    assert home.steps() == [4, 3, 1]
    assert {event.step for event in home.events(kind="save_failed")} == {2}


def test_c04_with_raise_the_next_call_raises(home: Home) -> None:
    switch = home.path / "switch"
    home.keeper(setup=fail_files, switch=str(switch))
    (life,) = home.start(
        c04_train, root=home.root(), switch=str(switch), policy="raise", last=4, is_closed=True
    )
    assert life.wait() == 1
    assert life.notes() == [{"failed": 2}]
    assert "SaveFailedError: step 2 could not be saved" in life.text()
    assert home.steps() == [1]


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "left-open"])
def test_c04_a_failed_last_save_gives_an_exit_code(home: Home, is_closed: bool) -> None:
    switch = home.path / "switch"
    home.keeper(setup=fail_files, switch=str(switch))
    (life,) = home.start(
        c04_train, root=home.root(), switch=str(switch), policy="warn", last=2, is_closed=is_closed
    )
    assert life.wait() == 1
    assert "step 2 is not durable" in life.text()
    assert home.steps() == [1]


# -- C05 ----------------------------------------------------------------------------------------------------


def c05_train(root: str, how: str, is_with: bool) -> int | None:
    """Begin a save, and end."""
    checkpointer = Checkpointer(root, TrainState(model=filled(1.0)), every=1)
    if is_with:
        with checkpointer:
            return c05_body(checkpointer, how)
    return c05_body(checkpointer, how)


def c05_body(checkpointer: Checkpointer, how: str) -> int | None:
    checkpointer.restore()
    checkpointer.step(1)
    if how == "raise":
        raise ValueError("the training's own error")
    if how == "exit":
        sys.exit(3)
    if how == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    return None


@pytest.mark.parametrize("is_with", [True, False], ids=["with", "without-with"])
@pytest.mark.parametrize(
    ("how", "code"), [("return", 0), ("raise", 1), ("exit", 3), ("terminate", -signal.SIGTERM)]
)
def test_c05_however_training_ends_its_last_save_is_stored(
    home: Home, how: str, code: int, is_with: bool
) -> None:
    home.keeper(setup=be_slow, seconds=0.3)
    (life,) = home.start(c05_train, root=home.root(), how=how, is_with=is_with)
    assert life.wait() == code
    if how == "raise":
        assert "ValueError: the training's own error" in life.text().splitlines()
        assert "During handling" not in life.text()
    # After SIGTERM the keeper stores the sealed snapshot without the trainer.
    steps = eventually(home.steps) if how == "terminate" else home.steps()
    assert steps == [1]


# -- C06 ----------------------------------------------------------------------------------------------------


def c06_train(root: str) -> None:
    """Fill the model with the number of the step, and ask for a save at each; rank 1 is twice as slow."""
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    model = filled(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Checkpointer(root, TrainState(model=model, optimizer=optimizer), every=1, keep=100) as checkpointer:
        checkpointer.restore()
        begun = 0
        for step in range(1, 25):
            time.sleep(0.01 * (1 + rank))
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, -1.0)
            optimizer.step()
            begun += checkpointer.step(step)
    # The last one is asked for again by `close`, if it was skipped.
    note(begun=begun, skipped=checkpointer.num_skipped, failed=checkpointer.num_failed)


def test_c06_saves_that_come_too_fast_are_skipped_by_all_ranks_and_counted(home: Home) -> None:
    """After a short wait for a slot the save is skipped, on every rank or on none."""
    home.keeper(setup=be_slow, seconds=0.7)
    first, second = home.live(c06_train, root=home.root(), world_size=2)
    assert first == second
    steps = home.steps()
    assert first[0]["begun"] == 24
    assert first[0]["failed"] == 0
    assert first[0]["skipped"] > 0
    assert len(steps) == first[0]["begun"] - first[0]["skipped"]
    assert steps[0] == 24
    for step in steps:
        assert c06_value(home, step) == step


def c06_value(home: Home, step: int) -> float:
    """Return the value that every stored element of a checkpoint has, read by the files alone."""
    import safetensors.torch

    folder = next(Path(home.root()).glob(f"step-{step:012d}.*"))
    tensors = [
        tensor.reshape(-1)
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in safetensors.torch.load_file(path).items()
        if name.startswith("model/")
    ]
    values = torch.cat(tensors)
    assert values.numel() == 2 * 64 * 65  # a plain model belongs to its rank: both store it
    assert values.unique().numel() == 1
    return values[0].item()
