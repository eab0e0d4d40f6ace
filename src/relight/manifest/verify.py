"""Verification: read every byte of a checkpoint and say which file and block differ from what was written."""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from relight.errors import (
    CopyError,
    CorruptionError,
    MissingCopyError,
    RelightError,
    StorageUnavailableError,
    UnknownFormatError,
)
from relight.manifest.image import read_image_tensors
from relight.manifest.manifest import BLOCK_BYTES, Manifest, RankRecord, digest_block
from relight.manifest.names import image_name, manifest_name, marker_name, record_name, step_dir
from relight.manifest.stored import read_manifest, read_marker, read_record
from relight.storage.backend import StorageBackend

__all__ = ["OnBlock", "Problem", "read_checked_record", "verify_rank_files", "verify_step"]

OnBlock = Callable[[int], None]
"""Called with the number of bytes of each image block that was read, for progress."""

_MAX_TENSORS_NAMED = 3
_RECORD = re.compile(r"rank-(\d{5,})\.json", re.ASCII)

# What a bad or unreadable file raises; anything else (an unavailable tier) goes to the caller.
_BAD = (CopyError, UnknownFormatError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One finding: the `file` (relative to the run's root), the `block` of an image or None, and what is wrong."""

    file: str
    block: int | None = None
    message: str


def verify_step(
    backend: StorageBackend, step: int, generation: int, on_block: OnBlock | None = None
) -> list[Problem]:
    """Return every problem of a checkpoint, [] when each byte of each file is as it was written.

    Raises:
        MissingCopyError: there is no such checkpoint.
    """
    name = manifest_name(step, generation)
    problems: list[Problem] = []
    manifest: Manifest | None = None
    digest: str | None = None
    try:
        manifest, digest = read_manifest(backend, step, generation)
    except MissingCopyError:
        raise
    except _BAD as error:
        problems.append(Problem(file=name, message=str(error)))
    ranks = range(manifest.world_size) if manifest is not None else _ranks_found(backend, step, generation)
    for rank in ranks:
        problems += verify_rank_files(backend, step, generation, rank, manifest=manifest, on_block=on_block)
    problems += _marker_problems(backend, step, generation, digest)
    return problems


def verify_rank_files(
    backend: StorageBackend,
    step: int,
    generation: int,
    rank: int,
    *,
    manifest: Manifest | None = None,
    on_block: OnBlock | None = None,
) -> list[Problem]:
    """Return the problems of one rank's record and image; without a manifest the record speaks for itself."""
    try:
        record = read_checked_record(backend, step, generation, rank, manifest)
    except _BAD as error:
        return [Problem(file=record_name(step, generation, rank), message=str(error))]
    name = image_name(step, generation, rank)
    size_bytes = backend.size_bytes(name)
    if size_bytes is None:
        return [Problem(file=name, message=f"{name} is not there")]
    problems = []
    if size_bytes != record.draft.image_bytes:
        message = f"{name} has {size_bytes} bytes; its record says {record.draft.image_bytes}"
        problems.append(Problem(file=name, message=message))
    for problem, num_bytes in _check_blocks(backend, name, record, min(size_bytes, record.draft.image_bytes)):
        if problem is not None:
            problems.append(problem)
        if on_block is not None:
            on_block(num_bytes)
    return problems


def read_checked_record(
    backend: StorageBackend, step: int, generation: int, rank: int, manifest: Manifest | None
) -> RankRecord:
    """Return a rank's record; with a `manifest`, only if that names its digest and size.

    Raises:
        MissingCopyError: it is not there.
        CorruptionError: its bytes differ from what was written.
        UnknownFormatError: another version of relight wrote it.
    """
    name = record_name(step, generation, rank)
    if manifest is not None and not 0 <= rank < manifest.world_size:
        raise MissingCopyError(
            f"{name}: the checkpoint has {manifest.world_size} ranks", path=name, rank=rank
        )
    record, digest = read_record(backend, step, generation, rank)
    if manifest is not None:
        summary = manifest.ranks[rank]
        if (digest, record.draft.image_bytes) != (summary.record_digest, summary.image_bytes):
            raise CorruptionError(f"{name} is not the record that the manifest names", path=name, rank=rank)
    return record


def _check_blocks(
    backend: StorageBackend, name: str, record: RankRecord, readable_bytes: int
) -> Iterator[tuple[Problem | None, int]]:
    """Yield for each block of an image its problem, if any, and its size in bytes."""
    # Page aligned, so that the backend can read past the page cache into it.
    buffer = memoryview(mmap.mmap(-1, BLOCK_BYTES))
    for block, expected in enumerate(record.digests):
        start = block * BLOCK_BYTES
        view = buffer[: min(BLOCK_BYTES, record.draft.image_bytes - start)]
        end = start + view.nbytes
        place = f"{name}: block {block} (rank {record.draft.rank}, bytes {start} to {end})"
        message = None
        if end > readable_bytes:
            message = f"{place} is cut short"
        else:
            try:
                backend.read_into(name, start, view)
                if digest_block(view) != expected:
                    message = (
                        f"{place} differs from its digest; holds {_tensors_in(backend, name, start, end)}"
                    )
            except (CopyError, StorageUnavailableError) as error:
                message = f"{place} cannot be read: {error}"
        yield (None if message is None else Problem(file=name, block=block, message=message)), view.nbytes


def _tensors_in(backend: StorageBackend, name: str, start: int, end: int) -> str:
    try:
        tensors = read_image_tensors(backend, name)
    except RelightError:
        return "the header, which cannot be read"
    keys = [key for key, tensor in tensors.items() if tensor.start_bytes < end and tensor.end_bytes > start]
    more = f" and {len(keys) - _MAX_TENSORS_NAMED} more" if len(keys) > _MAX_TENSORS_NAMED else ""
    return (", ".join(keys[:_MAX_TENSORS_NAMED]) + more) or "no tensor"


def _ranks_found(backend: StorageBackend, step: int, generation: int) -> list[int]:
    folder = f"{step_dir(step, generation)}/"
    matches = [_RECORD.fullmatch(file.name.removeprefix(folder)) for file in backend.list(folder)]
    return [int(match[1]) for match in matches if match is not None]


def _marker_problems(
    backend: StorageBackend, step: int, generation: int, digest: str | None
) -> Iterator[Problem]:
    for kind in ("verified", "pinned"):
        name = marker_name(step, generation, kind)
        try:
            marker = read_marker(backend, step, generation, kind)
        except MissingCopyError:
            continue
        except _BAD as error:
            yield Problem(file=name, message=str(error))
            continue
        if digest is not None and marker.manifest_digest != digest:
            yield Problem(file=name, message=f"{name} speaks of another manifest")
