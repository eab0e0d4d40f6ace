"""The index of a checkpoint, opened: rules, listed pieces and per-rank values side by side."""

from __future__ import annotations

import msgspec
import pytest

from relight.errors import UnknownFormatError
from relight.manifest.commit import build_manifest
from relight.manifest.index import ITEM_BYTES, StoredIndex
from relight.manifest.manifest import (
    EQUAL,
    IN_PIECES,
    PER_RANK,
    IndexEntry,
    Manifest,
    decode_file,
    encode_file,
)
from relight.manifest.shard import Box, Layout, Piece, Spread
from relight.testing.checkpoints import sample_image, sample_record

ROWS = Layout.on((2,), range(2), ((0, 0),))
COPIES = Layout.on((2,), range(2))
HALVES = (Piece(1, "cut@0:3", (0,), (3,)), Piece(0, "cut@3:4", (3,), (1,)))
ENTRIES = {
    "cut": IndexEntry("int8", (4,), IN_PIECES, HALVES),
    "own": IndexEntry("int64", (1,), PER_RANK),
    "equal": IndexEntry("int64", (3,), EQUAL),
    "rows": IndexEntry("float32", (5, 2), 0),
    "same": IndexEntry("bfloat16", (4,), 1),
    "one": IndexEntry("float64", (), 2),
    "wide": IndexEntry("complex128", (4,), 1),
}
INDEX = StoredIndex(ENTRIES, [ROWS, COPIES, Layout(base=1)])


def test_pieces_of_a_rule_are_those_of_all_tensors_under_it() -> None:
    assert INDEX.pieces("rows") == [
        Piece(0, "rows@0:3", (0, 0), (3, 2)),
        Piece(1, "rows@3:5", (3, 0), (2, 2)),
    ]
    both = Spread(COPIES, [("wide", 16, (4,)), ("same", 2, (4,))])
    assert INDEX.pieces("same") == both.holders("same") == [Piece(0, "same", (0,), (4,))]
    assert INDEX.pieces("wide") == [
        Piece(0, "wide@0:2", (0,), (2,)),
        Piece(1, "wide@2:4", (2,), (2,)),
    ]
    assert INDEX.pieces("one") == [Piece(1, "one", (), ())]


def test_pieces_of_a_box_are_those_that_overlap_it() -> None:
    assert INDEX.pieces("rows", Box((3, 0), (1, 1))) == [Piece(1, "rows@3:5", (3, 0), (2, 2))]
    assert list(INDEX.pieces("cut")) == list(HALVES)
    assert list(INDEX.pieces("cut", Box((3,), (1,)))) == [HALVES[1]]
    assert list(INDEX.pieces("cut", Box((3,), (0,)))) == []


def test_a_value_of_each_rank_has_no_pieces_and_an_equal_one_is_read_from_rank_0() -> None:
    assert list(INDEX.pieces("own")) == []
    assert list(INDEX.pieces("equal")) == [Piece(0, "equal", (0,), (3,))]


def test_the_home_of_a_tensor_is_known_where_one_rank_has_it_whole() -> None:
    assert {key: INDEX.home(key) for key in ENTRIES} == dict.fromkeys(ENTRIES) | {"one": 1}


@pytest.mark.parametrize("layout", [3, -4])
def test_an_entry_of_a_layout_that_is_not_there_is_refused(layout: int) -> None:
    with pytest.raises(UnknownFormatError, match="layout"):
        StoredIndex({"w": IndexEntry("int8", (4,), layout)}, INDEX.layouts)


def test_a_dtype_that_is_not_known_is_refused() -> None:
    with pytest.raises(UnknownFormatError, match=r"w .*float128"):
        StoredIndex({"w": IndexEntry("float128", (4,), 0)}, [ROWS]).pieces("w")


@pytest.mark.parametrize(
    "boxes",
    [
        [],
        [((0, 0), (2, 3))],
        [((0, 0), (2, 3)), ((1, 0), (3, 3))],
        [((0, 0), (2, 3)), ((2, 0), (3, 3))],
        [((-1, 0), (1, 3)), ((0, 0), (3, 3))],
        [((0, 0), (2, 3)), ((1, 0), (1, 3)), ((3, 0), (1, 3))],
        [((0, 0), (4, 2)), ((0, 1), (4, 1))],
        [((0,), (4,))],
    ],
)
def test_pieces_that_do_not_cover_the_tensor_once_are_refused(boxes) -> None:
    pieces = tuple(Piece(0, f"w{at}", *box) for at, box in enumerate(boxes))
    with pytest.raises(UnknownFormatError, match="w"):
        StoredIndex({"w": IndexEntry("int8", (4, 3), IN_PIECES, pieces)}, []).pieces("w")


def test_a_tensor_without_elements_may_have_no_pieces() -> None:
    assert list(StoredIndex({"w": IndexEntry("int8", (0, 3), IN_PIECES)}, []).pieces("w")) == []


def test_records_and_manifests_carry_index_and_layouts() -> None:
    record = sample_record(sample_image({}), step=3, index=ENTRIES, layouts=INDEX.layouts)
    manifest = build_manifest([(record, "0" * 32)])
    assert manifest.layouts == record.draft.layouts == INDEX.layouts
    read, _ = decode_file(encode_file(manifest), Manifest, path="p")
    for holder in (record.draft, read):
        opened = StoredIndex.of(holder)
        assert (opened.entries, opened.layouts) == (ENTRIES, INDEX.layouts)


def test_a_manifest_with_a_layout_that_is_no_rule_is_refused() -> None:
    manifest = build_manifest([(sample_record(sample_image({}), step=3, layouts=[ROWS]), "0" * 32)])
    body = msgspec.json.decode(msgspec.json.encode(manifest))
    body["layouts"][0][1] = [[0, 0], [0, 1]]
    raw = msgspec.json.decode(msgspec.json.encode(body), type=dict)
    with pytest.raises((UnknownFormatError, msgspec.ValidationError)):
        msgspec.convert(raw, Manifest)


def test_the_bytes_of_every_dtype_are_known() -> None:
    torch = pytest.importorskip("torch")
    from relight.checkpoint.format import DTYPES

    assert set(DTYPES) <= set(ITEM_BYTES)
    assert {name: ITEM_BYTES[name] for name in DTYPES} == {
        name: torch.empty((), dtype=dtype).element_size() for name, dtype in DTYPES.items()
    }
