"""One server of trainers and one of keepers for all chains, and the golden run."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relight.testing.trainers import Trainers
from tests.kills.chain import Chain

GOLDEN_STEPS = 700


@pytest.fixture(scope="session")
def trainers() -> Iterator[Trainers]:
    with Trainers(preload=["tests.kills.life", "relight.testing.kills"]) as server:
        yield server


@pytest.fixture(scope="session")
def nursery(trainers: Trainers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a server of keepers."""
    folder = Path(tempfile.mkdtemp(prefix="relight-keepers-"))
    path = folder / "sock"
    (server,) = trainers.start(
        "relight.testing.kills:serve_keepers", output=folder / "output", kwargs={"path": str(path)}
    )
    while not path.exists():
        time.sleep(0.01)
    yield path
    server.end()
    for left in folder.iterdir():
        left.unlink()
    folder.rmdir()


@pytest.fixture(scope="session")
def golden(trainers: Trainers, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Digests of the uninterrupted training by rank and step."""
    output = tmp_path_factory.mktemp("golden") / "life"
    lives = trainers.start(
        "tests.kills.life:golden", output=output, kwargs={"num_steps": GOLDEN_STEPS}, world_size=2
    )
    assert [life.wait() for life in lives] == [0, 0], lives[0].text()
    return [life.notes()[0]["digests"] for life in lives]


@pytest.fixture
def make_chain(trainers: Trainers, nursery: Path, golden: list[list[str]]) -> Iterator[Callable[..., Chain]]:
    made: list[Chain] = []

    def make(*, world_size: int = 1) -> Chain:
        made.append(Chain(trainers, nursery, golden, world_size=world_size))
        return made[-1]

    yield make
    for chain in made:
        chain.close()
