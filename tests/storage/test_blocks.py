"""Files that are stored block by block are whole or not there, like those that are stored at once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from relight.errors import CorruptionError, StorageFullError
from relight.storage.local import LocalBackend
from relight.testing.files import FullDiskFiles, Killed, KillingFiles, PowerLossFiles

CONTENT = bytes(range(256)) * 40


def blocks(block_bytes: int = 1000) -> Iterator[memoryview]:
    """Yield the content in pieces that all lie in the same memory."""
    buffer = memoryview(bytearray(block_bytes))
    for start in range(0, len(CONTENT), block_bytes):
        piece = CONTENT[start : start + block_bytes]
        buffer[: len(piece)] = piece
        yield buffer[: len(piece)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_blocks_are_stored_one_behind_the_other(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    assert backend.put_blocks("a/b", len(CONTENT), blocks())
    assert backend.get("a/b") == CONTENT
    assert backend.put_blocks("empty", 0, iter(()))
    assert backend.get("empty") == b""
    assert names(tmp_path) == ["b", "empty"]


def test_what_is_there_is_replaced_or_stays_as_asked(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    backend.put("x", b"old")
    assert not backend.put_blocks("x", len(CONTENT), blocks(), if_absent=True)
    assert backend.get("x") == b"old"
    assert backend.put_blocks("x", len(CONTENT), blocks())
    assert backend.get("x") == CONTENT
    assert names(tmp_path) == ["x"]


def test_a_source_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[memoryview]:
        yield memoryview(b"some")
        raise CorruptionError("the rest is not there")

    with pytest.raises(CorruptionError):
        LocalBackend(tmp_path).put_blocks("x", 100, failing())
    assert names(tmp_path) == []


@pytest.mark.parametrize("after_bytes", [0, 999, 5000])
def test_a_full_disk_leaves_nothing(tmp_path: Path, after_bytes: int) -> None:
    with pytest.raises(StorageFullError):
        LocalBackend(tmp_path, FullDiskFiles(after_bytes)).put_blocks("x", len(CONTENT), blocks())
    assert names(tmp_path) == []


@pytest.mark.parametrize("if_absent", [True, False])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_loss_of_power_at_any_call_leaves_the_whole_file_or_none(
    tmp_path: Path, seed: int | None, *, if_absent: bool
) -> None:
    for calls in itertools.count():
        folder = tmp_path / str(calls)
        folder.mkdir()
        power = PowerLossFiles(folder)
        files = KillingFiles(calls, die=lambda: None, inner=power)
        with suppress(Killed):
            LocalBackend(folder, files).put_blocks("x", len(CONTENT), blocks(3000), if_absent=if_absent)
        power.cut_power(None if seed is None else random.Random(seed + calls))
        backend = LocalBackend(folder)
        seen = backend.get("x") if backend.size_bytes("x") is not None else None
        assert seen in ((CONTENT, None) if files.is_dead else (CONTENT,))
        if not files.is_dead:
            assert calls >= 8
            return
