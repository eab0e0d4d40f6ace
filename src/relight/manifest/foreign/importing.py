"""Import: tensors of a foreign checkpoint as a committed, verified checkpoint of one rank."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from relight.clock import Clock, SystemClock
from relight.errors import ConfigError, CorruptionError, RelightError, StopError, UnknownFormatError
from relight.manifest.assembly import Tensor
from relight.manifest.catalog import Catalog, Inventory
from relight.manifest.foreign.source import Source, keys_of
from relight.manifest.image_plan import ALIGN_BYTES, ImageLayout, TensorSpec, layout_fingerprint, plan_image
from relight.manifest.manifest import (
    BLOCK_BYTES,
    Generation,
    IndexEntry,
    RankRecord,
    RecordDraft,
    digest_block,
    encode_index,
)
from relight.manifest.names import image_name
from relight.manifest.shard import Layout
from relight.stages import reached

__all__ = ["POINTS", "Imported", "import_source"]

POINTS = ("import.image_stored",)
"""Points announced while importing, before those of the catalog."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The checkpoint that was made.

    Attributes:
        num_tensors, num_bytes: of what is stored.
        aliases: further key -> key under which the tensor is stored.
    """

    step: int
    generation: int
    num_tensors: int
    num_bytes: int
    aliases: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Planned:
    tensors: Sequence[tuple[str, Tensor]]
    layout: ImageLayout
    aliases: Mapping[str, str]


def import_source(
    source: Source,
    catalog: Catalog,
    *,
    step: int = 0,
    force: bool = False,
    advance: Callable[[int], None] = lambda _: None,
    clock: Clock | None = None,
) -> Imported:
    """Store `source` as checkpoint `step` of a new run, committed and read back; memory is bounded by one block.

    Args:
        source: what to store.
        catalog: of the run's root; nothing may be there, an import that was interrupted aside.
        step: its number.
        force: with a run at that root, become its next generation; its steps stay, but no restore chooses them.
        advance: told the bytes of each block that was stored, and once more when it was read back.
        clock: tells when it was saved.

    Raises:
        ConfigError: there is a run at the root; or `source` holds no tensors, or names that clash.
        CorruptionError: `source` cannot be read, or what was read back differs. Nothing is left then.
        StorageFullError: no space. Nothing is left then.
    """
    planned = _plan(source)
    inventory = catalog.survey()
    generation = _next_generation(inventory, catalog.backend.url, force=force)
    for place in inventory.incomplete:
        if place[1] >= generation:
            catalog.remove(*place)
    try:
        digests = _store_image(planned, catalog, step, generation, advance)
        claimed = catalog.claim(None)
        if claimed.generation != generation:
            raise StopError(
                f"{catalog.backend.url}: another process has begun a generation here meanwhile; import to another place"
            )
        saved_at = (clock if clock is not None else SystemClock()).now()
        catalog.put_record(_record(planned, claimed, step, digests, saved_at))
        if catalog.commit(step, generation) is None:
            raise StopError(f"{catalog.backend.url}: step {step} was stored but is not there", step=step)
        problems = catalog.verify(step, generation, advance)
        if problems:
            raise CorruptionError(f"read back, {problems[0].message}; check the disk", path=problems[0].file)
    except StopError:
        # Somebody else is at work here: what is there may be theirs.
        raise
    except BaseException:
        with suppress(RelightError):
            catalog.remove(step, generation)
        raise
    catalog.mark_verified(step, generation)
    num_bytes = sum(tensor.num_bytes for _, tensor in planned.tensors)
    return Imported(
        step=step,
        generation=generation,
        num_tensors=len(planned.tensors),
        num_bytes=num_bytes,
        aliases=planned.aliases,
    )


def _plan(source: Source) -> _Planned:
    keys = keys_of([*(found.path for found in source.tensors), *source.aliases])
    for key in keys.values():
        try:
            key.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UnknownFormatError(f"{key!a}: names must be valid Unicode", path=ascii(key)) from error
    tensors = sorted(
        ((keys[found.path], found.tensor) for found in source.tensors), key=lambda pair: pair[1].place
    )
    if not tensors:
        raise ConfigError(
            f"there is no tensor in it; skipped: {', '.join(name for name, _ in source.skipped)}"
        )
    layout = plan_image([TensorSpec(key, tensor.dtype, tensor.shape) for key, tensor in tensors])
    return _Planned(tensors, layout, {keys[further]: keys[kept] for further, kept in source.aliases.items()})


def _next_generation(inventory: Inventory, url: str, *, force: bool) -> int:
    """Return the generation that an import would be; only what it left itself may be at a new root."""
    has_run = bool(inventory.checkpoints or inventory.problems or inventory.lineage.newest is not None)
    if has_run and not force:
        raise ConfigError(
            f"{url} holds a run already; choose another place, or --force to go on from the imported checkpoint there",
            path=url,
        )
    return (inventory.lineage.newest or 0) + 1


def _store_image(
    planned: _Planned, catalog: Catalog, step: int, generation: int, advance: Callable[[int], None]
) -> tuple[str, ...]:
    digests: list[str] = []

    def digested() -> Iterator[memoryview]:
        for block in _blocks(planned):
            digests.append(digest_block(block))
            yield block
            advance(block.nbytes)

    name = image_name(step, generation, 0)
    image_bytes = planned.layout.image_bytes
    if not catalog.backend.put_blocks(name, image_bytes, digested(), if_absent=True):
        raise StopError(f"{catalog.backend.url}/{name} is there already; look at it", step=step)
    reached("import.image_stored")
    return tuple(digests)


def _blocks(planned: _Planned) -> Iterator[memoryview]:
    """Yield the image block by block, always in the same memory."""
    layout = planned.layout
    buffer = memoryview(mmap.mmap(-1, BLOCK_BYTES))
    pieces = sorted(
        (offset, tensor.num_bytes, at)
        for at, (offset, (_, tensor)) in enumerate(zip(layout.offsets, planned.tensors, strict=True))
        if tensor.num_bytes
    )
    first = 0
    for start in range(0, layout.image_bytes, BLOCK_BYTES):
        view = buffer[: min(BLOCK_BYTES, layout.image_bytes - start)]
        head = layout.header[start : start + BLOCK_BYTES]
        view[: len(head)] = head
        end = start + view.nbytes
        for number in range(first, len(pieces)):
            offset, num_bytes, at = pieces[number]
            if offset >= end:
                break
            begin, after = max(offset, start), min(offset + num_bytes, end)
            planned.tensors[at][1].read(begin - offset, view[begin - start : after - start])
            # Padding follows at most; the next tensor overwrites what is its own.
            gap = view[after - start : after - start + ALIGN_BYTES]
            gap[:] = bytes(gap.nbytes)
            first = number if offset + num_bytes > end else number + 1
        yield view


def _record(
    planned: _Planned, claimed: Generation, step: int, digests: tuple[str, ...], saved_at: float
) -> RankRecord:
    index = {key: IndexEntry(tensor.dtype, tensor.shape, 0) for key, tensor in planned.tensors}
    described = (
        f"0 {key} {tensor.dtype} {tensor.shape}" for key, tensor in sorted(planned.tensors, key=_key)
    )
    draft = RecordDraft(
        run=claimed.run,
        step=step,
        generation=claimed.generation,
        parent=claimed.parent,
        rank=0,
        world_size=1,
        layout=layout_fingerprint(["1", repr(Layout()), *described]),
        image_bytes=planned.layout.image_bytes,
        saved_at=saved_at,
        context=msgspec.Raw(b"{}"),
        index=encode_index(index),
        layouts=(Layout(),),
        aliases=dict(planned.aliases),
    )
    return RankRecord(draft=draft, digests=digests)


def _key(pair: tuple[str, Tensor]) -> str:
    return pair[0]
