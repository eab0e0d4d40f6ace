"""Layouts of live tensors: placements as rules, and stored boxes into any part that a rank holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from relight.checkpoint.format import TensorSpec, plan_image
from relight.checkpoint.images import Image, StoredCopy
from relight.checkpoint.save_plan import plan_save
from relight.checkpoint.sharding import LayoutBook, splits_of
from relight.checkpoint.table import StateTable
from relight.checkpoint.transfer import LoadPlan
from relight.errors import UnknownFormatError
from relight.manifest.manifest import BLOCK_BYTES
from relight.manifest.shard import Box, Layout
from relight.storage.local import LocalBackend


@pytest.mark.parametrize(
    ("placements", "mesh", "expected"),
    [
        ((Replicate(),), (4,), ()),
        ((Shard(0),), (4,), ((0, 0),)),
        ((Replicate(), Shard(1)), (2, 2), ((1, 1),)),
        ((Shard(0), Shard(0)), (2, 3), ((0, 0), (1, 0))),
        ((_StridedShard(0, split_factor=3), Shard(0)), (2, 3), ((1, 0), (0, 0))),
        ((_StridedShard(0, split_factor=12), Shard(0), Shard(0)), (2, 3, 4), ((1, 0), (2, 0), (0, 0))),
        ((_StridedShard(0, split_factor=3), Shard(0), Shard(1)), (2, 3, 4), ((1, 0), (0, 0), (2, 1))),
        ((_StridedShard(1, split_factor=5), Shard(1)), (2, 3), None),
        ((Partial(),), (2,), None),
    ],
)
def test_placements_are_read_as_splits(
    placements: tuple[object, ...], mesh: tuple[int, ...], expected: tuple[tuple[int, int], ...] | None
) -> None:
    assert splits_of(placements, mesh) == expected


@pytest.mark.parametrize("rows", [12, 10, 9, 7, 5, 3, 1, 0])
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 4)])
def test_hd03_the_split_order_is_that_of_fsdp_over_tensor_parallel(rows: int, shape: tuple[int, int]) -> None:
    layout = Layout.on(shape, range(shape[0] * shape[1]), ((1, 0), (0, 0)))
    seen: list[int] = []
    for inner, part in enumerate(_chunks(list(range(rows)), shape[1])):
        for outer, chunk in enumerate(_chunks(part, shape[0])):
            box = layout.box((rows,), (outer, inner))
            assert list(range(box.offsets[0], box.offsets[0] + box.sizes[0])) == chunk or not chunk
            assert box.sizes[0] == len(chunk)
            seen += chunk
    assert seen == list(range(rows))


def _chunks(items: list[int], num: int) -> list[list[int]]:
    size = -(-len(items) // num)
    return [items[at * size : (at + 1) * size] for at in range(num)]


boxes = st.lists(st.integers(1, 6), min_size=0, max_size=4).flatmap(
    lambda shape: st.tuples(
        st.just(tuple(shape)),
        *(
            st.tuples(*(st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted) for size in shape))
            for _ in range(2)
        ),
    )
)


@settings(max_examples=150, deadline=None)
@given(
    boxes,
    st.sampled_from([torch.float32, torch.int8, torch.float64, torch.bfloat16]),
    st.booleans(),
    st.sampled_from([0, BLOCK_BYTES - 37, BLOCK_BYTES - 700]),
)
def test_a_stored_box_fills_exactly_what_it_shares_with_what_is_held(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[tuple[int, ...], tuple[list[int], ...], tuple[list[int], ...]],
    dtype: torch.dtype,
    contiguous: bool,
    start: int,
) -> None:
    shape, stored_at, held_at = case
    piece, held = (
        Box(tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges)) for ranges in (stored_at, held_at)
    )
    whole = torch.arange(int(np.prod(shape, dtype=int))).reshape(shape).to(dtype)
    data = _cut(whole, piece).contiguous()
    raw = bytes(start) + data.reshape(-1).view(torch.uint8).numpy().tobytes()
    target = torch.full(held.sizes, -1, dtype=dtype)
    if not contiguous and target.dim() > 1:
        target = torch.full(tuple(reversed(held.sizes)), -1, dtype=dtype).permute(
            *reversed(range(target.dim()))
        )
    expected = torch.full(shape, -1, dtype=dtype)
    _cut(expected, piece).copy_(data)
    plan = LoadPlan()
    image = _image(tmp_path_factory.mktemp("image"), raw)
    filled = plan.add_box(image, start, piece, target, held)
    plan.run()
    common = piece.overlap(held)
    assert filled == (common.num_elements if common is not None else 0)
    if target.is_contiguous() or filled == target.numel():
        assert torch.equal(target, _cut(expected, held))


def _cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def _image(folder: Path, raw: bytes) -> Image:
    import xxhash

    backend = LocalBackend(folder)
    backend.put("image", raw)
    digests = [xxhash.xxh3_128_digest(raw[at : at + BLOCK_BYTES]) for at in range(0, len(raw), BLOCK_BYTES)]
    return Image(image_bytes=len(raw), digests=digests, copies=[StoredCopy(backend, "image")])


def test_a_key_that_looks_like_a_part_of_another_tensor_is_refused_by_name() -> None:
    table = StateTable(LayoutBook(0, 2))
    table.put("w", torch.ones(4, 2), Layout.on((2,), range(2), ((0, 0),)))
    table.tensors[0] = torch.ones(2, 2)
    table.put("w@0:2", torch.ones(2, 2), None, "own")
    with pytest.raises(UnknownFormatError, match="w@0:2"):
        plan_save(table, rank=0, world_size=2)


def test_an_image_layout_names_what_it_holds() -> None:
    layout = plan_image([TensorSpec("a@0:2", "float32", (2, 3)), TensorSpec("b", "int8", ())])
    assert layout.image_bytes == layout.offsets[1] + 1
