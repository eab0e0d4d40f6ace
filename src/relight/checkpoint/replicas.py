"""Whether the ranks that should hold the same values do: digests of replicated tensors, compared at each save.

One digest per group of tensors travels with the vote of every save; only when one differs do the ranks exchange the
digests of its tensors, so that key and ranks can be named. With more than two replicas the odd ones are named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import xxhash

from relight.checkpoint.group import RankGroup
from relight.checkpoint.save_plan import SavePlan
from relight.checkpoint.sharding import Kind
from relight.checkpoint.table import StateTable
from relight.manifest.shard import Layout

__all__ = ["Difference", "ReplicaCheck", "ReplicaMode", "find_differences"]

ReplicaMode = Literal["full", "sample", "off"]
"""How replicas are compared: every byte; some rows of each tensor, which misses a change elsewhere; not at all."""

_OWN_KINDS: tuple[Kind, ...] = ("plain", "scalar", "buffer")
_SAMPLE_BYTES = 4096
_MAX_NAMED = 20


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor whose values are not equal where they should be, and the ranks that stand out."""

    key: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        noun = "rank" if len(self.ranks) == 1 else "ranks"
        return f"{self.key} ({noun} {', '.join(map(str, self.ranks))})"


Digests = dict[str, dict[str, str]]
"""Group -> key -> digest. A group is the number of a layout in the plan, or a kind of what is a rank's own."""


class ReplicaCheck:
    """Digests of what should be equal, and the comparison of all ranks' digests.

    Args:
        world_size: number of ranks; with one there is nothing to compare.
        mode: how much is looked at.
    """

    def __init__(self, world_size: int, mode: ReplicaMode = "full") -> None:
        self.mode: ReplicaMode = mode if world_size > 1 else "off"
        self._groups: tuple[SavePlan | None, dict[str, list[int]]] = (None, {})

    def digests(
        self, table: StateTable, plan: SavePlan, stored: Callable[[int], memoryview | None]
    ) -> Digests:
        """Return the digests of this rank's replicas.

        Args:
            table: the state; its shared tensors must not change meanwhile.
            plan: of this table.
            stored: gives the bytes of a tensor of this rank's own as they were copied, by its place in the table.
        """
        if self.mode == "off":
            return {}
        found: Digests = {}
        for group, members in self._members(plan).items():
            digests = found[group] = {}
            for at in members:
                data = stored(at) if table.kinds[at] != "shared" else None
                if data is not None:
                    digests[table.keys[at]] = self._of_bytes(data)
                else:
                    digests[table.keys[at]] = self._of_tensor(table.tensors[at])
        return found

    def _members(self, plan: SavePlan) -> dict[str, list[int]]:
        if self._groups[0] is not plan:
            names = {
                layout: str(number) for number, layout in enumerate(plan.layouts) if layout.num_replicas > 1
            }
            groups: dict[str, list[int]] = {}
            names_on_mesh = {layout: f"mesh {number}" for number, layout in enumerate(plan.mesh_layouts)}
            for at, (layout, kind) in enumerate(zip(plan.table_layouts, plan.kinds, strict=True)):
                if layout is not None:
                    group = (names_on_mesh if kind == "mesh" else names).get(layout)
                else:
                    group = kind if kind in _OWN_KINDS else None
                if group is not None:
                    groups.setdefault(group, []).append(at)
            self._groups = (plan, groups)
        return self._groups[1]

    def _of_tensor(self, tensor: torch.Tensor) -> str:
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        if not flat.numel():
            return ""
        if flat.is_cpu:
            return self._of_bytes(flat.view(torch.uint8).numpy().data)
        return device_digest(flat, sample_bytes=_SAMPLE_BYTES if self.mode == "sample" else None)

    def _of_bytes(self, data: memoryview) -> str:
        if self.mode == "full" or data.nbytes <= 3 * _SAMPLE_BYTES:
            return xxhash.xxh3_64_hexdigest(data)
        middle = (data.nbytes - _SAMPLE_BYTES) // 2
        parts = (data[:_SAMPLE_BYTES], data[middle : middle + _SAMPLE_BYTES], data[-_SAMPLE_BYTES:])
        return xxhash.xxh3_64_hexdigest(b"".join(parts))


def device_digest(flat: torch.Tensor, *, sample_bytes: int | None) -> str:
    """Return a digest of a flat tensor that is worked out where the tensor lives; two integers come to the host.

    Sums of the bytes' 32-bit words and of the words times odd weights, modulo 2**64: any single changed bit shows.
    """
    raw = flat.view(torch.uint8)
    if sample_bytes is not None and raw.numel() > 3 * sample_bytes:
        middle = (raw.numel() - sample_bytes) // 2
        raw = torch.cat((raw[:sample_bytes], raw[middle : middle + sample_bytes], raw[-sample_bytes:]))
    tail = raw.numel() % 4
    if tail:
        raw = torch.cat((raw, raw.new_zeros(4 - tail)))
    words = raw.view(torch.int32).to(torch.int64)
    weights = torch.arange(words.numel(), device=words.device, dtype=torch.int64) * 2 + 1
    sums = torch.stack((words.sum(), (words * weights).sum())).tolist()
    return "".join(f"{value & (2**64 - 1):016x}" for value in sums)


def summary(digests: Digests) -> dict[str, str]:
    """Return one digest per group, for the vote."""
    return {
        group: xxhash.xxh3_64_hexdigest("".join(members.values()).encode())
        for group, members in digests.items()
    }


def equal_kinds(
    summaries: Sequence[Mapping[str, str]], mesh_layouts: Sequence[Layout] = ()
) -> frozenset[Kind]:
    """Return the kinds of what belongs to each rank that were equal on all ranks that hold the same part."""
    first = summaries[0]
    found: set[Kind] = {
        kind
        for kind in _OWN_KINDS
        if kind in first and all(one.get(kind) == first[kind] for one in summaries)
    }
    if mesh_layouts and all(
        _are_equal(summaries, f"mesh {number}", layout) for number, layout in enumerate(mesh_layouts)
    ):
        found.add("mesh")
    return frozenset(found)


def _are_equal(summaries: Sequence[Mapping[str, str]], group: str, layout: Layout) -> bool:
    return all(len({summaries[rank].get(group) for rank in ranks}) == 1 for ranks in replica_sets(layout))


def differing_groups(summaries: Sequence[Mapping[str, str]], layouts: Sequence[Layout]) -> list[str]:
    """Return the groups of replicated tensors whose digests are not equal among the replicas of a shard."""
    names = sorted({group for one in summaries for group in one if group.isdecimal()}, key=int)
    return [group for group in names if not _are_equal(summaries, group, layouts[int(group)])]


def replica_sets(layout: Layout) -> list[list[int]]:
    """Return the sets of ranks that hold the same boxes."""
    replicas = layout.replica_axes
    sets: dict[tuple[int, ...], list[int]] = {}
    for at in range(layout.num_ranks):
        coordinates = layout.unravel(at)
        shard = tuple(0 if axis in replicas else one for axis, one in enumerate(coordinates))
        sets.setdefault(shard, []).append(layout.rank_at(coordinates))
    return list(sets.values())


def find_differences(
    groups: Sequence[str], layouts: Sequence[Layout], answers: Sequence[Mapping[str, Mapping[str, str]]]
) -> tuple[Difference, ...]:
    """Return the tensors that differ between replicas, from every rank's digests of the groups that do.

    Where most replicas of a shard agree, the others are named; else all of them.
    """
    found: dict[str, set[int]] = {}
    for group in groups:
        for ranks in replica_sets(layouts[int(group)]):
            for key in sorted({key for rank in ranks for key in answers[rank].get(group, {})}):
                values = {rank: answers[rank].get(group, {}).get(key) for rank in ranks}
                value, count = Counter(values.values()).most_common(1)[0]
                if count == len(ranks):
                    continue
                is_majority = 2 * count > len(ranks)
                odd = {rank for rank, one in values.items() if one != value or not is_majority}
                found.setdefault(key, set()).update(odd)
    return tuple(Difference(key, tuple(sorted(ranks))) for key, ranks in sorted(found.items()))


def name_differences(
    group: RankGroup, digests: Digests, differing: Sequence[str], layouts: Sequence[Layout]
) -> tuple[Difference, ...]:
    """Exchange the digests of the groups that differ, and return the tensors and ranks. Call on every rank."""
    answers = group.gather({name: digests[name] for name in differing})
    return find_differences(differing, layouts, answers)


def texts(differences: Sequence[Difference]) -> tuple[str, ...]:
    """Return what a record says of differences: the first of them by name, and how many more there are."""
    named = tuple(str(one) for one in differences[:_MAX_NAMED])
    more = len(differences) - _MAX_NAMED
    return (*named, f"and {more} more") if more > 0 else named
