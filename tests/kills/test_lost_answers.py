"""A keeper that dies between doing something and saying so: nothing stays lent to nobody, nothing sealed is freed."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.keeper.arena import ArenaSlot, SlotState, arena_dir, slot_path
from relight.keeper.messages import AcquireRequest, AttachRequest, TierPlan
from relight.keeper.node import Node

IMAGE_BYTES = 5000


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="relight-test-", dir="/dev/shm") as base:
        root = str(tmp_path / "run")
        made = Node(arena_dir(root, base=Path(base)), root)
        made.start()
        tiers = (TierPlan(url=root),)
        made.attach(
            AttachRequest(rank=0, world_size=1, pid=os.getpid(), tiers=tiers, generation=1, run="sample-run")
        )
        yield made
        made.close(clean=True)


def acquire(node: Node, *holding: int) -> int | None:
    return node.acquire(AcquireRequest(rank=0, timeout_seconds=0.0, holding=holding))


def test_a_slot_whose_loan_was_never_heard_of_is_lent_again(node: Node) -> None:
    heard = acquire(node)
    assert heard is not None
    lost = acquire(node, heard)
    assert lost not in (None, heard)
    # The answer was lost with the keeper; the rank asks again, and says what it knows.
    assert acquire(node, heard) == lost
    assert acquire(node, heard, lost) is None


def test_a_lent_slot_is_not_freed_while_its_page_names_the_owner_before(node: Node) -> None:
    index = acquire(node)
    assert index is not None
    with ArenaSlot.create(slot_path(node.folder, 0, index), IMAGE_BYTES, owner_pid=os.getpid()) as slot:
        slot.begin(step=1, generation=1, rank=0, world_size=1, image_bytes=IMAGE_BYTES, run="sample-run")
        values = (1, 1, 0, 1, IMAGE_BYTES, IMAGE_BYTES, 0, 0, 2**22 + 1, 0, time.time())
        slot._write_control(SlotState.WRITING, values)
        node.upkeep.rescan()
        assert slot.control().state is SlotState.WRITING
