"""One epoch of a stream: where its records lie, in their global order, cut into global batches.

The order is a function of the files, (seed, epoch) and the shuffle window alone. Every rank finds the ends of all
records by itself and keeps only its part of each batch, so that ranks and workers need not talk to each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from relight.checkpoint.order import SampleOrder
from relight.checkpoint.rng import derive_seed
from relight.checkpoint.stream_files import FileTable
from relight.checkpoint.stream_records import RecordFormat

__all__ = ["START", "BatchGroup", "EpochScan", "Mark", "RecordPlace"]

_GROUP_BATCHES = 64

_Rows = npt.NDArray[np.int64]
"""Shape (records, 4): turn of the file in the epoch, number of the record in the file, first byte, end byte."""

_TURN, _RECORD, _START, _STOP = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPlace:
    """Where one record lies, for any process that has the same stream."""

    file: int
    """Index in the file table."""
    record: int
    """Records of the file before it."""
    start: int
    stop: int
    epoch: int
    ordinal: int
    """Position in the global order of the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A record's start from which the epoch can be read on: with a shuffle window, the start of a window."""

    ordinal: int
    """Records of the epoch before it, before windows are shuffled."""
    turn: int
    """Files of the epoch before its file."""
    record: int
    """Records of its file before it."""
    offset: int
    """Its first byte in its file."""
    through: int
    """Number of files, in the epoch's order, that must be as they were for the epoch to go on from here; one more than
    there are if there must be no others."""


START = Mark(ordinal=0, turn=0, record=0, offset=0, through=0)
"""The start of every epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGroup:
    """Consecutive whole global batches of an epoch, or its last part."""

    first: int
    """Global batches of the epoch before it."""
    rows: _Rows
    marks: tuple[Mark, ...]
    """For each batch, where to start reading to get it."""
    total: int | None = None
    """Records of the epoch; known only in the last group, which may have no rows."""


class EpochScan:
    """The records of one epoch.

    Args:
        table: the files.
        format_: of their records.
        seed, epoch: what orders are a function of.
        shuffle_files: take the files in another order each epoch.
        window: records are shuffled within consecutive windows of so many; 0 or 1 leaves them in order.
        global_batch: records per batch, over all ranks.
        drop_last: leave out the records that fill no batch.
    """

    def __init__(
        self,
        table: FileTable,
        format_: RecordFormat,
        *,
        seed: int,
        epoch: int,
        shuffle_files: bool,
        window: int,
        global_batch: int,
        drop_last: bool,
    ) -> None:
        self.order = table.order(seed=seed, epoch=epoch, shuffle=shuffle_files)
        self._table = table
        self._format = format_
        self._epoch = epoch
        self._window = window if window > 1 else 0
        self._window_seed = derive_seed("relight stream window", seed, epoch)
        self._global_batch = global_batch
        self._drop_last = drop_last
        self._prefix = (-1, "")

    def name_at(self, turn: int) -> str:
        """Return the name of the file that has its turn after `turn` others."""
        return self._table.names[self.order[turn]]

    def prefix_digest(self, num_files: int) -> str:
        """Return a digest of the names and sizes of the first files of the epoch."""
        if self._prefix[0] != num_files:
            self._prefix = (num_files, self._table.digest_of(self.order[:num_files]))
        return self._prefix[1]

    def groups(self, batch: int, mark: Mark) -> Iterator[BatchGroup]:
        """Yield the global batches from `batch` to the end of the epoch.

        Args:
            batch: first batch to yield.
            mark: place to start reading; at or before the batch's start.
        """
        size = self._global_batch
        begin, end = batch * size, mark.ordinal
        rows = _no_rows()
        windows: list[tuple[Mark, int]] = []
        for at, found in self._windows(mark):
            end = at.ordinal + len(found)
            windows.append((at, len(found)))
            rows = np.concatenate([rows, found[max(0, begin - at.ordinal) :]])
            while len(rows) >= size:
                count = min(len(rows) // size, _GROUP_BATCHES)
                yield self._group(begin, rows[: count * size], windows)
                begin += count * size
                rows = rows[count * size :]
            windows = [(at, count) for at, count in windows if at.ordinal + count > begin]
        rows = _no_rows() if self._drop_last else rows
        last = self._group(begin, rows, windows)
        yield BatchGroup(first=last.first, rows=last.rows, marks=last.marks, total=end)

    def places(self, group: BatchGroup, rank: int, world_size: int) -> Iterator[RecordPlace]:
        """Yield the records of a group that are a rank's, in their global order."""
        size = self._global_batch
        begin = group.first * size
        ordinals = np.arange(begin, begin + len(group.rows))
        if len(group.rows) % size:
            part = slice(rank * len(group.rows) // world_size, (rank + 1) * len(group.rows) // world_size)
            rows, ordinals = group.rows[part], ordinals[part]
        else:
            part = slice(rank * size // world_size, (rank + 1) * size // world_size)
            rows = group.rows.reshape(-1, size, 4)[:, part].reshape(-1, 4)
            ordinals = ordinals.reshape(-1, size)[:, part].reshape(-1)
        for (turn, record, start, stop), ordinal in zip(rows.tolist(), ordinals.tolist(), strict=True):
            yield RecordPlace(
                file=self.order[turn],
                record=record,
                start=start,
                stop=stop,
                epoch=self._epoch,
                ordinal=ordinal,
            )

    def _group(self, begin: int, rows: _Rows, windows: list[tuple[Mark, int]]) -> BatchGroup:
        starts = range(begin, begin + len(rows), self._global_batch)
        if self._window:
            at = iter(windows)
            here, count = next(at, (START, 0))
            marks = []
            for start in starts:
                while start >= here.ordinal + count:
                    here, count = next(at)
                marks.append(here)
        else:
            marks = [_mark_of(start, rows[start - begin]) for start in starts]
        return BatchGroup(first=begin // self._global_batch, rows=rows, marks=tuple(marks))

    def _windows(self, mark: Mark) -> Iterator[tuple[Mark, _Rows]]:
        """Yield what is shuffled as one, shuffled, and the mark of its start; pieces of any size where nothing is."""
        if not self._window:
            ordinal = mark.ordinal
            for rows in self._extents(mark):
                yield _mark_of(ordinal, rows[0]), rows
                ordinal += len(rows)
            return
        ordinal, held, num_held = mark.ordinal, [_no_rows()], 0
        for rows in self._extents(mark):
            held.append(rows)
            num_held += len(rows)
            if num_held < self._window:
                continue
            joined = np.concatenate(held)
            for start in range(0, num_held - self._window + 1, self._window):
                yield self._shuffled(ordinal, joined[start : start + self._window])
                ordinal += self._window
            # A copy, so that the rest does not keep the whole.
            held = [joined[num_held - num_held % self._window :].copy()]
            num_held = len(held[0])
        if num_held:
            yield self._shuffled(ordinal, np.concatenate(held))

    def _shuffled(self, ordinal: int, rows: _Rows) -> tuple[Mark, _Rows]:
        # A short window hangs on there being no more files, too.
        through = int(rows[-1, _TURN]) + 1 if len(rows) == self._window else len(self.order) + 1
        order = SampleOrder(len(rows), seed=self._window_seed, epoch=ordinal // self._window)
        return _mark_of(ordinal, rows[0], through), rows[order.ids_at(np.arange(len(rows)))]

    def _extents(self, mark: Mark) -> Iterator[_Rows]:
        record, offset = mark.record, mark.offset
        for turn in range(mark.turn, len(self.order)):
            index = self.order[turn]
            for stops in self._format.stops(self._table.paths[index], self._table.sizes[index], offset):
                rows = np.empty((len(stops), 4), dtype=np.int64)
                rows[:, _TURN] = turn
                rows[:, _RECORD] = np.arange(record, record + len(stops))
                rows[0, _START] = offset
                rows[1:, _START] = stops[:-1]
                rows[:, _STOP] = stops
                yield rows
                record, offset = record + len(stops), int(stops[-1])
            record, offset = 0, 0


def _mark_of(ordinal: int, row: npt.NDArray[Any], through: int | None = None) -> Mark:
    turn = int(row[_TURN])
    return Mark(
        ordinal=ordinal,
        turn=turn,
        record=int(row[_RECORD]),
        offset=int(row[_START]),
        through=turn + 1 if through is None else through,
    )


def _no_rows() -> _Rows:
    return np.empty((0, 4), dtype=np.int64)
