"""Clocks: the manual one moves only when told, and wall time alone may go back."""

from __future__ import annotations

import time

import pytest

from relight.clock import Clock, ManualClock, SystemClock


def test_manual_clock_stands_still() -> None:
    clock = ManualClock(wall_seconds=100.0)
    assert (clock.now(), clock.monotonic()) == (100.0, 0.0)
    assert (clock.now(), clock.monotonic()) == (100.0, 0.0)


def test_sleeping_on_a_manual_clock_moves_both_times_and_does_not_block() -> None:
    clock = ManualClock(wall_seconds=100.0, monotonic_seconds=5.0)
    started = time.monotonic()
    clock.sleep(3600.0)
    assert (clock.now(), clock.monotonic()) == (3700.0, 3605.0)
    assert time.monotonic() - started < 5.0


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_sleeping_for_no_time_changes_nothing(seconds: float) -> None:
    clock = ManualClock()
    clock.sleep(seconds)
    SystemClock().sleep(seconds)
    assert clock.monotonic() == 0.0


def test_monotonic_time_never_goes_back() -> None:
    with pytest.raises(ValueError, match="cannot go back"):
        ManualClock().advance(-1.0)


def test_a_correction_moves_wall_time_only() -> None:
    clock = ManualClock(wall_seconds=100.0, monotonic_seconds=5.0)
    clock.correct_wall(-30.0)
    assert (clock.now(), clock.monotonic()) == (70.0, 5.0)


def test_system_clock_sleeps_for_at_least_the_time_asked() -> None:
    clock: Clock = SystemClock()
    started = clock.monotonic()
    clock.sleep(0.002)
    assert clock.monotonic() - started >= 0.002


def test_system_clock_gives_the_time_of_day() -> None:
    before = time.time()
    assert before <= SystemClock().now() <= time.time()
