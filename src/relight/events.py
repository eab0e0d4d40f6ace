"""Typed events: what happened, when, to which run, generation, rank and step; JSON lines.

Real and simulated runs write the same kinds, and every later view (report, planner, dashboard) reads only these.
Must not import anything of relight but `clock`.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

__all__ = ["Event", "EventKind", "EventLog", "read_events"]

_OWED_MAX_BYTES = 2**20

EventKind = Literal[
    "run_started",
    "restore_started",
    "restore_done",
    "save_requested",
    "save_staged",
    "save_sealed",
    "save_skipped",
    "save_deferred",
    "save_torn",
    "save_failed",
    "save_durable",
    "save_committed",
    "save_verified",
    "copy_bad",
    "candidate_skipped",
    "part_unclaimed",
    "mismatch_allowed",
    "replicas_differ",
    "checkpoint_removed",
    "keeper_started",
    "keeper_lost",
    "keeper_stopped",
    "thread_died",
    "run_closed",
]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event. `at` is wall-clock seconds; `fields` holds what the kind needs, units in the names."""

    kind: EventKind
    at: float
    run: str | None = None
    generation: int | None = None
    rank: int | None = None
    step: int | None = None
    fields: dict[str, Any] = {}


class EventLog:
    """Append events to one JSON-lines file; safe from several threads.

    A log that cannot be written (disk full) never stops training: what is owed is written with the next event that
    finds room, up to 1 MiB; events beyond that are counted in `num_lost`. The newest 256 are always in `recent`, for
    tests and status pages.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.num_lost = 0
        self.recent: list[Event] = []
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._owed = b""

    def emit(self, event: Event) -> None:
        """Append `event`; never raises for I/O."""
        line = msgspec.json.encode(event) + b"\n"
        with self._lock:
            self.recent.append(event)
            del self.recent[:-256]
            if len(self._owed) + len(line) <= _OWED_MAX_BYTES:
                self._owed += line
            else:
                self.num_lost += 1
            with suppress(OSError):
                self._write()

    def _write(self) -> None:
        if self.path is None:
            self._owed = b""
            return
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(
                self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
            )
        # A full disk may take a part of a line: the rest must follow before anything else.
        while self._owed:
            self._owed = self._owed[os.write(self._descriptor, self._owed) :]

    def close(self) -> None:
        """Close the file; later events open it again."""
        with self._lock:
            with suppress(OSError):
                self._write()
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


def read_events(folder: Path) -> Iterator[Event]:
    """Yield the events of every ``*.jsonl`` file in `folder`, file by file; a last line cut short is left out."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                yield msgspec.convert(json.loads(line), Event)
