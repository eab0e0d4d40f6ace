"""Where live tensors stand: the local part of a DTensor, its global shape, and its layout as a rule.

Ownership follows from placements, never from names: a DTensor is sharded or replicated as its placements say.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any, Literal

import torch

from relight.errors import UnknownFormatError
from relight.manifest.shard import Box, Layout

__all__ = [
    "Kind",
    "LayoutBook",
    "core_of",
    "is_dtensor",
    "local_box",
    "local_part",
    "on_all_ranks",
    "splits_of",
]


Kind = Literal["shared", "mesh", "plain", "scalar", "buffer", "scratch", "own"]
"""What a tensor is to the ranks.

"shared" follows a layout. All others are this rank's own. Of these "mesh" (sharded on some axes of a mesh, while
nothing says what its other axes hold), "plain" (parameters and state without placements), "scalar" (0-dim optimizer
state) and "buffer" may turn out equal on all ranks, which is looked at at each save; "scratch" is state without
placements of a sharded parameter, "own" what the user keeps for this rank.
"""

_MAX_SPECS = 200_000


def on_all_ranks(world_size: int) -> Layout:
    """Return the layout of what every rank holds whole."""
    return Layout.on((world_size,), range(world_size)) if world_size > 1 else Layout()


def is_dtensor(tensor: Any) -> bool:
    """Return whether `tensor` is a DTensor; does not import what defines it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of `tensor`, sharing its memory: the tensor itself unless it is a DTensor."""
    # `to_local` would go through autograd for every tensor of every save.
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]  # noqa: SLF001


def splits_of(placements: tuple[Any, ...], mesh_shape: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
    """Return (axis, dim) of each split in the order of application; None where placements are no such rule.

    `Shard` splits are applied from the first axis to the last. A `_StridedShard` of split factor f is applied behind
    the splits of later axes whose sizes multiply to f, as FSDP over tensor parallel does.
    """
    by_dim: dict[int, list[int]] = {}
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None or placement.is_partial():
            return None
        order = by_dim.setdefault(dim, [])
        factor, at = int(getattr(placement, "split_factor", 1)), 0
        while factor > 1 and at < len(order) and factor % mesh_shape[order[at]] == 0:
            factor //= mesh_shape[order[at]]
            at += 1
        if factor != 1:
            return None
        order.insert(at, axis)
    return tuple((axis, dim) for dim in sorted(by_dim) for axis in by_dim[dim])


class LayoutBook:
    """The layouts of the DTensors that were seen, worked out once for each mesh and placements.

    Args:
        rank, world_size: of this process.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.everyone = on_all_ranks(world_size)
        self._rules: dict[tuple[int, tuple[Any, ...]], tuple[Any, Layout]] = {}
        self._specs: dict[int, tuple[Any, Layout]] = {}
        self._wide: dict[Layout, tuple[Layout, ...]] = {}

    def layout(self, key: str, tensor: Any) -> Layout:
        """Return the layout of a DTensor; its mesh may leave ranks out.

        Raises:
            UnknownFormatError: it is a partial sum, or its local part is not what its placements say.
        """
        spec = tensor._spec  # noqa: SLF001 - one object per tensor, where placements are made anew at each look
        known = self._specs.get(id(spec))
        if known is not None:
            return known[1]
        mesh, placements = tensor.device_mesh, tensor.placements
        rule = self._rules.get((id(mesh), placements))
        if rule is None:
            # The mesh is kept with it, and the spec below: their ids must not be given to others.
            rule = self._rules[id(mesh), placements] = (mesh, _read(key, mesh, placements))
        layout, held = rule[1], tuple(local_part(tensor).shape)
        box = local_box(layout, tuple(tensor.shape), self.rank)
        if box.sizes != held:
            raise UnknownFormatError(
                f"{key}: this rank holds {held} of {tuple(tensor.shape)}, but {placements} on a mesh of "
                f"{tuple(mesh.shape)} gives {box.sizes}",
                path=key,
            )
        if len(self._specs) >= _MAX_SPECS:
            self._specs.clear()
        self._specs[id(spec)] = (spec, layout)
        return layout

    def common_layout(self, key: str, tensor: Any) -> Layout | None:
        """Return a DTensor's layout; None where its mesh leaves ranks out, so that no rank can speak for all."""
        layout = self.layout(key, tensor)
        return layout if layout.num_ranks == self.world_size else None

    def standing(self, key: str, tensor: Any, *, is_shared: bool) -> tuple[Layout | None, Kind]:
        """Return the layout of a tensor, or None and what it is to its rank.

        Args:
            key: its name, for messages.
            tensor: a parameter, or state of one.
            is_shared: whether something keeps a tensor without placements equal on all ranks.
        """
        if is_dtensor(tensor):
            layout = self.layout(key, tensor)
            if layout.num_ranks == self.world_size:
                return layout, "shared"
            wide = self._widened(layout, tensor.device_mesh)
            return (wide, "mesh") if wide is not None else (None, "own")
        if is_shared or self.world_size == 1:
            return self.everyone, "shared"
        return None, "plain"

    def _widened(self, layout: Layout, mesh: Any) -> Layout | None:
        """Return a layout on all ranks whose further axes hold replicas, or what would be if these agree.

        None where the mesh was not sliced by axes out of one of all ranks.
        """
        known = self._wide.get(layout)
        if known is None:
            known = self._wide[layout] = _widen(layout, mesh, self.world_size)
        return known[0] if known else None


def _widen(layout: Layout, mesh: Any, world_size: int) -> tuple[Layout, ...]:
    root = mesh._get_root_mesh()  # noqa: SLF001 - torch has no public way from a slice to what it was sliced from
    names, all_names = mesh.mesh_dim_names, root.mesh_dim_names
    ranks = [int(rank) for rank in root.mesh.flatten().tolist()]
    if (
        not names
        or not all_names
        or not set(names) <= set(all_names)
        or sorted(ranks) != list(range(world_size))
    ):
        return ()
    axes = [all_names.index(name) for name in names]
    return (
        Layout.on(tuple(root.mesh.shape), ranks, tuple((axes[axis], dim) for axis, dim in layout.splits)),
    )


def core_of(layout: Layout) -> Layout:
    """Return the layout on those ranks that stand at 0 on all axes of replicas: together they hold everything once."""
    cut = sorted(axis for axis, _ in layout.splits)
    mesh = tuple(layout.mesh[axis] for axis in cut)
    shards = itertools.product(*map(range, mesh))
    places = [dict(zip(cut, shard, strict=True)) for shard in shards]
    ranks = [
        layout.rank_at(tuple(place.get(axis, 0) for axis in range(len(layout.mesh)))) for place in places
    ]
    if len(ranks) == 1:
        return Layout(base=ranks[0])
    return Layout.on(mesh, ranks, tuple((cut.index(axis), dim) for axis, dim in layout.splits))


def _read(key: str, mesh: Any, placements: tuple[Any, ...]) -> Layout:
    shape = tuple(mesh.shape)
    splits = splits_of(placements, shape)
    if splits is None:
        raise UnknownFormatError(
            f"{key}: a tensor placed as {placements} cannot be saved; redistribute it to Shard or Replicate",
            path=key,
        )
    ranks = [int(rank) for rank in mesh.mesh.flatten().tolist()]
    return Layout.on(shape, ranks, splits) if len(ranks) > 1 else Layout(base=ranks[0])


def local_box(layout: Layout, shape: tuple[int, ...], rank: int) -> Box:
    """Return the box of a tensor of `shape` that `rank` holds.

    Raises:
        UnknownFormatError: the mesh leaves this rank out.
    """
    coordinates = layout.coordinates(rank)
    if coordinates is None:
        raise UnknownFormatError(f"rank {rank} is not in the mesh {layout.mesh} of a tensor that it holds")
    return layout.box(shape, coordinates)
