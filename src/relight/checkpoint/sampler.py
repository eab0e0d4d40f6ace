"""`ElasticSampler`: a data order and position that do not depend on the number of ranks.

The position is a pure function of the number of optimizer steps: each step consumes one global batch. Nothing is
counted by what a data loader has fetched ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import Sampler

from relight.checkpoint.order import SampleOrder
from relight.errors import ConfigError, StateMismatchError

__all__ = ["ElasticSampler"]

_CHUNK = 4096


class ElasticSampler(Sampler[int]):
    """Yield this rank's sample ids of each global batch, in a global order that is a function of (seed, epoch) only.

    Every rank takes its contiguous part of every global batch, so a run that is restored on fewer or more ranks sees
    the same global batches: no sample of the epoch twice, none skipped. Memory and the cost of resuming are O(1).

    Iterating yields the ids from the current position to the end of the epoch. The current position is what
    `advance_to` was told (by the Checkpointer, at each step), or the start of the next epoch if the last iterator
    ran to its end.

    Args:
        num_samples: size of the dataset.
        global_batch: samples per optimizer step, over all ranks and all accumulated micro-batches.
        seed: of the order.
        rank: this rank's part; default: of torch.distributed when it is initialised at first use, else 0.
        world_size: number of parts; default likewise, else 1.
        shuffle: False keeps the order 0, 1, 2, ...
        drop_last: drop the samples that do not fill a global batch. If False the last global batch of an epoch is
            short and split near evenly, so ranks may differ by one sample, and some may get none.

    Raises:
        ConfigError: a size is not positive, or a global batch is larger than the dataset while `drop_last` is set.
            At first use: `global_batch` cannot be divided by `world_size`, or `rank` is out of range.
    """

    # What the user wrote, for messages about ranks.
    _called = "ElasticSampler"

    def __init__(
        self,
        num_samples: int,
        *,
        global_batch: int,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = True,
        drop_last: bool = True,
    ) -> None:
        for name, value in (("num_samples", num_samples), ("global_batch", global_batch)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"ElasticSampler: {name} must be a positive integer, not {value!r}")
        if drop_last and num_samples < global_batch:
            raise ConfigError(
                f"ElasticSampler: num_samples={num_samples} is less than global_batch={global_batch},"
                " so that drop_last=True leaves nothing"
            )
        if (rank is None) != (world_size is None):
            raise ConfigError("ElasticSampler: give both rank and world_size, or neither")
        self.num_samples = num_samples
        self.global_batch = global_batch
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.steps_per_epoch = num_samples // global_batch if drop_last else -(-num_samples // global_batch)
        self.iterators_made = 0
        self._placement = None if rank is None or world_size is None else self._checked(rank, world_size)
        # Positions count global batches since epoch 0. The base pairs a position with the run's step counter.
        self._base_step = 0
        self._base_position = 0
        self._base_samples = 0
        self._told = 0
        self._floor = 0
        self._next_start: int | None = None
        self._is_placed = False

    @property
    def rank(self) -> int:
        """This rank's part of every global batch."""
        return self._resolved()[0]

    @property
    def world_size(self) -> int:
        """Number of parts of every global batch."""
        return self._resolved()[1]

    @property
    def position(self) -> int:
        """Global batches since the start of epoch 0 that lie behind the next iterator's start."""
        return max(self._told, self._floor)

    @property
    def epoch(self) -> int:
        """Epoch of the current position."""
        return self.position // self.steps_per_epoch

    @property
    def step_in_epoch(self) -> int:
        """Global batches of the current epoch that lie behind the current position."""
        return self.position % self.steps_per_epoch

    def __len__(self) -> int:
        """Return the number of this rank's samples in a whole epoch."""
        return self.samples_of_rank(0, self.steps_per_epoch)

    def __iter__(self) -> Iterator[int]:
        self.iterators_made += 1
        start, self._next_start = self._next_start, None
        # Told where to start, the caller knows what is consumed; running to the end then says nothing.
        return self._iterate(self.position if start is None else start, moves_floor=start is None)

    def start_next_at(self, position: int) -> None:
        """Make the next iterator start at `position` (in global batches since epoch 0)."""
        self._next_start = position

    def position_at(self, step: int) -> int:
        """Return the position once `step` optimizer steps of the run are done."""
        return self._base_position + step - self._base_step

    def advance_to(self, consumed_steps: int) -> None:
        """Tell that `consumed_steps` optimizer steps of the run are done, each of one global batch."""
        if consumed_steps < self._base_step:
            raise ConfigError(
                f"ElasticSampler: step {consumed_steps} lies before its base step {self._base_step}"
            )
        self._told = self.position_at(consumed_steps)
        self._is_placed = True

    def rebase(self, step: int) -> None:
        """Let the run's step counter stand at `step` without moving the position (after a warm start)."""
        position = self.position
        self._base_samples += self._samples_between(self._base_position, position)
        self._base_step, self._base_position, self._told = step, position, position
        self._is_placed = True

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the position once `step` optimizer steps are done, the same on every rank, for `load`."""
        epoch, step_in_epoch = divmod(self.position_at(step), self.steps_per_epoch)
        return {
            "step": step,
            "epoch": epoch,
            "step_in_epoch": step_in_epoch,
            "samples_in_epoch": step_in_epoch * self.global_batch,
            "consumed_samples": self._base_samples
            + self._samples_between(self._base_position, self.position_at(step)),
            "global_batch": self.global_batch,
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Move to a position that `state_at` returned, on any number of ranks.

        Raises:
            StateMismatchError: `saved` is no such position.
            ConfigError: the global batch has changed and the position is no multiple of the new one.
        """
        keys = ("step", "epoch", "samples_in_epoch", "consumed_samples", "global_batch")
        if not all(type(saved.get(key)) is int and saved[key] >= 0 for key in keys):
            raise StateMismatchError(f"data position {dict(saved)!r} is not one of an ElasticSampler")
        step_in_epoch, rest = divmod(saved["samples_in_epoch"], self.global_batch)
        if rest:
            raise ConfigError(
                f"ElasticSampler: {saved['samples_in_epoch']} samples of epoch {saved['epoch']} are consumed in"
                f" global batches of {saved['global_batch']}, which is no multiple of the new"
                f" global_batch={self.global_batch}; change it at an epoch's start or at a common multiple"
            )
        # A larger global batch with drop_last may leave nothing of the epoch.
        step_in_epoch = min(step_in_epoch, self.steps_per_epoch)
        self._base_step = saved["step"]
        self._base_position = saved["epoch"] * self.steps_per_epoch + step_in_epoch
        self._base_samples = saved["consumed_samples"]
        self._told, self._floor, self._next_start = self._base_position, 0, None
        self._is_placed = True

    def set_epoch(self, epoch: int) -> None:
        """Do nothing for the current epoch; the sampler keeps count of epochs itself.

        Before the first step it may choose the epoch to start with.

        Raises:
            ConfigError: a run is under way and stands in another epoch.
        """
        if epoch == self.epoch:
            return
        if self._is_placed or self._floor:
            raise ConfigError(
                f"ElasticSampler: set_epoch({epoch}), but the data position is in epoch {self.epoch}; the sampler"
                " counts epochs by itself: drop the call, or start the loop at `sampler.epoch` after restore()"
            )
        self._base_position = self._told = epoch * self.steps_per_epoch

    def settings(self) -> dict[str, Any]:
        """Return the settings that shape the trajectory."""
        names = ("num_samples", "global_batch", "seed", "shuffle", "drop_last")
        return {name: getattr(self, name) for name in names}

    def samples_of_rank(self, start: int, stop: int) -> int:
        """Return how many samples this rank has in the global batches [start, stop); negative if stop < start."""
        rank, world_size = self._resolved()

        part = self.global_batch // world_size
        last_begin, last_end = self._part(self.steps_per_epoch - 1, rank, world_size)
        per_epoch = (self.steps_per_epoch - 1) * part + last_end - last_begin

        def until(position: int) -> int:
            epochs, steps = divmod(position, self.steps_per_epoch)
            return epochs * per_epoch + steps * part

        return until(stop) - until(start)

    def _iterate(self, position: int, *, moves_floor: bool) -> Iterator[int]:
        rank, world_size = self._resolved()
        epoch, first = divmod(position, self.steps_per_epoch)
        order = SampleOrder(self.num_samples, seed=self.seed, epoch=epoch) if self.shuffle else None
        stride = max(1, _CHUNK * world_size // self.global_batch)
        for start in range(first, self.steps_per_epoch, stride):
            steps = range(start, min(start + stride, self.steps_per_epoch))
            parts = [np.arange(*self._part(step, rank, world_size), dtype=np.int64) for step in steps]
            positions = np.concatenate(parts)
            yield from (order.ids_at(positions) if order is not None else positions.tolist())
        if moves_floor:
            self._floor = max(self._floor, (epoch + 1) * self.steps_per_epoch)

    def _part(self, step: int, rank: int, world_size: int) -> tuple[int, int]:
        """Return this rank's half-open range of positions within the global batch `step` of an epoch."""
        begin = step * self.global_batch
        size = min(self.global_batch, self.num_samples - begin)
        return begin + rank * size // world_size, begin + (rank + 1) * size // world_size

    def _samples_between(self, start: int, stop: int) -> int:
        per_epoch = min(self.num_samples, self.steps_per_epoch * self.global_batch)

        def until(position: int) -> int:
            epochs, steps = divmod(position, self.steps_per_epoch)
            return epochs * per_epoch + steps * self.global_batch

        return until(stop) - until(start)

    def _resolved(self) -> tuple[int, int]:
        if self._placement is None:
            is_distributed = dist.is_available() and dist.is_initialized()
            self._placement = (
                self._checked(dist.get_rank(), dist.get_world_size()) if is_distributed else (0, 1)
            )
        return self._placement

    def _checked(self, rank: int, world_size: int) -> tuple[int, int]:
        if world_size < 1 or not 0 <= rank < world_size:
            raise ConfigError(f"{self._called}: rank={rank} is not in range(world_size={world_size})")
        if self.global_batch % world_size:
            raise ConfigError(
                f"{self._called}: global_batch={self.global_batch} cannot be divided by world_size={world_size}"
            )
        return rank, world_size
