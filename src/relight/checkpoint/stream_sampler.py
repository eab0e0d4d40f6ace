"""The order and position of a stream: those of an `ElasticSampler` whose number of samples may not be known yet.

Records whose ends must be looked for are counted by reading, so an epoch's length is known once it has been read to
its end. Until then it counts as endless, and positions are converted when the end is found.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

from relight.checkpoint.rng import derive_seed
from relight.checkpoint.sampler import ElasticSampler
from relight.checkpoint.stream_files import FileTable
from relight.checkpoint.stream_records import RecordFormat
from relight.checkpoint.stream_scan import START, BatchGroup, EpochScan, Mark
from relight.errors import ConfigError, CorruptionError, StateMismatchError

__all__ = ["StreamSampler"]

_ENDLESS = 1 << 62
_MAX_MARKS = 4096
_COUNTS = (
    "step",
    "epoch",
    "samples_in_epoch",
    "consumed_samples",
    "global_batch",
    "record",
    "byte",
    "in_window",
)
_BASIS = {"files": str, "order": str, "turn": int, "through": int, "prefix": str}


class StreamSampler(ElasticSampler):
    """Yield the places of this rank's records of each global batch; see `FileStream` for the order.

    Position, steps and epochs are those of an ElasticSampler. Marks of where global batches begin are kept from the
    current position on, so that a position is known by file and byte without reading anything again.

    Thread-safe as far as a loop needs that fetches in one thread and steps in another.
    """

    _called = "FileStream"

    def __init__(
        self,
        table: FileTable,
        format_: RecordFormat,
        *,
        global_batch: int,
        seed: int,
        shuffle_files: bool,
        shuffle_window: int,
        rank: int | None,
        world_size: int | None,
        drop_last: bool,
    ) -> None:
        self._lock = threading.RLock()
        self._table = table
        self._format = format_
        self._marks: dict[tuple[int, int], Mark] = {}
        self._scans: dict[int, EpochScan] = {}
        self.shuffle_window = shuffle_window if shuffle_window > 1 else 0
        counts = [format_.count(size) for size in table.sizes]
        total = sum(count for count in counts if count is not None)
        is_counted = None not in counts
        if is_counted:
            _check_total(total, global_batch, drop_last=drop_last)
        super().__init__(
            total if is_counted else _ENDLESS,
            global_batch=global_batch,
            seed=seed,
            rank=rank,
            world_size=world_size,
            shuffle=shuffle_files,
            drop_last=drop_last,
        )

    @property
    def records_per_epoch(self) -> int | None:
        """Number of records in all files; None until it is known."""
        return None if self.num_samples == _ENDLESS else self.num_samples

    def __len__(self) -> int:
        if self.records_per_epoch is None:
            # What len() raises where there is no length: loaders and progress bars rely on it.
            raise TypeError("the number of records is not known before an epoch has been read to its end")
        return super().__len__()

    def __getstate__(self) -> dict[str, Any]:
        # A spawned process may have no process group to ask.
        self._resolved()
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())

    def position_at(self, step: int) -> int:
        """Return the position once `step` optimizer steps of the run are done."""
        with self._lock:
            return super().position_at(step)

    def advance_to(self, consumed_steps: int) -> None:
        """Tell that `consumed_steps` optimizer steps of the run are done, each of one global batch."""
        with self._lock:
            super().advance_to(consumed_steps)
            here = divmod(self._told, self.steps_per_epoch)
            behind = sorted(place for place in self._marks if place <= here)
            for place in behind[:-1]:
                del self._marks[place]

    def rebase(self, step: int) -> None:
        """Let the run's step counter stand at `step` without moving the position (after a warm start)."""
        with self._lock:
            super().rebase(step)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing for the current epoch; the stream keeps count of epochs itself.

        Before the first step it may choose the epoch to start with.

        Raises:
            ConfigError: a run is under way and stands in another epoch.
        """
        if epoch != self.epoch and (self._is_placed or self._floor):
            raise ConfigError(
                f"FileStream: set_epoch({epoch}), but the data position is in epoch {self.epoch}; the stream counts"
                " epochs by itself: drop the call, or start the loop at `stream.epoch` after restore()"
            )
        super().set_epoch(epoch)

    def settings(self) -> dict[str, Any]:
        """Return the settings that shape the trajectory."""
        return {
            "files": self._table.describe(),
            "records": self._format.label,
            "global_batch": self.global_batch,
            "seed": self.seed,
            "shuffle_files": self.shuffle,
            "shuffle_window": self.shuffle_window,
            "drop_last": self.drop_last,
        }

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the position once `step` optimizer steps are done, the same on every rank, for `load`.

        `file`, `record` and `byte` say where the next record lies; with a shuffle window, where the window begins
        that it comes from, `in_window` records of which are consumed. Reads only if the position lies ahead of what
        this process has handed out.
        """
        with self._lock:
            self._find_end(self.position_at(step))
            epoch, batch = divmod(self.position_at(step), self.steps_per_epoch)
            mark = self._mark_at(epoch, batch)
            scan = self._scan(epoch)
            return super().state_at(step) | {
                "file": scan.name_at(mark.turn),
                "record": mark.record,
                "byte": mark.offset,
                "in_window": batch * self.global_batch - mark.ordinal,
                "basis": {
                    "files": self._table.fingerprint,
                    "order": self._order_key(),
                    "turn": mark.turn,
                    "through": mark.through,
                    "prefix": scan.prefix_digest(mark.through),
                    "records_per_epoch": self.records_per_epoch,
                },
            }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Move to a position that `state_at` returned, on any number of ranks. Reads nothing.

        A changed list of files, or changed settings of the order, are taken at the start of an epoch; inside one,
        only if the order up to the position is not touched: files may be added or changed behind it.

        Raises:
            StateMismatchError: `saved` is no such position.
            ConfigError: the epoch cannot go on from there, or the global batch has changed and the position is no
                multiple of the new one.
        """
        _check_shape(saved)
        step_in_epoch, rest = divmod(saved["samples_in_epoch"], self.global_batch)
        if rest:
            raise ConfigError(
                f"FileStream: {saved['samples_in_epoch']} records of epoch {saved['epoch']} are consumed in global"
                f" batches of {saved['global_batch']}, which is no multiple of the new global_batch="
                f"{self.global_batch}; change it at an epoch's start or at a common multiple"
            )
        with self._lock:
            epoch, basis = saved["epoch"], saved["basis"]
            self._marks.clear()
            if None in (self._format.count(size) for size in self._table.sizes):
                is_same = (basis["files"], basis["order"]) == (self._table.fingerprint, self._order_key())
                self._set_total(basis["records_per_epoch"] if is_same else None)
            if step_in_epoch:
                self._marks[epoch, step_in_epoch] = self._checked_mark(saved)
            self._base_step = saved["step"]
            self._base_position = epoch * self.steps_per_epoch + min(step_in_epoch, self.steps_per_epoch)
            self._base_samples = saved["consumed_samples"]
            self._told, self._floor, self._next_start = self._base_position, 0, None
            self._is_placed = True

    def _iterate(self, position: int, *, moves_floor: bool) -> Iterator[Any]:
        rank, world_size = self._resolved()
        epoch, first = divmod(position, self.steps_per_epoch)
        for group in self._groups(epoch, first):
            yield from self._scan(epoch).places(group, rank, world_size)
        if moves_floor:
            with self._lock:
                self._floor = max(self._floor, (epoch + 1) * self.steps_per_epoch)

    def _groups(self, epoch: int, batch: int) -> Iterator[BatchGroup]:
        """Read an epoch on from `batch`; keep what is learned of it on the way."""
        with self._lock:
            known = [done for of, done in self._marks if of == epoch and done <= batch]
            mark = self._marks[epoch, max(known)] if known else START
        for group in self._scan(epoch).groups(batch, mark):
            with self._lock:
                for at, found in enumerate(group.marks, group.first):
                    self._marks[epoch, at] = found
                while len(self._marks) > _MAX_MARKS:
                    # Nobody advances the position; a mark that is missed is found again by reading.
                    del self._marks[next(iter(self._marks))]
                if group.total is not None:
                    self._learn_total(group.total)
            yield group

    def _find_end(self, position: int) -> None:
        """Read on to see whether the global batch at `position` exists, unless that is known."""
        epoch, batch = divmod(position, self.steps_per_epoch)
        if self.records_per_epoch is not None or position == self._base_position or not batch:
            return
        if (epoch, batch) not in self._marks:
            next(self._groups(epoch, batch))

    def _mark_at(self, epoch: int, batch: int) -> Mark:
        if not batch:
            return START
        if (epoch, batch) not in self._marks:
            next(self._groups(epoch, batch))
        return self._marks[epoch, batch]

    def _scan(self, epoch: int) -> EpochScan:
        with self._lock:
            if epoch not in self._scans:
                while len(self._scans) > 1:
                    del self._scans[min(self._scans)]
                self._scans[epoch] = EpochScan(
                    self._table,
                    self._format,
                    seed=self.seed,
                    epoch=epoch,
                    shuffle_files=self.shuffle,
                    window=self.shuffle_window,
                    global_batch=self.global_batch,
                    drop_last=self.drop_last,
                )
            return self._scans[epoch]

    def _learn_total(self, total: int) -> None:
        if total == self.num_samples:
            return
        if self.records_per_epoch is not None:
            raise CorruptionError(
                f"FileStream: the files held {self.num_samples} records in an earlier epoch and hold {total} now; files"
                " must not change during a run: put the former ones back and start the run again"
            )
        endless = self.steps_per_epoch
        self._set_total(total)

        def moved(position: int) -> int:
            epoch, batch = divmod(position, endless)
            return epoch * self.steps_per_epoch + batch

        self._base_position, self._told = moved(self._base_position), moved(self._told)
        self._floor = moved(self._floor)
        self._next_start = None if self._next_start is None else moved(self._next_start)

    def _set_total(self, total: int | None) -> None:
        if total is not None:
            _check_total(total, self.global_batch, drop_last=self.drop_last)
        self.num_samples = _ENDLESS if total is None else total
        batches, rest = divmod(self.num_samples, self.global_batch)
        self.steps_per_epoch = batches if self.drop_last else batches + bool(rest)

    def _order_key(self) -> str:
        """Return what the order of an epoch hangs on beside its files."""
        words = (self.seed, self.shuffle, self.shuffle_window, self._format.label)
        return f"{derive_seed('relight stream order', *words):016x}"

    def _checked_mark(self, saved: Mapping[str, Any]) -> Mark:
        basis, epoch = saved["basis"], saved["epoch"]
        place = f"the position lies in epoch {epoch}, at record {saved['record']} of {saved['file']}"
        if basis["order"] != self._order_key():
            raise ConfigError(
                f"FileStream: {place}; seed, shuffle_files, shuffle_window and records can change only at the start of"
                " an epoch"
            )
        scan = self._scan(epoch)
        through = basis["through"]
        if basis["turn"] >= len(scan.order) or scan.prefix_digest(through) != basis["prefix"]:
            raise ConfigError(
                f"FileStream: {place}, which hangs on the first {through} files of that epoch, and they are not the"
                " same any more; files can be added or changed only behind the position and its shuffle window, or at"
                " the start of an epoch",
                path=saved["file"],
            )
        mark = Mark(
            ordinal=saved["samples_in_epoch"] - saved["in_window"],
            turn=basis["turn"],
            record=saved["record"],
            offset=saved["byte"],
            through=through,
        )
        window = self.shuffle_window or 1
        size = self._table.sizes[scan.order[mark.turn]]
        if mark.ordinal < 0 or mark.ordinal % window or not mark.record <= mark.offset < size:
            raise StateMismatchError(
                f"FileStream: {place}, byte {mark.offset}, which is no start of a record"
            )
        return mark


def _check_total(total: int, global_batch: int, *, drop_last: bool) -> None:
    if not total:
        raise ConfigError("FileStream: the files hold no records")
    if drop_last and total < global_batch:
        raise ConfigError(
            f"FileStream: the files hold {total} records, less than global_batch={global_batch}, so that"
            " drop_last=True leaves nothing"
        )


def _check_shape(saved: Mapping[str, Any]) -> None:
    basis = saved.get("basis")
    is_sound = (
        all(type(saved.get(key)) is int and saved[key] >= 0 for key in _COUNTS)
        and type(saved.get("file")) is str
        and isinstance(basis, Mapping)
        and all(type(basis.get(key)) is kind for key, kind in _BASIS.items())
        and min(basis["turn"], basis["through"]) >= 0
        and (basis.get("records_per_epoch") is None or type(basis["records_per_epoch"]) is int)
    )
    if not is_sound:
        raise StateMismatchError(f"data position {dict(saved)!r} is not one of a FileStream")
