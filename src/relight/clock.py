"""Time as an argument: whatever waits or takes a time is given a `Clock`.

Wall time names instants in records; intervals and deadlines use monotonic time only, which no clock correction moves.
Must not import anything of relight.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """A source of time; every method may be called from any thread."""

    def now(self) -> float:
        """Return wall time in seconds since 1970-01-01 UTC; it may jump, in both directions."""
        ...

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start; it never goes back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Return after at least `seconds` of monotonic time; at once if `seconds` is not positive."""
        ...


class SystemClock:
    """The machine's own time."""

    def now(self) -> float:
        """Return wall time in seconds since 1970-01-01 UTC."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds of the machine's monotonic clock, which processes of one machine share."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Block the calling thread for `seconds`."""
        if seconds > 0:
            time.sleep(seconds)


class ManualClock:
    """Time that stands still until it is told to move; sleeping moves it and never blocks."""

    def __init__(self, *, wall_seconds: float = 1_700_000_000.0, monotonic_seconds: float = 0.0) -> None:
        self._lock = threading.Lock()
        self._wall_seconds = wall_seconds
        self._monotonic_seconds = monotonic_seconds

    def now(self) -> float:
        """Return wall time in seconds since 1970-01-01 UTC."""
        with self._lock:
            return self._wall_seconds

    def monotonic(self) -> float:
        """Return the seconds that this clock was moved on, plus its start."""
        with self._lock:
            return self._monotonic_seconds

    def sleep(self, seconds: float) -> None:
        """Move the clock on by `seconds` and return at once."""
        if seconds > 0:
            self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Move both times on by `seconds`.

        Raises:
            ValueError: `seconds` is negative, since monotonic time never goes back.
        """
        if seconds < 0:
            raise ValueError(f"monotonic time cannot go back by {-seconds} s; use correct_wall")
        with self._lock:
            self._wall_seconds += seconds
            self._monotonic_seconds += seconds

    def correct_wall(self, seconds: float) -> None:
        """Move wall time alone by `seconds` (which may be negative), as a time server's correction does."""
        with self._lock:
            self._wall_seconds += seconds
