"""The data position: what ``data=`` of a train state may be, and how its position is counted, saved and restored."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from relight.checkpoint.loader import LoaderPass, LoaderTakeover, TrackedSampler, samplers_in
from relight.checkpoint.per_sample import PerSampleDataset, SampleId, per_sample_rng
from relight.checkpoint.rng import derive_seed, is_generator
from relight.checkpoint.sampler import ElasticSampler
from relight.checkpoint.stateful import StatefulLoaderPart, StatefulPart, has_state, refuse_open_iterator
from relight.checkpoint.stream import FileStream
from relight.errors import ConfigError, StateMismatchError

__all__ = ["DataPart", "SampleId", "attach_data", "per_sample_rng"]


class DataPart(Protocol):
    """The data part of a train state. All calls are local and come from the thread that trains."""

    @property
    def kind(self) -> str:
        """``"elastic"``, ``"stream"``, ``"loader"`` or ``"stateful"``."""
        ...

    @property
    def per_rank(self) -> bool:
        """Whether the position belongs to this rank alone, so that the number of ranks cannot change."""
        ...

    @property
    def iterators_made(self) -> int:
        """Number of iterators made since the data was attached, as far as that can be seen."""
        ...

    def capture(self, step: int) -> dict[str, Any]:
        """Return the position once `step` optimizer steps are done; call it between two steps."""
        ...

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Move to a captured position; the next iterator goes on from it.

        Raises:
            StateMismatchError: `saved` is of another kind of data.
            ConfigError: an iterator is in progress, or the position cannot be met under the present settings.
        """
        ...

    def settings(self) -> dict[str, Any]:
        """Return the settings that shape the trajectory."""
        ...

    def on_step(self, step: int) -> None:
        """Tell that `step` optimizer steps are done.

        Raises:
            ConfigError: what the loop has taken from the loader contradicts the global batch.
        """
        ...

    def rebase(self, step: int) -> None:
        """Let the run's step counter stand at `step` without moving the position (a warm start without data)."""
        ...

    def describe(self, saved: Mapping[str, Any]) -> str:
        """Return one line about a captured position."""
        ...


def attach_data(data: Any, *, seed: int) -> DataPart:
    """Take charge of the position of `data`, in place; the caller keeps iterating the same object.

    A DataLoader gets random generators of its own, seeded from (`seed`, epoch), so that making an iterator draws
    nothing from the global ones; and the epochs of samplers with `set_epoch` are counted here, whatever they are
    told. Attaching the same loader again replaces the former part; dropping the part lets go of the loader.

    Args:
        data: an ElasticSampler or a FileStream; a DataLoader around one, or around any other map-style sampler; or
            anything with `state_dict` and `load_state_dict`.
        seed: of the loader's generators; the seed of torch's global generator goes in too, so that ranks that were
            seeded differently shuffle differently.

    Raises:
        ConfigError: `data` is nothing of these.
    """
    if isinstance(data, ElasticSampler):
        return ElasticPart(data)
    if isinstance(data, FileStream):
        from relight.checkpoint.stream_part import StreamPart

        return StreamPart(data.sampler)
    if isinstance(data, DataLoader):
        return _attach_loader(data, seed)
    if has_state(data) and not is_generator(data):
        return StatefulPart(data)
    raise ConfigError(
        f"data= cannot be a {type(data).__qualname__}: give a relight.ElasticSampler, a torch DataLoader over a"
        " map-style dataset, or an object with state_dict() and load_state_dict()"
    )


def _attach_loader(loader: DataLoader[Any], seed: int) -> DataPart:
    _check_per_sample(loader.dataset)
    if loader.num_workers > 0 and not getattr(loader, "in_order", True):
        raise ConfigError("data=: a DataLoader with in_order=False yields batches in no repeatable order")
    if isinstance(loader.dataset, FileStream):
        from relight.checkpoint.stream_part import StreamLoaderPart

        return StreamLoaderPart.of(loader, loader.dataset, seed=seed)
    is_iterable = isinstance(loader.dataset, IterableDataset)
    index_sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    if isinstance(index_sampler, TrackedSampler):
        index_sampler = index_sampler.inner
    elastic = [sampler for sampler in samplers_in(index_sampler) if isinstance(sampler, ElasticSampler)]
    if elastic and not is_iterable:
        return ElasticLoaderPart(loader, elastic[0], seed=seed)
    if has_state(loader):
        return StatefulLoaderPart(loader, seed=seed)
    if is_iterable:
        raise ConfigError(
            f"data=: {type(loader.dataset).__qualname__} is iterable-style, and a plain DataLoader cannot say where"
            " it stands; use relight.FileStream, torchdata's StatefulDataLoader, or a map-style dataset with"
            " relight.ElasticSampler"
        )
    return LoaderPart(loader, seed=seed)


def _check_per_sample(dataset: Any) -> None:
    below = getattr(dataset, "datasets", None) or [getattr(dataset, "dataset", None)]
    if not isinstance(dataset, PerSampleDataset) and any(
        isinstance(item, PerSampleDataset) for item in below
    ):
        raise ConfigError(
            f"per_sample_rng must be the outermost wrapper, but {type(dataset).__qualname__} is around it and hides"
            " the epoch: wrap it the other way round"
        )


class ElasticPart:
    """An ElasticSampler: the position is the number of optimizer steps done, and the same on every rank."""

    kind = "elastic"
    per_rank = False

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler

    @property
    def iterators_made(self) -> int:
        """Number of iterators that the sampler has made."""
        return self._sampler.iterators_made

    def capture(self, step: int) -> dict[str, Any]:
        """Return the position once `step` optimizer steps are done."""
        return {"kind": self.kind, **self._sampler.state_at(step)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Move to a captured position, on any number of ranks.

        Raises:
            StateMismatchError: `saved` is of another kind of data.
            ConfigError: the sampler was iterated before, or the position is no multiple of a changed global batch.
        """
        _check_kind(saved, self.kind)
        if self.iterators_made:
            raise ConfigError(
                "the sampler was iterated before restore() and would go on from the old position;"
                " make the iterator after restore()"
            )
        self._sampler.load(saved)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the sampler that shape the trajectory."""
        return self._sampler.settings()

    def on_step(self, step: int) -> None:
        """Move the position on to `step` optimizer steps."""
        self._sampler.advance_to(step)

    def rebase(self, step: int) -> None:
        """Let the run's step counter stand at `step` without moving the position (after a warm start)."""
        self._sampler.rebase(step)

    def describe(self, saved: Mapping[str, Any]) -> str:
        """Return one line about a captured position."""
        return (
            f"epoch {saved.get('epoch')}, {saved.get('samples_in_epoch')} samples into it,"
            f" {saved.get('consumed_samples')} consumed in all"
        )


class ElasticLoaderPart(ElasticPart):
    """A DataLoader around an ElasticSampler: positions as above, and checked against what the loop really takes.

    The check has no false alarm. Too few: at the end of a step the loop must have got every sample that the steps up
    to it consume (but for the tail of an epoch that a batch sampler with drop_last leaves out). Too many: a prefetcher
    in the loop may run ahead by a bounded number of batches, while a wrong global batch falls behind by more at each
    step; so the loop may be two global batches and 16 loader batches ahead, and as far as it likes if it takes batches
    in another thread than the one that steps. And the loader's batch must divide this rank's part of a global batch.
    """

    def __init__(
        self, loader: DataLoader[Any], sampler: ElasticSampler, *, seed: int, source: Any = None
    ) -> None:
        super().__init__(sampler)
        if source is None and sampler.num_samples > len(loader.dataset):  # type: ignore[arg-type]
            raise ConfigError(
                f"ElasticSampler has num_samples={sampler.num_samples}, the dataset has only"
                f" {len(loader.dataset)}"  # type: ignore[arg-type]
            )
        self._loader = loader
        self._seed = seed
        self._takeover = LoaderTakeover(loader, plan=self._plan, wraps=TrackedSampler, source=source)

    @property
    def iterators_made(self) -> int:
        """Number of iterators made since the loader was attached."""
        return self._takeover.iterators_made

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Move to a captured position, on any number of ranks and with any batch size of the loader.

        Raises:
            StateMismatchError: `saved` is of another kind of data.
            ConfigError: an iterator is in progress, or the position is no multiple of a changed global batch.
        """
        _check_kind(saved, self.kind)
        refuse_open_iterator(self._takeover)
        self._takeover.forget()
        self._sampler.load(saved)

    def on_step(self, step: int) -> None:
        """Move the position on to `step` optimizer steps.

        Raises:
            ConfigError: what the loop has taken contradicts the sampler's global batch.
        """
        self._sampler.advance_to(step)
        made = self._takeover.current
        if made is not None:
            self._check_consumption(made, step)

    def _plan(self, previous: LoaderPass | None) -> LoaderPass:
        self._check_batch_size()
        sampler = self._sampler
        self._takeover.seed_words = (self._seed, sampler.rank)
        start = sampler.position
        if previous is not None and previous.is_finished():
            start = max(start, (previous.epoch + 1) * sampler.steps_per_epoch)
        sampler.start_next_at(start)
        return LoaderPass(epoch=start // sampler.steps_per_epoch, start=start % sampler.steps_per_epoch)

    def _check_batch_size(self) -> None:
        part = self._sampler.global_batch // self._sampler.world_size
        inner = self._takeover.inner
        size = (
            getattr(inner, "batch_size", None) if getattr(inner, "sampler", None) is self._sampler else None
        )
        if isinstance(size, int) and part % size:
            raise ConfigError(
                f"the DataLoader's batch_size={size} does not divide this rank's part of a global batch: {part} of"
                f" global_batch={self._sampler.global_batch} over {self._sampler.world_size} ranks"
            )

    def _check_consumption(self, made: LoaderPass, step: int) -> None:
        sampler = self._sampler
        position = sampler.position_at(step)
        begin = made.epoch * sampler.steps_per_epoch + made.start
        ahead = made.yielded_samples - sampler.samples_of_rank(begin, position)
        is_left_out = made.is_finished() and position == (made.epoch + 1) * sampler.steps_per_epoch
        part = sampler.global_batch // sampler.world_size
        slack = 2 * part + 16 * made.largest
        if (ahead < 0 and not is_left_out) or (ahead > slack and made.thread == threading.get_ident()):
            taken = "fewer" if ahead < 0 else "more"
            raise ConfigError(
                f"at step {step} the loop has taken {taken} samples from the data loader than {position - begin}"
                f" steps of this epoch consume ({made.yielded_samples} taken; {part} per step on this rank, by"
                f" global_batch={sampler.global_batch}); make global_batch = batch size x accumulation x ranks, and"
                " call step() once per optimizer step"
            )


class LoaderPart:
    """A DataLoader with any other sampler: the position is the epoch and the batches that the loop has got in it.

    An epoch is one iterator that ran to its end, or was in use at an optimizer step; one that was only looked at
    (``next(iter(loader))`` before the loop) does not count, and the next starts at the same place. Batches that a
    prefetcher in the loop takes ahead count as consumed; with an ElasticSampler they do not.
    """

    kind = "loader"
    per_rank = True

    def __init__(self, loader: DataLoader[Any], *, seed: int) -> None:
        self._loader = loader
        self._seed = seed
        self._key: int | None = None
        self._next = LoaderPass(epoch=0)
        self._takeover = LoaderTakeover(loader, plan=self._plan, wraps=TrackedSampler)

    @property
    def iterators_made(self) -> int:
        """Number of iterators made since the loader was attached."""
        return self._takeover.iterators_made

    def capture(self, step: int) -> dict[str, Any]:
        """Return the position; the end of an epoch is the start of the next, whether or not the loop has ended."""
        made = self._takeover.current
        epoch, batches, generators = self._next.epoch, self._next.skip, self._next.generators
        if made is not None:
            made.is_used = True
            epoch, batches, generators = made.epoch, made.skip + made.yielded, made.generators
            if made.is_finished() or made.is_abandoned():
                epoch, batches, generators = made.epoch + 1, 0, None
        return {
            "kind": self.kind,
            "step": step,
            "epoch": epoch,
            "batches": batches,
            "batch_size": self._batch_size(),
            "key": self._seed_key(),
            "generators": self._takeover.generator_states() if generators is None else generators,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Move to a captured position; the next iterator skips what is consumed without fetching it.

        Raises:
            StateMismatchError: `saved` is of another kind of data, or its samplers own other generators.
            ConfigError: an iterator is in progress, or the batch size has changed and the samples consumed in the
                epoch are no multiple of it.
        """
        _check_kind(saved, self.kind)
        refuse_open_iterator(self._takeover)
        skip, before, after = saved["batches"], saved["batch_size"], self._batch_size()
        if skip and before != after:
            if before is None or after is None or skip * before % after:
                raise ConfigError(
                    f"data position: {skip} batches of {before} are consumed, which is no number of batches of {after}"
                )
            skip = skip * before // after
        self._takeover.forget()
        self._key = saved["key"]
        self._next = LoaderPass(epoch=saved["epoch"], skip=skip, generators=saved["generators"])

    def settings(self) -> dict[str, Any]:
        """Return the settings that shape the trajectory."""
        sampler = self._takeover.samplers[-1]
        return {
            "sampler": type(sampler).__qualname__,
            "num_samples": len(sampler) if hasattr(sampler, "__len__") else None,
            "batch_size": self._batch_size(),
            "drop_last": bool(getattr(self._takeover.inner, "drop_last", False)),
        }

    def on_step(self, step: int) -> None:  # noqa: ARG002 (this kind counts batches)
        """Note that the iterator in progress is the one that training uses."""
        if self._takeover.current is not None:
            self._takeover.current.is_used = True

    def rebase(self, step: int) -> None:
        """Do nothing: this kind counts batches."""

    def describe(self, saved: Mapping[str, Any]) -> str:
        """Return one line about a captured position."""
        return (
            f"epoch {saved.get('epoch')}, {saved.get('batches')} batches of {saved.get('batch_size')} into it"
        )

    def _plan(self, previous: LoaderPass | None) -> LoaderPass:
        self._takeover.seed_words = (self._seed, self._seed_key())
        if previous is None:
            previous = self._next
        elif previous.is_used or previous.is_finished():
            return LoaderPass(epoch=previous.epoch + 1)
        return LoaderPass(epoch=previous.epoch, skip=previous.skip, generators=previous.generators)

    def _seed_key(self) -> int:
        if self._key is None:
            self._key = derive_seed("relight loader key", torch.initial_seed())
        return self._key

    def _batch_size(self) -> int | None:
        size = getattr(self._takeover.inner, "batch_size", None)
        if self._loader.batch_sampler is None:
            return 1
        return size if isinstance(size, int) else None


def _check_kind(saved: Mapping[str, Any], kind: str) -> None:
    if saved.get("kind") != kind:
        raise StateMismatchError(
            f"data position was saved from {saved.get('kind')!r} data, this run's is {kind!r}"
        )
