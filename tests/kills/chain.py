"""Lives of one run, one after the other, and what must hold after each."""

from __future__ import annotations

import itertools
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from relight.errors import MissingCopyError
from relight.keeper.arena import arena_dir
from relight.manifest.catalog import Catalog
from relight.manifest.verify import Problem
from relight.storage.backend import open_backend
from relight.testing.kills import KillPlan, Stage, keeper_argv
from relight.testing.trainers import Trainer, Trainers

LIFE_SECONDS = 40.0
VERIFY_SECONDS = 10.0


class Chain:
    """One run: its root, its arena, and what must be durable by now. `close` it.

    Attributes:
        bound: the newest step that is durable: a wait for it returned, or it was seen committed.
        num_kills: plans that fired, each checked.
    """

    def __init__(
        self, trainers: Trainers, nursery: Path, golden: Sequence[Sequence[str]], *, world_size: int = 1
    ) -> None:
        self._trainers = trainers
        self._golden = golden
        self._world_size = world_size
        self._serials = itertools.count(1)
        self._history: list[str] = []
        self.base = Path(tempfile.mkdtemp(prefix="relight-test-", dir="/dev/shm"))
        (self.base / "arenas").mkdir()
        self.root = self.base / "root"
        self.arena = arena_dir(f"file://{self.root}", base=self.base / "arenas")
        self.stage = Stage(self.base / "stage", self.arena)
        self._starter = keeper_argv(nursery, self.stage)
        self.catalog = Catalog(open_backend(str(self.root)))
        self.bound = 0
        self.num_kills = 0

    def close(self) -> None:
        """End the keeper and remove everything."""
        self.stage.kill("keeper")
        shutil.rmtree(self.base, ignore_errors=True)

    def kill(
        self,
        actor: str,
        point: str,
        occurrence: int,
        victims: Sequence[str],
        *,
        num_steps: int = 4,
        is_failing: bool = False,
    ) -> None:
        """Live a life that is killed as said, and check what is left; with `is_failing` its disk is full till then."""
        plan = KillPlan(
            actor=actor,
            point=point,
            occurrence=occurrence,
            victims=tuple(victims),
            serial=next(self._serials),
        )
        self._history.append(f"{actor} at {point}:{occurrence} kills {', '.join(victims)}")
        self.stage.fill_disk(is_failing)
        self.stage.put(plan)
        try:
            lives = self._start("train", num_steps=num_steps, ending="kill", is_failing=is_failing)
            self._end(lives)
            assert not self.stage.is_armed, f"the plan did not fire: {plan}"
            self.stage.fill_disk(False)
            self._check_reports(lives, is_trainer_killed=any(v.startswith("rank") for v in victims))
            self._check_stored()
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._describe()}") from error
        self.num_kills += 1

    def live(self) -> None:
        """Live a life to its end."""
        self._history.append("nobody is killed")
        lives = self._start("train", num_steps=4, ending="close", is_failing=False)
        self._end(lives)
        self._check_reports(lives, is_trainer_killed=False)
        self._check_stored()

    def endure(self, point: str) -> None:
        """Live a life in which every keeper dies at `point` until the last save."""
        self._history.append(f"every keeper dies at {point}")
        plan = KillPlan(
            actor="keeper", point=point, victims=("keeper",), is_repeated=True, serial=next(self._serials)
        )
        self.stage.put(plan)
        lives = self._start("endure", num_steps=12)
        self._end(lives)
        assert "waited" in lives[0].notes()[-1]
        self._check_stored()

    def _start(self, name: str, **kwargs: object) -> list[Trainer]:
        """Start the ranks of a life; `name` is a function of `tests.kills.life`."""
        given = {"stage": str(self.stage.folder), "root": str(self.root), "starter": self._starter, **kwargs}
        return self._trainers.start(
            f"tests.kills.life:{name}",
            output=self.base / f"life-{next(self._serials)}",
            kwargs=given,
            env={
                "RELIGHT_ARENA_DIR": str(self.base / "arenas"),
                "RELIGHT_KEEPER_LINGER_SECONDS": "30",
            },
            world_size=self._world_size,
        )

    def _end(self, lives: Sequence[Trainer]) -> None:
        """Wait until all ranks have ended; as a launcher does, end the others when one is lost."""
        deadline = time.monotonic() + LIFE_SECONDS
        left = list(lives)
        while left and time.monotonic() < deadline:
            for life in list(left):
                try:
                    code = life.wait(0.05 / len(left))
                except TimeoutError:
                    continue
                left.remove(life)
                assert code in (0, -signal.SIGKILL), f"code {code}: {life.text()}"
                for other in left if code else ():
                    other.end()
        for life in left:
            life.end()
        assert not left, f"a rank hangs: {left[0].text()}"

    def _check_reports(self, lives: Sequence[Trainer], *, is_trainer_killed: bool) -> None:
        """What each rank restored is what must be there, and is what training had at that step, bit for bit."""
        waited = self.bound
        for rank, life in enumerate(lives):
            notes = life.notes()
            # A rank may be killed before it has restored.
            assert notes or is_trainer_killed, life.text()
            for said in notes:
                waited = max(waited, said.get("waited", 0))
                if "restored" in said:
                    step = said["restored"]
                    assert step >= self.bound, f"rank {rank} restored {step}, but {self.bound} was durable"
                    assert said["digest"] == self._golden[rank][step], f"step {step} came back differently"
        self.bound = waited

    def _check_stored(self) -> None:
        """All that is committed is whole, and it holds what must be durable."""
        deadline = time.monotonic() + VERIFY_SECONDS
        # Retention may be removing what we look at; then it is gone the next time.
        while (problems := self._verify_all()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert problems == []
        newest = max((info.step for info in self.catalog.candidates()), default=0)
        assert newest >= self.bound, f"the newest candidate is {newest}, but {self.bound} was durable"
        self.bound = max(self.bound, newest)

    def _verify_all(self) -> list[Problem]:
        inventory = self.catalog.survey()
        problems = list(inventory.problems)
        for info in inventory.checkpoints:
            try:
                problems += self.catalog.verify(info.step, info.generation)
            except MissingCopyError:
                continue
        return problems

    def _describe(self) -> str:
        outputs = sorted(self.base.glob("life-*"), key=lambda path: path.stat().st_mtime)[-4:]
        logs = [path for path in (*outputs, self.arena / "keeper.log") if path.is_file()]
        stored = [str(path.relative_to(self.root)) for path in self.root.glob("step-*/*")]
        texts = [f"{path.name}: {path.read_text(errors='replace')[-2000:]}" for path in logs]
        return "\n".join([*self._history[-3:], f"durable: {self.bound}", *texts, *sorted(stored)])
