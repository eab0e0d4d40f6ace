"""Whose processes live, and what the keeper's own life follows from that. The decision is a pure function."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "CLEAN_GRACE_SECONDS",
    "IDLE_SECONDS",
    "LifeAction",
    "LifeFacts",
    "decide_life",
    "is_alive",
    "started_ticks",
]

CLEAN_GRACE_SECONDS = 1.0
"""How long a keeper with nothing left to do waits for the next process to attach."""

IDLE_SECONDS = 60.0
"""How long a keeper stays to which nobody ever attached and that holds no snapshot."""

LifeAction = Literal["stay", "drain_again", "leave", "leave_clean"]
"""What to do: "drain_again" tries what failed once more; "leave_clean" also removes slots and folder."""


def started_ticks(pid: int) -> int | None:
    """Return when the process started (clock ticks since boot), or None when there is none that still runs.

    A process that only waits to be reaped does not run; one whose other threads still run does.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may hold anything; the fields after it are state, parent, ... start time.
            fields = file.read().rpartition(b")")[2].split()
        if fields[0] in (b"X", b"x") or (fields[0] == b"Z" and len(os.listdir(f"/proc/{pid}/task")) <= 1):
            return None
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[19])


def is_alive(pid: int, started: int) -> bool:
    """Return whether the process that had `pid` and started at `started` ticks still runs."""
    return started_ticks(pid) == started


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeFacts:
    """What the decision to stay or leave depends on.

    Attributes:
        num_alive: attached processes that run.
        num_lost: ranks whose process ended without a clean detach and that were not replaced.
        was_attached: whether any rank ever attached, also to an earlier keeper of these slots.
        quiet_seconds: since the last attached process was seen or somebody asked the keeper to hold on.
        is_busy: digests, drains, read-backs or retention are queued or at work.
        is_saving: a living rank holds a slot that it has not sealed yet.
        holds_snapshots: some slot is sealed or digested.
        has_failed: a snapshot that is held could not be stored.
        tried_again: that was tried once more already.
        stop: what was asked for: nothing, drain first, or at once.
        term_left_seconds: grace left since SIGTERM; None when there was none.
        linger_seconds: how long snapshots outlive lost workers.
    """

    num_alive: int
    num_lost: int
    was_attached: bool
    quiet_seconds: float
    is_busy: bool
    is_saving: bool
    holds_snapshots: bool
    has_failed: bool
    tried_again: bool
    stop: Literal["no", "drain", "now"]
    term_left_seconds: float | None
    linger_seconds: float


def decide_life(facts: LifeFacts) -> tuple[LifeAction, str]:
    """Return what the keeper does now, and why."""
    if facts.stop == "now":
        return "leave", "asked to stop"
    leave: LifeAction = "leave" if facts.num_alive or facts.has_failed else "leave_clean"
    if facts.term_left_seconds is not None:
        if facts.term_left_seconds <= 0:
            return "leave", "the grace after SIGTERM is over"
        if facts.is_busy or facts.is_saving:
            return "stay", "draining within the grace after SIGTERM"
        return leave, "drained after SIGTERM"
    if facts.stop == "drain":
        return (
            ("stay", "draining before the stop") if facts.is_busy else (leave, "asked to stop, and drained")
        )
    if facts.num_alive:
        return "stay", f"{facts.num_alive} ranks are attached"
    if facts.is_busy:
        return "stay", "draining"
    return _decide_alone(facts)


def _decide_alone(facts: LifeFacts) -> tuple[LifeAction, str]:
    is_held = facts.num_lost > 0 or (facts.holds_snapshots and not facts.was_attached)
    if is_held:
        allowed_seconds, reason = facts.linger_seconds, "workers were lost; snapshots are kept for them"
    elif facts.was_attached:
        allowed_seconds, reason = CLEAN_GRACE_SECONDS, "all ranks left cleanly"
    else:
        allowed_seconds, reason = IDLE_SECONDS, "nobody has attached"
    if facts.quiet_seconds < allowed_seconds:
        return "stay", reason
    if facts.has_failed and not facts.tried_again:
        return "drain_again", reason + "; one more try to store what failed"
    return "leave_clean", reason
