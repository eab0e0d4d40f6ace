"""Reading the typed files of one checkpoint: decoded, digest checked, and cross-checked with their place."""

from __future__ import annotations

from relight.errors import CorruptionError, UnknownFormatError
from relight.manifest.manifest import (
    BLOCK_BYTES,
    Generation,
    Manifest,
    Marker,
    RankRecord,
    decode_file,
)
from relight.manifest.names import generation_name, manifest_name, marker_name, record_name
from relight.storage.backend import StorageBackend

__all__ = ["read_generation", "read_manifest", "read_marker", "read_record"]


def read_generation(backend: StorageBackend, generation: int) -> Generation:
    """Return the file of `generation`.

    Raises:
        MissingCopyError: there is none.
        CorruptionError: its bytes differ from what was written, or it speaks of another generation.
        UnknownFormatError: another version of relight wrote it.
    """
    name = generation_name(generation)
    body, _ = decode_file(backend.get(name), Generation, path=name)
    _check_place(name, {"generation": (body.generation, generation)})
    return body


def read_manifest(backend: StorageBackend, step: int, generation: int) -> tuple[Manifest, str]:
    """Return the manifest of a checkpoint and its digest; raises as `read_generation`."""
    name = manifest_name(step, generation)
    body, digest = decode_file(backend.get(name), Manifest, path=name)
    _check_place(name, {"step": (body.step, step), "generation": (body.generation, generation)})
    if len(body.ranks) != body.world_size:
        raise CorruptionError(
            f"{name}: {len(body.ranks)} ranks listed, world size {body.world_size}", path=name
        )
    return body, digest


def read_record(backend: StorageBackend, step: int, generation: int, rank: int) -> tuple[RankRecord, str]:
    """Return the record of a rank and its digest; raises as `read_generation`."""
    name = record_name(step, generation, rank)
    body, digest = decode_file(backend.get(name), RankRecord, path=name)
    draft = body.draft
    places = {
        "step": (draft.step, step),
        "generation": (draft.generation, generation),
        "rank": (draft.rank, rank),
    }
    _check_place(name, places)
    if body.block_bytes != BLOCK_BYTES:
        raise UnknownFormatError(
            f"{name}: blocks of {body.block_bytes} bytes; known: {BLOCK_BYTES}", path=name
        )
    num_blocks = -(-draft.image_bytes // BLOCK_BYTES)
    if len(body.digests) != num_blocks:
        raise CorruptionError(f"{name}: {len(body.digests)} digests for {num_blocks} blocks", path=name)
    return body, digest


def read_marker(backend: StorageBackend, step: int, generation: int, kind: str) -> Marker:
    """Return the marker of that kind ("verified", "pinned"); raises as `read_generation`."""
    name = marker_name(step, generation, kind)
    body, _ = decode_file(backend.get(name), Marker, path=name)
    if body.kind != kind:
        raise CorruptionError(f"{name}: says {body.kind!r}", path=name)
    return body


def _check_place(name: str, places: dict[str, tuple[int, int]]) -> None:
    """Refuse a file that was moved or copied: what it says of itself and what its name says must agree."""
    for key, (said, named) in places.items():
        if said != named:
            raise CorruptionError(f"{name}: says {key} {said}; its name says {named}", path=name)
