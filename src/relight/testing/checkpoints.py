"""Small checkpoints made without torch and without a keeper: for tests of whatever reads, lists or removes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import msgspec

from relight.manifest.catalog import Catalog
from relight.manifest.manifest import (
    BLOCK_BYTES,
    IndexEntry,
    Manifest,
    Parent,
    RankRecord,
    RecordDraft,
    digest_block,
    encode_index,
)
from relight.manifest.shard import Layout

__all__ = ["TensorData", "sample_image", "sample_index", "sample_record", "write_checkpoint"]

TensorData = tuple[str, tuple[int, ...], bytes]
"""Stored dtype ("F32", ...), shape and content of one tensor."""

_ALIGN_BYTES = 64

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I32": "int32",
    "I64": "int64",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}
"""relight's names of the stored dtypes that samples use."""


def sample_image(tensors: Mapping[str, TensorData]) -> bytes:
    """Return a rank image that holds `tensors`, each of a multiple of 64 bytes."""
    header: dict[str, object] = {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        if len(data) % _ALIGN_BYTES:
            raise ValueError(f"{name}: {len(data)} bytes; samples hold multiples of {_ALIGN_BYTES}")
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-(8 + len(encoded)) % _ALIGN_BYTES)
    return len(encoded).to_bytes(8, "little") + encoded + b"".join(data for _, _, data in tensors.values())


def sample_index(
    ranks: Sequence[Mapping[str, TensorData]],
) -> tuple[dict[str, IndexEntry], tuple[Layout, ...]]:
    """Return the index and the layouts of tensors that are stored whole, each by the rank that has it."""
    index = {
        name: IndexEntry(_DTYPES[dtype], shape, rank)
        for rank, entries in enumerate(ranks)
        for name, (dtype, shape, _) in entries.items()
    }
    return index, tuple(Layout(base=rank) for rank in range(len(ranks)))


def sample_record(
    image: bytes | memoryview,
    *,
    step: int,
    generation: int = 1,
    rank: int = 0,
    world_size: int = 1,
    run: str = "sample-run",
    parent: Parent | None = None,
    layout: str = "sample-layout",
    saved_at: float | None = None,
    metrics: Mapping[str, float | None] | None = None,
    context: Mapping[str, object] | None = None,
    index: Mapping[str, IndexEntry] | None = None,
    layouts: Sequence[Layout] = (),
    local: Mapping[str, tuple[str, tuple[int, ...]]] | None = None,
    replicas_differ: tuple[str, ...] = (),
) -> RankRecord:
    """Return the record of `image`, digests included."""
    view = memoryview(image)
    draft = RecordDraft(
        run=run,
        step=step,
        generation=generation,
        parent=parent,
        rank=rank,
        world_size=world_size,
        layout=layout,
        image_bytes=view.nbytes,
        saved_at=1_700_000_000.0 + step + rank if saved_at is None else saved_at,
        context=msgspec.Raw(msgspec.json.encode(context or {})),
        metrics=metrics or {},
        index=encode_index(dict(index or {})),
        layouts=tuple(layouts),
        local=dict(local or {}),
        replicas_differ=replicas_differ,
    )
    starts = range(0, view.nbytes, BLOCK_BYTES)
    return RankRecord(draft=draft, digests=tuple(digest_block(view[at : at + BLOCK_BYTES]) for at in starts))


def write_checkpoint(
    catalog: Catalog,
    step: int,
    generation: int = 1,
    *,
    tensors: Sequence[Mapping[str, TensorData]] | None = None,
    run: str | None = None,
    parent: Parent | None = None,
    metrics: Mapping[str, float | None] | None = None,
    context: Mapping[str, object] | None = None,
    replicas_differ: tuple[str, ...] = (),
    index: Mapping[str, IndexEntry] | None = None,
    layouts: Sequence[Layout] = (),
    local: Sequence[Mapping[str, tuple[str, tuple[int, ...]]]] | None = None,
    is_verified: bool = False,
) -> Manifest:
    """Store and commit a checkpoint of `step` in the order of the protocol; one rank for each entry of `tensors`.

    Every tensor counts as whole and replicated unless `index` (with the `layouts` that it speaks of) says otherwise;
    `local` says, rank by rank, which ones are the rank's own. It belongs to the run that was claimed in `catalog`
    unless `run` says otherwise.
    """
    if run is None:
        claimed = catalog.generations()
        run = claimed[0].run if claimed else "sample-run"
    ranks = tensors if tensors is not None else [{"w": ("U8", (64,), bytes([step % 256]) * 64)}]
    if index is None:
        index, layouts = sample_index(ranks)
    for rank, entries in enumerate(ranks):
        image = sample_image(entries)
        catalog.put_image(step, generation, rank, image)
        record = sample_record(
            image,
            step=step,
            generation=generation,
            rank=rank,
            world_size=len(ranks),
            run=run,
            parent=parent,
            metrics=metrics,
            context=context,
            index=index if rank == 0 else None,
            layouts=layouts if rank == 0 else (),
            local=local[rank] if local is not None else None,
            replicas_differ=replicas_differ,
        )
        catalog.put_record(record)
    manifest = catalog.commit(step, generation)
    if manifest is None:
        raise AssertionError(f"step {step} was stored but not found")
    if is_verified:
        catalog.mark_verified(step, generation)
    return manifest
