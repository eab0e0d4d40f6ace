"""The verbs that talk to a keeper, against a real one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from relight.cli import main
from relight.keeper.arena import ArenaSlot, arena_dir, slot_path
from relight.keeper.client import KeeperClient
from relight.keeper.messages import AttachRequest, TierPlan
from relight.keeper.process import ensure_keeper, find_keeper
from relight.manifest.catalog import Catalog
from relight.storage.backend import open_backend
from relight.storage.tiers import tier_url
from relight.testing.checkpoints import sample_image, sample_record

pytestmark = pytest.mark.multiprocess

IMAGE = sample_image({"model/w": ("U8", (4096,), bytes(4096))})


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("RELIGHT_ARENA_DIR", str(tmp_path / "arena"))
    (tmp_path / "arena").mkdir()
    return str(tmp_path / "run")


@pytest.fixture
def keeper(root: str) -> Iterator[KeeperClient]:
    url = tier_url(root)
    client = ensure_keeper(arena_dir(url), url, linger_seconds=30.0)
    pid = client.health().pid
    yield client
    client.close()
    still = find_keeper(client.folder)
    if still is not None:
        still.stop(drain=False)
        still.close()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def wait_until(holds) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "waited for 20 s"
        time.sleep(0.02)


def attach(keeper: KeeperClient, root: str) -> None:
    tiers = (TierPlan(url="ram"), TierPlan(url=tier_url(root)))
    keeper.attach(AttachRequest(rank=0, world_size=1, pid=os.getpid(), tiers=tiers, generation=1))


def seal(folder: Path, step: int, run: str) -> None:
    path = slot_path(folder, 0, 0)
    with ArenaSlot.create(path, len(IMAGE), owner_pid=os.getpid()) as slot:
        slot.begin(step=step, generation=1, rank=0, world_size=1, image_bytes=len(IMAGE))
        slot.image[: len(IMAGE)] = IMAGE
        draft = sample_record(IMAGE, step=step, run=run).draft
        slot.seal(msgspec.json.encode(draft), sealed_at=time.time())


def test_save_asks_the_training_through_its_keeper(root: str, keeper: KeeperClient, capsys) -> None:
    assert main(["save", root]) == 3
    assert "no training is attached" in capsys.readouterr().err
    attach(keeper, root)
    assert main(["save", root]) == 0
    assert "asked for a save at the next step" in capsys.readouterr().out
    assert int.from_bytes(keeper.requests_path.read_bytes()[:8], "little") == 1


def test_status_and_ls_show_what_memory_holds(root: str, keeper: KeeperClient, capsys) -> None:
    run = Catalog(open_backend(root)).claim(None).run
    attach(keeper, root)
    keeper.acquire(0, timeout_seconds=5.0)
    seal(keeper.folder, 7, run)
    keeper.seal(0, 0)
    assert keeper.wait(7, 1, timeout_seconds=20.0).state in ("committed", "verified")
    assert main(["keeper", "status", root, "--json"]) == 0
    [status] = json.loads(capsys.readouterr().out)
    assert (status["health"]["root"], status["slots"][0]["step"]) == (tier_url(root), 7)
    assert main(["keeper", "status"]) == 0
    shown = capsys.readouterr().out
    assert f"{tier_url(root)}: keeper {status['health']['pid']}, 1 of 1 ranks alive" in shown
    assert main(["ls", root, "--json"]) == 0
    [listed] = json.loads(capsys.readouterr().out)
    assert listed["tiers"] == ["ram", tier_url(root)]


def test_stop_ends_the_keeper_and_clean_frees_what_it_held(root: str, keeper: KeeperClient, capsys) -> None:
    assert main(["keeper", "clean", root]) == 0
    assert "its keeper is running" in capsys.readouterr().err
    pid = keeper.health().pid
    assert main(["keeper", "stop", root, "--no-drain"]) == 0
    assert f"keeper {pid} stops" in capsys.readouterr().out
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    folder = arena_dir(tier_url(root))
    seal(folder, 7, "run")
    assert main(["keeper", "clean", root]) == 2
    assert "holds a sealed snapshot" in capsys.readouterr().err
    assert main(["keeper", "clean", root, "--force"]) == 0
    assert "freed " in capsys.readouterr().out
    assert not folder.exists()
