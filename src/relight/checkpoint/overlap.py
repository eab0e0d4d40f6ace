"""Which tensors may be copied during forward and backward: guarded by their optimizer, and not torn too often."""

from __future__ import annotations

from collections.abc import Sequence

from relight.checkpoint.save_plan import SavePlan
from relight.checkpoint.snapshot import Partition, partition
from relight.checkpoint.table import StateTable

__all__ = ["Overlap"]

_MAX_TEARS = 2


class Overlap:
    """What past saves have taught about overlapping.

    A torn snapshot makes the next save block; a tensor that was torn twice is copied inside the call from then on.
    `note_torn` is called by the snapshot thread, all else by the training thread.
    """

    def __init__(self) -> None:
        self._tear_counts: dict[str, int] = {}
        self._num_torn = 0
        self._num_blocked = 0
        self._cached: tuple[tuple[object, ...], Partition] | None = None

    def take_block(self) -> bool:
        """Return whether the next save must block since the last one was torn; counts as having blocked."""
        must_block = self._num_torn > self._num_blocked
        self._num_blocked = self._num_torn
        return must_block

    def note_torn(self, keys: Sequence[str]) -> None:
        """Take note of a torn snapshot and the tensors that changed in it."""
        for key in keys:
            self._tear_counts[key] = self._tear_counts.get(key, 0) + 1
        self._num_torn += 1

    def parts(self, plan: SavePlan, table: StateTable, guards: tuple[bool, ...]) -> Partition:
        """Return which entries of `plan` are copied when.

        Args:
            plan: of the state in `table`.
            table: the state.
            guards: for each optimizer, whether it was seen to fire its hook in the last step; () to block.
        """
        key = (id(plan), guards, self._num_torn, table.owners)
        if self._cached is None or self._cached[0] != key:
            owners, keys, tears = table.owners, table.keys, self._tear_counts

            def may_overlap(at: int) -> bool:
                owner = owners[at]
                return (
                    bool(guards)
                    and owner is not None
                    and guards[owner]
                    and tears.get(keys[at], 0) < _MAX_TEARS
                )

            self._cached = (key, partition(plan, table, may_overlap))
        return self._cached[1]
