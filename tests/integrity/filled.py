"""A train state whose every byte is a function of the step, so that a wrong one is seen whatever the step."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import torch

import relight
from relight.checkpoint.group import world
from relight.keeper.arena import arena_dir
from relight.manifest.catalog import Catalog
from relight.storage.backend import open_backend
from relight.testing.trainers import note

STEPS = (1, 2, 3)
# Each of two ranks stores a little more than one block.
BIG_ROWS = 9000
_POISON = -123456789


class Filled:
    """The state; `fill(step)` writes what belongs to a step, `poison()` what belongs to none."""

    def __init__(self, rank: int, *, big_rows: int = BIG_ROWS) -> None:
        self.rank = rank
        self.model = torch.nn.Module()
        self.tensors: dict[str, torch.Tensor] = {}
        shapes = {"big": (big_rows, 1000), "odd": (3, 7), "one": (1,), "tail": (129,)}
        for name, shape in shapes.items():
            parameter = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
            self.model.register_parameter(name, parameter)
            self.tensors[name] = parameter
        buffer = torch.zeros(5, dtype=torch.int32)
        self.model.register_buffer("own", buffer)
        self.tensors["own"] = buffer
        self.counts = torch.zeros(11, dtype=torch.int64)
        self.tensors["counts"] = self.counts
        self.state = relight.TrainState(model=self.model, extra={"counts": self.counts})

    def fill(self, step: int) -> None:
        for at, bits in enumerate(self._bits()):
            bits.copy_(torch.arange(bits.numel(), dtype=bits.dtype).mul_(2 * at + 3).add_(step * 1_000_003))

    def poison(self) -> None:
        for bits in self._bits():
            bits.fill_(_POISON)

    def is_filled(self, step: int) -> bool:
        """Whether every byte is what `fill(step)` writes."""
        other = _golden(self.rank, self.tensors["big"].shape[0], step)
        return all(torch.equal(a, b) for a, b in zip(self._bits(), other._bits(), strict=True))

    def is_clean(self) -> bool:
        """Whether every byte is poison, or what some step put there."""
        whole = [_golden(self.rank, self.tensors["big"].shape[0], step)._bits() for step in STEPS]
        for at, bits in enumerate(self._bits()):
            known = bits == _POISON
            for golden in whole:
                known |= bits == golden[at]
            if not bool(known.all()):
                return False
        return True

    def _bits(self) -> list[torch.Tensor]:
        kinds = {4: torch.int32, 8: torch.int64}
        with torch.no_grad():
            return [t.detach().reshape(-1).view(kinds[t.element_size()]) for t in self.tensors.values()]


_known: dict[tuple[int, int, int], Filled] = {}


def _golden(rank: int, big_rows: int, step: int) -> Filled:
    key = (rank, big_rows, step)
    if key not in _known:
        _known[key] = Filled(rank, big_rows=big_rows)
        _known[key].fill(step)
    return _known[key]


def write(*, root: str, big_rows: int = BIG_ROWS) -> None:
    """Save all steps, wait until they are verified, and die with the snapshots of the newest two in memory."""
    filled = Filled(world()[0], big_rows=big_rows)
    # Below DistributedDataParallel the ranks share out the bytes, so that a restore needs both images.
    next(p for p in filled.model.parameters() if p.is_floating_point()).requires_grad_(True)
    replica = torch.nn.parallel.DistributedDataParallel(filled.model)
    state = relight.TrainState(model=replica, extra={"counts": filled.counts})
    checkpointer = relight.Checkpointer(root, state, every=1)
    checkpointer.restore()
    for step in STEPS:
        filled.fill(step)
        checkpointer.save(step)
        checkpointer.wait(step, timeout=40)
    catalog = Catalog(open_backend(root))
    while not all(catalog.is_verified(step, 1) for step in STEPS):
        time.sleep(0.01)
    note(written=list(STEPS))
    os.kill(os.getpid(), signal.SIGKILL)


def outgrow(*, root: str, ballast: str, left_bytes: int, big_rows: int) -> None:
    """Save steps 1 and 2, fill the disk but for `left_bytes`, save 3, make room, save 4."""
    filled = Filled(world()[0], big_rows=big_rows)
    with relight.Checkpointer(root, filled.state, every=1000) as checkpointer:
        checkpointer.restore()
        for step in (1, 2):
            _save(filled, checkpointer, step)
        while not Catalog(open_backend(root)).is_verified(2, 1):
            time.sleep(0.01)
        _fill_disk(ballast, left_bytes)
        try:
            _save(filled, checkpointer, 3)
        except relight.errors.SaveFailedError as error:
            note(failed=3, why=str(error))
        # Training goes on all the same.
        assert not checkpointer.step(5)
        note(num_failed=checkpointer.num_failed)
        os.unlink(ballast)
        _save(filled, checkpointer, 6)
        note(saved=6)


def _save(filled: Filled, checkpointer: relight.Checkpointer, step: int) -> None:
    filled.fill(step)
    checkpointer.save(step)
    checkpointer.wait(step, timeout=30)


def _fill_disk(path: str, left_bytes: int) -> None:
    seen = os.statvfs(os.path.dirname(path))
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, seen.f_bavail * seen.f_frsize - left_bytes)


def open_files() -> list[str]:
    """Return what this process holds open, beside pipes of the test's server and the place that is being read."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if not target.startswith("pipe:") and target != f"/proc/{os.getpid()}/fd":
            found.append(target)
    return sorted(found)


def memory_bytes(pid: int | str = "self", kinds: tuple[str, ...] = ("RssAnon",)) -> int:
    """Return how much resident memory of these kinds a process has."""
    with open(f"/proc/{pid}/status") as file:
        lines = [line.split() for line in file]
    return sum(int(line[1]) * 1024 for line in lines if line[0].removesuffix(":") in kinds)


def save_often(*, root: str, num_saves: int, ending: str) -> None:
    """Train a little, save often, and note what this process and its keeper hold on the way and afterwards."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    before = open_files()
    checkpointer = relight.Checkpointer(
        root, relight.TrainState(model=model, optimizer=optimizer), every=1, keep=2
    )
    step = first = checkpointer.restore()
    note(restored=first)
    while step < first + num_saves:
        optimizer.zero_grad()
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        step += 1
        checkpointer.save(step, loss=0.5)
        if step % 50 == 0:
            checkpointer.wait()
            keeper = checkpointer_keeper(root)
            whole = ("RssAnon", "RssFile")
            note(step=step, trainer_bytes=memory_bytes(), keeper_bytes=memory_bytes(keeper, whole))
    checkpointer.wait()
    if ending == "kill":
        os.kill(checkpointer_keeper(root), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()
    threads = [thread.name for thread in threading.enumerate()]
    note(closed=step, opened=[name for name in open_files() if name not in before], threads=threads)


def checkpointer_keeper(root: str) -> int:
    """Return the process id of the keeper of the run at `root`."""
    published = json.loads((arena_dir(f"file://{root}") / "keeper.json").read_text())
    return int(published["pid"])
