"""Data that keeps its own position: anything with `state_dict` and `load_state_dict`, per rank.

A DataLoader of this kind (torchdata's StatefulDataLoader) also gets generators of its own, so that its workers' seeds
and its shuffles are a function of (seed, epoch), and its states at the end of an epoch are made to start the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from relight.checkpoint.loader import LoaderPass, LoaderTakeover, TrackedSampler
from relight.checkpoint.per_sample import tag_ids
from relight.checkpoint.rng import RngStream
from relight.errors import ConfigError, StateMismatchError

__all__ = ["StatefulLoaderPart", "StatefulPart", "has_state"]

_METHODS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
_FINISHED = "_iterator_finished"


def has_state(obj: object) -> bool:
    """Return whether `obj` has a pair of methods that read and load its position."""
    return any(all(callable(getattr(obj, name, None)) for name in pair) for pair in _METHODS)


class StatefulPart:
    """Any object with `state_dict` and `load_state_dict`, or with `get_state` and `set_state` (Grain's iterators).

    Its state is opaque and belongs to this rank.
    """

    kind = "stateful"
    per_rank = True
    iterators_made = 0

    def __init__(self, data: Any) -> None:
        self._data = data
        pair = next(pair for pair in _METHODS if all(callable(getattr(data, name, None)) for name in pair))
        self._read, self._load = (getattr(data, name) for name in pair)

    @property
    def can_change_world_size(self) -> bool:
        """Whether the object says that its state is good on any number of ranks."""
        return bool(getattr(self._data, "can_change_world_size", False))

    def capture(self, step: int) -> dict[str, Any]:
        """Return the position; it may alias the object's live state, so encode it before training goes on."""
        return {"kind": self.kind, "step": step, "type": type(self._data).__qualname__, "state": self._read()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Load a position that `capture` returned.

        Raises:
            StateMismatchError: the position is of another kind of data, or the object refuses it.
        """
        self._check_kind(saved)
        self._load(saved["state"])

    def settings(self) -> dict[str, Any]:
        """Return nothing: what shapes such data's trajectory is not known."""
        return {}

    def on_step(self, step: int) -> None:
        """Do nothing: the object counts by itself."""

    def rebase(self, step: int) -> None:
        """Do nothing: the object counts by itself."""

    def describe(self, saved: Mapping[str, Any]) -> str:
        """Return one line about a saved position."""
        return f"{saved.get('type', 'stateful data')}, its own state, at step {saved.get('step')}"

    def _check_kind(self, saved: Mapping[str, Any]) -> None:
        if saved.get("kind") != self.kind or "state" not in saved:
            raise StateMismatchError(
                f"data position was saved from {saved.get('kind')!r} data, this run's is {self.kind!r}"
            )


class StatefulLoaderPart(StatefulPart):
    """A DataLoader that has `state_dict` and `load_state_dict`.

    A `for` over the restored loader goes on with the next batch. A state taken when the last batch has just been
    yielded, before or after the loop has ended, starts the next epoch; of iterable-style data, whose end is known
    only once the loop has ended, the state before gives an empty rest of the epoch first.
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int) -> None:
        super().__init__(loader)
        self._loader = loader
        self._next = LoaderPass(epoch=0)
        self._seed = seed
        self._key = torch.initial_seed()
        is_map_style = not isinstance(loader.dataset, IterableDataset)
        self._takeover = LoaderTakeover(
            loader, plan=self._plan, wraps=_seeded_class(loader) if is_map_style else None
        )

    @property
    def iterators_made(self) -> int:  # type: ignore[override]
        """Number of iterators made since the loader was taken over."""
        return self._takeover.iterators_made

    def capture(self, step: int) -> dict[str, Any]:
        """Return the position, the epoch, and the key of the loader's random seeds."""
        state = self._read()
        if isinstance(state, dict) and state.get(_FINISHED) is False and self._has_yielded_all():
            state = {**state, _FINISHED: True}
        made = self._takeover.current or self._next
        saved = super().capture(step)
        return saved | {
            "state": state,
            "epoch": made.epoch,
            "key": self._key,
            "num_workers": self._loader.num_workers,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Load a position that `capture` returned; the next iterator goes on from it.

        Raises:
            StateMismatchError: the position is of another kind of data.
            ConfigError: an iterator is in progress, or the number of workers has changed.
        """
        self._check_kind(saved)
        # Reading the state of a loader that was never iterated makes an iterator, which nobody holds.
        if not getattr(self._loader, "_initial_iter_for_state_dict", False):
            refuse_open_iterator(self._takeover)
        if saved["num_workers"] != self._loader.num_workers:
            raise ConfigError(
                f"data position was saved with num_workers={saved['num_workers']}, this loader has"
                f" {self._loader.num_workers}; a {saved['type']} can only resume with as many"
            )
        self._takeover.forget()
        self._load(saved["state"])
        self._key = saved["key"]
        self._next = LoaderPass(epoch=saved["epoch"])

    def settings(self) -> dict[str, Any]:
        """Return the settings that shape the trajectory of this rank."""
        return {"batch_size": self._loader.batch_size, "drop_last": self._loader.drop_last}

    def describe(self, saved: Mapping[str, Any]) -> str:
        """Return one line about a saved position."""
        return f"{super().describe(saved)}, epoch {saved.get('epoch')}"

    def _plan(self, previous: LoaderPass | None) -> LoaderPass:
        self._takeover.seed_words = (self._seed, self._key)
        if previous is None:
            return LoaderPass(epoch=self._next.epoch)
        for sampler in self._takeover.samplers:
            # torchdata's distributed sampler keeps a loaded position until it is next iterated, which for a finished
            # epoch is the epoch after: it would come out empty.
            if getattr(sampler, "next_yielded", None) is not None:
                sampler.next_yielded = None
        return LoaderPass(epoch=previous.epoch + 1)

    def _has_yielded_all(self) -> bool:
        iterator = self._loader._iterator  # noqa: SLF001 (the iterator that state_dict speaks of)
        if iterator is None or isinstance(self._loader.dataset, IterableDataset):
            return False
        return bool(iterator._num_yielded >= len(self._loader))  # noqa: SLF001


def refuse_open_iterator(takeover: LoaderTakeover) -> None:
    """Raise ConfigError if the loop has an iterator in progress, whose prefetched batches a restore cannot recall."""
    if takeover.has_open_iterator():
        raise ConfigError(
            "an iterator of the data loader was made before restore() and would go on from the old position;"
            " make the iterator after restore()"
        )


class _SeededSampler(TrackedSampler):
    """Hands the wrapped sampler's own iterator through, since torchdata reads its state."""

    def __iter__(self) -> Iterator[Any]:
        takeover = self._takeover()
        made = takeover.pass_for_iterator() if takeover is not None else None
        source: Iterator[Any] = iter(self.inner)
        if takeover is None or made is None:
            return source
        stream = takeover.private_stream()
        if stream is None and not takeover.needs_tags:
            return source
        seeded = _StatefulSeeded if hasattr(source, "load_state_dict") else _Seeded
        return seeded(source, stream, made.epoch if takeover.needs_tags else None)


class _StatefulSeededSampler(_SeededSampler):
    def state_dict(self) -> Any:
        """Return the wrapped sampler's state."""
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Load the wrapped sampler's state."""
        self.inner.load_state_dict(state)


class _Seeded:
    """An index iterator that draws from a private stream and tags ids with their epoch, as far as needed."""

    def __init__(self, source: Any, stream: RngStream | None, epoch: int | None) -> None:
        self._source = source
        self._stream = stream
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._stream is None:
            batch = next(self._source)
        else:
            with self._stream:
                batch = next(self._source)
        return batch if self._epoch is None else tag_ids(batch, self._epoch)


class _StatefulSeeded(_Seeded):
    def state_dict(self) -> Any:
        """Return the wrapped iterator's state."""
        return self._source.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Load the wrapped iterator's state; skipping draws from the private stream, as the skipped batches did."""
        if self._stream is None:
            self._source.load_state_dict(state)
        else:
            with self._stream:
                self._source.load_state_dict(state)


def _seeded_class(loader: DataLoader[Any]) -> type[TrackedSampler]:
    inner = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    is_stateful = hasattr(inner, "state_dict") and hasattr(inner, "load_state_dict")
    return _StatefulSeededSampler if is_stateful else _SeededSampler
