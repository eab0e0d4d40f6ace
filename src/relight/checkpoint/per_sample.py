"""Random augmentation that depends on the sample alone: not on workers, batches, restarts or other samples."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from relight.checkpoint.rng import RngStream, derive_seed
from relight.errors import ConfigError

__all__ = ["PerSampleDataset", "SampleId", "per_sample_rng", "tag_ids"]


class SampleId(int):
    """A sample's index that also says for which epoch it was drawn."""

    epoch: int

    def __new__(cls, value: int, epoch: int = 0) -> SampleId:  # noqa: PYI034 (an int subclass that is never derived from)
        """Make the index `value` of `epoch`."""
        made = super().__new__(cls, value)
        made.epoch = epoch
        return made

    def __reduce__(self) -> tuple[type[SampleId], tuple[int, int]]:
        return SampleId, (int(self), self.epoch)


def per_sample_rng(dataset: Any, seed: int) -> PerSampleDataset:
    """Wrap a map-style dataset so that each sample's random draws are a function of (seed, epoch, sample id).

    While one sample is made, Python's, NumPy's and torch's global CPU generators hold a stream of its own; before
    and after they are what they were. So augmentation is the same with any number of workers and after any restart.
    The epoch is known when the DataLoader is the train state's ``data=``; elsewhere (validation) it counts as 0.
    Draws made in `collate_fn`, or on a device, are not covered. A sample drawn twice in an epoch gets the same draws.

    Args:
        dataset: has ``__getitem__`` by integer; must be the DataLoader's own dataset, with no wrapper around this one.
        seed: of all streams.

    Raises:
        ConfigError: `dataset` is iterable-style or cannot be indexed.
    """
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    ):
        raise ConfigError(f"per_sample_rng needs a map-style dataset, not {type(dataset).__qualname__}")
    return PerSampleDataset(dataset, seed)


class PerSampleDataset(Dataset[Any]):
    """The dataset that `per_sample_rng` returns; other attributes are those of the wrapped dataset."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples at `indices`, each made under its own stream."""
        made = []
        with RngStream(self.seed) as stream:
            for index in indices:
                epoch = index.epoch if isinstance(index, SampleId) else 0
                plain = int(operator.index(index))
                stream.reseed(derive_seed("relight sample", self.seed, epoch, plain))
                if hasattr(self.dataset, "__getitem__"):
                    made.append(self.dataset[plain])
                else:
                    made.append(self.dataset.__getitems__([plain])[0])
        return made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


def tag_ids(batch: Any, epoch: int) -> Any:
    """Return a sampler's batch (or single id) with `epoch` tagged on each id.

    Raises:
        ConfigError: an id is no integer.
    """
    if isinstance(batch, list | tuple):
        return [tag_ids(item, epoch) for item in batch]
    try:
        return SampleId(operator.index(batch), epoch)
    except TypeError as error:
        raise ConfigError(f"per_sample_rng needs integer sample ids, the sampler yields {batch!r}") from error
