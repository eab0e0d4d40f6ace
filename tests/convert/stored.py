"""Checkpoints of any layout and dtype, made by hand: what a conversion reads."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from relight.manifest.catalog import Catalog
from relight.manifest.image_plan import TensorSpec, plan_image
from relight.manifest.index import ITEM_BYTES
from relight.manifest.manifest import (
    BLOCK_BYTES,
    EQUAL,
    PER_RANK,
    IndexEntry,
    RankRecord,
    RecordDraft,
    digest_block,
    encode_index,
)
from relight.manifest.shard import Box, Layout, Spread

Content = Mapping[str, tuple[str, tuple[int, ...], bytes]]
"""Key -> dtype name, global shape, row-major bytes."""


def noise(seed: int, dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], bytes]:
    """Return a tensor of bits that look like anything, NaN payloads included; bools are 0 and 1."""
    data = random.Random(seed).randbytes(math.prod(shape) * ITEM_BYTES[dtype])
    return dtype, shape, bytes(one & 1 for one in data) if dtype == "bool" else data


def cut(tensor: tuple[str, tuple[int, ...], bytes], box: Box) -> bytes:
    """Return the row-major bytes of a box."""
    dtype, shape, data = tensor
    whole = np.frombuffer(data, dtype=f"V{ITEM_BYTES[dtype]}").reshape(shape)
    where = tuple(slice(start, start + size) for start, size in zip(*box, strict=True))
    return whole[where].tobytes()


def store(
    catalog: Catalog,
    content: Content,
    layouts: Mapping[str, Layout] | None = None,
    *,
    world_size: int = 1,
    step: int = 1,
    aliases: Mapping[str, str] | None = None,
    own: Sequence[Content] = (),
    equal: frozenset[str] = frozenset(),
) -> None:
    """Commit `content`; `layouts` says how a key is spread (default: rank 0 has it), `own` what each rank has alone."""
    if not catalog.generations():
        catalog.claim(None)
    layouts = layouts or {}
    used = list(dict.fromkeys(layouts.get(key, Layout()) for key in content))
    index = {
        key: IndexEntry(dtype, shape, used.index(layouts.get(key, Layout())))
        for key, (dtype, shape, _) in content.items()
    }
    for key, (dtype, shape, _) in own[0].items() if own else ():
        index[key] = IndexEntry(dtype, shape, EQUAL if key in equal else PER_RANK)
    spreads = [
        Spread(
            layout,
            [
                (key, ITEM_BYTES[dtype], shape)
                for key, (dtype, shape, _) in content.items()
                if layouts.get(key, Layout()) == layout
            ],
        )
        for layout in used
    ]
    for rank in range(world_size):
        pieces = [item for spread in spreads for item in spread.stored_by(rank).items()]
        specs = [TensorSpec(piece.name, content[key][0], piece.sizes) for key, piece in pieces]
        data = [cut(content[key], piece.box) for key, piece in pieces]
        for key, (dtype, shape, held) in own[rank].items() if own else ():
            specs.append(TensorSpec(key, dtype, shape))
            data.append(held)
        layout = plan_image(specs)
        image = bytearray(layout.image_bytes)
        image[: len(layout.header)] = layout.header
        for offset, one in zip(layout.offsets, data, strict=True):
            image[offset : offset + len(one)] = one
        catalog.put_image(step, 1, rank, image)
        draft = RecordDraft(
            run=catalog.run() or "",
            step=step,
            generation=1,
            parent=None,
            rank=rank,
            world_size=world_size,
            layout="by hand",
            image_bytes=len(image),
            saved_at=1.7e9,
            context=msgspec.Raw(b"{}"),
            index=encode_index(index if rank == 0 else {}),
            layouts=tuple(used) if rank == 0 else (),
            aliases=dict(aliases or {}) if rank == 0 else {},
            local={key: (dtype, shape) for key, (dtype, shape, _) in own[rank].items()} if own else {},
        )
        view = memoryview(image)
        starts = range(0, len(image), BLOCK_BYTES)
        digests = tuple(digest_block(view[at : at + BLOCK_BYTES]) for at in starts)
        catalog.put_record(RankRecord(draft=draft, digests=digests))
    assert catalog.commit(step, 1) is not None
