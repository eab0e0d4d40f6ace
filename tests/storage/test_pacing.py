"""The bandwidth limit of a tier."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from relight.clock import ManualClock
from relight.storage.backend import open_backend
from relight.storage.pacing import PacedFiles

MEBIBYTE = 2**20


def test_writes_take_as_long_as_the_rate_asks(tmp_path: Path) -> None:
    clock = ManualClock()
    files = PacedFiles(10 * MEBIBYTE, clock)
    descriptor = files.create(tmp_path / "x", direct=False)
    data = memoryview(os.urandom(30 * MEBIBYTE))
    started = clock.monotonic()
    done = 0
    while done < len(data):
        done += files.write(descriptor, data[done:], done)
    files.close(descriptor)
    assert clock.monotonic() - started == pytest.approx(30 / 10, abs=0.2)
    assert (tmp_path / "x").read_bytes() == data


def test_a_pause_does_not_save_up_for_a_later_burst(tmp_path: Path) -> None:
    clock = ManualClock()
    files = PacedFiles(MEBIBYTE, clock)
    descriptor = files.create(tmp_path / "x", direct=False)
    clock.sleep(1000)
    started = clock.monotonic()
    for at in range(5):
        files.write(descriptor, memoryview(bytes(MEBIBYTE)), at * MEBIBYTE)
    files.close(descriptor)
    assert clock.monotonic() - started == pytest.approx(4, abs=0.2)


def test_a_limited_tier_stores_the_same_bytes(tmp_path: Path) -> None:
    backend = open_backend(str(tmp_path / "tier"), bandwidth=1e12)
    data = os.urandom(3 * MEBIBYTE + 5)
    assert backend.put("a/b", data)
    assert backend.get("a/b") == data
