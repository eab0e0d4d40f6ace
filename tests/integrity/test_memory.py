"""Wrong bytes in shared memory: the block comes from the disk, or the snapshot does not count; no tensor sees them."""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.errors import CorruptionError
from relight.keeper.arena import PAGE_BYTES, ArenaSlot, SlotState, slot_path
from relight.keeper.slots import SlotTable
from relight.manifest.manifest import BLOCK_BYTES
from relight.manifest.names import step_dir
from tests.integrity.conftest import Stored, broken

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(120)]

NUM_CHANCE = 25


def newest_slot(stored: Stored, rank: int) -> Path:
    held = [one for one in stored.held() if (one.rank, one.step) == (rank, 3)]
    return slot_path(stored.arena, rank, held[0].slot)


@pytest.fixture
def memory_only(stored: Stored) -> Iterator[Stored]:
    """Step 3 is in memory alone."""
    folder = stored.root / step_dir(3, 1)
    folder.rename(stored.base / "away")
    yield stored
    shutil.rmtree(folder, ignore_errors=True)
    (stored.base / "away").rename(folder)


def image_offsets(path: Path) -> list[int]:
    with ArenaSlot.open(path) as slot:
        size = slot.control().image_bytes
    rng = random.Random(5)
    return [
        0,
        7,
        8,
        900,
        BLOCK_BYTES - 1,
        BLOCK_BYTES,
        size - 1,
        *(rng.randrange(size) for _ in range(NUM_CHANCE)),
    ]


def test_memory_is_used_when_it_is_good(stored: Stored) -> None:
    restored = stored.restore(from_memory=True)
    assert (restored.step, restored.place, restored.is_right(), restored.reports) == (3, "ram", True, [])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_block_in_memory_is_taken_from_the_disk(stored: Stored, rank: int) -> None:
    path = newest_slot(stored, rank)
    for offset in image_offsets(path):
        with broken(path, PAGE_BYTES + offset, 1 << offset % 8):
            restored = stored.restore(from_memory=True)
            assert (restored.step, restored.is_right()) == (3, True), f"byte {offset}"
            assert restored.reports == ["copy_bad"]
            assert f"block {offset // BLOCK_BYTES}" in repr(restored.told)


def test_a_wrong_block_in_memory_without_another_copy_costs_the_step(memory_only: Stored) -> None:
    assert memory_only.restore(from_memory=True).step == 3
    path = newest_slot(memory_only, 1)
    for offset in image_offsets(path)[::4]:
        with broken(path, PAGE_BYTES + offset):
            restored = memory_only.restore(from_memory=True)
            assert (restored.step, restored.is_right()) == (2, True), f"byte {offset}"
            assert "candidate_skipped" in restored.reports


def test_a_wrong_block_in_memory_and_another_on_disk_cost_nothing(stored: Stored) -> None:
    """Copies of one step are mixed, block by block."""
    image = stored.root / step_dir(3, 1) / "rank-00001.safetensors"
    with broken(newest_slot(stored, 1), PAGE_BYTES + 5000), broken(image, BLOCK_BYTES + 5000):
        restored = stored.restore(from_memory=True)
        assert (restored.step, restored.is_right()) == (3, True)
    with broken(newest_slot(stored, 1), PAGE_BYTES + 5000), broken(image, 6000):
        restored = stored.restore(from_memory=True)
        assert (restored.step, restored.is_right()) == (2, True)


def control_offsets() -> list[int]:
    # Magic, state, checksum and every byte of the fields.
    return [*range(8), 8, *range(56, 64), *range(64, 64 + struct.calcsize("<qqIIQQQQIId"))]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_slot_with_a_wrong_control_page_is_not_used(stored: Stored, rank: int) -> None:
    path = newest_slot(stored, rank)
    held = stored.held()
    for offset in control_offsets():
        for bit in range(8):
            with broken(path, offset, 1 << bit):
                fact = fact_of(stored, path)
                if offset != 8:
                    assert fact is None, f"byte {offset}"
                elif fact is not None:
                    assert fact is not SlotState.DIGESTED
        with broken(path, offset, 1 << offset % 8):
            # The keeper had listed it before it broke.
            restored = stored.restore(from_memory=True, held=held)
            assert (restored.step, restored.is_right()) == (3, True), f"byte {offset}"


def fact_of(stored: Stored, path: Path) -> SlotState | None:
    table = SlotTable(stored.arena)
    slot = next(slot for slot in table.ids() if table.path(slot) == path)
    control = table.control(slot)
    table.close()
    return control.state if control is not None else None


def test_a_slot_with_a_wrong_draft_or_wrong_digests_is_not_used(memory_only: Stored) -> None:
    path = newest_slot(memory_only, 0)
    held = memory_only.held()
    with ArenaSlot.open(path) as slot:
        control = slot.control()
        digests_at, draft_at = slot._digests_at, slot._record_at
    sum_at = draft_at + -(-control.record_bytes // PAGE_BYTES) * PAGE_BYTES
    rng = random.Random(9)
    offsets = [draft_at + rng.randrange(control.record_bytes) for _ in range(12)]
    offsets += [draft_at, draft_at + control.record_bytes - 1]
    offsets += [digests_at + at for at in range(16 * control.num_blocks)]
    offsets += [sum_at + at for at in range(16)]
    for offset in offsets:
        with (
            broken(path, offset, 1 << offset % 8),
            ArenaSlot.open(path) as slot,
            pytest.raises(CorruptionError),
        ):
            slot.digests()
    for offset in offsets[::4]:
        with broken(path, offset, 1 << offset % 8):
            restored = memory_only.restore(from_memory=True, held=held)
            assert (restored.step, restored.is_right()) == (2, True), f"byte {offset}"


@pytest.mark.parametrize("size_bytes", [0, 100, PAGE_BYTES, PAGE_BYTES + BLOCK_BYTES])
def test_a_slot_that_was_cut_short_is_not_used(stored: Stored, size_bytes: int) -> None:
    path = newest_slot(stored, 0)
    held = stored.held()
    kept = path.with_name("kept")
    shutil.copy(path, kept)
    try:
        os.truncate(path, size_bytes)
        assert fact_of(stored, path) is None
        restored = stored.restore(from_memory=True, held=held)
        assert (restored.step, restored.is_right()) == (3, True)
    finally:
        kept.rename(path)


def test_slots_of_two_ranks_exchanged_are_not_used(stored: Stored) -> None:
    first, second = newest_slot(stored, 0), newest_slot(stored, 1)
    held = stored.held()
    between = first.with_name("between")

    def exchange() -> None:
        first.rename(between)
        second.rename(first)
        between.rename(second)

    exchange()
    try:
        restored = stored.restore(from_memory=True, held=held)
        assert (restored.step, restored.is_right()) == (3, True)
        assert "copy_bad" in restored.reports
    finally:
        exchange()
