"""Commit: all rank records of (step, generation) there -> the manifest, which makes the checkpoint exist."""

from __future__ import annotations

from collections.abc import Sequence

from relight.errors import CorruptionError, DesyncError, StopError
from relight.manifest.manifest import Manifest, RankRecord, RankSummary, encode_file
from relight.manifest.names import image_name, manifest_name, record_name, step_dir
from relight.manifest.stored import read_manifest, read_record
from relight.stages import reached
from relight.storage.backend import StorageBackend

__all__ = ["POINTS", "build_manifest", "commit_step"]

POINTS = ("commit.files_found", "commit.records_read", "commit.manifest_stored")
"""Points announced while committing, in their order."""

# Equal on all ranks of one checkpoint; ranks that differ here do not belong together.
_SHARED = ("run", "step", "generation", "parent", "world_size", "layout")


def commit_step(backend: StorageBackend, step: int, generation: int) -> Manifest | None:
    """Write the manifest if all records and images are there; return it, or None while something is missing.

    Any number of processes may call this at once: the manifest is a function of the records, and only one is stored.
    A manifest that is returned is durable, whoever stored it.
    """
    if backend.size_bytes(manifest_name(step, generation)) is not None:
        manifest = read_manifest(backend, step, generation)[0]
        _make_durable(backend, step, generation)
        return manifest
    sizes = {file.name: file.size_bytes for file in backend.list(f"{step_dir(step, generation)}/")}
    if record_name(step, generation, 0) not in sizes:
        return None
    first = read_record(backend, step, generation, 0)
    ranks = range(first[0].draft.world_size)
    needed = {name(step, generation, rank) for rank in ranks for name in (record_name, image_name)}
    if not needed <= sizes.keys():
        return None
    reached("commit.files_found")
    records = [first, *(read_record(backend, step, generation, rank) for rank in ranks[1:])]
    manifest = build_manifest(records)
    for rank, summary in enumerate(manifest.ranks):
        name = image_name(step, generation, rank)
        if sizes[name] != summary.image_bytes:
            raise CorruptionError(
                f"{name} has {sizes[name]} bytes; its record says {summary.image_bytes}", path=name
            )
    reached("commit.records_read")
    encoded = encode_file(manifest)
    name = manifest_name(step, generation)
    if not backend.put(name, encoded, if_absent=True) and backend.get(name) != encoded:
        raise StopError(
            f"{backend.url}/{name} was committed with other content; look at both ranks' records", step=step
        )
    reached("commit.manifest_stored")
    return manifest


def _make_durable(backend: StorageBackend, step: int, generation: int) -> None:
    """Wait until a manifest that was found is durable: who stored it may have died, or not have come so far.

    Storing a file again that is there makes its directory durable. Not the manifest itself: should the checkpoint
    be removed right now, a record alone is no checkpoint.
    """
    name = record_name(step, generation, 0)
    backend.put(name, backend.get(name), if_absent=True)


def build_manifest(records: Sequence[tuple[RankRecord, str]]) -> Manifest:
    """Return the manifest of `records` (each with its digest, in the order of ranks); equal records, equal manifest.

    Raises:
        DesyncError: the ranks differ in run, step, generation, parent, world size or layout.
    """
    first = records[0][0].draft
    for record, _ in records:
        for key in _SHARED:
            ours, theirs = getattr(first, key), getattr(record.draft, key)
            if ours != theirs:
                raise DesyncError(
                    f"ranks 0 and {record.draft.rank} differ in {key}: {ours!r} and {theirs!r}; step {first.step} "
                    "cannot be committed",
                    step=first.step,
                    rank=record.draft.rank,
                )
    if len(records) != first.world_size:
        raise DesyncError(f"{len(records)} records for world size {first.world_size}", step=first.step)
    return Manifest(
        run=first.run,
        step=first.step,
        generation=first.generation,
        parent=first.parent,
        world_size=first.world_size,
        layout=first.layout,
        saved_at=max(record.draft.saved_at for record, _ in records),
        ranks=tuple(RankSummary(record.draft.image_bytes, digest) for record, digest in records),
        metrics=first.metrics,
        index=first.index,
        aliases=first.aliases,
        replicas_differ=tuple(sorted({key for record, _ in records for key in record.draft.replicas_differ})),
    )
