"""Which rank stores which part of which tensor, computed on every rank alone from the layout, and cached.

Replicated tensors are cut into rows so that every rank stores an equal share of the bytes; per-rank tensors are
stored whole by their rank. Equal tables give equal plans, so no message is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from relight.checkpoint.state import StateTable
from relight.errors import UnknownFormatError
from relight.manifest.manifest import IN_PIECES, PER_RANK, IndexEntry, Piece, encode_index

__all__ = ["LocalEntry", "SavePlan", "plan_save"]

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass(frozen=True, slots=True)
class LocalEntry:
    """One entry of this rank's image.

    Attributes:
        at: index of the tensor in the state table.
        offset_bytes: where it starts in the image.
        start_bytes: where the stored rows start in the (contiguous) tensor.
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
        fingerprint: of the global layout: names, dtypes, shapes, ownership, world size; equal on all ranks.
        local: per-rank key -> (dtype, shape) on this rank.
    """

    keys: list[str]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    is_per_rank: list[bool]
    world_size: int
    layout: ImageLayout
    entries: tuple[LocalEntry, ...]
    index: msgspec.Raw
    local: dict[str, tuple[str, tuple[int, ...]]]
    fingerprint: str

    def matches(self, table: StateTable, world_size: int) -> bool:
        """Return whether the plan still fits `table`: same names, shapes, dtypes, ownership, number of ranks."""
        return (
            self.world_size == world_size
            and self.keys == table.keys
            and self.is_per_rank == table.is_per_rank
            and self.dtypes == [tensor.dtype for tensor in table.tensors]
            and self.shapes == [tensor.shape for tensor in table.tensors]
        )


def plan_save(table: StateTable, *, rank: int, world_size: int) -> SavePlan:
    """Plan this rank's part of a save.

    Raises:
        UnknownFormatError: a tensor cannot be stored (sparse, quantised, an unknown subclass or dtype).
    """
    specs = [_spec_of(key, tensor) for key, tensor in zip(table.keys, table.tensors, strict=True)]
    pieces = _split(specs, table.is_per_rank, world_size)
    chosen: list[tuple[int, TensorSpec, int]] = []
    for at, spec in enumerate(specs):
        if table.is_per_rank[at]:
            chosen.append((at, spec, 0))
        chosen += [
            (at, TensorSpec(piece.name, spec.dtype, piece.sizes), _start_bytes(spec, piece))
            for piece in pieces[at]
            if piece.rank == rank
        ]
    layout = plan_image([spec for _, spec, _ in chosen])
    entries = tuple(
        LocalEntry(at, offset, start, spec.num_bytes)
        for (at, spec, start), offset in zip(chosen, layout.offsets, strict=True)
    )
    index = {
        spec.name: _index_entry(spec, pieces[at], is_per_rank=table.is_per_rank[at])
        for at, spec in enumerate(specs)
    }
    replicated = [(at, spec) for at, spec in enumerate(specs) if not table.is_per_rank[at]]
    return SavePlan(
        keys=list(table.keys),
        shapes=[tensor.shape for tensor in table.tensors],
        dtypes=[tensor.dtype for tensor in table.tensors],
        is_per_rank=list(table.is_per_rank),
        world_size=world_size,
        layout=layout,
        entries=entries,
        index=encode_index(index if rank == 0 else {}),
        local={spec.name: (spec.dtype, spec.shape) for at, spec in enumerate(specs) if table.is_per_rank[at]},
        fingerprint=layout_fingerprint(
            [str(world_size), *(f"{spec.name} {spec.dtype} {spec.shape}" for _, spec in replicated)]
        ),
    )


def _spec_of(key: str, tensor: torch.Tensor) -> TensorSpec:
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
    return TensorSpec(key, dtype_name(tensor.dtype), tuple(tensor.shape))


def _split(specs: list[TensorSpec], is_per_rank: list[bool], world_size: int) -> list[list[Piece]]:
    """Cut the replicated tensors, laid end to end, into `world_size` runs of about equal bytes at row borders."""
    total = sum(spec.num_bytes for at, spec in enumerate(specs) if not is_per_rank[at])
    pieces: list[list[Piece]] = [[] for _ in specs]
    position = 0
    for at, spec in enumerate(specs):
        if is_per_rank[at]:
            continue
        num_rows = spec.shape[0] if spec.shape else 1
        row_bytes = spec.num_bytes // num_rows if num_rows else 0
        row = 0
        while row < num_rows or not pieces[at]:
            rank = min(world_size - 1, (position + row * row_bytes) * world_size // total) if total else 0
            border = -(-(rank + 1) * total // world_size) if rank < world_size - 1 else None
            stop = num_rows
            if border is not None and row_bytes:
                stop = min(num_rows, max(row + 1, -(-(border - position) // row_bytes)))
            pieces[at].append(_piece(spec, rank, row, stop))
            row = max(stop, 1) if not num_rows else stop
        position += spec.num_bytes
    return pieces


def _index_entry(spec: TensorSpec, pieces: list[Piece], *, is_per_rank: bool) -> IndexEntry:
    if is_per_rank:
        return IndexEntry(spec.dtype, spec.shape, PER_RANK)
    if len(pieces) == 1:
        return IndexEntry(spec.dtype, spec.shape, pieces[0].rank)
    return IndexEntry(spec.dtype, spec.shape, IN_PIECES, tuple(pieces))


def _piece(spec: TensorSpec, rank: int, row: int, stop: int) -> Piece:
    if not spec.shape or (row == 0 and stop == spec.shape[0]):
        return Piece(rank, spec.name, (0,) * len(spec.shape), spec.shape)
    offsets = (row, *(0 for _ in spec.shape[1:]))
    return Piece(rank, f"{spec.name}@{row}:{stop}", offsets, (stop - row, *spec.shape[1:]))


def _start_bytes(spec: TensorSpec, piece: Piece) -> int:
    num = DTYPES[spec.dtype].itemsize
    for size in spec.shape[1:]:
        num *= size
    return num * piece.offsets[0] if piece.offsets else 0
