"""Lives of a training run for the demo: start torchrun, follow its log, kill a rank at a chosen instant.

A life is one torchrun with `--max-restarts 0`. Each logs to files of its own, so that what two lives say of the
same step can be compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from relight.errors import CopyError, RelightError
from relight.keeper.arena import ArenaSlot, SlotState, arena_dir, list_slots
from relight.keeper.client import KeeperClient
from relight.storage.tiers import tier_url

TRAIN_SCRIPT = Path(__file__).with_name("train_gpt.py")
NUM_RANKS = 2
POLL_SECONDS = 0.002
STARTUP_LIMIT_SECONDS = 60.0
STALL_LIMIT_SECONDS = 60.0
TORCHRUN_EXIT_LIMIT_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What one rank logged after one step."""

    step: int
    rank: int
    loss: float
    bits: str
    at: float
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A SIGKILL that was sent: to whom, when, after which finished step, and what it cut in two."""

    at: float
    rank: int
    after_step: int
    cut: str


@dataclass(slots=True, kw_only=True)
class Life:
    """One torchrun from start to end."""

    number: int
    started_at: float
    ended_at: float = 0.0
    exit_code: int = 0
    kill: Kill | None = None
    worker_started_at: float | None = None
    lines: list[Line] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run: its folder, and what every life of it is started with."""

    folder: Path
    steps: int
    every: int
    script_args: tuple[str, ...] = ()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def digest_file(self) -> Path:
        return self.folder / "weights.sha256"

    def log_file(self, life: int) -> Path:
        return self.folder / f"life-{life}.jsonl"

    def output_file(self, life: int) -> Path:
        return self.folder / f"life-{life}.txt"

    def arena(self) -> Path:
        return arena_dir(tier_url(self.checkpoints))

    def command(self, life: int) -> list[str]:
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(NUM_RANKS), "--max-restarts", "0"]
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        files = ["--log-file", str(self.log_file(life)), "--digest-file", str(self.digest_file)]
        saves = ["--checkpoints", str(self.checkpoints), "--every", str(self.every)]
        script = [str(TRAIN_SCRIPT), "--steps", str(self.steps), *saves, *files, *self.script_args]
        return [sys.executable, *torchrun, *rendezvous, *script]


Killer = Callable[[Run, Life], Kill | None]
"""Called again and again while a life runs; kills and returns the kill once its instant has come."""


def live(run: Run, number: int, killer: Killer | None, on_line: Callable[[Line], None]) -> Life:
    """Run one life to its end and return it; every process it started is gone then, but the run's keeper."""
    life = Life(number=number, started_at=time.time())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with run.output_file(number).open("wb") as output:
        torchrun = subprocess.Popen(
            run.command(number),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        _follow(run, life, torchrun, killer, on_line)
    finally:
        _end(torchrun, life)
    life.ended_at = time.time()
    life.exit_code = torchrun.returncode
    return life


def _follow(
    run: Run,
    life: Life,
    torchrun: subprocess.Popen[bytes],
    killer: Killer | None,
    on_line: Callable[[Line], None],
) -> None:
    reader = _read_lines(run.log_file(life.number))
    quiet_since = time.monotonic()
    while torchrun.poll() is None:
        new = next(reader)
        for line in new:
            if life.worker_started_at is None:
                life.worker_started_at = process_started_at(line.pid)
            life.lines.append(line)
            on_line(line)
        quiet_since = time.monotonic() if new else quiet_since
        if killer is not None and life.kill is None:
            life.kill = killer(run, life)
        limit = STALL_LIMIT_SECONDS if life.kill is None else TORCHRUN_EXIT_LIMIT_SECONDS
        if time.monotonic() - quiet_since > limit:
            return
        time.sleep(POLL_SECONDS)
    for line in next(reader):
        life.lines.append(line)
        on_line(line)


def _read_lines(path: Path) -> Iterator[list[Line]]:
    """Yield the lines that were added since the last time; a line that is not finished waits for its end."""
    rest = b""
    while not path.exists():
        yield []
    with path.open("rb") as file:
        while True:
            *whole, rest = (rest + file.read()).split(b"\n")
            yield [Line(**json.loads(line)) for line in whole]


def _end(torchrun: subprocess.Popen[bytes], life: Life) -> None:
    """Take down what is left of a life: torchrun first by request, then it and its workers by force."""
    if torchrun.poll() is not None:
        return
    workers = [*_children(torchrun.pid), *(line.pid for line in life.lines)]
    torchrun.terminate()
    try:
        torchrun.wait(timeout=5)
    except subprocess.TimeoutExpired:
        for pid in {torchrun.pid, *workers}:
            # A worker leads a session of its own; one that has ended is left alone.
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) == pid:
                    os.killpg(pid, signal.SIGKILL)
        torchrun.wait()


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def process_started_at(pid: int) -> float | None:
    """Return the wall-clock time at which the process began, or None where /proc does not tell."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        up_seconds = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return time.time() - (up_seconds - ticks / os.sysconf("SC_CLK_TCK"))


def kill_mid_step(rank: int, after_step: int) -> Killer:
    """Kill `rank` half a step after it finished `after_step`."""

    def killer(_run: Run, life: Life) -> Kill | None:
        mine = [line for line in life.lines if line.rank == rank]
        if len(mine) < 2 or mine[-1].step < after_step:
            return None
        step_seconds = (mine[-1].at - mine[0].at) / (len(mine) - 1)
        if time.time() < mine[-1].at + step_seconds / 2:
            return None
        _kill(mine[-1].pid)
        return Kill(at=time.time(), rank=rank, after_step=mine[-1].step, cut=f"step {mine[-1].step + 1}")

    return killer


def kill_mid_save(rank: int, from_step: int) -> Killer:
    """Kill `rank` while its snapshot of a step from `from_step` on is being made or stored.

    The slot is looked at again when the process is dead: what it says then was cut in two for good.
    """
    slots: dict[Path, ArenaSlot] = {}

    def killer(run: Run, life: Life) -> Kill | None:
        mine = [line for line in life.lines if line.rank == rank]
        if not mine or mine[-1].step < from_step:
            return None
        for slot in _open_slots(run, rank, slots):
            step = _step_in_flight(run, slot)
            if step is None or step < from_step:
                continue
            _kill(mine[-1].pid)
            killed_at = time.time()
            _wait_dead(mine[-1].pid)
            cut = _what_was_cut(run, slot, step)
            return Kill(at=killed_at, rank=rank, after_step=mine[-1].step, cut=cut)
        return None

    return killer


def _open_slots(run: Run, rank: int, slots: dict[Path, ArenaSlot]) -> list[ArenaSlot]:
    for path in list_slots(run.arena()):
        if path not in slots and path.name.startswith(f"rank-{rank:05d}."):
            with contextlib.suppress(CopyError):
                slots[path] = ArenaSlot.open(path)
    return list(slots.values())


def _step_in_flight(run: Run, slot: ArenaSlot) -> int | None:
    try:
        seen = slot.control()
    except CopyError:
        return None
    is_busy = seen.state == SlotState.WRITING or (
        seen.state != SlotState.FREE and not is_committed(run, seen.step)
    )
    return seen.step if is_busy else None


def _what_was_cut(run: Run, slot: ArenaSlot, step: int) -> str:
    """Say what a dead rank left unfinished of the save of `step`; empty if the checkpoint was complete already."""
    if is_committed(run, step):
        return ""
    with contextlib.suppress(CopyError):
        seen = slot.control()
        if seen.step == step and seen.state in (SlotState.SEALED, SlotState.DIGESTED):
            return f"the writing of step {step} to disk"
    return f"the snapshot of step {step}"


def is_committed(run: Run, step: int) -> bool:
    """Whether the checkpoint of `step` exists on disk."""
    return any(run.checkpoints.glob(f"step-{step:012d}.g*/manifest.json"))


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _wait_dead(pid: int) -> None:
    """Wait until the process runs no more; its parent may not have reaped it yet."""
    for _ in range(2000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state in "ZX":
            return
        time.sleep(0.001)


def sweep(run: Run) -> None:
    """Stop the run's keeper if it is still there, and remove the run's shared memory."""
    keeper = KeeperClient(run.arena(), timeout_seconds=5)
    with contextlib.suppress(RelightError):
        pid = keeper.health().pid
        keeper.stop(drain=False)
        _wait_dead(pid)
    keeper.close()
    shutil.rmtree(run.arena(), ignore_errors=True)
