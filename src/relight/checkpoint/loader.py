"""A DataLoader taken over in place: its iterators are counted, seeded and started where the run left off.

The user keeps iterating the loader. Two things change inside it: the sampler that hands out index batches is wrapped,
and iterators are made through this module. Creating an iterator then draws nothing from the global generators: the
workers' base seed and a shuffling sampler without a generator of its own come from (seed, epoch).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.dataloader import _DatasetKind

from relight.checkpoint.per_sample import PerSampleDataset, tag_ids
from relight.checkpoint.rng import RngStream, capture_generator, derive_seed, is_generator, restore_generator
from relight.checkpoint.sampler import ElasticSampler
from relight.errors import ConfigError, StateMismatchError

__all__ = ["LoaderPass", "LoaderTakeover", "TrackedSampler", "samplers_in"]

_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
# Samplers of these packages draw from no global generator once a shuffling one has its own; the rest may.
_QUIET_PACKAGES = ("torch.utils.data.", "torchdata.", "relight.", "builtins")


@dataclass(slots=True, kw_only=True)
class LoaderPass:
    """One iterator's way through an epoch. Batches and samples are those of this rank."""

    epoch: int
    skip: int = 0
    """Batches at the start of the epoch that an earlier process consumed."""
    start: int = 0
    """Global batches of the epoch before the first that this pass takes (of an ElasticSampler)."""
    generators: dict[str, Any] | None = None
    """States, at the start of the epoch, of the generators that samplers own."""
    total: int | None = None
    """Batches of the whole epoch, skipped ones included; known once the sampler has handed out the last."""
    yielded: int = 0
    yielded_samples: int = 0
    largest: int = 0
    """Samples of the largest batch so far."""
    is_exhausted: bool = False
    is_used: bool = False
    """Whether an optimizer step ended while this was the pass in progress."""
    thread: int | None = None
    """The thread that took the last batch."""
    sizes: deque[int] = field(default_factory=deque)
    """Samples of each batch that was handed out and not yet yielded."""
    iterator: weakref.ref[Any] | None = None

    def is_finished(self) -> bool:
        """Return whether the loop has got every batch of the epoch."""
        is_last = self.total is not None and self.skip + self.yielded >= self.total
        return self.is_exhausted or is_last

    def is_abandoned(self) -> bool:
        """Return whether the iterator is gone before its end, so that the next one is another pass."""
        return self.iterator is not None and self.iterator() is None and not self.is_finished()

    def count(self) -> None:
        """Count one batch that the loop has got."""
        self.yielded += 1
        size = self.sizes.popleft() if self.sizes else 0
        self.yielded_samples += size
        self.largest = max(self.largest, size)
        self.thread = threading.get_ident()


PlanPass = Callable[[LoaderPass | None], LoaderPass]
"""Called as plan(previous) when an iterator is made; returns the pass it makes."""


class LoaderTakeover:
    """The hooks inside one DataLoader, which live as long as this object; taking over again replaces them.

    References go from here to the loader, never back: a loader that is dropped stops its workers at once, as ever.
    With a `source`, the loader asks its dataset for what the source hands out, whatever its kind was.

    Attributes:
        current: the pass that yielded last, or the newest one; None before the first.
        iterators_made: number of passes begun.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        plan: PlanPass,
        wraps: type[TrackedSampler] | None,
        source: Any = None,
    ) -> None:
        detach(loader)
        self.loader = loader
        self.current: LoaderPass | None = None
        self.iterators_made = 0
        self.seed_words: tuple[object, ...] = ()
        self.needs_tags = isinstance(loader.dataset, PerSampleDataset)
        self._plan = weakref.WeakMethod(plan)
        self._is_making = False
        self._slots: weakref.WeakKeyDictionary[Any, list[LoaderPass]] = weakref.WeakKeyDictionary()
        place = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        self.inner = getattr(loader, place) if source is None else source
        self.samplers = samplers_in(self.inner)
        self._hooks = _Hooks()
        self._own = [torch.Generator()]
        self._hooks.put(loader, "generator", self._own[0])
        if source is not None:
            self._hooks.put(loader, "_dataset_kind", _DatasetKind.Map)
        for sampler in self.samplers:
            if isinstance(sampler, _SHUFFLING) and sampler.generator is None:
                self._own.append(torch.Generator())
                self._hooks.put(sampler, "generator", self._own[-1])
        self._is_quiet = all(
            f"{type(sampler).__module__}.".startswith(_QUIET_PACKAGES) for sampler in self.samplers
        )
        if wraps is not None:
            self._hooks.put(loader, place, wraps(self))
        self._hooks.put(loader, "_get_iterator", _IteratorMaker(self))
        loader.__dict__["_relight_hooks"] = self._hooks

    def begin(self) -> LoaderPass:
        """Start the next pass: seed what it draws from, before anything draws."""
        plan = self._plan()
        assert plan is not None
        planned = plan(self.current)
        for sampler in self.samplers:
            if hasattr(sampler, "set_epoch") and not isinstance(sampler, ElasticSampler):
                sampler.set_epoch(planned.epoch)
        for index, generator in enumerate(self._own):
            generator.manual_seed(derive_seed("relight loader", *self.seed_words, planned.epoch, index))
        if planned.generators is None:
            planned.generators = self.generator_states()
        else:
            self._restore_generators(planned.generators)
        self.current = planned
        self.iterators_made += 1
        return planned

    def make_iterator(self) -> Any:
        """Return a new iterator of the loader, whose batches are counted."""
        made = self.begin()
        self._is_making = True
        try:
            iterator = self._hooks.make_iterator(self.loader)
        finally:
            self._is_making = False
        slot = [made]
        self._slots[iterator] = slot
        made.iterator = weakref.ref(iterator)
        _count_batches(iterator, slot, weakref.ref(self))
        return iterator

    def pass_for_iterator(self) -> LoaderPass | None:
        """Return the pass that the sampler is now being iterated for; None if not on behalf of the loader."""
        if not self._is_making:
            # A loader with persistent workers keeps its iterator and starts it again for each epoch.
            iterator = self.loader._iterator  # noqa: SLF001
            slot = self._slots.get(iterator) if iterator is not None else None
            if slot is None:
                return None
            slot[0] = self.begin()
            slot[0].iterator = weakref.ref(iterator)
        return self.current

    def private_stream(self) -> RngStream | None:
        """Return the stream that this pass's samplers draw from, or None if they draw from no global generator."""
        if self._is_quiet or self.current is None:
            return None
        seed = derive_seed("relight sampler", *self.seed_words, self.current.epoch)
        return RngStream(seed, keep=True)

    def generator_states(self) -> dict[str, Any]:
        """Return the present states of the generators that samplers own, by place and attribute."""
        return {name: capture_generator(generator) for name, generator in self._owned_by_samplers()}

    def has_open_iterator(self) -> bool:
        """Return whether an iterator is alive that has not come to its end."""
        return any(not slot[0].is_finished() for slot in self._slots.values())

    def forget(self) -> None:
        """Forget all passes; the next iterator is planned as the first."""
        self.current = None
        self._slots.clear()

    def _owned_by_samplers(self) -> Iterator[tuple[str, Any]]:
        for index, sampler in enumerate(self.samplers):
            for name, value in vars(sampler).items() if hasattr(sampler, "__dict__") else ():
                if is_generator(value) and not any(value is own for own in self._own):
                    yield f"{index}.{name}", value

    def _restore_generators(self, saved: dict[str, Any]) -> None:
        live = dict(self._owned_by_samplers())
        if set(live) != set(saved):
            raise StateMismatchError(
                f"the loader's samplers own generators {sorted(live)}, the saved ones owned {sorted(saved)}"
            )
        for name, generator in live.items():
            restore_generator(generator, saved[name])


class TrackedSampler(Sampler[Any]):
    """Stands where the loader's sampler stood; length and attributes are those of the wrapped one."""

    def __init__(self, takeover: LoaderTakeover) -> None:
        self.inner = takeover.inner
        self._takeover = weakref.ref(takeover)

    def __iter__(self) -> Iterator[Any]:
        takeover = self._takeover()
        made = takeover.pass_for_iterator() if takeover is not None else None
        if takeover is None or made is None:
            untracked: Iterator[Any] = iter(self.inner)
            return untracked
        return _HandOut(self.inner, made, takeover.private_stream(), needs_tags=takeover.needs_tags)

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


def detach(loader: DataLoader[Any]) -> None:
    """Put the loader back as it was before it was taken over, if it was."""
    hooks = loader.__dict__.pop("_relight_hooks", None)
    if hooks is not None:
        hooks.undo(loader)


class _Hooks:
    """What stood in the loader and its samplers before. Holds no reference to the loader."""

    def __init__(self) -> None:
        self._of_loader: dict[str, Any] = {}
        self._of_samplers: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute and remember the former one."""
        if isinstance(owner, DataLoader):
            self._of_loader[name] = owner.__dict__.get(name, _ABSENT)
            # DataLoader forbids setting some of these, although its iterators read them afresh.
            owner.__dict__[name] = value
        else:
            self._of_samplers.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

    def make_iterator(self, loader: DataLoader[Any]) -> Any:
        """Make an iterator the way the loader did."""
        former = self._of_loader["_get_iterator"]
        return type(loader)._get_iterator(loader) if former is _ABSENT else former()  # noqa: SLF001

    def undo(self, loader: DataLoader[Any]) -> None:
        """Put everything back."""
        for name, former in self._of_loader.items():
            if former is _ABSENT:
                loader.__dict__.pop(name, None)
            else:
                loader.__dict__[name] = former
        for sampler, name, former in self._of_samplers:
            setattr(sampler, name, former)


class _IteratorMaker:
    """Stands for the loader's `_get_iterator`, torch's one seam for iterators with and without workers."""

    def __init__(self, takeover: LoaderTakeover) -> None:
        self._takeover = weakref.ref(takeover)
        self._loader = weakref.ref(takeover.loader)

    def __call__(self) -> Any:
        takeover, loader = self._takeover(), self._loader()
        assert loader is not None
        if takeover is not None:
            return takeover.make_iterator()
        detach(loader)
        return loader._get_iterator()  # noqa: SLF001


def _count_batches(iterator: Any, slot: list[LoaderPass], owner: weakref.ref[LoaderTakeover]) -> None:
    """Count what the loop gets from `iterator`, without holding it: its workers stop when it is dropped."""
    next_data = type(iterator)._next_data  # noqa: SLF001 (what __next__ calls, once per batch)
    reference = weakref.ref(iterator)

    def counted() -> Any:
        takeover = owner()
        if takeover is not None:
            takeover.current = slot[0]
        try:
            data = next_data(reference())
        except StopIteration:
            slot[0].is_exhausted = True
            raise
        slot[0].count()
        return data

    iterator._next_data = counted  # noqa: SLF001


class _HandOut:
    """Hands out the index batches of one pass, without those consumed before, one batch looked ahead.

    Looking ahead settles the samplers' generators, and tells which batch is the last, before the loop gets it.
    The wrapped sampler is started at the first batch: loaders make iterators that they never use.
    """

    def __init__(self, inner: Any, made: LoaderPass, stream: RngStream | None, *, needs_tags: bool) -> None:
        self._inner = inner
        self._pass = made
        self._stream = stream
        self._needs_tags = needs_tags
        self._source: Iterator[Any] | None = None
        self._ahead: Any = None
        self._handed = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._stream is None:
            batch = self._take()
        else:
            with self._stream:
                batch = self._take()
        self._pass.sizes.append(len(batch) if isinstance(batch, list | tuple) else 1)
        return tag_ids(batch, self._pass.epoch) if self._needs_tags else batch

    def _take(self) -> Any:
        if self._source is None:
            self._source = self._started()
            self._look_ahead()
        if self._pass.total is not None and self._pass.skip + self._handed >= self._pass.total:
            raise StopIteration
        batch = self._ahead
        self._handed += 1
        self._look_ahead()
        return batch

    def _started(self) -> Iterator[Any]:
        source: Iterator[Any] = iter(self._inner)
        for done in range(self._pass.skip):
            if next(source, _END) is _END:
                raise ConfigError(
                    f"data position: {self._pass.skip} batches of epoch {self._pass.epoch} are consumed, but the"
                    f" loader now has only {done}"
                )
        return source

    def _look_ahead(self) -> None:
        assert self._source is not None
        self._ahead = next(self._source, _END)
        if self._ahead is _END:
            self._pass.total = self._pass.skip + self._handed


_END = object()
_ABSENT = object()


def samplers_in(outermost: Any) -> list[Any]:
    """Return a loader's sampler and the samplers that it wraps, outermost first."""
    found = [outermost]
    for sampler in found:
        for name, value in vars(sampler).items() if hasattr(sampler, "__dict__") else ():
            is_sampler = isinstance(value, Sampler) or name in ("sampler", "batch_sampler")
            if is_sampler and not any(value is known for known in found):
                found.append(value)
    return found
