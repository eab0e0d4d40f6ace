"""Kill processes at named points: plans that fire once, and keepers that cost a fork and can be killed like trainers.

A `Stage` is a folder that the test and its processes share. A test writes a `KillPlan` there; the process that reaches
the plan's point takes the plan away and sends SIGKILL to its victims, itself among them or not. Trainers come from
`relight.testing.trainers`; a process of theirs that runs `serve_keepers` stands in for the start of keepers.
"""

from __future__ import annotations

import ast
import errno
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from relight import stages

__all__ = ["FILE_CALL", "KillPlan", "Stage", "announced_points", "keeper_argv", "run_keeper", "serve_keepers"]

FILE_CALL = "files.call"
"""Point that a keeper of `run_keeper` announces before each file call that durability depends on."""

KEEPER = "keeper"

_REQUEST_MAX_BYTES = 65536

# Starts in milliseconds and ends with the code of what it stands for, which the server forks.
_STARTER = """
import json, os, socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect(sys.argv[1])
request = {"stage": sys.argv[2], "argv": sys.argv[3:], "output": os.readlink("/proc/self/fd/1")}
link.sendall(json.dumps(request).encode() + b"\\n")
sys.exit(json.loads(link.makefile().readline())["code"])
"""


class KillPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Who is killed, and when.

    Attributes:
        actor: process whose progress counts ("keeper", "rank-0").
        point: name of the point.
        occurrence: how often the actor passes the point after the plan was written, until it fires.
        victims: processes that get SIGKILL; the actor may be one of them, and is the last.
        is_repeated: stay after firing, for every process that becomes the actor.
        serial: makes equal plans different.
    """

    actor: str
    point: str
    occurrence: int = 1
    victims: tuple[str, ...]
    is_repeated: bool = False
    serial: int = 0


class Stage:
    """A folder with the plan, the process ids of the actors, and the switch that fills the keeper's disk.

    Args:
        folder: made if it is not there.
        arena: the run's arena folder, which says who the keeper is; None without a keeper.
    """

    def __init__(self, folder: Path, arena: Path | None = None) -> None:
        self.folder = folder
        self.arena = arena
        self._plan = folder / "plan.json"
        self._full = folder / "full"
        folder.mkdir(parents=True, exist_ok=True)
        if arena is not None:
            (folder / "arena").write_text(str(arena))
        elif (folder / "arena").exists():
            self.arena = Path((folder / "arena").read_text())

    def put(self, plan: KillPlan) -> None:
        """Write `plan`; one that has not fired is replaced."""
        temp = self.folder / "plan.new"
        temp.write_bytes(msgspec.json.encode(plan))
        os.replace(temp, self._plan)

    def clear(self) -> None:
        """Take a plan back."""
        self._plan.unlink(missing_ok=True)

    @property
    def is_armed(self) -> bool:
        """Whether there is a plan that has not fired."""
        return self._plan.exists()

    @property
    def is_full(self) -> bool:
        """Whether writes of the keeper meet a full disk."""
        return self._full.exists()

    def fill_disk(self, full: bool) -> None:  # noqa: FBT001
        """Let writes of keepers fail with ENOSPC from now on, or succeed again."""
        if full:
            self._full.touch()
        else:
            self._full.unlink(missing_ok=True)

    def enter(self, actor: str) -> None:
        """Make this process `actor`: it can be a victim, and passes points that plans speak of."""
        if actor != KEEPER:
            (self.folder / f"{actor}.pid").write_text(str(os.getpid()))
        counts = _Counter(self, actor)
        stages.subscribe(counts.passed)

    def pid_of(self, actor: str) -> int | None:
        """Return the process id of an actor, None if it never came or has left."""
        try:
            if actor != KEEPER:
                return int((self.folder / f"{actor}.pid").read_text())
            if self.arena is None:
                return None
            published = msgspec.json.decode((self.arena / "keeper.json").read_bytes())
            return int(published["pid"])
        except (FileNotFoundError, ValueError):
            return None

    def kill(self, actor: str) -> bool:
        """Send SIGKILL to `actor`; return False if it is not there."""
        pid = self.pid_of(actor)
        try:
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return pid is not None

    def read_plan(self) -> KillPlan | None:
        """Return the plan that has not fired, or None."""
        try:
            return msgspec.json.decode(self._plan.read_bytes(), type=KillPlan)
        except FileNotFoundError:
            return None

    def take(self) -> bool:
        """Take the plan away; of several takers one gets True."""
        try:
            self._plan.unlink()
        except FileNotFoundError:
            return False
        return True


class _Counter:
    def __init__(self, stage: Stage, actor: str) -> None:
        self._stage = stage
        self._actor = actor
        self._lock = threading.Lock()
        self._seen: KillPlan | None = None
        self._count = 0

    def passed(self, point: str) -> None:
        plan = self._stage.read_plan()
        if plan is None or (plan.actor, plan.point) != (self._actor, point):
            return
        with self._lock:
            if plan != self._seen:
                self._seen, self._count = plan, 0
            self._count += 1
            if self._count != plan.occurrence or not (plan.is_repeated or self._stage.take()):
                return
        for victim in plan.victims:
            if victim != self._actor:
                self._stage.kill(victim)
        if self._actor in plan.victims:
            os.kill(os.getpid(), signal.SIGKILL)


def run_keeper(argv: Sequence[str], stage: str | None = None) -> int:
    """Run a keeper with the given command line as actor "keeper" of the stage in that folder."""
    from relight.keeper.__main__ import main
    from relight.storage import local
    from relight.testing.files import LayeredFiles

    if stage is not None:
        place = Stage(Path(stage))

        class Announcing(LayeredFiles):
            def call(self, operation: str, *args: Any, **options: Any) -> Any:
                stages.reached(FILE_CALL)
                if place.is_full and operation in ("allocate", "write"):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return super().call(operation, *args, **options)

        setattr(local, "Files", Announcing)  # noqa: B010 - the seam that this process writes through
        place.enter(KEEPER)
    return main(argv)


def announced_points(source: Path) -> set[str]:
    """Return every point that the Python files below `source` announce through `relight.stages.reached`."""
    found = set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "reached"
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                found.add(str(node.args[0].value))
    return found


def keeper_argv(server: Path, stage: Stage) -> list[str]:
    """Return a command (`argv_prefix` of `ensure_keeper`) whose keeper is forked off `server` and runs `run_keeper`."""
    return [sys.executable, "-I", "-S", "-c", _STARTER, str(server), str(stage.folder)]


def serve_keepers(path: str) -> NoReturn:
    """Fork a keeper for each command of `keeper_argv` that connects to the socket at `path`; until killed."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path + ".new")
    listener.listen(64)
    links: dict[int, socket.socket] = {}
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    polls = selectors.DefaultSelector()
    polls.register(listener, selectors.EVENT_READ)
    polls.register(woken, selectors.EVENT_READ)
    os.rename(path + ".new", path)
    while True:
        for key, _ in polls.select():
            if key.fileobj is woken:
                woken.recv(4096)
                _tell_ended(links)
                continue
            link, _ = listener.accept()
            request = msgspec.json.decode(link.makefile("rb").readline(_REQUEST_MAX_BYTES))
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for one in (link, listener, woken, waker, *links.values()):
                    one.close()
                _live(request)
            links[pid] = link


def _tell_ended(links: dict[int, socket.socket]) -> None:
    while links:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with links.pop(pid) as link, suppress(BrokenPipeError):
            link.sendall(msgspec.json.encode({"code": os.waitstatus_to_exitcode(status)}) + b"\n")


def _live(request: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        os.setsid()
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        code = run_keeper(request["argv"], request["stage"])
    except BaseException:  # noqa: BLE001 - the end of a process; shown in the keeper's log
        traceback.print_exc()
    finally:
        os._exit(code)
