"""A private arena per test, snapshots as a trainer makes them, and keepers in this process or in their own."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from relight.keeper.arena import ArenaSlot, arena_dir, run_digest, slot_path
from relight.keeper.client import KeeperClient
from relight.keeper.drain import DrainSettings
from relight.keeper.messages import AttachRequest, TierPlan
from relight.keeper.node import Node, NodeSettings
from relight.keeper.process import ensure_keeper
from relight.keeper.slots import SlotId, StepKey
from relight.keeper.stores import TierStores
from relight.manifest.catalog import Catalog
from relight.manifest.manifest import RecordDraft
from relight.storage.backend import open_backend

IMAGE_BYTES = 3 * 2**20 + 5
QUICK = DrainSettings(retry_seconds=0.5, backoff_seconds=0.01, backoff_max_seconds=0.05, recheck_seconds=0.0)


class Run:
    """One run: its root, its arena folder, and what a trainer does to slots."""

    def __init__(self, base: Path, root: Path) -> None:
        self.root = root
        self.root_url = str(root)
        self.folder = arena_dir(self.root_url, base=base)
        self.run = "sample-run"

    def catalog(self, url: str | None = None) -> Catalog:
        return Catalog(open_backend(url or self.root_url))

    def claim(self, url: str | None = None, parent: object = None) -> None:
        self.run = self.catalog(url).claim(parent).run

    def key(self, step: int, generation: int = 1) -> StepKey:
        return StepKey(generation, step, run_digest(self.run))

    def image(self, step: int, rank: int = 0, num_bytes: int = IMAGE_BYTES) -> bytes:
        return bytes([(step * 7 + rank + 1) % 256]) * num_bytes

    def draft(
        self, step: int, rank: int = 0, world_size: int = 1, generation: int = 1, **changes: object
    ) -> RecordDraft:
        draft = RecordDraft(
            run=self.run,
            step=step,
            generation=generation,
            parent=None,
            rank=rank,
            world_size=world_size,
            layout="sample-layout",
            image_bytes=IMAGE_BYTES,
            saved_at=1_700_000_000.0 + step,
            context=msgspec.Raw(b"{}"),
        )
        return msgspec.structs.replace(draft, **changes)

    def open(self, slot: SlotId, capacity_bytes: int = IMAGE_BYTES) -> ArenaSlot:
        path = slot_path(self.folder, slot.rank, slot.index)
        if path.exists():
            return ArenaSlot.open(path)
        return ArenaSlot.create(path, capacity_bytes, owner_pid=os.getpid())

    def write(
        self, step: int, *, rank: int = 0, index: int = 0, world_size: int = 1, generation: int = 1
    ) -> SlotId:
        """Leave a slot in the middle of a snapshot."""
        slot = SlotId(rank, index)
        with self.open(slot) as mapped:
            mapped.begin(
                step=step,
                generation=generation,
                rank=rank,
                world_size=world_size,
                image_bytes=IMAGE_BYTES,
                run=self.run,
            )
            mapped.image[:IMAGE_BYTES] = self.image(step, rank)
        return slot

    def seal(
        self,
        step: int,
        *,
        rank: int = 0,
        index: int = 0,
        world_size: int = 1,
        generation: int = 1,
        draft: bytes | None = None,
    ) -> SlotId:
        """Seal a whole snapshot."""
        slot = self.write(step, rank=rank, index=index, world_size=world_size, generation=generation)
        with self.open(slot) as mapped:
            encoded = msgspec.json.encode(self.draft(step, rank, world_size, generation))
            mapped.seal(draft if draft is not None else encoded, sealed_at=time.time())
        return slot

    def attach_request(self, rank: int = 0, world_size: int = 1, **changes: object) -> AttachRequest:
        request = AttachRequest(
            rank=rank,
            world_size=world_size,
            pid=os.getpid(),
            tiers=(TierPlan(url=self.root_url),),
            generation=1,
            run=self.run,
        )
        return msgspec.structs.replace(request, **changes)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory in shared memory that is gone after the test."""
    path = Path(tempfile.mkdtemp(prefix="relight-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def run(shared: Path, tmp_path: Path) -> Run:
    return Run(shared, tmp_path / "run")


@pytest.fixture
def make_node(run: Run) -> Iterator[Callable[..., Node]]:
    """Make keepers within this process, without wires."""
    made: list[Node] = []

    def make(
        *,
        start: bool = True,
        stores: TierStores | None = None,
        drain: DrainSettings = QUICK,
        **settings: float,
    ) -> Node:
        node = Node(
            run.folder, run.root_url, settings=NodeSettings(**settings), drain_settings=drain, stores=stores
        )
        made.append(node)
        if start:
            node.start()
        return node

    yield make
    for node in made:
        node.close(clean=False)


@pytest.fixture
def start_keeper(run: Run) -> Iterator[Callable[..., KeeperClient]]:
    """Start real keepers; all are gone after the test."""
    pids: set[int] = set()
    clients: list[KeeperClient] = []

    def start(*options: str, **settings: object) -> KeeperClient:
        import sys

        prefix = [sys.executable, "-m", "relight.keeper", *options]
        client = ensure_keeper(run.folder, run.root_url, argv_prefix=prefix, **settings)
        pids.add(client.health().pid)
        clients.append(client)
        return client

    yield start
    for client in clients:
        client.close()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], object]:
    """Wait until a claim holds, at most 20 seconds."""

    def wait(claim: Callable[[], object], seconds: float = 20.0) -> object:
        deadline = time.monotonic() + seconds
        while True:
            seen = claim()
            if seen or time.monotonic() > deadline:
                assert seen
                return seen
            time.sleep(0.01)

    return wait


@pytest.fixture
def is_gone() -> Callable[[int], bool]:
    """Tell whether a process has ended, reaped or not."""

    def gone(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
        except (FileNotFoundError, ProcessLookupError):
            return True

    return gone
