"""Layouts as rules: held against the rule of docs/format.md, written down here once more element by element."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from relight.errors import UnknownFormatError
from relight.manifest.shard import Box, Layout, Piece, Spread, entry_name, whole

numpy = pytest.importorskip("numpy")

Shape = tuple[int, ...]


class Case(NamedTuple):
    """A layout, what its rank at each position of the mesh is, and tensors on it: key -> (bytes of an item, shape)."""

    layout: Layout
    ranks: tuple[int, ...]
    tensors: dict[str, tuple[int, Shape]]

    def spread(self) -> Spread:
        return Spread(self.layout, [(key, *spec) for key, spec in self.tensors.items()])

    def stored(self, key: str) -> list[Piece]:
        """Return what all ranks store of one tensor."""
        spread = self.spread()
        found = [spread.stored_by(rank).get(key) for rank in self.ranks]
        return [piece for piece in found if piece is not None]


@st.composite
def rank_lists(draw, mesh: Shape) -> tuple[int, ...]:
    """Ranks of a mesh in row-major order: counted up in any order of the axes, spread out, or in any order at all."""
    num = math.prod(mesh)
    if draw(st.booleans()):
        return tuple(draw(st.permutations(range(num + 2)))[:num])
    base, gap = draw(st.integers(0, 5)), draw(st.integers(1, 3))
    order = draw(st.permutations(range(len(mesh))))
    counted = numpy.arange(num).reshape([mesh[axis] for axis in order])
    in_mesh_order = counted.transpose([order.index(axis) for axis in range(len(mesh))])
    return tuple(int(at) * gap + base for at in in_mesh_order.flatten())


@st.composite
def cases(draw, max_ranks: int = 48) -> Case:
    mesh = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    assume(math.prod(mesh) <= max_ranks)
    axes = draw(st.permutations(range(len(mesh))))[: draw(st.integers(0, len(mesh)))]
    splits = tuple((axis, draw(st.integers(0, 2))) for axis in axes)
    least = max((dim + 1 for _, dim in splits), default=0)
    shapes = st.lists(st.integers(0, 7), min_size=least, max_size=max(least, 3)).map(tuple)
    specs = st.tuples(st.sampled_from([1, 2, 4, 8, 16]), shapes)
    keys = st.text("ab@:/\u00e9", min_size=1, max_size=3)
    tensors = draw(st.dictionaries(keys, specs, min_size=1, max_size=5))
    ranks = draw(rank_lists(mesh))
    return Case(Layout.on(mesh, ranks, splits), ranks, tensors)


# The rule of the page, as plainly as it can be said.


def page_box(mesh: Shape, splits, coordinates: Shape, shape: Shape) -> Box:
    held = [list(range(size)) for size in shape]
    for axis, dim in splits:
        chunk = math.ceil(len(held[dim]) / mesh[axis])
        held[dim] = held[dim][coordinates[axis] * chunk :][:chunk]
    if not all(held):
        return Box((0,) * len(shape), (0,) * len(shape))
    return Box(tuple(part[0] for part in held), tuple(len(part) for part in held))


def page_rows(
    tensors: dict[str, tuple[int, Shape]], boxes: dict[str, Box], num: int
) -> Iterator[tuple[str, int, int]]:
    """Yield for each row of a shard's boxes its key, its number in the box and the replica that stores it."""
    sizes = {key: math.prod(boxes[key].sizes) * tensors[key][0] for key in tensors}
    total, at = sum(sizes.values()), 0
    for key in sorted(tensors):
        num_rows = boxes[key].sizes[0] if boxes[key].sizes else 1
        for row in range(num_rows if sizes[key] else 0):
            yield key, row, at * num // total
            at += sizes[key] // num_rows


def page_pieces(case: Case) -> dict[int, list[tuple[str, Box]]]:
    """Return what each rank stores: (key, box) in the order of the keys."""
    mesh, splits, tensors = case.layout.mesh, case.layout.splits, case.tensors
    cut = {axis for axis, _ in splits}
    replicas = list(itertools.product(*(range(size) for axis, size in enumerate(mesh) if axis not in cut)))
    stored: dict[int, list[tuple[str, Box]]] = {}
    for rank, coordinates in zip(case.ranks, itertools.product(*(range(size) for size in mesh)), strict=True):
        mine = replicas.index(tuple(one for axis, one in enumerate(coordinates) if axis not in cut))
        boxes = {key: page_box(mesh, splits, coordinates, shape) for key, (_, shape) in tensors.items()}
        rows: dict[str, list[int]] = {}
        for key, row, replica in page_rows(tensors, boxes, len(replicas)):
            if replica == mine:
                rows.setdefault(key, []).append(row)
        found = []
        for key in sorted(tensors):
            shape = tensors[key][1]
            if 0 in shape and not any(coordinates):
                found.append((key, Box((0,) * len(shape), shape)))
            if key in rows:
                first, num = rows[key][0], len(rows[key])
                (start, *starts), (_, *sizes) = (
                    (boxes[key].offsets, boxes[key].sizes) if shape else ([0], [0])
                )
                box = Box((start + first, *starts), (num, *sizes)) if shape else Box((), ())
                found.append((key, box))
        stored[rank] = found
    return stored


def page_name(key: str, shape: Shape, box: Box) -> str:
    ranges = [
        None if size == limit else f"{start}:{start + size}"
        for start, size, limit in zip(*box, shape, strict=True)
    ]
    while ranges and ranges[-1] is None:
        ranges.pop()
    full = [f"0:{limit}" for limit in shape]
    return key + ("@" + ",".join(one or full[dim] for dim, one in enumerate(ranges)) if ranges else "")


@given(cases())
def test_every_rank_stores_what_the_page_says(case: Case) -> None:
    expected = {
        rank: [Piece(rank, page_name(key, case.tensors[key][1], box), *box) for key, box in found]
        for rank, found in page_pieces(case).items()
    }
    spread = case.spread()
    assert {rank: list(spread.stored_by(rank).values()) for rank in case.ranks} == expected


@given(cases())
def test_the_pieces_of_all_ranks_cover_each_tensor_once(case: Case) -> None:
    for key, (_, shape) in case.tensors.items():
        count = numpy.zeros(shape, dtype=int)
        for piece in case.stored(key):
            count[tuple(slice(o, o + s) for o, s in zip(*piece.box, strict=True))] += 1
        assert (count == 1).all()


@given(cases(), st.data())
def test_holders_of_a_box_are_the_stored_pieces_that_overlap_it(case: Case, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(case.tensors)))
    shape = case.tensors[key][1]
    spread = case.spread()
    mine = {piece for piece in case.stored(key) if 0 not in shape}
    held = spread.holders(key)
    assert (set(held), len(held)) == (mine, len(mine))
    offsets = tuple(data.draw(st.integers(0, size)) for size in shape)
    sizes = tuple(data.draw(st.integers(0, size - at)) for at, size in zip(offsets, shape, strict=True))
    wanted = numpy.zeros(shape, dtype=bool)
    wanted[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] = True
    overlapping = {
        piece
        for piece in mine
        if wanted[tuple(slice(o, o + s) for o, s in zip(*piece.box, strict=True))].any()
    }
    held = spread.holders(key, Box(offsets, sizes))
    assert (set(held), len(held)) == (overlapping, len(overlapping))


@pytest.mark.parametrize(
    "layout",
    [
        Layout.on((2, 3), range(6), ((1, 0),)),
        Layout.on((3, 2), range(6), ((1, 1),)),
        Layout.on((4,), (2, 0, 3, 1)),
        Layout.on((2, 2, 2), range(8), ((2, 0), (0, 0))),
    ],
)
def test_holders_of_every_box_are_found(layout: Layout) -> None:
    ranks = tuple(layout.rank_at(layout.unravel(at)) for at in range(layout.num_ranks))
    case = Case(layout, ranks, {"a": (4, (5, 2)), "b": (1, (7, 3)), "c": (2, (4, 4))})
    spread, stored = case.spread(), case.stored("b")
    ranges = [[(o, s) for o in range(size) for s in range(1, size - o + 1)] for size in (7, 3)]
    for wanted in (Box(*zip(*both, strict=True)) for both in itertools.product(*ranges)):
        held = spread.holders("b", wanted)
        assert set(held) == {piece for piece in stored if piece.box.overlap(wanted) is not None}
        assert len(held) == len(set(held))


@given(cases())
def test_replicas_store_equal_shares_up_to_a_row(case: Case) -> None:
    cut = {axis for axis, _ in case.layout.splits}
    spread = case.spread()
    shares: dict[Shape, list[int]] = {}
    row_bytes: dict[Shape, int] = {}
    places = itertools.product(*(range(size) for size in case.layout.mesh))
    for rank, place in zip(case.ranks, places, strict=True):
        shard = tuple(one for axis, one in enumerate(place) if axis in cut)
        stored_bytes = 0
        for key, piece in spread.stored_by(rank).items():
            num_bytes = piece.box.num_elements * case.tensors[key][0]
            stored_bytes += num_bytes
            row_bytes[shard] = max(row_bytes.get(shard, 0), num_bytes // max(piece.box.num_rows, 1))
        shares.setdefault(shard, []).append(stored_bytes)
    for shard, share in shares.items():
        assert len(share) == case.layout.num_replicas
        fair = sum(share) / len(share)
        assert not any(share) or all(abs(one - fair) < row_bytes[shard] for one in share)


# Where ranks stand.


@given(
    st.lists(st.integers(1, 5), max_size=4).map(tuple).flatmap(lambda m: st.tuples(st.just(m), rank_lists(m)))
)
def test_a_layout_knows_the_rank_at_each_place_and_the_place_of_each_rank(given_ranks) -> None:
    mesh, ranks = given_ranks
    layout = Layout.on(mesh, ranks)
    places = list(itertools.product(*(range(size) for size in mesh)))
    assert [layout.rank_at(place) for place in places] == list(ranks)
    assert [layout.coordinates(rank) for rank in ranks] == places
    assert [layout.unravel(at) for at in range(len(ranks))] == places
    others = set(range(max(ranks) + 3)) - set(ranks)
    assert [rank for rank in others if layout.coordinates(rank) is not None] == []
    assert layout.num_ranks == len(ranks)


@given(
    st.lists(st.integers(1, 5), max_size=4).map(tuple),
    st.integers(0, 9),
    st.integers(1, 4),
    st.data(),
)
def test_strides_are_found_in_any_order_of_the_axes(
    mesh: Shape, base: int, gap: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(mesh))))
    strides, stride = [0] * len(mesh), gap
    for axis in order:
        strides[axis] = stride if mesh[axis] > 1 else 0
        stride *= mesh[axis]
    ranks = [
        base + sum(at * step for at, step in zip(place, strides, strict=True))
        for place in itertools.product(*(range(size) for size in mesh))
    ]
    assert Layout.on(mesh, ranks) == Layout(mesh, (), base, tuple(strides))


def test_ranks_without_strides_are_listed() -> None:
    layout = Layout.on((2, 2), (0, 3, 1, 2))
    assert layout == Layout((2, 2), (), 0, (), (0, 3, 1, 2))
    assert Layout.on((3,), (5, 3, 1)).ranks == (5, 3, 1)


@pytest.mark.parametrize(("mesh", "ranks"), [((2,), (0,)), ((2,), (1, 1)), ((), ()), ((0,), ())])
def test_a_mesh_and_ranks_that_do_not_fit_are_refused(mesh: Shape, ranks: Shape) -> None:
    with pytest.raises(UnknownFormatError, match="cannot have the ranks"):
        Layout.on(mesh, ranks)


@given(cases())
def test_a_layout_comes_back_equal_from_json(case: Case) -> None:
    assert msgspec.json.decode(msgspec.json.encode(case.layout), type=Layout) == case.layout


@pytest.mark.parametrize(
    "text",
    [
        "[[2],[[0,0]],0,[1],[],1]",
        "[[2,2],[[0,0],[0,1]],0,[2,1],[]]",
        "[[2],[[1,0]],0,[1],[]]",
        "[[2],[[-1,0]],0,[1],[]]",
        "[[2],[[0,-1]],0,[1],[]]",
        "[[0],[],0,[0],[]]",
        "[[2,2],[],0,[1],[]]",
        "[[2,2],[],0,[1,1],[]]",
        "[[2,3],[],0,[2,1],[]]",
        "[[2],[],0,[-1],[]]",
        "[[2],[],-1,[1],[]]",
        "[[2],[],0,[],[0,0]]",
        "[[2],[],0,[],[0,-1]]",
        "[[2],[],0,[],[0]]",
        "[[2],[],0,[1],[0,1]]",
        "[[2],[],3,[],[0,1]]",
    ],
)
def test_a_layout_that_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises((UnknownFormatError, msgspec.ValidationError)):
        msgspec.json.decode(text, type=Layout)


@pytest.mark.parametrize("shape", [(), (4,)])
def test_a_split_of_a_dim_that_a_tensor_does_not_have_is_refused(shape: Shape) -> None:
    layout = Layout.on((2,), range(2), ((0, 1),))
    with pytest.raises(UnknownFormatError, match=r"w .*dim 1"):
        Spread(layout, [("w", 4, shape)])


# Cases by hand.


def test_a_dim_that_is_cut_twice_has_strides() -> None:
    """Tensor parallel on axis 1 first, then sharded on axis 0: what FSDP2 does to a tensor-parallel parameter."""
    layout = Layout.on((2, 2), range(4), ((1, 0), (0, 0)))
    assert [layout.box((8,), layout.coordinates(rank)).offsets[0] for rank in range(4)] == [0, 4, 2, 6]
    other = Layout.on((2, 2), range(4), ((0, 0), (1, 0)))
    assert [other.box((8,), other.coordinates(rank)).offsets[0] for rank in range(4)] == [0, 2, 4, 6]


def test_chunks_are_cut_as_torch_cuts_them() -> None:
    torch = pytest.importorskip("torch")
    for size, num in itertools.product(range(12), range(1, 7)):
        layout = Layout.on((num,), range(num), ((0, 0),))
        sizes = [layout.box((size,), (at,)).sizes[0] for at in range(num)]
        chunks = [len(chunk) for chunk in torch.arange(size).chunk(num)] if size else []
        assert sizes == chunks + [0] * (num - len(chunks))


def test_a_tensor_without_elements_is_stored_by_the_first_rank() -> None:
    layout = Layout.on((2, 2), (3, 2, 1, 0), ((0, 0),))
    spread = Spread(layout, [("e", 4, (0, 3)), ("z", 4, (5, 0))])
    assert {rank: spread.stored_by(rank) for rank in range(4)} == {
        3: {"e": Piece(3, "e", (0, 0), (0, 3)), "z": Piece(3, "z", (0, 0), (5, 0))},
        2: {},
        1: {},
        0: {},
    }
    assert spread.holders("e") == []


def test_a_rank_outside_the_mesh_stores_nothing() -> None:
    assert Spread(Layout.on((2,), (4, 6), ((0, 0),)), [("w", 4, (8,))]).stored_by(5) == {}


def test_a_row_that_is_larger_than_a_share_goes_to_one_replica() -> None:
    spread = Spread(Layout.on((4,), range(4)), [("a", 1, (1, 100)), ("b", 1, (4,))])
    stored = {rank: list(spread.stored_by(rank)) for rank in range(4)}
    assert stored == {0: ["a"], 1: [], 2: [], 3: ["b"]}


@pytest.mark.parametrize(
    ("shape", "box", "name"),
    [
        ((), Box((), ()), "k"),
        ((4, 3), Box((0, 0), (4, 3)), "k"),
        ((4, 3), Box((1, 0), (2, 3)), "k@1:3"),
        ((4, 3), Box((0, 1), (4, 1)), "k@0:4,1:2"),
        ((4, 3, 2), Box((2, 0, 0), (1, 2, 2)), "k@2:3,0:2"),
        ((0, 3), Box((0, 0), (0, 3)), "k"),
    ],
)
def test_names_say_the_ranges_up_to_the_last_cut_dim(shape: Shape, box: Box, name: str) -> None:
    assert entry_name("k", shape, box) == name == page_name("k", shape, box)


@given(st.data())
def test_boxes_overlap_where_both_have_elements(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))
    masks, boxes = [], []
    for _ in range(2):
        offsets = tuple(data.draw(st.integers(0, size)) for size in shape)
        sizes = tuple(data.draw(st.integers(0, size - at)) for at, size in zip(offsets, shape, strict=True))
        mask = numpy.zeros(shape, dtype=bool)
        mask[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] = True
        masks.append(mask)
        boxes.append(Box(offsets, sizes))
        assert boxes[-1].num_elements == mask.sum()
    both = masks[0] & masks[1]
    found = boxes[0].overlap(boxes[1])
    assert found == boxes[1].overlap(boxes[0])
    assert (found is None) == (not both.any())
    if found is not None:
        assert both[tuple(slice(o, o + s) for o, s in zip(*found, strict=True))].all()
        assert found.num_elements == both.sum()


def test_the_whole_of_a_tensor_is_a_box() -> None:
    assert (whole((2, 3)), whole(())) == (Box((0, 0), (2, 3)), Box((), ()))
    assert (whole((2, 3)).num_rows, whole(()).num_rows, whole(()).num_elements) == (2, 1, 1)
    assert whole((2, 3)).rows(1, 2) == Box((1, 0), (1, 3))
    assert whole(()).rows(0, 1) == whole(())
