"""A bandwidth limit for writing, as a layer at the file seam: a tier's `bandwidth` in bytes per second."""

from __future__ import annotations

import threading

from relight.clock import Clock, SystemClock
from relight.storage.files import Files

__all__ = ["PacedFiles"]

_BURST_SECONDS = 0.1
_PART_BYTES = 1024 * 1024


class PacedFiles(Files):
    """Real file calls whose writes together stay below a rate; safe from several threads.

    Over any time longer than a tenth of a second the bytes written stay below `bytes_per_second` times it, plus
    one write of 1 MiB. Reading is not limited.
    """

    def __init__(self, bytes_per_second: float, clock: Clock | None = None) -> None:
        self.bytes_per_second = bytes_per_second
        self._clock = clock if clock is not None else SystemClock()
        self._lock = threading.Lock()
        self._due = self._clock.monotonic()

    def write(self, descriptor: int, data: memoryview, offset_bytes: int) -> int:
        """Write up to 1 MiB of `data`, once the rate allows it."""
        part = data[:_PART_BYTES]
        with self._lock:
            now = self._clock.monotonic()
            self._due = max(self._due, now - _BURST_SECONDS)
            pause_seconds = self._due - now
            self._due += len(part) / self.bytes_per_second
        if pause_seconds > 0:
            self._clock.sleep(pause_seconds)
        return super().write(descriptor, part, offset_bytes)
