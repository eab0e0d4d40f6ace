from __future__ import annotations

import os
from pathlib import Path

import pytest

from relight import stages
from relight.errors import ConfigError, CorruptionError, MissingCopyError
from relight.keeper.arena import ArenaSlot, SlotState, arena_dir, list_slots, slot_path
from relight.manifest.manifest import BLOCK_BYTES

CAPACITY = 2 * BLOCK_BYTES + 77


@pytest.fixture
def path(shared: Path) -> Path:
    return slot_path(shared, 0, 0)


@pytest.fixture
def sealed(path: Path) -> ArenaSlot:
    slot = ArenaSlot.create(path, CAPACITY, owner_pid=os.getpid())
    slot.begin(step=5, generation=2, rank=0, world_size=3, image_bytes=CAPACITY)
    slot.image[:5] = b"hello"
    slot.seal(b'{"a":1}', sealed_at=12.5)
    return slot


def pass_all_states(slot: ArenaSlot) -> None:
    slot.begin(step=1, generation=1, rank=0, world_size=1, image_bytes=100)
    slot.seal(b"{}", sealed_at=1.0)
    slot.write_digests([bytes(16)])


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes()[offset : offset + 1])
    data[0] ^= 1
    with path.open("rb+") as file:
        file.seek(offset)
        file.write(data)


def test_a_sealed_slot_reads_the_same_through_another_mapping(sealed: ArenaSlot, path: Path) -> None:
    with ArenaSlot.open(path) as other:
        control = other.control()
        assert (control.state, control.step, control.generation) == (SlotState.SEALED, 5, 2)
        assert (control.rank, control.world_size, control.image_bytes) == (0, 3, CAPACITY)
        assert (control.num_blocks, control.sealed_at, control.owner_pid) == (3, 12.5, os.getpid())
        assert other.draft() == b'{"a":1}'
        assert bytes(other.image[:5]) == b"hello"
    sealed.close()


def test_digests_come_back_with_the_state(sealed: ArenaSlot, path: Path) -> None:
    digests = [bytes([block]) * 16 for block in range(3)]
    with sealed:
        sealed.write_digests(digests)
    with ArenaSlot.open(path) as other:
        assert other.control().state is SlotState.DIGESTED
        assert other.digests() == digests
        assert other.draft() == b'{"a":1}'


def test_a_changed_digest_or_draft_is_found(sealed: ArenaSlot, path: Path) -> None:
    with sealed:
        sealed.write_digests([bytes(16)] * 3)
        digests_at = 4096 + -(-CAPACITY // 4096) * 4096
        for offset in (digests_at + 20, digests_at + 4096 + 3):
            flip(path, offset)
            with pytest.raises(CorruptionError, match="differ"):
                sealed.digests()
            flip(path, offset)
        assert len(sealed.digests()) == 3


@pytest.mark.parametrize("offset", [8, 57, 64, 80, 100, 120])
def test_a_changed_control_page_is_found(sealed: ArenaSlot, path: Path, offset: int) -> None:
    with sealed:
        flip(path, offset)
        if offset == 8:  # the state is outside the checksum: it is the last byte to change
            assert sealed.control().state is not SlotState.SEALED
        else:
            with pytest.raises(CorruptionError, match="checksum"):
                sealed.control()


def test_a_missing_slot_is_missing(path: Path) -> None:
    with pytest.raises(MissingCopyError):
        ArenaSlot.open(path)


@pytest.mark.parametrize("content", [b"", b"x" * 100, bytes(4096), bytes(2**20)])
def test_a_half_made_slot_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(CorruptionError, match="not a finished slot"):
        ArenaSlot.open(path)


@pytest.mark.parametrize("kept_bytes", [4096, 4096 + CAPACITY, 4096 + CAPACITY + 4096 - CAPACITY % 4096])
def test_a_slot_that_was_cut_short_is_refused(sealed: ArenaSlot, path: Path, kept_bytes: int) -> None:
    sealed.close()
    os.truncate(path, kept_bytes)
    with pytest.raises(CorruptionError, match="shorter"):
        ArenaSlot.open(path)


def test_making_a_slot_twice_fails(path: Path) -> None:
    ArenaSlot.create(path, 10, owner_pid=1).close()
    with pytest.raises(FileExistsError):
        ArenaSlot.create(path, 10, owner_pid=1)


def test_a_slot_that_does_not_fit_leaves_nothing_behind(path: Path) -> None:
    with pytest.raises(OSError, match=r".*"):
        ArenaSlot.create(path, 2**50, owner_pid=1)
    assert list_slots(path.parent) == []


def test_links_are_not_followed(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_bytes(bytes(8192))
    path.symlink_to(target)
    with pytest.raises(OSError, match=r".*"):
        ArenaSlot.open(path)
    with pytest.raises(OSError, match=r".*"):
        ArenaSlot.create(path, 10, owner_pid=1)
    assert target.read_bytes() == bytes(8192)


@pytest.mark.parametrize(
    ("point", "expected"),
    [
        ("slot.writing", SlotState.WRITING),
        ("seal.draft_written", SlotState.WRITING),
        ("seal.control_written", SlotState.WRITING),
        ("seal.sealed", SlotState.SEALED),
        ("seal.digests_written", SlotState.SEALED),
    ],
)
def test_stopped_at_any_point_the_state_says_how_far_it_came(
    path: Path, point: str, expected: SlotState
) -> None:
    class Stopped(BaseException):
        pass

    def stop(seen: str) -> None:
        if seen == point:
            raise Stopped

    with ArenaSlot.create(path, 100, owner_pid=os.getpid()) as slot:
        stages.subscribe(stop)
        try:
            with pytest.raises(Stopped):
                pass_all_states(slot)
        finally:
            stages.unsubscribe(stop)
    with ArenaSlot.open(path) as other:
        assert other.control().state is expected


def test_a_new_snapshot_takes_a_digested_slot_over(sealed: ArenaSlot) -> None:
    with sealed:
        sealed.write_digests([bytes(16)] * 3)
        sealed.begin(step=6, generation=2, rank=0, world_size=3, image_bytes=100)
        assert (sealed.control().state, sealed.control().step) == (SlotState.WRITING, 6)
        sealed.seal(b'{"longer":"' + b"x" * 9000 + b'"}', sealed_at=13.0)
        sealed.write_digests([b"d" * 16])
        assert sealed.digests() == [b"d" * 16]
        assert len(sealed.draft()) == 9013


def test_closing_with_a_slice_in_use_is_no_error(sealed: ArenaSlot) -> None:
    part = sealed.image[:5]
    sealed.close()
    sealed.close()
    assert bytes(part) == b"hello"


def test_the_arena_is_private(shared: Path) -> None:
    folder = arena_dir("/runs/a", base=shared)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert arena_dir("/runs/a", base=shared) == folder
    assert arena_dir("/runs/b", base=shared) != folder


def test_an_arena_that_others_may_enter_is_refused(shared: Path) -> None:
    folder = arena_dir("/runs/a", base=shared)
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        arena_dir("/runs/a", base=shared)


def test_an_arena_that_is_a_link_is_refused(shared: Path, tmp_path: Path) -> None:
    folder = arena_dir("/runs/a", base=shared)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError):
        arena_dir("/runs/a", base=shared)


def test_slots_are_listed_by_rank_and_index(shared: Path) -> None:
    for rank, index in ((1, 0), (0, 1), (0, 0)):
        ArenaSlot.create(slot_path(shared, rank, index), 1, owner_pid=1).close()
    (shared / "keeper.json").write_text("{}")
    names = [path.name for path in list_slots(shared)]
    assert names == ["rank-00000.slot-0", "rank-00000.slot-1", "rank-00001.slot-0"]
