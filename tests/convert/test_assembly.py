"""A tensor in boxes reads as one run of bytes: any boxes, any range."""

from __future__ import annotations

import math
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from relight.manifest.assembly import Assembly
from relight.manifest.shard import Box, whole
from tests.convert.stored import cut

ITEM = "int16"


@st.composite
def partitions(draw: st.DrawFn, box: Box, depth: int = 3) -> list[Box]:
    """Draw boxes that cover `box` once."""
    dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
    if not depth or not dims or draw(st.booleans()):
        return [box]
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(1, box.sizes[dim] - 1))
    low = Box(box.offsets, (*box.sizes[:dim], at, *box.sizes[dim + 1 :]))
    offsets = (*box.offsets[:dim], box.offsets[dim] + at, *box.offsets[dim + 1 :])
    high = Box(offsets, (*box.sizes[:dim], box.sizes[dim] - at, *box.sizes[dim + 1 :]))
    return draw(partitions(low, depth - 1)) + draw(partitions(high, depth - 1))


def read_from(data: bytes, start: int, target: memoryview) -> None:
    assert start + target.nbytes <= len(data)
    target[:] = data[start : start + target.nbytes]


@given(st.lists(st.integers(0, 6), max_size=4).map(tuple), st.data())
def test_any_range_of_any_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    num_bytes = 2 * math.prod(shape)
    content = bytes(at % 251 for at in range(num_bytes))
    boxes = data.draw(st.permutations(data.draw(partitions(whole(shape)))))
    pieces = [(box, partial(read_from, cut((ITEM, shape, content), box))) for box in boxes]
    assembly = Assembly(shape, 2, pieces)
    start = data.draw(st.integers(0, num_bytes))
    stop = data.draw(st.integers(start, num_bytes))
    target = bytearray(stop - start)
    assembly.read(start, memoryview(target))
    assert target == content[start:stop]
