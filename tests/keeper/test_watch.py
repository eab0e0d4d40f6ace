from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from relight.keeper.watch import (
    CLEAN_GRACE_SECONDS,
    IDLE_SECONDS,
    LifeFacts,
    decide_life,
    is_alive,
    started_ticks,
)

CALM = LifeFacts(
    num_alive=0,
    num_lost=0,
    was_attached=True,
    quiet_seconds=10.0,
    is_busy=False,
    is_saving=False,
    holds_snapshots=True,
    has_failed=False,
    tried_again=False,
    stop="no",
    term_left_seconds=None,
    linger_seconds=600.0,
)


@pytest.mark.parametrize(
    ("changes", "action"),
    [
        ({}, "leave_clean"),
        ({"num_alive": 2}, "stay"),
        ({"is_busy": True}, "stay"),
        ({"quiet_seconds": CLEAN_GRACE_SECONDS / 2}, "stay"),
        ({"quiet_seconds": -50.0}, "stay"),
        ({"has_failed": True}, "drain_again"),
        ({"has_failed": True, "tried_again": True}, "leave_clean"),
        ({"num_lost": 1}, "stay"),
        ({"num_lost": 1, "quiet_seconds": 601.0}, "leave_clean"),
        ({"num_lost": 1, "quiet_seconds": 601.0, "is_busy": True}, "stay"),
        ({"num_lost": 1, "quiet_seconds": 601.0, "has_failed": True}, "drain_again"),
        ({"was_attached": False}, "stay"),
        ({"was_attached": False, "quiet_seconds": 601.0}, "leave_clean"),
        ({"was_attached": False, "holds_snapshots": False}, "stay"),
        ({"was_attached": False, "holds_snapshots": False, "quiet_seconds": IDLE_SECONDS + 1}, "leave_clean"),
        ({"stop": "now"}, "leave"),
        ({"stop": "now", "is_busy": True, "num_alive": 2}, "leave"),
        ({"stop": "drain", "is_busy": True}, "stay"),
        ({"stop": "drain"}, "leave_clean"),
        ({"stop": "drain", "num_alive": 1}, "leave"),
        ({"stop": "drain", "has_failed": True}, "leave"),
        ({"term_left_seconds": 5.0}, "leave_clean"),
        ({"term_left_seconds": 5.0, "num_alive": 1}, "leave"),
        ({"term_left_seconds": 5.0, "num_alive": 1, "is_saving": True}, "stay"),
        ({"term_left_seconds": 5.0, "is_busy": True}, "stay"),
        ({"term_left_seconds": 0.0, "is_busy": True}, "leave"),
    ],
)
def test_when_the_keeper_leaves(changes: dict[str, object], action: str) -> None:
    decided, reason = decide_life(replace(CALM, **changes))
    assert decided == action
    assert reason


def test_this_process_runs() -> None:
    started = started_ticks(os.getpid())
    assert started is not None
    assert is_alive(os.getpid(), started)


def test_another_process_of_the_same_number_is_not_taken_for_it() -> None:
    started = started_ticks(os.getpid())
    assert started is not None
    assert not is_alive(os.getpid(), started - 1)


def test_a_process_that_only_waits_to_be_reaped_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = started_ticks(process.pid)
    assert started is not None
    os.kill(process.pid, 9)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert started_ticks(process.pid) is None
    process.communicate()
    assert started_ticks(process.pid) is None
