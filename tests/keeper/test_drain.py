from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relight import stages
from relight.errors import StorageFullError, StorageUnavailableError
from relight.events import read_events
from relight.keeper.arena import ArenaSlot, SlotState, slot_path
from relight.keeper.crew import Crew
from relight.keeper.drain import POINTS, DrainSettings
from relight.keeper.messages import AcquireRequest, TierPlan
from relight.keeper.node import Node
from relight.keeper.slots import SlotId
from relight.keeper.stores import TierStores
from relight.manifest.manifest import BLOCK_BYTES, Parent, digest_block
from relight.manifest.names import image_name, step_dir
from relight.storage.local import LocalBackend
from relight.testing.files import FailingFiles, FullDiskFiles

NodeMaker = Callable[..., Node]


@pytest.fixture
def points() -> Iterator[list[str]]:
    """Every point that is passed in this process."""
    seen: list[str] = []
    stages.subscribe(seen.append)
    yield seen
    stages.unsubscribe(seen.append)


@pytest.fixture
def at_point() -> Iterator[Callable[[str, Callable[[], object]], None]]:
    """Do something once when a point is passed."""
    observers = []

    def at(point: str, act: Callable[[], object]) -> None:
        done = threading.Event()

        def observe(seen: str) -> None:
            if seen == point and not done.is_set():
                done.set()
                act()

        stages.subscribe(observe)
        observers.append(observe)

    yield at
    for observe in observers:
        stages.unsubscribe(observe)


class GatedBackend(LocalBackend):
    """Local files that fail with what `trouble` raises for a name."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.trouble: Callable[[str], None] = lambda name: None

    def put(self, name: str, data: memoryview | bytes, *, if_absent: bool = False) -> bool:
        self.trouble(name)
        return super().put(name, data, if_absent=if_absent)


def failing(kind: type[Exception], times: int, part: str = "") -> Callable[[str], None]:
    left = [times]

    def trouble(name: str) -> None:
        if part in name and left[0] > 0:
            left[0] -= 1
            raise kind("the cable is out")

    return trouble


def states(node: Node, step: int, generation: int = 1) -> dict[str, str]:
    found = next(one for one in node.status().steps if (one.step, one.generation) == (step, generation))
    return {tier.url: tier.state for tier in found.tiers}


def drain(node: Node, *slots: SlotId) -> None:
    for slot in slots:
        node.drainer.submit(slot)
    assert node.drainer.wait_idle(20)


def test_a_sealed_snapshot_becomes_a_verified_checkpoint(run, make_node: NodeMaker) -> None:
    node = make_node()
    drain(node, run.seal(5))
    assert states(node, 5) == {run.root_url: "verified"}
    catalog = run.catalog()
    assert catalog.is_verified(5, 1)
    assert catalog.verify(5, 1) == []
    assert catalog.backend.get(image_name(5, 1, 0)) == run.image(5)
    record = catalog.record(5, 1, 0, catalog.manifest(5, 1))
    assert record.draft == run.draft(5)
    assert record.digests == (digest_block(run.image(5)),)


def test_the_slot_holds_the_digests_of_every_block(run, make_node: NodeMaker) -> None:
    num_bytes = 2 * BLOCK_BYTES + 100
    path = slot_path(run.folder, 0, 0)
    with ArenaSlot.create(path, num_bytes, owner_pid=os.getpid()) as mapped:
        mapped.begin(step=1, generation=1, rank=0, world_size=1, image_bytes=num_bytes)
        mapped.image[:] = os.urandom(num_bytes)
        draft = run.draft(1, image_bytes=num_bytes)
        import msgspec

        mapped.seal(msgspec.json.encode(draft), sealed_at=time.time())
        drain(make_node(), SlotId(0, 0))
        image = bytes(mapped.image)
        expected = [digest_block(image[at : at + BLOCK_BYTES]) for at in range(0, num_bytes, BLOCK_BYTES)]
        assert [digest.hex() for digest in mapped.digests()] == expected
        assert run.catalog().verify(1, 1) == []


def test_a_step_is_committed_once_every_rank_is_durable(run, make_node: NodeMaker) -> None:
    node = make_node()
    drain(node, run.seal(5, rank=0, world_size=2))
    assert states(node, 5) == {run.root_url: "durable"}
    assert not run.catalog().is_committed(5, 1)
    drain(node, run.seal(5, rank=1, world_size=2))
    assert states(node, 5) == {run.root_url: "verified"}
    assert run.catalog().manifest(5, 1).world_size == 2


def test_a_step_that_another_node_completes_is_committed_by_looking_again(
    run, make_node: NodeMaker, eventually
) -> None:
    from relight.testing.checkpoints import sample_record

    node = make_node()
    drain(node, run.seal(5, rank=0, world_size=2))
    catalog = run.catalog()
    catalog.put_image(5, 1, 1, b"x" * 100)
    record = sample_record(b"x" * 100, step=5, rank=1, world_size=2, run=run.run, layout="sample-layout")
    catalog.put_record(record)
    node.tick()
    eventually(lambda: states(node, 5) == {run.root_url: "verified"})


def test_tiers_are_drained_in_order_and_each_has_its_own_commit(run, make_node: NodeMaker, tmp_path) -> None:
    far = str(tmp_path / "far")
    node = make_node()
    node.attach(run.attach_request(tiers=(TierPlan(url=run.root_url), TierPlan(url=far))))
    drain(node, run.seal(5))
    assert states(node, 5) == {run.root_url: "verified", far: "verified"}
    assert run.catalog(far).verify(5, 1) == []
    durable = [event.fields["tier"] for event in node.reports.events.recent if event.kind == "save_durable"]
    assert durable == [run.root_url, far]


def test_a_tier_gets_the_first_and_then_every_nth_checkpoint(run, make_node: NodeMaker, tmp_path) -> None:
    far = str(tmp_path / "far")
    node = make_node()
    node.attach(run.attach_request(tiers=(TierPlan(url=run.root_url), TierPlan(url=far, every=2))))
    for step in (10, 20, 30):
        drain(node, run.seal(step))
    assert [states(node, step)[far] for step in (10, 20, 30)] == ["verified", "skipped", "verified"]
    assert node.state(run.key(20), far).state == "skipped"
    assert run.catalog(far).is_committed(30, 1)
    assert not run.catalog(far).is_committed(20, 1)


def test_the_count_of_checkpoints_survives_the_keeper(run, make_node: NodeMaker, tmp_path) -> None:
    far = str(tmp_path / "far")
    tiers = (TierPlan(url=run.root_url), TierPlan(url=far, every=2))
    first = make_node()
    first.attach(run.attach_request(tiers=tiers))
    drain(first, run.seal(10, rank=0, index=0), run.seal(20, rank=0, index=1))
    first.close(clean=False)
    second = make_node()
    drain(second, run.seal(30, rank=0, index=0))
    assert states(second, 30)[far] == "verified"


def test_the_ram_tier_is_committed_when_every_rank_is_digested(run, make_node: NodeMaker) -> None:
    node = make_node()
    node.attach(run.attach_request(tiers=(TierPlan(url="ram"), TierPlan(url=run.root_url))))
    drain(node, run.seal(5, rank=0, world_size=2))
    assert node.state(run.key(5), "ram").state == "durable"
    drain(node, run.seal(5, rank=1, world_size=2))
    assert node.state(run.key(5), "ram").state == "committed"
    assert states(node, 5)[run.root_url] == "verified"


def test_a_tier_that_is_silent_for_a_while_is_tried_again(run, make_node: NodeMaker) -> None:
    backend = GatedBackend(run.root)
    backend.trouble = failing(StorageUnavailableError, 3)
    node = make_node(stores=TierStores(lambda url: backend))
    drain(node, run.seal(5))
    assert states(node, 5) == {run.root_url: "verified"}
    errors = node.status().errors
    assert [(one.error, one.is_final) for one in errors] == [("StorageUnavailableError", False)] * 3
    assert errors[0].message == "the cable is out"
    assert node.status().counters["retries"] == 3


@pytest.mark.parametrize("part", ["rank-00000.safetensors", "rank-00000.json"])
def test_a_silent_tier_fails_the_step_and_leaves_nothing_of_it(
    run, make_node: NodeMaker, tmp_path, part: str
) -> None:
    far = str(tmp_path / "far")
    backend = GatedBackend(run.root)
    backend.trouble = failing(StorageUnavailableError, 10**9, part)
    node = make_node(
        stores=TierStores(lambda url: backend if url == run.root_url else LocalBackend(Path(url)))
    )
    node.attach(run.attach_request(tiers=(TierPlan(url=run.root_url), TierPlan(url=far))))
    slot = run.seal(5)
    drain(node, slot)
    assert states(node, 5) == {run.root_url: "failed", far: "verified"}
    assert node.state(run.key(5), run.root_url).message == "the cable is out"
    assert not (run.root / step_dir(5, 1)).exists()
    assert node.ledger.is_drained(slot, run.key(5))
    failed = [event for event in node.reports.events.recent if event.kind == "save_failed"]
    assert [(event.step, event.fields["tier"], event.fields["error"]) for event in failed] == [
        (5, run.root_url, "StorageUnavailableError")
    ]


def test_a_manifest_that_cannot_be_written_leaves_the_images_for_the_next_start(
    run, make_node: NodeMaker
) -> None:
    backend = GatedBackend(run.root)
    backend.trouble = failing(StorageUnavailableError, 10**9, "manifest.json")
    node = make_node(stores=TierStores(lambda url: backend))
    drain(node, run.seal(5))
    assert states(node, 5) == {run.root_url: "failed"}
    assert (run.root / image_name(5, 1, 0)).exists()
    node.close(clean=False)
    again = make_node()
    assert again.drainer.wait_idle(20)
    assert states(again, 5) == {run.root_url: "verified"}


def test_a_full_disk_fails_the_step_alone_and_the_next_one_works(run, make_node: NodeMaker) -> None:
    files = FullDiskFiles(5 * 2**20)
    node = make_node(stores=TierStores(lambda url: LocalBackend(Path(url), files)))
    drain(node, run.seal(5))
    drain(node, run.seal(10, index=1))
    assert states(node, 10) == {run.root_url: "failed"}
    assert [(one.error, one.is_final) for one in node.status().errors] == [
        ("StorageFullError", False),
        ("StorageFullError", True),
    ]
    assert not (run.root / step_dir(10, 1)).exists()
    assert run.catalog().verify(5, 1) == []
    files.free_space()
    drain(node, run.seal(15, index=0))
    assert states(node, 15) == {run.root_url: "verified"}


def test_a_full_disk_is_tried_again_once_retention_has_made_room(run, make_node: NodeMaker, at_point) -> None:
    run.claim()
    backend = GatedBackend(run.root)
    node = make_node(stores=TierStores(lambda url: backend))
    for step, index in ((5, 0), (10, 1), (15, 0)):
        drain(node, run.seal(step, index=index))
    assert run.catalog().is_committed(5, 1)
    node.attach(run.attach_request(tiers=(TierPlan(url=run.root_url, keep=1),)))
    backend.trouble = failing(StorageFullError, 10**9)
    at_point("retention.removed", lambda: setattr(backend, "trouble", lambda name: None))
    drain(node, run.seal(20, index=1))
    assert states(node, 20) == {run.root_url: "verified"}
    assert not run.catalog().is_committed(5, 1)


def test_when_one_rank_fails_nothing_of_the_step_stays(run, make_node: NodeMaker) -> None:
    backend = GatedBackend(run.root)
    backend.trouble = failing(StorageUnavailableError, 10**9, "rank-00001.safetensors")
    node = make_node(stores=TierStores(lambda url: backend))
    drain(node, run.seal(5, rank=0, world_size=2), run.seal(5, rank=1, world_size=2))
    assert states(node, 5) == {run.root_url: "failed"}
    assert not (run.root / step_dir(5, 1)).exists()
    drain(node, run.seal(5, rank=2, world_size=3, generation=2))
    assert not run.catalog().is_committed(5, 1)


def test_a_generation_that_was_left_behind_is_fenced(run, make_node: NodeMaker) -> None:
    run.claim()
    run.claim(parent=Parent(step=3, generation=1))
    node = make_node()
    drain(node, run.seal(5))
    assert states(node, 5) == {run.root_url: "failed"}
    assert node.status().errors[-1].error == "FencedError"
    assert not (run.root / step_dir(5, 1)).exists()
    drain(node, run.seal(3, index=1))
    assert states(node, 3) == {run.root_url: "verified"}


def test_a_snapshot_that_is_overwritten_while_it_is_stored_is_not_committed(
    run, make_node: NodeMaker, at_point
) -> None:
    slot = SlotId(0, 0)
    at_point("catalog.image_stored", lambda: run.write(6))
    node = make_node()
    run.seal(5)
    drain(node, slot)
    assert states(node, 5) == {run.root_url: "failed"}
    assert "overwritten" in (node.state(run.key(5), None).message or "")
    assert not (run.root / step_dir(5, 1)).exists()


@pytest.mark.parametrize("draft", [b"", b"{", b"{}", b'{"schema": 99}'])
def test_a_draft_that_cannot_be_read_fails_the_step(run, make_node: NodeMaker, draft: bytes) -> None:
    node = make_node()
    slot = run.seal(5, draft=draft)
    drain(node, slot)
    assert states(node, 5) == {run.root_url: "failed"}
    assert node.status().errors[-1].error == "CorruptionError"
    assert node.ledger.is_drained(slot, run.key(5))
    assert not (run.root / step_dir(5, 1)).exists()


def test_a_rank_whose_draft_cannot_be_read_takes_the_others_files_along(run, make_node: NodeMaker) -> None:
    node = make_node()
    drain(node, run.seal(5, rank=0, world_size=2))
    drain(node, run.seal(5, rank=1, world_size=2, draft=b"{"))
    assert states(node, 5) == {run.root_url: "failed"}
    assert not (run.root / step_dir(5, 1)).exists()


def test_a_draft_of_another_snapshot_fails_the_step(run, make_node: NodeMaker) -> None:
    import msgspec

    node = make_node()
    drain(node, run.seal(5, draft=msgspec.json.encode(run.draft(6))))
    assert states(node, 5) == {run.root_url: "failed"}


def test_digests_that_cannot_be_kept_fail_the_step(run, make_node: NodeMaker, monkeypatch) -> None:
    def full(self: ArenaSlot, digests: list[bytes]) -> None:
        raise OSError(errno.ENOSPC, "no shared memory")

    monkeypatch.setattr(ArenaSlot, "write_digests", full)
    node = make_node()
    slot = run.seal(5)
    drain(node, slot)
    assert states(node, 5) == {run.root_url: "failed"}
    assert "no shared memory" in (node.state(run.key(5), None).message or "")
    assert node.ledger.is_drained(slot, run.key(5))


def test_an_error_that_nobody_expected_fails_the_step_and_not_the_thread(run, make_node: NodeMaker) -> None:
    backend = GatedBackend(run.root)
    backend.trouble = failing(ZeroDivisionError, 1)
    node = make_node(stores=TierStores(lambda url: backend))
    drain(node, run.seal(5))
    assert states(node, 5) == {run.root_url: "failed"}
    assert node.status().errors[-1].error == "ZeroDivisionError"
    drain(node, run.seal(10, index=1))
    assert states(node, 10) == {run.root_url: "verified"}


def test_a_byte_that_reads_back_wrong_is_reported_and_keeps_older_checkpoints(
    run, make_node: NodeMaker, at_point
) -> None:
    run.claim()
    node = make_node()
    node.attach(run.attach_request(tiers=(TierPlan(url=run.root_url, keep=1),)))
    drain(node, run.seal(5))

    def flip() -> None:
        path = run.root / image_name(10, 1, 0)
        with path.open("rb+") as file:
            file.seek(12345)
            file.write(b"\xff")

    at_point("drain.committed", flip)
    drain(node, run.seal(10, index=1))
    assert states(node, 10) == {run.root_url: "failed"}
    assert "block 0" in (node.state(run.key(10), None).message or "")
    assert not run.catalog().is_verified(10, 1)
    assert run.catalog().is_verified(5, 1)


def test_retention_keeps_the_newest_and_what_the_run_resumed_from(run, make_node: NodeMaker) -> None:
    run.claim()
    node = make_node()
    for step in (1, 2, 3):
        drain(node, run.seal(step, index=step % 2))
    run.claim(parent=Parent(step=2, generation=1))
    tiers = (TierPlan(url=run.root_url, keep=1),)
    node.attach(run.attach_request(tiers=tiers, generation=2, protect=((2, 1),)))
    drain(node, run.seal(7, index=0, generation=2))
    drain(node, run.seal(8, index=1, generation=2))
    kept = sorted((info.step, info.generation) for info in run.catalog().committed())
    assert kept == [(8, 2)]
    removed = [event.step for event in node.reports.events.recent if event.kind == "checkpoint_removed"]
    assert sorted(removed) == [1, 2, 3, 7]


def test_what_the_run_resumed_from_stays_until_something_newer_is_verified(run, make_node: NodeMaker) -> None:
    node = make_node()
    node.attach(run.attach_request(protect=((100, 1),), generation=2))
    assert (100, 1) in node.ledger.protected(run.root_url)
    drain(node, run.seal(100, generation=1))
    assert (100, 1) in node.ledger.protected(run.root_url)
    drain(node, run.seal(110, index=1, generation=2))
    assert (100, 1) not in node.ledger.protected(run.root_url)


def test_a_restarted_keeper_stores_what_was_sealed_and_what_was_digested(run, make_node: NodeMaker) -> None:
    run.seal(5, index=0)
    with run.open(run.seal(10, index=1)) as mapped:
        mapped.write_digests([bytes.fromhex(digest_block(run.image(10)))])
    node = make_node()
    assert node.drainer.wait_idle(20)
    assert states(node, 5) == states(node, 10) == {run.root_url: "verified"}


def test_a_restarted_keeper_leaves_alone_what_is_stored(run, make_node: NodeMaker) -> None:
    first = make_node()
    drain(first, run.seal(5))
    first.close(clean=False)
    run.catalog().remove(5, 1)
    second = make_node()
    assert second.drainer.wait_idle(20)
    assert "saves_durable" not in second.status().counters
    assert not run.catalog().is_committed(5, 1)


def test_a_restarted_keeper_drains_to_the_tiers_that_were_attached(
    run, make_node: NodeMaker, tmp_path
) -> None:
    far = str(tmp_path / "far")
    first = make_node()
    first.attach(run.attach_request(tiers=(TierPlan(url=far),)))
    first.close(clean=False)
    run.seal(5)
    second = make_node()
    assert second.drainer.wait_idle(20)
    assert states(second, 5) == {far: "verified"}


def test_a_journal_that_cannot_be_read_is_not_used(run, make_node: NodeMaker) -> None:
    (run.folder / "attach.json").write_text('{"owners": 7')
    run.seal(5)
    node = make_node()
    assert node.drainer.wait_idle(20)
    assert states(node, 5) == {run.root_url: "verified"}


def test_a_full_arena_does_not_stop_the_drain(run, make_node: NodeMaker) -> None:
    node = make_node()
    (run.folder / "attach.tmp").mkdir()
    drain(node, run.seal(5))
    assert states(node, 5) == {run.root_url: "verified"}
    (run.folder / "attach.tmp").rmdir()


def test_half_made_slots_of_dead_owners_are_removed(run, make_node: NodeMaker) -> None:
    broken = slot_path(run.folder, 0, 0)
    broken.write_bytes(b"x" * 5000)
    torn = run.seal(5, index=1)
    with slot_path(run.folder, 0, 1).open("rb+") as file:
        file.seek(70)
        file.write(b"\xff")
    node = make_node()
    assert node.slots.ids() == []
    assert node.slots.control(torn) is None


def test_half_made_slots_of_living_owners_are_left_to_them(run, make_node: NodeMaker) -> None:
    node = make_node()
    node.attach(run.attach_request())
    slot_path(run.folder, 0, 0).write_bytes(b"x" * 5000)
    writing = run.write(5, index=1)
    node.upkeep.rescan()
    assert node.slots.ids() == [SlotId(0, 0), SlotId(0, 1)]
    assert node.slots.control(writing).state is SlotState.WRITING


def test_a_snapshot_that_a_dead_owner_left_unfinished_is_freed(run, make_node: NodeMaker) -> None:
    slot = run.write(5)
    node = make_node()
    assert node.slots.control(slot).state is SlotState.FREE


def test_another_run_under_the_same_root_does_not_take_old_snapshots_for_its_own(
    run, make_node: NodeMaker
) -> None:
    node = make_node()
    node.attach(run.attach_request())
    drain(node, run.seal(5, index=0), run.seal(10, index=1))
    run.catalog().remove(5, 1)
    run.catalog().remove(10, 1)
    run.run = "the-next-run"
    node.attach(run.attach_request())
    assert node.inventory() == ((), True)
    assert [fact.control.state for fact in node.upkeep.facts()] == [SlotState.FREE] * 2
    assert node.state(run.key(5), None).state == "unknown"
    drain(node, run.seal(5))
    assert run.catalog().manifest(5, 1).run == "the-next-run"
    assert node.state(run.key(5), None).state == "verified"


def test_slots_of_ranks_that_are_no_more_are_removed(run, make_node: NodeMaker) -> None:
    node = make_node()
    node.attach(run.attach_request(world_size=2))
    drain(node, run.seal(5, rank=0, world_size=2), run.seal(5, rank=1, world_size=2))
    node.attach(run.attach_request(generation=2))
    assert len(node.slots.ids()) == 2
    drain(node, run.seal(7, index=1, generation=2))
    node.upkeep.rescan()
    assert node.slots.ids() == [SlotId(0, 0), SlotId(0, 1)]


def test_leases_outlive_the_keeper_and_a_repeated_attach(run, make_node: NodeMaker) -> None:
    first = make_node()
    first.attach(run.attach_request())
    wish = AcquireRequest(rank=0, timeout_seconds=0)
    assert first.acquire(wish) == 0
    first.close(clean=False)
    second = make_node()
    second.attach(run.attach_request())
    assert second.acquire(wish) == 1
    assert second.acquire(wish) is None
    second.attach(run.attach_request(generation=2))
    assert second.acquire(wish) == 0


def test_every_point_of_a_save_is_listed(run, make_node: NodeMaker, points: list[str]) -> None:
    run.claim()
    node = make_node()
    node.attach(run.attach_request(tiers=(TierPlan(url=run.root_url, keep=1),)))
    drain(node, run.seal(5), run.seal(10, index=1))
    drain(node, run.seal(15, draft=b"{"))
    ours = {point for point in points if point.split(".")[0] in ("digest", "drain", "verify")}
    assert ours | {"retention.removed"} == set(POINTS)
    assert "retention.removed" in points


def test_events_carry_durations_and_bytes(run, make_node: NodeMaker) -> None:
    node = make_node()
    drain(node, run.seal(5))
    node.close(clean=False)
    events = list(read_events(run.root / "events"))
    kinds = [event.kind for event in events]
    assert kinds == ["keeper_started", "save_durable", "save_committed", "save_verified", "keeper_stopped"]
    durable = events[1]
    assert (durable.step, durable.generation, durable.rank, durable.run) == (5, 1, 0, run.run)
    assert durable.fields["image_bytes"] == len(run.image(5))
    assert durable.fields["seconds"] >= durable.fields["write_seconds"] > 0


def test_an_error_in_a_task_ends_the_task_and_not_the_thread() -> None:
    errors: list[tuple[str, Exception]] = []
    crew = Crew(
        "crew", 1, on_error=lambda name, error: errors.append((name, error)), on_death=lambda *_: None
    )
    done = threading.Event()
    crew.put(lambda: 1 // 0)
    crew.put(done.set)
    assert done.wait(5)
    assert crew.close(timeout_seconds=5)
    assert [(name, type(error)) for name, error in errors] == [("crew-0", ZeroDivisionError)]


def test_the_newest_task_may_go_first() -> None:
    order: list[int] = []
    gate = threading.Event()
    crew = Crew("crew", 1, on_error=lambda *_: None, on_death=lambda *_: None)
    crew.put(lambda: gate.wait(5))
    for number in range(3):
        crew.put(lambda number=number: order.append(number))
    crew.newest_first = True
    gate.set()
    assert crew.wait_idle(5)
    assert order == [2, 1, 0]
    assert crew.close(timeout_seconds=5)


def test_the_mapping_of_a_slot_is_kept_and_follows_the_file(run, make_node: NodeMaker) -> None:
    node = make_node()
    slot = run.seal(5)
    drain(node, slot)
    with node.slots.use(slot) as first, node.slots.use(slot) as second:
        assert first is second
    slot_path(run.folder, 0, 0).unlink()
    run.seal(10)
    with node.slots.use(slot) as renewed:
        assert renewed is not first
        assert renewed.control().step == 10


def test_a_failing_call_is_a_failure_of_the_tier(run, make_node: NodeMaker) -> None:
    files = FailingFiles(8)
    node = make_node(
        stores=TierStores(lambda url: LocalBackend(Path(url), files)),
        drain=DrainSettings(retry_seconds=0.0),
    )
    drain(node, run.seal(5))
    assert states(node, 5) == {run.root_url: "failed"}
    assert node.status().errors[-1].error == "StorageUnavailableError"
