"""The overlapped copy of live tensors into an arena slot, and the proof that what was copied was one state.

Order: `start` (in the training thread, between two optimizer steps) copies by value what nothing guards and takes
evidence of the rest; `run` (in the snapshot thread, without the interpreter lock) copies the rest during forward
and backward; the optimizer's pre-step hook waits for it. Evidence - version counters and samples of the bytes as
they were at `start` - is compared afterwards: a difference makes the snapshot torn, and a torn one is never sealed.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from relight.checkpoint.save_plan import LocalEntry, SavePlan
from relight.checkpoint.table import StateTable
from relight.keeper.arena import ArenaSlot
from relight.stages import reached

__all__ = ["CudaCopy", "HostCopy", "Partition", "Snapshot", "StagedCopy", "partition"]

SAMPLE_BYTES = 64
MAX_SAMPLES = 256
MAX_DEVICE_SAMPLES = 16
_SAMPLE_PRIME = 1_000_003


class StagedCopy(Protocol):
    """One way to get live tensors into a slot in two steps: enqueued at the save call, done before the next update."""

    def start(self) -> None:
        """Enqueue the copy (training thread); nothing that was written before this call may be missed."""
        ...

    def run(self) -> None:
        """Copy, or wait until the device has copied (snapshot thread)."""
        ...

    def guard(self) -> None:
        """Keep the next update from overtaking the copy (training thread, in the pre-step hook)."""
        ...

    def torn(self) -> list[int]:
        """Return positions (in `entries`) of tensors that changed between `start` and the end of the copy."""
        ...


def slot_view(slot: ArenaSlot, entry: LocalEntry, tensor: torch.Tensor) -> torch.Tensor:
    """Return the entry's place in the slot as a tensor of `tensor`'s dtype, flat."""
    if entry.num_bytes == 0:
        return torch.empty(0, dtype=tensor.dtype)
    raw = torch.frombuffer(slot.image, dtype=torch.uint8, count=entry.num_bytes, offset=entry.offset_bytes)
    return raw.view(tensor.dtype)


def stored_rows(entry: LocalEntry, tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of `tensor` that `entry` stores, conjugation and negation resolved, detached."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if entry.num_bytes == plain.numel() * plain.element_size():
        return plain
    row_bytes = plain[0].numel() * plain.element_size()
    first = entry.start_bytes // row_bytes
    return plain[first : first + entry.num_bytes // row_bytes]


def _is_flat_host(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


class HostCopy:
    """Copy host tensors with plain memory moves, which release the interpreter lock; no torch thread pool is used."""

    def __init__(
        self, slot: ArenaSlot, entries: Sequence[LocalEntry], tensors: Sequence[torch.Tensor], *, seed: int
    ) -> None:
        self._slot = slot
        self._entries = entries
        self._tensors = tensors
        self._seed = seed
        self._versions: list[int] = []
        self._samples: list[tuple[int, int, bytes]] = []
        self._torn: list[int] = []

    def start(self) -> None:
        """Take version counters and samples; nothing is copied yet."""
        self._versions = _versions(self._tensors)
        self._samples = self._take_samples()

    def run(self) -> None:
        """Copy everything, then compare with the evidence."""
        base = self._slot.address()
        for entry, tensor in zip(self._entries, self._tensors, strict=True):
            copy_to_slot(self._slot, base, entry, tensor)
        self._torn = self._compare()

    def guard(self) -> None:
        """Nothing to do: the hook waits on the host until `run` is done."""

    def torn(self) -> list[int]:
        """Return what `run` found."""
        return self._torn

    def _take_samples(self) -> list[tuple[int, int, bytes]]:
        """Take a few bytes of up to `MAX_SAMPLES` tensors, at places that move on with the seed."""
        num = len(self._entries)
        stride = -(-num // MAX_SAMPLES)
        seed = self._seed * _SAMPLE_PRIME
        samples = []
        for at in range(self._seed % stride, num, stride):
            entry, tensor = self._entries[at], self._tensors[at]
            num_bytes = entry.num_bytes
            if num_bytes and tensor.is_contiguous():
                size = min(num_bytes, SAMPLE_BYTES)
                place = (seed + at * size) % (num_bytes - size + 1)
                seen = ctypes.string_at(tensor.data_ptr() + entry.start_bytes + place, size)
                samples.append((at, entry.offset_bytes + place, seen))
        return samples

    def _compare(self) -> list[int]:
        now = _versions(self._tensors)
        changed = {at for at, version in enumerate(self._versions) if now[at] != version}
        image = self._slot.image
        changed |= {at for at, offset, seen in self._samples if image[offset : offset + len(seen)] != seen}
        return sorted(changed)


class CudaCopy:
    """Copy device tensors by one batched asynchronous copy on a side stream, ordered by events, into pinned memory.

    Args:
        cuda: `torch.cuda`, or a stand-in with the same `Event`, `Stream`, `stream` and `current_stream`.
        foreach_copy: `torch._foreach_copy_`, or a stand-in.
    """

    def __init__(
        self,
        slot: ArenaSlot,
        entries: Sequence[LocalEntry],
        tensors: Sequence[torch.Tensor],
        *,
        seed: int,
        cuda: Any = torch.cuda,
        foreach_copy: Any = torch._foreach_copy_,
        side_stream: Any = None,
    ) -> None:
        self._cuda = cuda
        self._foreach_copy = foreach_copy
        self._slot = slot
        self._entries = entries
        self._tensors = tensors
        self._seed = seed
        self._stream = side_stream if side_stream is not None else cuda.Stream()
        self._done: Any = None
        self._sources: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._samples: list[tuple[int, int, torch.Tensor]] = []
        self._changed: set[int] = set()

    def start(self) -> None:
        """Enqueue the whole copy behind what the compute stream has been given so far; returns at once."""
        self._versions = _versions(self._tensors)
        self._samples = self._take_samples()
        # Tensors that are not contiguous are packed by the compute stream, so this comes before the event; and they
        # are held until the side stream has read them, or their memory would be given to the next tensor.
        self._sources = [
            stored_rows(e, t).reshape(-1) for e, t in zip(self._entries, self._tensors, strict=True)
        ]
        targets = [slot_view(self._slot, e, t) for e, t in zip(self._entries, self._tensors, strict=True)]
        ready = self._cuda.Event()
        ready.record(self._cuda.current_stream())
        with self._cuda.stream(self._stream):
            self._stream.wait_event(ready)
            self._foreach_copy(targets, self._sources, non_blocking=True)
            self._done = self._cuda.Event()
            self._done.record(self._stream)

    def run(self) -> None:
        """Wait on the host until the side stream has copied, and compare the samples."""
        self._done.synchronize()
        self._sources = []
        for at, offset, seen in self._samples:
            raw = seen.cpu().view(torch.uint8)
            stored = torch.frombuffer(self._slot.image, dtype=torch.uint8, count=raw.numel(), offset=offset)
            if not torch.equal(raw, stored):
                self._changed.add(at)

    def guard(self) -> None:
        """Make the compute stream wait for the copy (no host wait), and look at the version counters."""
        self._cuda.current_stream().wait_event(self._done)
        now = _versions(self._tensors)
        self._changed |= {at for at, version in enumerate(self._versions) if now[at] != version}

    def torn(self) -> list[int]:
        """Return positions of tensors whose version or sampled bytes changed."""
        return sorted(self._changed)

    def _take_samples(self) -> list[tuple[int, int, torch.Tensor]]:
        chooser = random.Random(self._seed)  # noqa: S311 - places of samples, not secrets
        candidates = [at for at, entry in enumerate(self._entries) if entry.num_bytes]
        samples = []
        for at in chooser.sample(candidates, min(MAX_DEVICE_SAMPLES, len(candidates))):
            rows = stored_rows(self._entries[at], self._tensors[at]).reshape(-1)
            num = min(rows.numel(), SAMPLE_BYTES // rows.element_size() or 1)
            first = int(chooser.random() * (rows.numel() - num + 1))
            offset = self._entries[at].offset_bytes + first * rows.element_size()
            samples.append((at, offset, rows[first : first + num].clone()))
        return samples


def copy_to_slot(slot: ArenaSlot, base: int, entry: LocalEntry, tensor: torch.Tensor) -> None:
    """Copy one entry now; `base` is the slot's address."""
    if entry.num_bytes == 0:
        return
    if _is_flat_host(tensor):
        ctypes.memmove(base + entry.offset_bytes, tensor.data_ptr() + entry.start_bytes, entry.num_bytes)
        return
    rows = stored_rows(entry, tensor)
    slot_view(slot, entry, tensor).copy_(rows.reshape(-1))


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        # Inference tensors have no version counter; for them the samples are all there is.
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


@dataclass(frozen=True, slots=True)
class Partition:
    """Which entries are copied inside the call, and which during forward and backward, by host and device."""

    now: tuple[LocalEntry, ...]
    host: tuple[LocalEntry, ...]
    device: tuple[LocalEntry, ...]


def partition(plan: SavePlan, table: StateTable, overlapped: Callable[[int], bool]) -> Partition:
    """Split the plan's entries; `overlapped(at)` says whether tensor `at` is guarded until the copy is done."""
    now, host, device = [], [], []
    for entry in plan.entries:
        tensor = table.tensors[entry.at]
        if (
            not overlapped(entry.at)
            or not (tensor.is_cpu or tensor.is_cuda)
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            now.append(entry)
        elif tensor.is_cuda:
            device.append(entry)
        else:
            host.append(entry)
    return Partition(tuple(now), tuple(host), tuple(device))


class Snapshot:
    """One rank's snapshot of one step on its way into a slot.

    Args:
        slot: a slot that this rank may write, at least `plan.image.image_bytes` large.
        parts: which entries are copied when.
        seed: moves the places of the samples; the step.
    """

    def __init__(
        self, slot: ArenaSlot, plan: SavePlan, table: StateTable, parts: Partition, *, seed: int
    ) -> None:
        self.slot = slot
        self.plan = plan
        self._now = parts.now
        self._tensors = table.tensors
        self._keys = table.keys
        self._copies: list[tuple[StagedCopy, tuple[LocalEntry, ...]]] = []
        if parts.host:
            tensors = [table.tensors[entry.at] for entry in parts.host]
            self._copies.append((HostCopy(slot, parts.host, tensors, seed=seed), parts.host))
        if parts.device:
            tensors = [table.tensors[entry.at] for entry in parts.device]
            self._copies.append((CudaCopy(slot, parts.device, tensors, seed=seed), parts.device))

    @property
    def is_overlapped(self) -> bool:
        """Whether something is copied after the call."""
        return bool(self._copies)

    @property
    def is_copied_by_host(self) -> bool:
        """Whether the update must wait for the copy on the host; device copies are ordered by `guard` alone."""
        return any(isinstance(copy, HostCopy) for copy, _ in self._copies)

    def start(self) -> None:
        """Write the header, copy the unguarded part by value and enqueue the rest."""
        image = self.slot.image
        image[: len(self.plan.image.header)] = self.plan.image.header
        for start, size in self.plan.image.pads:
            image[start : start + size] = bytes(size)
        for copy, _ in self._copies:
            copy.start()
        base = self.slot.address()
        for entry in self._now:
            copy_to_slot(self.slot, base, entry, self._tensors[entry.at])
        reached("snapshot.started")

    def run(self) -> None:
        """Copy the guarded part; afterwards `torn_keys` is final for host tensors."""
        for copy, _ in self._copies:
            copy.run()
        reached("snapshot.copied")

    def guard(self) -> None:
        """Order the coming update behind the copy; call in the pre-step hook after `run` is done or enqueued."""
        for copy, _ in self._copies:
            copy.guard()

    def torn_keys(self) -> list[str]:
        """Return the names of tensors that changed while they were copied."""
        return [self._keys[entries[at].at] for copy, entries in self._copies for at in copy.torn()]
