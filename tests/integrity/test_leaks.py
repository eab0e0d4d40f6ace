"""Nothing is left behind: descriptors, threads, shared memory, processes; and nothing grows over many saves."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relight.testing.trainers import Trainers

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(120)]

MEBIBYTE = 2**20
NUM_SAVES = 250
KEEPER_BYTES = 64 * MEBIBYTE

Run = Callable[..., tuple[int, list[dict[str, Any]], str]]


@pytest.fixture
def run(trainers: Trainers, arenas: Path, tmp_path: Path) -> Run:
    count = iter(range(10))

    def live(num_saves: int, ending: str = "close") -> tuple[int, list[dict[str, Any]], str]:
        (life,) = trainers.start(
            "tests.integrity.filled:save_often",
            output=tmp_path / f"life-{next(count)}",
            kwargs={"root": str(tmp_path / "run"), "num_saves": num_saves, "ending": ending},
            env={"RELIGHT_ARENA_DIR": str(arenas), "RELIGHT_KEEPER_LINGER_SECONDS": "1"},
        )
        return life.wait(90), life.notes(), life.text()

    return live


def processes_of(arenas: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if str(arenas).encode() in command:
            found.append(command.decode(errors="replace"))
    return found


def files_of(arenas: Path) -> list[str]:
    return [str(path) for path in arenas.rglob("*") if not path.is_dir()]


def wait_until_gone(arenas: Path) -> None:
    deadline = time.monotonic() + 20
    while (processes_of(arenas) or files_of(arenas)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (processes_of(arenas), files_of(arenas)) == ([], [])


def test_nothing_grows_and_nothing_is_left_after_close(run: Run, arenas: Path) -> None:
    code, notes, text = run(NUM_SAVES)
    assert code == 0, text
    held = [note for note in notes if "trainer_bytes" in note]
    assert len(held) == NUM_SAVES // 50
    # Half a KiB a save would show; the allocator's own steps are larger than that at the start.
    assert held[-1]["trainer_bytes"] - held[0]["trainer_bytes"] < 2 * MEBIBYTE
    assert max(note["keeper_bytes"] for note in held) < KEEPER_BYTES
    assert held[-1]["keeper_bytes"] - held[0]["keeper_bytes"] < 4 * MEBIBYTE
    closed = notes[-1]
    assert (closed["opened"], closed["threads"]) == ([], ["MainThread"])
    wait_until_gone(arenas)


def test_nothing_is_left_after_a_crash_and_the_next_run(run: Run, arenas: Path) -> None:
    assert run(5, "kill")[0] == -9
    assert files_of(arenas)
    code, notes, text = run(5)
    assert code == 0, text
    assert (notes[0], notes[-1]["opened"], notes[-1]["threads"]) == ({"restored": 5}, [], ["MainThread"])
    wait_until_gone(arenas)
