from __future__ import annotations

import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from relight import Checkpointer, TrainState
from relight.clock import ManualClock
from relight.errors import ConfigError, MissingCopyError, WaitTimeoutError
from relight.keeper.process import find_keeper
from relight.testing.trainers import note
from tests.faults.keepers import hold_drains
from tests.running import Home, eventually, restore_once, save_once

pytestmark = pytest.mark.multiprocess


def filled(value: float) -> nn.Module:
    model = nn.Linear(4, 4)
    fill(model, value)
    return model


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def test_a_fresh_run_starts_at_0_and_a_second_one_where_the_first_was(home: Home) -> None:
    home.keeper()
    model = filled(1.0)
    with Checkpointer(home.root(), TrainState(model=model), every=2) as checkpointer:
        assert checkpointer.restore() == 0
        assert [checkpointer.step(step, loss=1.0 / step) for step in range(1, 6)] == [False, True] * 2 + [
            False
        ]
    model = filled(0.0)
    assert restore_once(home, TrainState(model=model)) == 4
    assert model.weight.unique().tolist() == [1.0]
    (info,) = (info for info in home.catalog().committed() if info.step == 4)
    assert dict(info.metrics) == {"loss": 0.25}


def test_a_trainer_starts_a_keeper_by_itself(home: Home) -> None:
    with Checkpointer(home.root(), TrainState(model=filled(1.0))) as checkpointer:
        checkpointer.restore()
        checkpointer.save(1)
        checkpointer.wait()
        assert find_keeper(home.folder()) is not None
    assert home.steps() == [1]


def test_a_run_that_has_checkpoints_must_be_restored_first(home: Home) -> None:
    home.keeper()
    save_once(home, TrainState(model=filled(1.0)))
    with (
        Checkpointer(home.root(), TrainState(model=filled(1.0))) as checkpointer,
        pytest.raises(ConfigError, match=r"restore\(\) was not called"),
    ):
        checkpointer.step(1)


def test_restore_comes_before_the_first_step(home: Home) -> None:
    home.keeper()
    with Checkpointer(home.root(), TrainState(model=filled(1.0))) as checkpointer:
        checkpointer.step(1)
        with pytest.raises(ConfigError, match="before the first"):
            checkpointer.restore()


def test_a_step_that_is_not_there_cannot_be_restored(home: Home) -> None:
    home.keeper()
    save_once(home, TrainState(model=filled(1.0)), step=3)
    with (
        Checkpointer(home.root(), TrainState(model=filled(1.0))) as checkpointer,
        pytest.raises(MissingCopyError, match="step 2"),
    ):
        checkpointer.restore(2)
    home.keeper("new")
    with Checkpointer(home.root("new"), TrainState(model=filled(1.0))) as checkpointer:
        with pytest.raises(MissingCopyError, match=r"step 7 in .*run"):
            checkpointer.restore(7, source=home.root())
        with pytest.raises(MissingCopyError, match="elsewhere"):
            checkpointer.restore(source=home.root("elsewhere"))


@pytest.mark.parametrize("step", [-1, 1.0, True, "3"])
def test_a_step_is_a_count(home: Home, step: object) -> None:
    home.keeper()
    with (
        Checkpointer(home.root(), TrainState(model=filled(1.0))) as checkpointer,
        pytest.raises(ConfigError, match="number of optimizer steps"),
    ):
        checkpointer.step(step)


def test_steps_after_a_restored_older_step_are_left_behind(home: Home) -> None:
    home.keeper()
    model = filled(0.0)
    with Checkpointer(home.root(), TrainState(model=model), every=1, keep=10) as checkpointer:
        checkpointer.restore()
        for step in (1, 2, 3):
            fill(model, step)
            checkpointer.save(step)
    with Checkpointer(home.root(), TrainState(model=model), every=10, keep=10) as checkpointer:
        assert checkpointer.restore(1) == 1
        fill(model, 20)
        checkpointer.save(2)
    model = filled(0.0)
    assert restore_once(home, TrainState(model=model)) == 2
    assert model.weight.unique().tolist() == [20]


def test_a_fork_goes_on_from_its_own_checkpoints_once_it_has_some(home: Home) -> None:
    home.keeper("old")
    home.keeper("new")
    save_once(home, TrainState(model=filled(5.0)), step=5, name="old")
    model = filled(0.0)
    with Checkpointer(home.root("new"), TrainState(model=model)) as checkpointer:
        assert checkpointer.restore(source=home.root("old")) == 5
        fill(model, 6)
        checkpointer.save(6)
    with Checkpointer(home.root("new"), TrainState(model=model)) as checkpointer:
        assert checkpointer.restore(source=home.root("old")) == 6
    (generation, *_) = home.catalog("new").generations()
    assert (generation.parent.step, generation.parent.source) == (5, home.root("old"))


@pytest.mark.parametrize(("better", "best"), [("min", 3), ("max", 2)])
def test_the_best_checkpoint_stays_beside_the_newest(home: Home, better: str, best: int) -> None:
    home.keeper()
    losses = {1: 0.5, 2: 0.9, 3: 0.1, 4: 0.4, 5: float("nan"), 6: 0.3}
    with Checkpointer(
        home.root(), TrainState(model=filled(1.0)), every=10, keep=1, keep_best=("loss", better)
    ) as checkpointer:
        checkpointer.restore()
        for step, loss in losses.items():
            checkpointer.save(step, loss=torch.tensor(loss))
            checkpointer.wait()
            # Only a verified checkpoint can be the best one.
            eventually(lambda step=step: home.catalog().is_verified(step, 1))
    assert eventually(lambda: len(found := home.steps()) == 2 and found) == [6, best]


def test_waiting_ends_at_the_timeout_and_the_step_becomes_durable_later(home: Home) -> None:
    gate = home.path / "gate"
    gate.touch()
    home.keeper(setup=hold_drains, gate=str(gate))
    with Checkpointer(home.root(), TrainState(model=filled(1.0))) as checkpointer:
        checkpointer.restore()
        checkpointer.save(1)
        with pytest.raises(WaitTimeoutError):
            checkpointer.wait(timeout=0.05)
        gate.unlink()
        checkpointer.wait(1)
    assert home.steps() == [1]


def test_a_killed_keeper_is_started_again_and_nothing_is_lost(home: Home) -> None:
    keeper = home.keeper()
    model = filled(0.0)
    with Checkpointer(home.root(), TrainState(model=model), every=10) as checkpointer:
        checkpointer.restore()
        for step in (1, 2, 3):
            if step == 2:
                keeper.end()
                keeper.wait()
            fill(model, step)
            checkpointer.save(step)
            checkpointer.wait()
    assert home.steps() == [3, 2, 1]
    assert home.events(kind="keeper_lost")


# -- when -----------------------------------------------------------------------------------------------------


def due_steps(home: Home, every: int | str, step_seconds: float, num: int) -> list[int]:
    clock = ManualClock()
    due = []
    with Checkpointer(home.root(), TrainState(model=filled(1.0)), every=every, clock=clock) as checkpointer:
        checkpointer.restore()
        for step in range(1, num + 1):
            clock.advance(step_seconds)
            if checkpointer.step(step):
                due.append(step)
                checkpointer.wait(step)
            # The decision on the next save is made in the background.
            time.sleep(0.002)
    return due


def test_a_duration_is_kept_whatever_a_step_takes(home: Home) -> None:
    home.keeper()
    due = due_steps(home, "10m", 60.0, 45)
    assert len(due) == 4
    assert all(9 <= later - earlier <= 11 for earlier, later in pairwise(due))


def test_auto_saves_at_once_and_then_at_most_each_half_hour(home: Home) -> None:
    home.keeper()
    due = due_steps(home, "auto", 300.0, 30)
    assert due[0] <= 6
    assert len(due) >= 3
    assert all(later - earlier >= 2 for earlier, later in pairwise(due))
    assert all((later - earlier) * 300 <= 1800 + 600 for earlier, later in pairwise(due))


@pytest.mark.parametrize("every", [0, -1, "soon", 1.5, True])
def test_a_cadence_that_makes_no_sense_is_refused(home: Home, every: object) -> None:
    with pytest.raises(ConfigError):
        Checkpointer(home.root(), TrainState(model=filled(1.0)), every=every)


# -- saves asked for from outside ----------------------------------------------------------------------------


def asked_train(root: str, how: str, num: int) -> None:
    """Train until a save that was asked for is durable."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = filled(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handled: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: handled.append(1))
    with Checkpointer(root, TrainState(model=model, optimizer=optimizer), every=10**6) as checkpointer:
        checkpointer.restore()
        for step in range(1, 10**4):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, -1.0)
            if dist.is_initialized():
                dist.all_reduce(torch.zeros(1))
            optimizer.step()
            if step == 5 and rank == 0 and how == "signal":
                os.kill(os.getpid(), signal.SIGUSR1)
            if step == 5:
                note(ready=True)
            if checkpointer.step(step):
                note(saved=step)
                num -= 1
                if num == 0:
                    break
            time.sleep(0.002 * (1 + rank))
    note(handled=len(handled))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("how", ["signal", "request"])
def test_a_save_asked_for_from_outside_is_one_step_of_all_ranks(
    home: Home, how: str, world_size: int
) -> None:
    home.keeper()
    lives = home.start(asked_train, world_size=world_size, root=home.root(), how=how, num=1)
    if how == "request":
        eventually(lambda: all(life.notes() for life in lives))
        with home.client() as client:
            assert client.request_save() == 1
    assert [life.wait() for life in lives] == [0] * world_size, lives[0].text()
    saved = {entry["saved"] for life in lives for entry in life.notes() if "saved" in entry}
    assert len(saved) == 1
    assert home.steps() == sorted(saved)
    # The user's own handler ran too.
    assert lives[0].notes()[-1] == {"handled": int(how == "signal")}


def test_requests_of_an_earlier_life_are_not_obeyed_again(home: Home) -> None:
    home.keeper()
    with home.client() as client:
        client.request_save()
    with Checkpointer(home.root(), TrainState(model=filled(1.0)), every=10**6) as checkpointer:
        checkpointer.restore()
        assert [checkpointer.step(step) for step in range(1, 4)] == [False] * 3


# -- leaving ---------------------------------------------------------------------------------------------------


def test_nothing_of_a_run_stays_in_memory_after_a_clean_end(home: Home) -> None:
    home.linger_seconds = 0.0
    keeper = home.keeper()
    with Checkpointer(home.root(), TrainState(model=filled(1.0))) as checkpointer:
        checkpointer.restore()
        checkpointer.save(1)
    assert keeper.wait() == 0
    assert list(home.arena.glob("relight-*/*/*")) == []


def test_closing_twice_is_once_and_a_closed_checkpointer_refuses_work(home: Home) -> None:
    home.keeper()
    checkpointer = Checkpointer(home.root(), TrainState(model=filled(1.0)))
    checkpointer.restore()
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(ConfigError, match="closed"):
        checkpointer.step(1)
    assert signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, signal.SIG_IGN)


def test_the_stall_of_a_save_is_measured(home: Home) -> None:
    home.keeper()
    with Checkpointer(home.root(), TrainState(model=filled(1.0))) as checkpointer:
        checkpointer.restore()
        checkpointer.save(1)
        checkpointer.wait()
        assert 0 < checkpointer.last_stall_seconds < 5
    (event,) = home.events(kind="save_sealed")
    assert event.fields["stall_seconds"] > 0
    assert Path(home.root()).is_dir()


def test_wait_takes_a_tier_as_the_user_wrote_it(home: Home) -> None:
    root = home.root()
    with Checkpointer(root, TrainState(model=filled(1.0))) as checkpointer:
        checkpointer.restore()
        checkpointer.save(1)
        checkpointer.wait(1, tier="ram", timeout=30)
        checkpointer.wait(1, tier=str(root), timeout=30)
        with pytest.raises(ConfigError, match="none of this run's"):
            checkpointer.wait(1, tier=f"{root}-elsewhere", timeout=30)
