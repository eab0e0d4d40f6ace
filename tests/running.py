"""What tests of whole runs share: a private arena, roots, keepers, training processes, and what they left behind."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

import relight
from relight.events import Event, read_events
from relight.keeper.arena import arena_dir
from relight.keeper.client import KeeperClient
from relight.keeper.process import KeeperFile, find_keeper
from relight.manifest.catalog import Catalog
from relight.storage.backend import open_backend
from relight.storage.tiers import tier_url
from relight.testing.trainers import Trainer, Trainers

__all__ = ["Home", "home"]


@functools.cache
def trainers() -> Trainers:
    """Return the session's server; it ends with the session."""
    server = Trainers(preload=("pytest", "tests.running", "torchdata.stateful_dataloader"))
    atexit.register(server.close)
    return server


class Home:
    """One test's place on the machine. Every process that it started, and every keeper, is gone after `close`."""

    def __init__(self, path: Path, arena: Path) -> None:
        self.path = path
        self.lives_path = path
        self.arena = arena
        self.linger_seconds = 30.0
        self._lives: list[Trainer] = []

    def root(self, name: str = "run") -> str:
        """Return a run's root."""
        return str(self.path / name)

    def folder(self, name: str = "run", arena: Path | None = None) -> Path:
        """Return the arena folder of a run, on another node if `arena` is given."""
        return arena_dir(tier_url(self.root(name)), base=arena or self.arena)

    def keeper(
        self,
        name: str = "run",
        *,
        setup: Callable[..., Any] | None = None,
        retry_seconds: float = 0.2,
        arena: Path | None = None,
        **kwargs: Any,
    ) -> Trainer:
        """Start the keeper of a run by a fork (cheaper than what a trainer starts); `setup` runs in it first."""
        life = self.start(
            "relight.testing.trainers:run_keeper",
            folder=str(self.folder(name, arena)),
            root=tier_url(self.root(name)),
            linger_seconds=self.linger_seconds,
            retry_seconds=retry_seconds,
            setup=f"{setup.__module__}:{setup.__qualname__}" if setup is not None else None,
            kwargs=kwargs,
        )[0]
        eventually(lambda: find_keeper(self.folder(name, arena)))
        return life

    def start(
        self,
        target: Callable[..., Any] | str,
        *,
        world_size: int = 1,
        env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[Trainer]:
        """Start a process per rank that calls `target(**kwargs)`."""
        output = self.lives_path / f"life-{len(self._lives)}"
        places = {
            "RELIGHT_ARENA_DIR": str(self.arena),
            "RELIGHT_KEEPER_LINGER_SECONDS": str(self.linger_seconds),
        }
        lives = trainers().start(
            target, output=output, kwargs=kwargs, env={**places, **(env or {})}, world_size=world_size
        )
        self._lives += lives
        return lives

    def live(
        self,
        target: Callable[..., Any],
        *,
        world_size: int = 1,
        dies: bool = False,
        env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[list[dict[str, Any]]]:
        """Run `target` on each rank to its end and return the notes of each rank.

        With `dies` some rank must end by SIGKILL; the others are killed then.
        """
        lives = self.start(target, world_size=world_size, env=env, **kwargs)
        if dies:
            eventually(lambda: any(life.wait_now() is not None for life in _Polled.of(lives)))
            for life in lives:
                life.end()
            codes = [life.wait() for life in lives]
            assert -signal.SIGKILL in codes, "\n".join(life.text() for life in lives)
        else:
            codes = [life.wait() for life in lives]
            assert codes == [0] * world_size, "\n".join(life.text() for life in lives)
        return [life.notes() for life in lives]

    def catalog(self, name: str = "run") -> Catalog:
        """Return the catalog of a run."""
        return Catalog(open_backend(self.root(name)))

    def steps(self, name: str = "run") -> list[int]:
        """Return the committed steps, newest first."""
        return [info.step for info in self.catalog(name).committed()]

    def events(self, name: str = "run", kind: str | None = None) -> list[Event]:
        """Return what the processes of a run recorded, in the order of time."""
        found = sorted(read_events(Path(self.root(name)) / "events"), key=lambda event: event.at)
        return [event for event in found if kind is None or event.kind == kind]

    @contextmanager
    def client(self, name: str = "run") -> Iterator[KeeperClient]:
        """Give a client of the run's keeper."""
        client = KeeperClient(self.folder(name))
        try:
            yield client
        finally:
            client.close()

    def end_keeper(self, name: str = "run") -> None:
        """Kill the keeper of a run, and remove its slots: what a reboot does."""
        self._kill_keeper(self.folder(name))
        shutil.rmtree(self.folder(name))

    def kill_keeper(self, name: str = "run") -> None:
        """Kill the keeper of a run; its slots stay."""
        self._kill_keeper(self.folder(name))

    def close(self) -> None:
        """End everything."""
        for life in self._lives:
            life.end()
        for life in self._lives:
            life.wait()
        for folder in self.arena.glob("**/relight-*/*"):
            self._kill_keeper(folder)

    def _kill_keeper(self, folder: Path) -> None:
        with suppress(FileNotFoundError, ProcessLookupError):
            pid = msgspec.json.decode((folder / "keeper.json").read_bytes(), type=KeeperFile).pid
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid))


class _Polled:
    def __init__(self, life: Trainer) -> None:
        self._life = life

    @classmethod
    def of(cls, lives: list[Trainer]) -> list[_Polled]:
        return [cls(life) for life in lives]

    def wait_now(self) -> int | None:
        try:
            return self._life.wait(0.005)
        except TimeoutError:
            return None


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return True


def eventually(claim: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Wait until a claim holds, and return what it gave."""
    deadline = time.monotonic() + seconds
    while True:
        seen = claim()
        if seen or time.monotonic() > deadline:
            assert seen
            return seen
        time.sleep(0.005)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """A place of this test's own; in-process checkpointers use its arena too."""
    arena = Path(tempfile.mkdtemp(prefix="relight-test-", dir="/dev/shm"))
    monkeypatch.setenv("RELIGHT_ARENA_DIR", str(arena))
    monkeypatch.setenv("RELIGHT_KEEPER_LINGER_SECONDS", "30")
    place = Home(tmp_path, arena)
    yield place
    place.close()
    shutil.rmtree(arena, ignore_errors=True)


def save_once(
    home: Home, state: relight.TrainState, step: int = 1, name: str = "run", **options: Any
) -> None:
    """Save `state` as `step` of a run and wait until it is durable."""
    with relight.Checkpointer(home.root(name), state, every=10**9, **options) as checkpointer:
        checkpointer.restore()
        checkpointer.save(step)
        checkpointer.wait(step)


def restore_once(
    home: Home, state: relight.TrainState, step: int | None = None, name: str = "run", **options: Any
) -> int:
    """Restore `state` and return the step."""
    with relight.Checkpointer(home.root(name), state, **options) as checkpointer:
        return checkpointer.restore(step)
