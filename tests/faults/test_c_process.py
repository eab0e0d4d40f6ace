"""Async hazards: the reports about memory and forks."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from relight import Checkpointer, TrainState, stages
from relight.errors import MemoryBudgetError
from relight.testing.trainers import note
from tests.running import Home

pytestmark = pytest.mark.multiprocess


def filled(value: float, num: int = 64) -> nn.Module:
    """Return a model whose every element is `value`."""
    model = nn.Linear(num, num)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


# -- C07 ----------------------------------------------------------------------------------------------------


def c07_train(root: str, mode: str, num_bytes: int) -> None:
    """Save often, and tell how much memory of its own the process takes."""
    model = nn.Linear(1024, num_bytes // 4096, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Checkpointer(
        root, TrainState(model=model, optimizer=optimizer), every=1, keep=1, mode=mode
    ) as checkpointer:
        checkpointer.restore()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for step in range(1, 21):
            optimizer.step()
            checkpointer.save(step)
            checkpointer.wait()
            note(step=step, anonymous_bytes=own_bytes())


def own_bytes() -> int:
    """Return the memory of this process that is not shared."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


@pytest.mark.parametrize("mode", ["overlap", "blocking"])
def test_c07_memory_does_not_grow_from_save_to_save(home: Home, mode: str) -> None:
    num_bytes = 8 * 2**20
    home.keeper()
    (notes,) = home.live(c07_train, root=home.root(), mode=mode, num_bytes=num_bytes)
    used = {entry["step"]: entry["anonymous_bytes"] for entry in notes}
    assert used[20] - used[3] < 0.05 * num_bytes
    slots = [path.stat().st_size for path in home.folder().glob("rank-*")]
    assert len(slots) == 2
    assert sum(slots) < 2 * (num_bytes + 2**18)


def test_c07_a_budget_that_is_too_small_is_refused_before_the_first_save(home: Home) -> None:
    """The message says how much is needed; saving in waves within a smaller budget is not offered."""
    home.keeper()
    model = filled(1.0, num=512)
    checkpointer = Checkpointer(home.root(), TrainState(model=model), every=10, ram_budget="1MiB")
    checkpointer.restore()
    with pytest.raises(MemoryBudgetError) as caught:
        checkpointer.save(1)
    needed = caught.value.details["needed_bytes"]
    assert 2 * 512 * 513 * 4 <= needed < 2 * (512 * 513 * 4 + 2**14)
    assert caught.value.details["budget_bytes"] == 2**20
    assert "need 2" in str(caught.value)
    assert not list(home.folder().glob("rank-*"))
    with pytest.raises(MemoryBudgetError):
        checkpointer.close()


# -- C08 ----------------------------------------------------------------------------------------------------


def c08_train(root: str) -> None:
    """Fork loader workers while the snapshot thread holds a lock in the middle of a save."""
    lock = threading.Lock()
    is_busy, may_go = threading.Event(), threading.Event()

    def hold(point: str) -> None:
        if point == "snapshot.copied":
            with lock:
                is_busy.set()
                may_go.wait(20)

    stages.subscribe(hold)
    model = filled(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = TensorDataset(torch.arange(8))
    with Checkpointer(root, TrainState(model=model, optimizer=optimizer), every=1) as checkpointer:
        checkpointer.restore()
        for step in range(1, 21):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            may_go.set()
            optimizer.step()
            may_go.clear()
            is_busy.clear()
            if step > 1:
                checkpointer.save(step)
                assert is_busy.wait(20)
                assert lock.locked()
            else:
                may_go.set()
                checkpointer.save(step)
            (batch,) = next(
                iter(DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork"))
            )
            note(step=step, batch=batch.tolist())
        may_go.set()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    note(children=[Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in children])


def test_c08_loader_workers_may_be_forked_during_a_save(home: Home) -> None:
    home.keeper()
    (notes,) = home.live(c08_train, root=home.root())
    assert notes[:-1] == [{"step": step, "batch": [0, 1, 2, 3]} for step in range(1, 21)]
    assert notes[-1] == {"children": []}
    assert home.steps()[0] == 20
