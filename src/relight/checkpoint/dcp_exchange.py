"""What the ranks tell each other during a save of torch.distributed.checkpoint, and what follows from it.

DCP carries these values: up with each rank's plan, down with the plan that the coordinator returns, up again with the
results. Nothing else is exchanged, so no rank keeps anything between the calls of one save.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from relight.checkpoint.dcp_place import Place
from relight.errors import ConfigError, DesyncError, StateMismatchError
from relight.manifest.image_plan import layout_fingerprint
from relight.manifest.manifest import IN_PIECES, PER_RANK, IndexEntry, RankRecord
from relight.manifest.shard import Layout, Piece, cover_once

__all__ = [
    "LocalPart",
    "RankPlan",
    "RankReport",
    "StoredTensor",
    "build_index",
    "compare_ranks",
    "make_plans",
]

ItemKey = tuple[str, tuple[int, ...] | None]
"""Name of an item of a plan, and where in the global tensor it begins; None for what is no tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPart:
    """What a rank tells with its plan: where it means to save, and all its items, those of other ranks included."""

    url: str
    step: int | None
    items: tuple[WriteItem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What the coordinator tells a rank.

    Attributes:
        layout: fingerprint of the whole layout.
        compare: the items of this rank that others have too; their values must be equal.
    """

    place: Place
    rank: int
    world_size: int
    layout: str
    compare: tuple[WriteItem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A piece that a rank has stored, and the tensor that it belongs to."""

    dtype: str
    shape: tuple[int, ...]
    piece: Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What a rank has stored.

    Attributes:
        record: of its image; for rank 0, whose record the coordinator completes, without index and objects.
        tensors: name -> pieces of it.
        objects: name -> typed JSON of what is no tensor.
        inner: names of the tensors that lie within objects.
        per_rank: names of the values of which every rank stores its own.
        digests: what the plan said to compare.
    """

    place: Place
    rank: int
    record: RankRecord
    tensors: Mapping[str, Sequence[StoredTensor]]
    objects: Mapping[str, Any]
    inner: Sequence[str]
    per_rank: Sequence[str]
    digests: Mapping[ItemKey, str]


def item_key(index: MetadataIndex) -> ItemKey:
    """Return the name of an item."""
    return index.fqn, None if index.offset is None else tuple(index.offset)


def make_plans(plans: Sequence[SavePlan], place: Place) -> list[RankPlan]:
    """Return what to tell each rank about a save to `place`.

    Raises:
        DesyncError: the ranks mean to save to different places.
        StateMismatchError: two ranks differ in dtype or global shape of a tensor that they store together.
    """
    parts = [_part_of(plan, rank) for rank, plan in enumerate(plans)]
    for rank, part in enumerate(parts):
        ours, theirs = (parts[0].url, parts[0].step), (part.url, part.step)
        if ours != theirs:
            raise DesyncError(
                f"ranks 0 and {rank} save to different places: {_place_text(*ours)} and {_place_text(*theirs)}",
                rank=rank,
            )
    _check_tensors(plans)
    counts = Counter(item.index for part in parts for item in part.items)
    layout = layout_fingerprint([str(len(plans)), *sorted(map(_item_text, _items(plans)))])
    return [
        RankPlan(
            place=place,
            rank=rank,
            world_size=len(plans),
            layout=layout,
            compare=tuple(item for item in part.items if counts[item.index] > 1),
        )
        for rank, part in enumerate(parts)
    ]


def compare_ranks(reports: Sequence[RankReport]) -> dict[str, tuple[int, ...]]:
    """Return the names whose values differ between ranks that should hold the same, and the ranks that stand out.

    Where most ranks agree, the others are named; else all that have the value.
    """
    held: dict[ItemKey, dict[int, str]] = {}
    for report in reports:
        for key, digest in report.digests.items():
            held.setdefault(key, {})[report.rank] = digest
    differ: dict[str, set[int]] = {}
    for (name, _), digests in held.items():
        usual, count = Counter(digests.values()).most_common(1)[0]
        if count < len(digests):
            is_majority = 2 * count > len(digests)
            odd = {rank for rank, digest in digests.items() if digest != usual or not is_majority}
            differ.setdefault(name, set()).update(odd)
    return {name: tuple(sorted(ranks)) for name, ranks in sorted(differ.items())}


def build_index(reports: Sequence[RankReport]) -> tuple[dict[str, IndexEntry], tuple[Layout, ...]]:
    """Return the global index of what the ranks have stored, and its layouts.

    A tensor that one rank stores whole has a layout of that rank; all others are listed in pieces.

    Raises:
        StateMismatchError: the pieces of a tensor do not cover it once, or differ in dtype or shape.
    """
    found: dict[str, list[StoredTensor]] = {}
    for report in reports:
        for name, tensors in report.tensors.items():
            found.setdefault(name, []).extend(tensors)
    homes = sorted({tensors[0].piece.rank for tensors in found.values() if _is_whole(tensors)})
    numbers = {rank: number for number, rank in enumerate(homes)}
    index = {
        name: IndexEntry(dtype, shape, PER_RANK)
        for report in reports[:1]
        for name, (dtype, shape) in report.record.draft.local.items()
    }
    for name, tensors in found.items():
        first = tensors[0]
        if name in index or any((one.dtype, one.shape) != (first.dtype, first.shape) for one in tensors):
            raise StateMismatchError(f"{name}: two values of different sorts go by this name", path=name)
        if _is_whole(tensors):
            index[name] = IndexEntry(first.dtype, first.shape, numbers[first.piece.rank])
            continue
        pieces = tuple(sorted((one.piece for one in tensors), key=lambda piece: piece.offsets))
        if not cover_once(first.shape, (piece.box for piece in pieces)):
            raise StateMismatchError(
                f"{name}: the ranks' pieces do not cover the tensor of shape {first.shape} exactly once; is every "
                "rank that holds a part among those that save?",
                path=name,
            )
        index[name] = IndexEntry(first.dtype, first.shape, IN_PIECES, pieces)
    return index, tuple(Layout(base=rank) for rank in homes)


def _part_of(plan: SavePlan, rank: int) -> LocalPart:
    if not isinstance(plan.storage_data, LocalPart):
        raise ConfigError(
            f"the plan of rank {rank} does not come from its relight.dcp.Writer: every rank must use one, and the "
            "planner must keep SavePlan.storage_data",
            rank=rank,
        )
    return plan.storage_data


def _check_tensors(plans: Sequence[SavePlan]) -> None:
    """Compare dtype and global shape of the pieces of one tensor: DCP takes those of the first it meets."""
    seen: dict[str, tuple[int, str]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.tensor_data is not None:
                what = f"{item.tensor_data.properties.dtype} {tuple(item.tensor_data.size)}"
                first_rank, first = seen.setdefault(item.index.fqn, (rank, what))
                if what != first:
                    raise StateMismatchError(
                        f"{item.index.fqn}: rank {first_rank} holds part of {first}, rank {rank} of {what}",
                        path=item.index.fqn,
                        rank=rank,
                    )


def _items(plans: Sequence[SavePlan]) -> list[tuple[int, WriteItem]]:
    return [(rank, item) for rank, plan in enumerate(plans) for item in plan.items]


def _item_text(ranked: tuple[int, WriteItem]) -> str:
    rank, item = ranked
    data = item.tensor_data
    if data is None:
        return item.index.fqn
    box = f"{tuple(data.chunk.offsets)} {tuple(data.chunk.sizes)}"
    return f"{item.index.fqn} {data.properties.dtype} {tuple(data.size)} {box} {rank}"


def _place_text(url: str, step: int | None) -> str:
    return url if step is None else f"step {step} at {url}"


def _is_whole(tensors: Sequence[StoredTensor]) -> bool:
    return len(tensors) == 1 and tensors[0].piece.sizes == tensors[0].shape
