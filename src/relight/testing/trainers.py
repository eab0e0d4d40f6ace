"""Real training processes at the price of a fork: for tests that kill them.

One server process imports torch once and runs no operation, so that no thread exists when it forks. Each process it
forks starts as a fresh interpreter would (random generators unlike any other's, one torch thread, a process group of
its own), runs one function and may be killed at any instant. Only the hash seed of strings is the server's.

::

    with Trainers() as trainers:
        (life,) = trainers.start(train, kwargs={"root": "..."}, output=tmp_path / "life")
        life.wait()             # the exit code, negative for a signal
        life.notes()            # what the function reported by `note`
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Self

from relight import stages

__all__ = ["Trainer", "Trainers", "block_at", "kill_at", "note", "run_keeper"]

_PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.utils.data",
    "relight.checkpoint.checkpointer",
    "relight.keeper.node",
    "relight.keeper.server",
)
_START_SECONDS = 60.0
_WAIT_SECONDS = 50.0
_RANKS_SECONDS = 60.0
_PAUSE_SECONDS = 0.005
_NOTES = "RELIGHT_TEST_NOTES"
_STORE = "RELIGHT_TEST_STORE"


# -- in the forked process ----------------------------------------------------------------------------------


def note(**fields: Any) -> None:
    """Report `fields` (JSON values) to the test; they are kept whatever happens to this process afterwards."""
    line = json.dumps(fields).encode() + b"\n"
    descriptor = os.open(os.environ[_NOTES], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, line)
    os.close(descriptor)


def kill_at(point: str, *, nth: int = 1) -> None:
    """Kill this process by SIGKILL when it passes `point` (see `relight.stages`) for the `nth` time."""
    left = [nth]

    def observe(passed: str) -> None:
        if passed == point:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    stages.subscribe(observe)


def block_at(point: str, gate: str | os.PathLike[str]) -> None:
    """Make every thread of this process that passes `point` wait there for as long as the file `gate` exists."""

    def observe(passed: str) -> None:
        while passed == point and os.path.exists(gate):
            time.sleep(_PAUSE_SECONDS)

    stages.subscribe(observe)


def run_keeper(
    *,
    folder: str,
    root: str,
    linger_seconds: float,
    retry_seconds: float,
    setup: str | None,
    kwargs: dict[str, Any],
) -> int:
    """Be the keeper of the run at `root` after calling `setup` ("module:function"); returns its exit code."""
    from relight.keeper.__main__ import main

    if setup is not None:
        _function(setup)(**kwargs)
    options = ["--folder", folder, "--root", root, "--linger", str(linger_seconds)]
    return main([*options, "--retry", str(retry_seconds), "--foreground"])


def _function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found


def _become_fresh(request: dict[str, Any]) -> None:
    """Undo what is the server's: signals, streams, random generators."""
    import random

    import numpy as np
    import torch

    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ.update(request["env"])
    random.seed()
    np.random.seed()  # noqa: NPY002 - the global generator is what scripts use
    torch.set_num_threads(1)
    torch.manual_seed(random.SystemRandom().getrandbits(63))


def _join_ranks() -> None:
    from datetime import timedelta

    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        store = dist.FileStore(os.environ[_STORE], world_size)  # type: ignore[attr-defined]
        timeout = timedelta(seconds=_RANKS_SECONDS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def _live(request: dict[str, Any]) -> NoReturn:
    """Run the requested function and end as an interpreter would: atexit handlers, threads, exit code."""
    import atexit
    import threading

    code = 1
    try:
        _become_fresh(request)
        _join_ranks()
        result = _function(request["target"])(**request["kwargs"])
        code = result if isinstance(result, int) else 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - the end of a process: shown, and told by the exit code
        traceback.print_exc()
    finally:
        with suppress(Exception):
            # As in an interpreter's shutdown: threads first, then what was registered.
            threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
        atexit._run_exitfuncs()  # noqa: SLF001
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# -- the server ---------------------------------------------------------------------------------------------


def _serve() -> None:
    for name in _PRELOADED + tuple(sys.argv[1:]):
        importlib.import_module(name)
    num_threads = len(os.listdir("/proc/self/task"))
    wakeup, written = os.pipe()
    os.set_blocking(written, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    _say({"ready": os.getpid(), "num_threads": num_threads})
    children: set[int] = set()
    pending = b""
    while True:
        readable, _, _ = select.select([0, wakeup], [], [])
        if wakeup in readable:
            os.read(wakeup, 4096)
        if 0 in readable:
            data = os.read(0, 65536)
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    os.close(wakeup)
                    os.close(written)
                    _live(json.loads(line))
                children.add(pid)
                _say({"started": pid})
        _reap(children)
    for pid in children:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _reap(children: set[int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        children.discard(pid)
        _say({"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _say(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


# -- in the test --------------------------------------------------------------------------------------------


class Trainer:
    """One forked process, as the test sees it.

    Attributes:
        pid: of the process, which leads a group of the same number.
        output: file with what it printed.
    """

    def __init__(self, owner: Trainers, pid: int, output: Path) -> None:
        self._owner = owner
        self.pid = pid
        self.output = output

    def wait(self, timeout_seconds: float = _WAIT_SECONDS) -> int:
        """Return its exit code once it has ended, negative for a signal.

        Raises:
            TimeoutError: it runs on; shows what it printed.
        """
        code = self._owner.wait(self.pid, timeout_seconds)
        if code is None:
            raise TimeoutError(f"process {self.pid} runs on after {timeout_seconds} s:\n{self.text()}")
        return code

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill the process and all it started, if they are still there."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def notes(self) -> list[dict[str, Any]]:
        """Return what it reported so far."""
        path = notes_path(self.output)
        lines = path.read_bytes().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def text(self) -> str:
        """Return what it printed so far."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""


def notes_path(output: Path) -> Path:
    """Return the file of the notes of the process that prints to `output`."""
    return output.with_name(output.name + ".notes")


class Trainers:
    """The test's side of the server; start one per test session, it takes seconds.

    Args:
        preload: modules that the server imports beside torch and relight, such as "pytest".
    """

    def __init__(self, *, preload: Sequence[str] = ()) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._server = subprocess.Popen(
            [sys.executable, "-m", "relight.testing.trainers", *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
        )
        self._pending = b""
        self._ended: dict[int, int] = {}
        self._started: list[int] = []
        ready = self._read_until(lambda: None, _START_SECONDS)
        if ready is None or ready["num_threads"] != 1:
            self.close()
            raise RuntimeError(f"the server of trainers cannot fork safely: {ready}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(
        self,
        target: Callable[..., Any] | str,
        *,
        output: Path,
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        world_size: int = 1,
    ) -> list[Trainer]:
        """Fork `world_size` processes that call `target(**kwargs)`, joined in a gloo group when they are several.

        Args:
            target: a module-level function, or "module:function". An integer that it returns is the exit code.
            output: file for what is printed; ranks above 0 get ``.rank-N`` appended.
            kwargs: JSON values.
            env: environment variables on top of the server's.
            world_size: number of processes.
        """
        name = target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"
        store = output.with_name(f"{output.name}.store")
        trainers = []
        for rank in range(world_size):
            printed = output.with_name(f"{output.name}.rank-{rank}") if rank else output
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
            places = {_NOTES: str(notes_path(printed)), _STORE: str(store), "GLOO_SOCKET_IFNAME": "lo"}
            request = {"target": name, "kwargs": dict(kwargs or {}), "output": str(printed)}
            trainers.append(self._fork({**request, "env": {**ranks, **places, **(env or {})}}, printed))
        return trainers

    def wait(self, pid: int, timeout_seconds: float) -> int | None:
        """Return the exit code of `pid`, or None if it runs on after `timeout_seconds`."""
        self._read_until(lambda: pid in self._ended or None, timeout_seconds)
        return self._ended.get(pid)

    def close(self) -> None:
        """End the server and every process that it forked."""
        if self._server.stdin is not None:
            self._server.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._server.wait(5)
        self._server.kill()
        self._server.wait()
        if self._server.stdout is not None:
            self._server.stdout.close()

    def _fork(self, request: dict[str, Any], output: Path) -> Trainer:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        self._read_until(lambda: self._started or None, _START_SECONDS)
        if not self._started:
            raise RuntimeError("the server of trainers does not answer")
        return Trainer(self, self._started.pop(), output)

    def _read_until(self, claim: Callable[[], object], timeout_seconds: float) -> dict[str, Any] | None:
        """Take in messages until `claim` gives something, the server is ready, or the time is up."""
        assert self._server.stdout is not None
        deadline = time.monotonic() + timeout_seconds
        while claim() is None:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._server.stdout], [], [], left)[0]:
                return None
            data = os.read(self._server.stdout.fileno(), 65536)
            if not data:
                raise RuntimeError("the server of trainers has ended")
            *lines, self._pending = (self._pending + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "ready" in message:
                    return dict(message)
                if "started" in message:
                    self._started.append(message["started"])
                else:
                    self._ended[message["ended"]] = message["code"]
        return None


if __name__ == "__main__":
    # Functions are looked up in the importable module, not in this one.
    importlib.import_module("relight.testing.trainers")._serve()  # noqa: SLF001
