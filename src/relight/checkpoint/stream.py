"""`FileStream`: a resumable stream over the records of many files.

Its order and position are in `stream_sampler`, reading is in `stream_scan` and `stream_records`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

from relight.checkpoint.rng import RngStream, derive_seed
from relight.checkpoint.stream_files import FilePaths, open_table
from relight.checkpoint.stream_records import OpenFiles, Splitter, record_format
from relight.checkpoint.stream_sampler import StreamSampler
from relight.checkpoint.stream_scan import RecordPlace
from relight.errors import ConfigError

__all__ = ["FileStream"]


class FileStream(IterableDataset[Any]):
    """Yield this rank's records of each global batch, in a global order that is a function of (seed, epoch) only.

    The global order is the records of the files, one file after the other, or shuffled as asked for. Global batch i
    of an epoch is its records i x global_batch onwards, and each rank takes its contiguous part of every global
    batch: a run that is restored on fewer or more ranks, or with another number of workers, sees the same global
    batches, no record of the epoch twice and none skipped. The position is a file, a record in it and its byte; going
    on from it reads nothing twice, save the shuffle window that it lies in.

    Hand it over to `TrainState` as ``data=``, by itself or in a DataLoader with any number of workers::

        stream = relight.FileStream("corpus/*.jsonl", global_batch=512, shuffle_window=10_000, transform=tokenize)
        loader = DataLoader(stream, batch_size=16, num_workers=4)
        state = relight.TrainState(model=model, optimizer=optimizer, data=loader)

    Records are then found in the training process, which reads the files ahead (every rank reads all of them, at the
    pace of training, but for records of a fixed length); workers read and transform the rank's own records.

    Without a TrainState, `state_at` and `load` save and restore the position, `advance_to` counts steps. A DataLoader
    with several workers needs `batch_size` here then, and `set_epoch` before each epoch after the first, since its
    workers iterate copies of the stream.

    Args:
        files: paths, or glob patterns (sorted), or one of them. They must not change while a run reads them.
        records: ``"lines"``: bytes up to a newline, without it (a carriage return stays; the last line needs no
            newline). An integer: so many bytes each. A function: called with a binary file that stands at the start
            of a record, it reads that record and returns it; it must be cheap, since it is also how records are found.
        global_batch: records per optimizer step, over all ranks and all accumulated micro-batches.
        seed: of the order and of random transforms.
        shuffle_files: take the files in another order each epoch.
        shuffle_window: shuffle records within consecutive windows of so many; 0 leaves them in order. Costs 32 bytes of
            memory per record of a window, and no record's content.
        transform: called with each record, in the worker. Its draws from Python's, NumPy's and torch's global CPU
            generators are a function of (seed, epoch, position in the epoch).
        rank: this rank's part; default: of torch.distributed when it is initialised at first use, else 0.
        world_size: number of parts; default likewise, else 1.
        drop_last: drop the records that do not fill a global batch. If False the last global batch of an epoch is
            short and split near evenly, so ranks may differ by one record, and some may get none.
        batch_size: of the DataLoader; needed only with several workers and without a TrainState.

    Raises:
        ConfigError: an argument cannot be used, a file is missing or compressed, or has no whole number of records.
            While iterating: there are fewer records than a global batch.
        StorageUnavailableError: while iterating: a file cannot be read.
        CorruptionError: while iterating: a file has changed.
    """

    def __init__(
        self,
        files: FilePaths,
        *,
        records: Literal["lines"] | int | Splitter = "lines",
        global_batch: int,
        seed: int = 0,
        shuffle_files: bool = False,
        shuffle_window: int = 0,
        transform: Callable[[Any], Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = True,
        batch_size: int | None = None,
    ) -> None:
        for name, value, least in (
            ("global_batch", global_batch, 1),
            ("shuffle_window", shuffle_window, 0),
            ("batch_size", 1 if batch_size is None else batch_size, 1),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"FileStream: {name} must be an integer of at least {least}, not {value!r}")
        if (rank is None) != (world_size is None):
            raise ConfigError("FileStream: give both rank and world_size, or neither")
        self._table = open_table(files)
        self._format = record_format(records, self._table)
        self._transform = transform
        self._batch_size = batch_size
        self._open = OpenFiles()
        self.sampler = StreamSampler(
            self._table,
            self._format,
            global_batch=global_batch,
            seed=seed,
            shuffle_files=shuffle_files,
            shuffle_window=shuffle_window,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
        )

    @property
    def files(self) -> tuple[str, ...]:
        """The files, in the order that an epoch without shuffling takes them."""
        return self._table.paths

    @property
    def epoch(self) -> int:
        """Epoch of the current position."""
        return self.sampler.epoch

    @property
    def records_per_epoch(self) -> int | None:
        """Number of records in all files; None until one epoch has been read, unless records have a fixed length."""
        return self.sampler.records_per_epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch to start with; see `ElasticSampler.set_epoch`."""
        self.sampler.set_epoch(epoch)

    def advance_to(self, consumed_steps: int) -> None:
        """Tell that `consumed_steps` optimizer steps are done; a Checkpointer does this by itself."""
        self.sampler.advance_to(consumed_steps)

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the position once `step` optimizer steps are done, as JSON values, the same on every rank."""
        return self.sampler.state_at(step)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Move to a position that `state_at` returned, on any number of ranks; the next iterator goes on from it.

        Raises:
            StateMismatchError: `saved` is no such position.
            ConfigError: the epoch cannot go on from there with these files and settings.
        """
        self.sampler.load(saved)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        places: Iterator[Any] = iter(self.sampler)
        if worker is not None and worker.num_workers > 1:
            places = self._share(places, worker.id, worker.num_workers)
        for place in places:
            yield self[place]

    def __getitem__(self, place: RecordPlace) -> Any:
        return self.__getitems__([place])[0]

    def __getitems__(self, places: Sequence[RecordPlace]) -> list[Any]:
        """Return the records at places that this stream's sampler yielded, transformed."""
        records = [self._read(place) for place in places]
        if self._transform is None:
            return records
        made = []
        with RngStream(self.sampler.seed) as stream:
            for place, record in zip(places, records, strict=True):
                words = (self.sampler.seed, place.epoch, place.ordinal)
                stream.reseed(derive_seed("relight stream record", *words))
                made.append(self._transformed(self._transform, place, record))
        return made

    def index_source(self, loader: DataLoader[Any]) -> Any:
        """Return what hands out places to `loader`, in batches of its size."""
        if loader.batch_size is None:
            return self.sampler
        return BatchSampler(self.sampler, loader.batch_size, loader.drop_last)

    def _read(self, place: RecordPlace) -> Any:
        return self._format.read(self._open, self._table.paths[place.file], place.start, place.stop)

    def _transformed(self, transform: Callable[[Any], Any], place: RecordPlace, record: Any) -> Any:
        try:
            return transform(record)
        except Exception as error:
            where = f"record {place.record} (byte {place.start}) of {self._table.paths[place.file]}"
            error.add_note(f"in the transform of {where}, epoch {place.epoch}")
            raise

    def _share(self, places: Iterator[Any], worker: int, num_workers: int) -> Iterator[Any]:
        """Keep the loader batches that are this worker's: they are dealt out in turn."""
        if self._batch_size is None:
            raise ConfigError(
                "FileStream in a DataLoader with several workers: hand the loader over as data= of a TrainState, or"
                " tell FileStream the loader's batch_size"
            )
        for at, place in enumerate(places):
            if at // self._batch_size % num_workers == worker:
                yield place
