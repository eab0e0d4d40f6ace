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
    """Position of an ElasticSampler at which this pass starts."""
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
    """The hooks inside one DataLoader. `detach` removes them all; taking over again detaches the former first.

    Attributes:
        current: the pass that yielded last, or the newest one; None before the first.
        iterators_made: number of passes begun.
    """

    def __init__(
        self, loader: DataLoader[Any], *, plan: PlanPass, wraps: type[TrackedSampler] | None
    ) -> None:
        former = loader.__dict__.get("_relight_takeover")
        if former is not None:
            former.detach()
        self.loader = loader
        self.current: LoaderPass | None = None
        self.iterators_made = 0
        self.seed_words: tuple[object, ...] = ()
        self.needs_tags = isinstance(loader.dataset, PerSampleDataset)
        self._plan = plan
        self._is_making = False
        self._slots: weakref.WeakKeyDictionary[Any, list[LoaderPass]] = weakref.WeakKeyDictionary()
        self._undo: list[Callable[[], None]] = []
        self._make_iterator = loader._get_iterator  # noqa: SLF001 (torch's one seam for iterators, 2.0 to 2.13)
        self._place = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        self.inner = getattr(loader, self._place)
        self.samplers = samplers_in(self.inner)
        self._own = [torch.Generator()]
        self._adopt_generators()
        self._is_quiet = all(
            f"{type(sampler).__module__}.".startswith(_QUIET_PACKAGES) for sampler in self.samplers
        )
        if wraps is not None:
            # DataLoader forbids setting these attributes, although its iterators read them afresh.
            self._replace(loader.__dict__, self._place, wraps(self))
        self._replace(loader.__dict__, "_get_iterator", self._get_iterator)
        self._replace(loader.__dict__, "_relight_takeover", self)

    def detach(self) -> None:
        """Put the loader back as it was."""
        while self._undo:
            self._undo.pop()()

    def begin(self) -> LoaderPass:
        """Start the next pass: seed what it draws from, before anything draws."""
        planned = self._plan(self.current)
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

    def _get_iterator(self) -> Any:
        made = self.begin()
        self._is_making = True
        try:
            iterator = self._make_iterator()
        finally:
            self._is_making = False
        slot = [made]
        self._slots[iterator] = slot
        made.iterator = weakref.ref(iterator)
        self._count_batches(iterator, slot)
        return iterator

    def _count_batches(self, iterator: Any, slot: list[LoaderPass]) -> None:
        """Count what the loop gets. No strong reference to the iterator: its workers stop when it is dropped."""
        next_data = type(iterator)._next_data  # noqa: SLF001 (what __next__ calls, once per batch)
        reference = weakref.ref(iterator)

        def counted() -> Any:
            self.current = slot[0]
            try:
                data = next_data(reference())
            except StopIteration:
                slot[0].is_exhausted = True
                raise
            slot[0].count()
            return data

        iterator._next_data = counted  # noqa: SLF001

    def _adopt_generators(self) -> None:
        self._replace(vars(self.loader), "generator", self._own[0])
        for sampler in self.samplers:
            if isinstance(sampler, _SHUFFLING) and sampler.generator is None:
                own = torch.Generator()
                self._own.append(own)
                self._replace(vars(sampler), "generator", own)

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

    def _replace(self, place: dict[str, Any], name: str, value: Any) -> None:
        if name in place:
            former = place[name]
            self._undo.append(lambda: place.__setitem__(name, former))
        else:
            self._undo.append(lambda: place.pop(name, None))
        place[name] = value


class TrackedSampler(Sampler[Any]):
    """Stands where the loader's sampler stood; length and attributes are those of the wrapped one."""

    def __init__(self, takeover: LoaderTakeover) -> None:
        self._takeover = takeover

    def __iter__(self) -> Iterator[Any]:
        made = self._takeover.pass_for_iterator()
        if made is None:
            untracked: Iterator[Any] = iter(self._takeover.inner)
            return untracked
        return _HandOut(
            self._takeover.inner,
            made,
            self._takeover.private_stream(),
            needs_tags=self._takeover.needs_tags,
        )

    def __len__(self) -> int:
        return len(self._takeover.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "_takeover":
            raise AttributeError(name)
        return getattr(self._takeover.inner, name)


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


def samplers_in(outermost: Any) -> list[Any]:
    """Return a loader's sampler and the samplers that it wraps, outermost first."""
    found = [outermost]
    for sampler in found:
        for name, value in vars(sampler).items() if hasattr(sampler, "__dict__") else ():
            is_sampler = isinstance(value, Sampler) or name in ("sampler", "batch_sampler")
            if is_sampler and not any(value is known for known in found):
                found.append(value)
    return found
