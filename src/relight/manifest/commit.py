"""Commit: all rank records of (step, generation) there -> the manifest, which makes the checkpoint exist."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from relight.errors import CorruptionError, DesyncError, StopError
from relight.manifest.manifest import Manifest, RankRecord, RankSummary, RecordDraft, encode_file
from relight.manifest.names import image_name, manifest_name, record_name, step_dir
from relight.manifest.stored import read_manifest, read_record
from relight.stages import reached
from relight.storage.backend import StorageBackend

__all__ = ["POINTS", "build_manifest", "commit_step"]

POINTS = ("commit.files_found", "commit.records_read", "commit.manifest_stored")
"""Points announced while committing, in their order."""

# Equal on all ranks of one checkpoint; ranks that differ here do not belong together.
_SHARED = ("run", "step", "generation", "parent", "world_size", "layout")

# A listing costs about as much as this many looks at single files.
_MAX_LOOKS = 64

# Records are read this many at once: far away, a round trip takes longer than all work on a record.
_NUM_READERS = 16
_BATCH = 512


def commit_step(
    backend: StorageBackend, step: int, generation: int, *, missed: str | None = None
) -> Manifest | str:
    """Write the manifest if all records and images are there; return it, or the name of a file that is missing.

    Any number of processes may call this at once: the manifest is a function of the records, and only one is stored.
    A manifest that is returned is durable, whoever stored it. Thousands of ranks look before the last one is there,
    so a look that comes too early costs little: a few single files are looked at before everything is listed.

    Args:
        backend: the tier.
        step: which checkpoint.
        generation: which checkpoint.
        missed: what was missing at the last look, which is looked at first.
    """
    if backend.size_bytes(manifest_name(step, generation)) is not None:
        manifest = read_manifest(backend, step, generation)[0]
        _make_durable(backend, step, generation)
        return manifest
    for name in (missed, record_name(step, generation, 0)):
        if name is not None and backend.size_bytes(name) is None:
            return name
    first = read_record(backend, step, generation, 0)
    sizes = _sizes(backend, first[0].draft)
    if isinstance(sizes, str):
        return sizes
    reached("commit.files_found")
    records = chain([first], _read_records(backend, first[0].draft))
    manifest = build_manifest(_fitting(records, sizes))
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


def _sizes(backend: StorageBackend, first: RecordDraft) -> Mapping[str, int] | str:
    """Return the sizes of all files of the step, or the name of a record or image that is missing."""
    step, generation, num_ranks = first.step, first.generation, first.world_size
    if num_ranks > _MAX_LOOKS:
        for at in range(1, _MAX_LOOKS + 1):
            name = record_name(step, generation, _scattered(at, num_ranks))
            if backend.size_bytes(name) is None:
                return name
    sizes = {file.name: file.size_bytes for file in backend.list(f"{step_dir(step, generation)}/")}
    for rank in range(num_ranks):
        for name in (record_name(step, generation, rank), image_name(step, generation, rank)):
            if name not in sizes:
                return name
    return sizes


def _scattered(at: int, num_ranks: int) -> int:
    """Return the rank to look at as number `at`: neighbours, who share a node and its speed, are far apart."""
    # The golden ratio's multiples leave no large gap, however many are taken.
    return int(at * 0.6180339887498949 % 1.0 * num_ranks)


def _read_records(backend: StorageBackend, first: RecordDraft) -> Iterator[tuple[RankRecord, str]]:
    """Yield the record of each rank but rank 0, and its digest; few are in memory at once."""
    step, generation, ranks = first.step, first.generation, range(1, first.world_size)

    def read(rank: int) -> tuple[RankRecord, str]:
        return read_record(backend, step, generation, rank)

    if len(ranks) < _NUM_READERS:
        yield from map(read, ranks)
        return
    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="relight-commit") as readers:
        for start in range(0, len(ranks), _BATCH):
            yield from readers.map(read, ranks[start : start + _BATCH])


def _fitting(
    records: Iterable[tuple[RankRecord, str]], sizes: Mapping[str, int]
) -> Iterator[tuple[RankRecord, str]]:
    """Yield the records whose images have the sizes that they say.

    Raises:
        CorruptionError: another one.
    """
    for record, digest in records:
        draft = record.draft
        name = image_name(draft.step, draft.generation, draft.rank)
        if sizes[name] != draft.image_bytes:
            raise CorruptionError(
                f"{name} has {sizes[name]} bytes; its record says {draft.image_bytes}", path=name
            )
        yield record, digest


def build_manifest(records: Iterable[tuple[RankRecord, str]]) -> Manifest:
    """Return the manifest of `records` (each with its digest, in the order of ranks); equal records, equal manifest.

    Raises:
        DesyncError: the ranks differ in run, step, generation, parent, world size or layout.
    """
    remaining = iter(records)
    record, digest = next(remaining)
    first = record.draft
    summaries = [RankSummary(first.image_bytes, digest)]
    saved_at, differing = first.saved_at, set(first.replicas_differ)
    for record, digest in remaining:
        draft = record.draft
        _check_shared(first, draft)
        summaries.append(RankSummary(draft.image_bytes, digest))
        saved_at = max(saved_at, draft.saved_at)
        differing.update(draft.replicas_differ)
    if len(summaries) != first.world_size:
        raise DesyncError(f"{len(summaries)} records for world size {first.world_size}", step=first.step)
    return Manifest(
        run=first.run,
        step=first.step,
        generation=first.generation,
        parent=first.parent,
        world_size=first.world_size,
        layout=first.layout,
        saved_at=saved_at,
        ranks=tuple(summaries),
        metrics=first.metrics,
        index=first.index,
        layouts=first.layouts,
        aliases=first.aliases,
        replicas_differ=tuple(sorted(differing)),
    )


def _check_shared(first: RecordDraft, other: RecordDraft) -> None:
    for key in _SHARED:
        ours, theirs = getattr(first, key), getattr(other, key)
        if ours != theirs:
            raise DesyncError(
                f"ranks 0 and {other.rank} differ in {key}: {ours!r} and {theirs!r}; step {first.step} "
                "cannot be committed",
                step=first.step,
                rank=other.rank,
            )
