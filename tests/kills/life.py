"""What a killed trainer does: trains a tiny model whose state after every step is known, and says what it sees."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

import relight
from relight.checkpoint import keeping
from relight.checkpoint.group import world
from relight.errors import SaveFailedError
from relight.keeper.process import ensure_keeper
from relight.testing.kills import Stage
from relight.testing.trainers import note

PLAN_SECONDS = 10.0
HANG_SECONDS = 25.0


class Tiny:
    """A training whose every step draws from the random generators, so that a wrong byte anywhere shows later."""

    def __init__(self) -> None:
        rank, _ = world()
        torch.manual_seed(7)
        random.seed(100 + rank)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 9),
            torch.nn.BatchNorm1d(9),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(9, 3),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=True)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, gamma=0.9)
        self.seen = torch.zeros(4, dtype=torch.float64)
        self.mine = relight.PerRank({"draws": 0.0})
        self.state = relight.TrainState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            extra={"seen": self.seen, "mine": self.mine},
            settings={"seed": 7},
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(8, 6)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.seen += loss.detach()
        self.mine.value["draws"] += random.random()

    def digest(self) -> str:
        sums = xxhash.xxh3_128()
        tensors = [*self.model.state_dict().values(), self.seen, torch.get_rng_state()]
        for kept in self.optimizer.state.values():
            tensors += kept.values()
        for tensor in tensors:
            sums.update(tensor.detach().contiguous().numpy().tobytes())
        sums.update(repr((self.scheduler.get_last_lr(), self.mine.value, random.getstate())).encode())
        return sums.hexdigest()


def golden(*, num_steps: int) -> None:
    """Note the digest after each step of the uninterrupted training."""
    tiny = Tiny()
    digests = [tiny.digest()]
    for _ in range(num_steps):
        tiny.step()
        digests.append(tiny.digest())
    note(digests=digests)


def train(
    *, stage: str, root: str, num_steps: int, starter: Sequence[str], ending: str, is_failing: bool
) -> None:
    """Restore, train `num_steps` steps with a save each, wait until the plan has fired, and save once more."""
    rank, _ = world()
    # A life that hangs shows where before it is ended.
    faulthandler.dump_traceback_later(HANG_SECONDS)
    place = Stage(Path(stage))
    keeping.ensure_keeper = partial(ensure_keeper, argv_prefix=list(starter))
    place.enter(f"rank-{rank}")
    tiny = Tiny()
    checkpointer = relight.Checkpointer(root, tiny.state, every=1, keep=2)
    restored = checkpointer.restore()
    note(restored=restored, digest=tiny.digest())
    step = restored
    for _ in range(num_steps):
        step = _train_step(tiny, checkpointer, step, is_failing)
    _waited(checkpointer, step, is_failing)
    deadline = time.monotonic() + PLAN_SECONDS
    while _is_armed(place) and time.monotonic() < deadline:
        # Read-backs take the newest first, so some points are passed less often than there are saves.
        step = _train_step(tiny, checkpointer, step, is_failing)
        _waited(checkpointer, step, is_failing)
    if place.is_full:
        place.fill_disk(False)
    step += 1
    tiny.step()
    checkpointer.save(step)
    _waited(checkpointer, step, False)
    if ending == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()
    note(closed=step)


def endure(*, stage: str, root: str, num_steps: int, starter: Sequence[str]) -> None:
    """Train while every keeper dies; then let them live, and save once more."""
    faulthandler.dump_traceback_later(HANG_SECONDS)
    place = Stage(Path(stage))
    keeping.ensure_keeper = partial(ensure_keeper, argv_prefix=list(starter))
    tiny = Tiny()
    checkpointer = relight.Checkpointer(root, tiny.state, every=2)
    step = checkpointer.restore()
    for _ in range(num_steps):
        step += 1
        tiny.step()
        checkpointer.step(step)
        time.sleep(0.02)
    note(endured=step)
    place.clear()
    # The start of a keeper that is under way may still fail.
    for _ in range(5):
        step += 1
        tiny.step()
        checkpointer.save(step)
        with suppress(SaveFailedError):
            checkpointer.wait(step, timeout=20)
            note(waited=step)
            break
    checkpointer.close()


def _is_armed(place: Stage) -> bool:
    """Return whether the plan is still there after what is under way had a moment to fire it; equal on all ranks."""
    deadline = time.monotonic() + 0.1
    while place.is_armed and time.monotonic() < deadline:
        time.sleep(0.005)
    armed = torch.tensor(int(place.is_armed))
    if world()[1] > 1:
        dist.all_reduce(armed, dist.ReduceOp.MAX)
    return bool(armed)


def _train_step(tiny: Tiny, checkpointer: Any, step: int, is_failing: bool) -> int:
    step += 1
    tiny.step()
    if step % 2:
        checkpointer.step(step)
    else:
        checkpointer.save(step)
        _waited(checkpointer, step, is_failing)
    return step


def _waited(checkpointer: Any, step: int, is_failing: bool) -> None:
    try:
        checkpointer.wait(step, timeout=20)
    except SaveFailedError as error:
        note(failed=step, why=str(error))
        # A save that is skipped since the machine is slow is no fault.
        if not is_failing and "skipped" not in str(error):
            raise
        return
    note(waited=step)
