from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from relight import Checkpointer, TrainState
from relight.checkpoint.save_plan import SavePlan, plan_save
from relight.checkpoint.snapshot import CudaCopy, Snapshot, partition
from relight.checkpoint.table import StateTable
from relight.keeper.arena import ArenaSlot
from relight.manifest.shard import Layout
from tests.running import Home, restore_once


def table_of(**tensors: torch.Tensor) -> StateTable:
    table = StateTable()
    for name, tensor in tensors.items():
        table.put(name, tensor, Layout(), owner=0)
    return table


@pytest.fixture
def make_slot(tmp_path: Path) -> Iterator[Any]:
    made: list[ArenaSlot] = []

    def make(plan: SavePlan) -> ArenaSlot:
        path = tmp_path / f"rank-00000.slot-{len(made)}"
        made.append(ArenaSlot.create(path, plan.image.image_bytes, owner_pid=os.getpid()))
        return made[-1]

    yield make
    for slot in made:
        slot.close()


def snapshot_of(make_slot: Any, table: StateTable, *, seed: int = 1, overlapped: bool = True) -> Snapshot:
    plan = plan_save(table, rank=0, world_size=1)
    parts = partition(plan, table, lambda _: overlapped)
    return Snapshot(make_slot(plan), plan, table, parts, seed=seed)


def stored(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    with snapshot.slot.image[: snapshot.plan.image.image_bytes] as image:
        found = safetensors.torch.load(bytes(image))
    return {name: tensor for name, tensor in found.items() if not name.startswith("__pad")}


def test_a_snapshot_is_a_safetensors_image_of_the_state(make_slot: Any) -> None:
    tensors = {
        "plain": torch.randn(5, 3),
        "turned": torch.randn(4, 6).t(),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 2),
        "flags": torch.tensor([True, False]),
    }
    for overlapped in (True, False):
        snapshot = snapshot_of(make_slot, table_of(**tensors), overlapped=overlapped)
        snapshot.start()
        snapshot.run()
        snapshot.guard()
        assert snapshot.torn_keys() == []
        found = stored(snapshot)
        assert set(found) == set(tensors)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_what_is_not_guarded_is_copied_inside_the_call(make_slot: Any) -> None:
    value = torch.ones(3)
    snapshot = snapshot_of(make_slot, table_of(value=value), overlapped=False)
    snapshot.start()
    assert not snapshot.is_overlapped
    value.fill_(2)
    snapshot.run()
    assert stored(snapshot)["value"].tolist() == [1, 1, 1]


def test_a_write_between_start_and_copy_makes_the_snapshot_torn(make_slot: Any) -> None:
    first, second = torch.ones(100), torch.ones(100)
    snapshot = snapshot_of(make_slot, table_of(first=first, second=second))
    snapshot.start()
    second[99] = 5
    snapshot.run()
    assert snapshot.torn_keys() == ["second"]


@pytest.mark.parametrize("how", ["data", "numpy"])
def test_writes_that_no_version_counter_sees_are_caught_by_samples(make_slot: Any, how: str) -> None:
    value = torch.ones(16)
    snapshot = snapshot_of(make_slot, table_of(value=value))
    version = value._version
    snapshot.start()
    if how == "data":
        value.data.fill_(3)
    else:
        value.numpy()[:] = 3
    assert value._version == version
    snapshot.run()
    assert snapshot.torn_keys() == ["value"]


def test_samples_look_at_other_places_as_steps_go_on(make_slot: Any) -> None:
    value = torch.zeros(4096)
    places = set()
    for seed in range(40):
        snapshot = snapshot_of(make_slot, table_of(value=value), seed=seed)
        copy = snapshot._copies[0][0]
        copy.start()
        places |= {offset for _, offset, _ in copy._samples}
    assert len(places) == 40


def test_a_fused_update_of_all_bytes_is_caught_though_versions_stand_still(make_slot: Any) -> None:
    """Fused optimizers do not move the version counter in every torch version; bytes tell it in any case."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    snapshot = snapshot_of(make_slot, table_of(weight=model.weight, bias=model.bias))
    snapshot.start()
    optimizer.step()
    snapshot.run()
    assert snapshot.torn_keys() == ["weight", "bias"]


class FakeCuda:
    """Records the order of what is asked of streams and events."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self._num_events = 0
        self._at = "compute"
        fake = self

        class Stream:
            def __init__(self, name: str = "side") -> None:
                self.name = name

            def wait_event(self, event: Any) -> None:
                fake.calls.append(("wait", self.name, event.name))

        class Event:
            def __init__(self) -> None:
                fake._num_events += 1
                self.name = f"event-{fake._num_events}"

            def record(self, stream: Any) -> None:
                fake.calls.append(("record", stream.name, self.name))

            def synchronize(self) -> None:
                fake.calls.append(("synchronize", "host", self.name))

        self.Stream, self.Event = Stream, Event
        self._compute = Stream("compute")

    def current_stream(self) -> Any:
        return self._compute

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self._at, before = stream.name, self._at
        yield
        self._at = before

    def foreach_copy(
        self, targets: list[torch.Tensor], sources: list[torch.Tensor], *, non_blocking: bool
    ) -> None:
        assert non_blocking
        self.calls.append(("copy", self._at, f"{len(targets)} tensors"))
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def cuda_copy(make_slot: Any, *tensors: torch.Tensor, seed: int = 0) -> tuple[FakeCuda, CudaCopy, ArenaSlot]:
    table = table_of(**{f"t{at}": tensor for at, tensor in enumerate(tensors)})
    plan = plan_save(table, rank=0, world_size=1)
    slot = make_slot(plan)
    cuda = FakeCuda()
    values = [table.tensors[entry.at] for entry in plan.entries]
    copy = CudaCopy(slot, plan.entries, values, seed=seed, cuda=cuda, foreach_copy=cuda.foreach_copy)
    return cuda, copy, slot


def test_a_device_copy_waits_for_compute_and_the_next_update_waits_for_it(make_slot: Any) -> None:
    tensors = [torch.randn(4, 4), torch.randn(3, 5).t(), torch.randn(7)]
    cuda, copy, slot = cuda_copy(make_slot, *tensors)
    copy.start()
    assert cuda.calls == [
        ("record", "compute", "event-1"),
        ("wait", "side", "event-1"),
        ("copy", "side", "3 tensors"),
        ("record", "side", "event-2"),
    ]
    cuda.calls.clear()
    copy.guard()
    assert cuda.calls == [("wait", "compute", "event-2")]
    copy.run()
    assert cuda.calls[1:] == [("synchronize", "host", "event-2")]
    assert copy.torn() == []
    for entry, tensor in zip(copy._entries, tensors, strict=True):
        raw = bytes(slot.image[entry.offset_bytes : entry.offset_bytes + entry.num_bytes])
        assert raw == tensor.contiguous().numpy().tobytes()


def test_tensors_that_are_packed_for_a_device_copy_live_until_it_is_done(make_slot: Any) -> None:
    _, copy, _ = cuda_copy(make_slot, torch.randn(3, 5).t())
    copy.start()
    assert [source.is_contiguous() for source in copy._sources] == [True]
    copy.run()
    assert copy._sources == []


def test_a_device_tensor_that_changes_before_its_copy_is_found_torn(make_slot: Any) -> None:
    by_version, by_bytes = torch.ones(8), torch.ones(8)
    _, copy, slot = cuda_copy(make_slot, by_version, by_bytes)
    copy.start()
    by_version.add_(0)
    at = copy._entries[1].offset_bytes
    slot.image[at : at + 32] = bytes(32)
    copy.guard()
    copy.run()
    assert copy.torn() == [0, 1]


# -- whole loops --------------------------------------------------------------------------------------------


def loop_of(home: Home, model: nn.Module, optimizer: Any, **options: Any) -> Checkpointer:
    checkpointer = Checkpointer(
        home.root(), TrainState(model=model, optimizer=optimizer), every=10**6, **options
    )
    checkpointer.restore()
    return checkpointer


def stalls(home: Home) -> list[bool]:
    return [event.fields["is_overlapped"] for event in home.events(kind="save_sealed")]


@pytest.mark.multiprocess
def test_saves_block_until_the_optimizers_hook_was_seen_and_overlap_from_then_on(home: Home) -> None:
    home.keeper()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with loop_of(home, model, optimizer) as checkpointer:
        checkpointer.save(0)
        for step in (1, 2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            checkpointer.save(step)
        checkpointer.wait()
        # A step that is replayed or written by hand fires no hook.
        with torch.no_grad():
            model.weight.add_(1)
        checkpointer.step(3)
        checkpointer.save(3)
        with torch.no_grad():
            model.weight.add_(1)
        checkpointer.wait()
    assert stalls(home) == [False, True, True, False]


@pytest.mark.multiprocess
def test_a_loop_without_an_optimizer_blocks(home: Home) -> None:
    home.keeper()
    model = nn.Linear(4, 4)
    with loop_of(home, model, None) as checkpointer:
        for step in (1, 2, 3):
            with torch.no_grad():
                model.weight.fill_(step)
            checkpointer.save(step)
            with torch.no_grad():
                model.weight.fill_(-1)
    assert stalls(home) == [False] * 3
    assert restore_once(home, TrainState(model=model)) == 3
    assert model.weight.unique().tolist() == [3]


@pytest.mark.multiprocess
def test_torn_snapshots_are_dropped_then_block_and_overlap_is_given_up_for_the_tensor(home: Home) -> None:
    """Something outside of the optimizer's step writes to a parameter while it is copied."""
    from relight import stages

    home.keeper()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def stray(point: str) -> None:
        if point == "snapshot.started":
            model.weight.data.mul_(2)

    with loop_of(home, model, optimizer) as checkpointer:
        for step in range(1, 7):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            if step == 2:
                stages.subscribe(stray)
            checkpointer.save(step)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        stages.unsubscribe(stray)
    torn = home.events(kind="save_torn")
    assert [(event.step, event.fields["tensors"]) for event in torn] == [
        (2, ["model/weight"]),
        (4, ["model/weight"]),
    ]
    sealed = {event.step: event.fields["is_overlapped"] for event in home.events(kind="save_sealed")}
    # Blocking after each tear; at last the weight alone is copied inside the call.
    assert sealed == {1: True, 3: False, 5: False, 6: True}
    assert {2, 4}.isdisjoint(home.steps())
