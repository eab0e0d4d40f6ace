"""Which rank stores which part of which tensor, computed on every rank alone from the layouts, and cached.

Shards are stored by who holds them, replicas share the bytes, and what belongs to a rank is stored whole by it. Equal
tables give equal plans, so no message is needed. See `relight.manifest.shard` for the rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import torch

from relight.checkpoint.format import (
    DTYPES,
    ImageLayout,
    TensorSpec,
    dtype_name,
    layout_fingerprint,
    plan_image,
)
from relight.checkpoint.sharding import Kind, core_of, local_box
from relight.checkpoint.table import StateTable
from relight.errors import UnknownFormatError
from relight.manifest.manifest import EQUAL, PER_RANK, IndexEntry, encode_index
from relight.manifest.shard import Layout, Piece, Spread, entry_name

__all__ = ["LocalEntry", "SavePlan", "plan_save"]

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass(frozen=True, slots=True)
class LocalEntry:
    """One entry of this rank's image.

    Attributes:
        at: index of the tensor in the state table.
        offset_bytes: where it starts in the image.
        start_bytes: where the stored rows start in this rank's (contiguous) part of the tensor.
        num_bytes: how many bytes are stored.
    """

    at: int
    offset_bytes: int
    start_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SavePlan:
    """This rank's image layout and the global index; valid as long as `matches(table)`.

    Attributes:
        layouts: every layout of a shared tensor, and of those on a part of a mesh if they agree, each once, in an
            order that is the same on all ranks.
        mesh_layouts: the layouts of tensors of the kind "mesh".
        local: per-rank key -> (dtype, shape) on this rank.
        fingerprint: of the global layout: names, dtypes, shapes, layouts, world size; equal on all ranks.
    """

    rank: int
    world_size: int
    keys: list[str]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    table_layouts: list[Layout | None]
    kinds: list[Kind]
    layouts: tuple[Layout, ...]
    mesh_layouts: tuple[Layout, ...]
    image: ImageLayout
    entries: tuple[LocalEntry, ...]
    local: dict[str, tuple[str, tuple[int, ...]]]
    fingerprint: str
    _indexes: dict[frozenset[Kind], msgspec.Raw] = field(default_factory=dict)

    def matches(self, table: StateTable, world_size: int) -> bool:
        """Return whether the plan still fits `table`: same names, shapes, dtypes, layouts, number of ranks."""
        return (
            self.world_size == world_size
            and self.keys == table.keys
            and self.table_layouts == table.layouts
            and self.kinds == table.kinds
            and self.dtypes == [tensor.dtype for tensor in table.tensors]
            and self.shapes == table.shapes
        )

    def index(self, equal: frozenset[Kind] = frozenset()) -> msgspec.Raw:
        """Return the stored form of the global index, on rank 0; empty elsewhere.

        Args:
            equal: kinds of tensors that belong to each rank and were found equal on all of them.
        """
        if self.rank:
            return msgspec.Raw(b"{}")
        known = self._indexes.get(equal)
        if known is None:
            numbers = {layout: number for number, layout in enumerate(self.layouts)}
            entries = {}
            for key, dtype, shape, layout, kind in zip(
                self.keys, self.dtypes, self.shapes, self.table_layouts, self.kinds, strict=True
            ):
                if layout is None or (kind == "mesh" and kind not in equal):
                    where = EQUAL if kind in equal else PER_RANK
                else:
                    where = numbers[core_of(layout) if kind == "mesh" else layout]
                entries[key] = IndexEntry(dtype_name(dtype), tuple(shape), where)
            known = self._indexes[equal] = encode_index(entries)
        return known


def plan_save(table: StateTable, *, rank: int, world_size: int) -> SavePlan:
    """Plan this rank's part of a save.

    Raises:
        UnknownFormatError: a tensor cannot be stored (sparse, quantised, an unknown subclass or dtype).
    """
    specs = [
        _spec_of(key, tensor, tuple(shape))
        for key, tensor, shape in zip(table.keys, table.tensors, table.shapes, strict=True)
    ]
    by_layout: dict[Layout, list[TensorSpec]] = {}
    on_mesh: dict[Layout, list[TensorSpec]] = {}
    standings = zip(specs, table.layouts, table.kinds, strict=True)
    for spec, layout, kind in sorted(standings, key=lambda one: one[0].name):
        if layout is not None:
            (on_mesh if kind == "mesh" else by_layout).setdefault(layout, []).append(spec)
    pieces: dict[str, Piece] = {}
    for layout, members in by_layout.items():
        spread = Spread(layout, [(spec.name, DTYPES[spec.dtype].itemsize, spec.shape) for spec in members])
        pieces |= spread.stored_by(rank)
    chosen: list[tuple[int, TensorSpec, int]] = []
    local: dict[str, tuple[str, tuple[int, ...]]] = {}
    for at, (spec, layout, kind) in enumerate(zip(specs, table.layouts, table.kinds, strict=True)):
        if layout is None:
            local[spec.name] = (spec.dtype, spec.shape)
            chosen.append((at, spec, 0))
        elif kind == "mesh":
            box = local_box(layout, spec.shape, rank)
            local[spec.name] = (spec.dtype, box.sizes)
            chosen.append((at, TensorSpec(entry_name(spec.name, spec.shape, box), spec.dtype, box.sizes), 0))
        elif (piece := pieces.get(spec.name)) is not None:
            start = _start_bytes(spec, piece, layout, rank)
            chosen.append((at, TensorSpec(piece.name, spec.dtype, piece.sizes), start))
    _refuse_twins([spec.name for _, spec, _ in chosen])
    image = plan_image([spec for _, spec, _ in chosen])
    entries = tuple(
        LocalEntry(at, offset, start, spec.num_bytes)
        for (at, spec, start), offset in zip(chosen, image.offsets, strict=True)
    )
    shared = [
        f"{layout!r} {spec.name} {spec.dtype} {spec.shape}"
        for layouts in (by_layout, on_mesh)
        for layout, members in layouts.items()
        for spec in members
    ]
    return SavePlan(
        rank=rank,
        world_size=world_size,
        keys=list(table.keys),
        shapes=list(table.shapes),
        dtypes=[tensor.dtype for tensor in table.tensors],
        table_layouts=list(table.layouts),
        kinds=list(table.kinds),
        layouts=tuple(dict.fromkeys([*by_layout, *map(core_of, on_mesh)])),
        mesh_layouts=tuple(on_mesh),
        image=image,
        entries=entries,
        local=local,
        fingerprint=layout_fingerprint([str(world_size), *shared]),
    )


def _spec_of(key: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> TensorSpec:
    if type(tensor) not in _PLAIN and not isinstance(tensor, torch.nn.Parameter):
        raise UnknownFormatError(f"{key}: tensors of type {type(tensor).__name__} cannot be saved", path=key)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise UnknownFormatError(
            f"{key}: {tensor.layout} tensors on {tensor.device} cannot be saved", path=key
        )
    try:
        key.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UnknownFormatError(f"{key!a}: names must be valid Unicode", path=ascii(key)) from error
    return TensorSpec(key, dtype_name(tensor.dtype), shape)


def _refuse_twins(names: list[str]) -> None:
    """Refuse two entries of one name: a key may end in what the name of another tensor's part ends in."""
    if len(set(names)) != len(names):
        twin = next(name for name in names if names.count(name) > 1)
        raise UnknownFormatError(
            f"two tensors of this rank would be stored as {twin!r}: rename the one whose own name ends in a range "
            "behind @",
            path=twin,
        )


def _start_bytes(spec: TensorSpec, piece: Piece, layout: Layout, rank: int) -> int:
    """Return where the rows of `piece` start in what the rank holds."""
    if not piece.offsets or not spec.num_bytes:
        return 0
    held = local_box(layout, spec.shape, rank)
    row_bytes = DTYPES[spec.dtype].itemsize * held.num_elements // held.num_rows
    return (piece.offsets[0] - held.offsets[0]) * row_bytes
