"""Boxes of global tensors, and layouts as rules: which rank holds which box, and which of its rows it stores.

A layout names a mesh of ranks and the splits that cut a tensor over its axes; ranks along an axis without a split are
replicas and share the storing. Everything follows from the rule: nothing here grows with ranks x tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import msgspec

from relight.errors import UnknownFormatError

__all__ = ["Box", "Layout", "Piece", "Spread", "cover_once", "entry_name", "whole"]


class Box(NamedTuple):
    """A part of a global tensor: where it starts and how large it is, in elements per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Return how many elements the box has; 1 for a 0-dim tensor."""
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """Return the part that both have, None where that is empty."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(mine + size, theirs + their_size) - start
            for mine, size, theirs, their_size, start in zip(*self, *other, offsets, strict=True)
        )
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def rows(self, start: int, stop: int) -> Box:
        """Return rows [start, stop) of the box, counted from its own first; a 0-dim box is one row."""
        if not self.sizes:
            return self
        return Box((self.offsets[0] + start, *self.offsets[1:]), (stop - start, *self.sizes[1:]))

    @property
    def num_rows(self) -> int:
        """Return the size of the first dim; 1 for a 0-dim box."""
        return self.sizes[0] if self.sizes else 1


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box that is all of a tensor."""
    return Box((0,) * len(shape), shape)


def entry_name(key: str, shape: tuple[int, ...], box: Box) -> str:
    """Return the name under which an image holds `box`: the key, and behind @ the ranges up to the last cut dim."""
    last = max((dim for dim, size in enumerate(shape) if box.sizes[dim] != size), default=-1)
    if last < 0:
        return key
    ranges = (
        f"{start}:{start + size}"
        for start, size in zip(box.offsets[: last + 1], box.sizes[: last + 1], strict=True)
    )
    return f"{key}@{','.join(ranges)}"


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One stored box of a global tensor: entry `name` of the image of `rank`, at `offsets` with `sizes`."""

    rank: int
    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def box(self) -> Box:
        """Return where in the global tensor the piece lies."""
        return Box(self.offsets, self.sizes)


def cover_once(shape: tuple[int, ...], boxes: Iterable[Box]) -> bool:
    """Return whether the boxes lie in a tensor of `shape` and cover each of its elements once."""
    filled = []
    for box in boxes:
        if not len(box.offsets) == len(box.sizes) == len(shape):
            return False
        ends = map(int.__add__, *box)
        if any(
            not 0 <= start <= end <= size for start, end, size in zip(box.offsets, ends, shape, strict=True)
        ):
            return False
        filled += [box] if box.num_elements else []
    if sum(box.num_elements for box in filled) != math.prod(shape):
        return False
    # As many elements as the tensor has: they cover it if no two overlap. Only those that share an index of the dim
    # with the most cuts can.
    dim = max(range(len(shape)), key=lambda one: len({box.offsets[one] for box in filled}), default=0)
    near: list[Box] = []
    for box in sorted(filled, key=lambda one: one.offsets[dim : dim + 1]):
        near = [one for one in near if shape and one.offsets[dim] + one.sizes[dim] > box.offsets[dim]]
        if any(box.overlap(one) is not None for one in near):
            return False
        near.append(box)
    return True


class Layout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """How tensors are spread over ranks.

    Attributes:
        mesh: size of each axis of the mesh; none for a single rank.
        splits: (axis, dim) in the order in which they are applied: what the splits before left of tensor dim `dim`
            is cut into as many chunks as the axis is long, each of ceil(size / chunks) but the last ones.
        base: the rank at coordinate 0.
        strides: the rank at coordinates c is base + sum(c[i] * strides[i]).
        ranks: where no strides fit, the rank at each coordinate in row-major order; else empty.
    """

    mesh: tuple[int, ...] = ()
    splits: tuple[tuple[int, int], ...] = ()
    base: int = 0
    strides: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        axes = [axis for axis, _ in self.splits]
        if self.ranks:
            has_ranks = len(set(self.ranks)) == len(self.ranks) == math.prod(self.mesh) and not self.strides
        else:
            has_ranks = _are_strides(self.mesh, self.strides)
        if (
            not has_ranks
            or min(self.mesh, default=1) < 1
            or min((*self.ranks, self.base)) < 0
            or (self.ranks and self.base)
            or len(set(axes)) != len(axes)
            or not set(axes) <= set(range(len(self.mesh)))
            or any(dim < 0 for _, dim in self.splits)
        ):
            raise UnknownFormatError(f"mesh {self.mesh} with splits {self.splits} and its ranks is no layout")

    @classmethod
    def on(
        cls, mesh: tuple[int, ...], ranks: Iterable[int], splits: tuple[tuple[int, int], ...] = ()
    ) -> Layout:
        """Return the layout on a mesh whose ranks are given in row-major order; strides are used where they fit."""
        listed = tuple(ranks)
        if not listed or len(listed) != math.prod(mesh) or len(set(listed)) != len(listed):
            raise UnknownFormatError(f"a mesh of {mesh} cannot have the ranks {listed[:8]}...")
        steps = [math.prod(mesh[axis + 1 :]) for axis in range(len(mesh))]
        strides = tuple(
            listed[step] - listed[0] if size > 1 else 0 for step, size in zip(steps, mesh, strict=True)
        )
        if _are_strides(mesh, strides):
            ruled = cls(mesh, splits, listed[0], strides)
            if all(ruled.coordinates(rank) == ruled.unravel(at) for at, rank in enumerate(listed)):
                return ruled
        return cls(mesh, splits, 0, (), listed)

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks that hold a part."""
        return math.prod(self.mesh)

    @property
    def num_replicas(self) -> int:
        """Return how many ranks hold each box."""
        return math.prod(self.mesh[axis] for axis in self.replica_axes)

    @property
    def replica_axes(self) -> tuple[int, ...]:
        """Return the axes along which all ranks hold the same box."""
        cut = {axis for axis, _ in self.splits}
        return tuple(axis for axis in range(len(self.mesh)) if axis not in cut)

    def unravel(self, at: int) -> tuple[int, ...]:
        """Return the coordinates of position `at` of the mesh in row-major order."""
        coordinates = []
        for size in reversed(self.mesh):
            coordinates.append(at % size)
            at //= size
        return tuple(reversed(coordinates))

    def rank_at(self, coordinates: tuple[int, ...]) -> int:
        """Return the rank at `coordinates`."""
        if self.ranks:
            at = 0
            for size, one in zip(self.mesh, coordinates, strict=True):
                at = at * size + one
            return self.ranks[at]
        return self.base + sum(map(int.__mul__, coordinates, self.strides))

    def coordinates(self, rank: int) -> tuple[int, ...] | None:
        """Return where `rank` stands in the mesh, None for a rank that holds nothing."""
        if self.ranks:
            return self.unravel(self.ranks.index(rank)) if rank in self.ranks else None
        left = rank - self.base
        found = [0] * len(self.mesh)
        for axis in sorted(range(len(self.mesh)), key=lambda one: -self.strides[one]):
            if self.strides[axis] > 0:
                found[axis], left = divmod(left, self.strides[axis])
        inside = all(0 <= one < size for one, size in zip(found, self.mesh, strict=True))
        return tuple(found) if left == 0 and inside else None

    def box(self, shape: tuple[int, ...], coordinates: tuple[int, ...]) -> Box:
        """Return the part of a tensor of `shape` that the rank at `coordinates` holds; it may be empty."""
        offsets, sizes = [0] * len(shape), list(shape)
        for axis, dim in self.splits:
            chunk = -(-sizes[dim] // self.mesh[axis])
            start = min(coordinates[axis] * chunk, sizes[dim])
            offsets[dim] += start
            sizes[dim] = min(start + chunk, sizes[dim]) - start
        return Box(tuple(offsets), tuple(sizes))

    def shards(self, shape: tuple[int, ...], wanted: Box) -> Iterator[tuple[tuple[int, ...], Box]]:
        """Yield (coordinates, box) of every shard that has part of `wanted`; replica axes stay at 0."""
        yield from self._shards(whole(shape), wanted, (0,) * len(self.mesh), 0)

    def _shards(
        self, box: Box, wanted: Box, coordinates: tuple[int, ...], depth: int
    ) -> Iterator[tuple[tuple[int, ...], Box]]:
        common = box.overlap(wanted)
        if common is None:
            return
        if depth == len(self.splits):
            yield coordinates, box
            return
        axis, dim = self.splits[depth]
        size, offset = box.sizes[dim], box.offsets[dim]
        chunk = -(-size // self.mesh[axis])
        first = (common.offsets[dim] - offset) // chunk
        last = (common.offsets[dim] + common.sizes[dim] - 1 - offset) // chunk
        for at in range(first, last + 1):
            start = at * chunk
            offsets = (*box.offsets[:dim], offset + start, *box.offsets[dim + 1 :])
            sizes = (*box.sizes[:dim], min(chunk, size - start), *box.sizes[dim + 1 :])
            there = (*coordinates[:axis], at, *coordinates[axis + 1 :])
            yield from self._shards(Box(offsets, sizes), wanted, there, depth + 1)


def _are_strides(mesh: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether the strides are as they should be: no two places of the mesh have the same rank."""
    reach = 0
    for stride, size in sorted(zip(strides, mesh, strict=False)):
        if (stride <= reach) if size > 1 else stride:
            return False
        reach += stride * (size - 1)
    return len(mesh) == len(strides)


class Spread:
    """The tensors of one layout, and which rank stores what of them.

    Replicas share the bytes of a shard: its boxes are laid end to end in the order of their keys; a row (index of the
    first dim) that begins at byte s of the total T is stored by replica s * R // T of R, in row-major order of the
    replica axes. A tensor without elements is stored by the layout's first rank.

    Args:
        layout: of all the tensors.
        tensors: (key, bytes of an element, global shape) of each, in any order.

    Raises:
        UnknownFormatError: the layout cuts a dim that a tensor does not have.
    """

    def __init__(self, layout: Layout, tensors: Iterable[tuple[str, int, tuple[int, ...]]]) -> None:
        self.layout = layout
        self._tensors = sorted(tensors)
        num_dims = max((dim + 1 for _, dim in layout.splits), default=0)
        for key, _, shape in self._tensors:
            if len(shape) < num_dims:
                raise UnknownFormatError(
                    f"{key} of shape {shape} cannot be cut along dim {num_dims - 1}", path=key
                )
        self._runs: dict[tuple[int, ...], tuple[list[int], int]] = {}

    @cached_property
    def _places(self) -> dict[str, int]:
        return {key: at for at, (key, _, _) in enumerate(self._tensors)}

    @cached_property
    def _num_replicas(self) -> int:
        return self.layout.num_replicas

    def stored_by(self, rank: int) -> dict[str, Piece]:
        """Return what `rank` stores by key, at most one piece of each tensor; nothing for a rank that holds nothing."""
        layout = self.layout
        coordinates = layout.coordinates(rank)
        if coordinates is None:
            return {}
        is_first = not any(coordinates)
        replica = self._replica(coordinates)
        pieces = {}
        for at, (key, item_bytes, shape) in enumerate(self._tensors):
            box = layout.box(shape, coordinates)
            if not box.num_elements:
                if is_first and not math.prod(shape):
                    pieces[key] = Piece(rank, key, *whole(shape))
                continue
            if self._num_replicas > 1:
                start, stop = self._rows(at, box, item_bytes, coordinates, replica)
                if start >= stop:
                    continue
                box = box.rows(start, stop)
            pieces[key] = Piece(rank, entry_name(key, shape, box), *box)
        return pieces

    def holders(self, key: str, wanted: Box | None = None) -> list[Piece]:
        """Return the stored pieces of tensor `key` that have part of `wanted`; by default all."""
        at = self._places[key]
        _, item_bytes, shape = self._tensors[at]
        pieces = []
        for coordinates, box in self.layout.shards(shape, wanted or whole(shape)):
            if self._num_replicas == 1:
                pieces.append(Piece(self.layout.rank_at(coordinates), entry_name(key, shape, box), *box))
                continue
            common = box.overlap(wanted) if wanted is not None else box
            if common is None:
                continue
            first = common.offsets[0] - box.offsets[0] if shape else 0
            rows = range(first, first + common.num_rows)
            for replica in self._replicas_of(at, box, item_bytes, coordinates, rows):
                start, stop = self._rows(at, box, item_bytes, coordinates, replica)
                if start < stop:
                    part = box.rows(start, stop)
                    pieces.append(
                        Piece(self._rank_of(coordinates, replica), entry_name(key, shape, part), *part)
                    )
        return pieces

    def _replica(self, coordinates: tuple[int, ...]) -> int:
        at = 0
        for axis in self.layout.replica_axes:
            at = at * self.layout.mesh[axis] + coordinates[axis]
        return at

    def _rank_of(self, coordinates: tuple[int, ...], replica: int) -> int:
        there = list(coordinates)
        for axis in reversed(self.layout.replica_axes):
            replica, there[axis] = divmod(replica, self.layout.mesh[axis])
        return self.layout.rank_at(tuple(there))

    def _run(self, coordinates: tuple[int, ...]) -> tuple[list[int], int]:
        """Return the byte at which each tensor's box begins in the run of one shard, and the run's length."""
        shard = tuple(0 if axis in self.layout.replica_axes else one for axis, one in enumerate(coordinates))
        run = self._runs.get(shard)
        if run is None:
            starts, total = [], 0
            for _, item_bytes, shape in self._tensors:
                starts.append(total)
                total += self.layout.box(shape, shard).num_elements * item_bytes
            run = self._runs[shard] = (starts, total)
        return run

    def _rows(
        self, at: int, box: Box, item_bytes: int, coordinates: tuple[int, ...], replica: int
    ) -> tuple[int, int]:
        """Return the rows [start, stop) of a box that one replica stores."""
        starts, total = self._run(coordinates)
        row_bytes = box.num_elements * item_bytes // box.num_rows
        num, begin = self._num_replicas, starts[at]
        first, after = (
            min(box.num_rows, max(0, -(-(border * total - begin * num) // (row_bytes * num))))
            for border in (replica, replica + 1)
        )
        return first, after

    def _replicas_of(
        self, at: int, box: Box, item_bytes: int, coordinates: tuple[int, ...], rows: range
    ) -> range:
        """Return the replicas that store some rows of a box."""
        starts, total = self._run(coordinates)
        row_bytes = box.num_elements * item_bytes // box.num_rows
        num, begin = self._num_replicas, starts[at]
        first, last = ((begin + row * row_bytes) * num // total for row in (rows[0], rows[-1]))
        return range(first, last + 1)
