"""The ranks of a run talking to each other: small gathers of JSON on private groups, each with a timeout.

Nothing is pickled. With one process everything answers at once.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

import torch
import torch.distributed as dist

from relight.checkpoint import context
from relight.errors import ConfigError, DesyncError

__all__ = ["RankGroup", "world"]

_SLOT_BYTES = 2048


def world() -> tuple[int, int]:
    """Return (global rank, world size) of this process; (0, 1) without torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


class RankGroup:
    """All ranks of the run on a private gloo group. Create on every rank, in the same order.

    Args:
        timeout_seconds: how long one gather may wait for the slowest rank.
    """

    def __init__(self, *, timeout_seconds: float) -> None:
        self.rank, self.world_size = world()
        self.timeout_seconds = timeout_seconds
        self._group: Any = None
        if self.world_size > 1:
            if not dist.is_gloo_available():
                raise ConfigError("torch was built without gloo, which relight needs for its small messages")
            timeout = dt.timedelta(seconds=timeout_seconds)
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def gather(self, value: Any) -> list[Any]:
        """Return what every rank passed, by rank. Call on every rank; JSON values only.

        One message of 2 KiB; a second one only when some rank's value is larger.

        Raises:
            DesyncError: a rank did not come within the timeout, or is gone.
        """
        if self.world_size == 1:
            return [value]
        data = context.dumps(value)
        try:
            first = self._exchange(data[: _SLOT_BYTES - 8], len(data), _SLOT_BYTES)
            lengths = [length for length, _ in first]
            if max(lengths) <= _SLOT_BYTES - 8:
                return [context.loads(part[:length]) for length, part in first]
            whole = self._exchange(data, len(data), 8 + max(lengths))
        except RuntimeError as error:
            raise DesyncError(
                f"rank {self.rank}: another rank is gone or did not answer in {self.timeout_seconds:.0f} s: {error}",
                rank=self.rank,
            ) from error
        return [context.loads(part[:length]) for length, part in whole]

    def _exchange(self, data: bytes, length: int, size: int) -> list[tuple[int, bytes]]:
        mine = torch.frombuffer(
            bytearray(length.to_bytes(8, "little") + data.ljust(size - 8, b"\0")), dtype=torch.uint8
        )
        parts = [torch.empty(size, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(parts, mine, group=self._group)
        raw = [part.numpy().tobytes() for part in parts]
        return [(int.from_bytes(part[:8], "little"), part[8:]) for part in raw]
