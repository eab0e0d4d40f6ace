"""The typed files: every byte counts, equal bodies give equal bytes, what is not known is refused."""

from __future__ import annotations

import json
import math

import msgspec
import pytest

from relight.errors import CorruptionError, UnknownFormatError
from relight.manifest.commit import build_manifest
from relight.manifest.manifest import (
    IN_PIECES,
    Generation,
    IndexEntry,
    Marker,
    Parent,
    RankRecord,
    decode_file,
    decode_index,
    digest_block,
    digest_in,
    encode_file,
    encode_index,
)
from relight.manifest.shard import Piece
from relight.manifest.stored import read_generation, read_manifest, read_marker, read_record
from relight.testing.checkpoints import sample_image, sample_record

IMAGE = sample_image({"w": ("F32", (16,), bytes(64))})
BODIES = [
    sample_record(
        IMAGE, step=3, metrics={"loss": 0.5}, context={"a": [1, None]}, parent=Parent(step=1, generation=1)
    ),
    Generation(
        run="r", generation=2, parent=Parent(step=4, generation=1, source="file:///x"), created_at=1.5
    ),
    Marker(kind="verified", manifest_digest="0" * 32, at=2.0),
]


def with_digest(body: bytes) -> bytes:
    return b'{"digest":"' + digest_block(body).encode() + b'","body":' + body + b"}\n"


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_a_file_is_json_and_comes_back_equal(body) -> None:
    data = encode_file(body)
    assert json.loads(data).keys() == {"digest", "body"}
    assert decode_file(data, type(body), path="p") == (body, digest_in(data))


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_every_changed_byte_is_found(body) -> None:
    data = encode_file(body)
    for at in range(len(data)):
        for flip in (0x01, 0x20, 0x80):
            changed = bytearray(data)
            changed[at] ^= flip
            with pytest.raises(CorruptionError, match="p: "):
                decode_file(bytes(changed), type(body), path="p")


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_every_cut_and_every_addition_is_found(body) -> None:
    data = encode_file(body)
    for changed in [data[:at] for at in range(len(data))] + [data + b"\n", b" " + data, data + data]:
        with pytest.raises(CorruptionError):
            decode_file(changed, type(body), path="p")


def test_another_schema_is_refused_and_named() -> None:
    body = msgspec.json.encode({"schema": 2, "new": 1})
    with pytest.raises(UnknownFormatError, match="schema 2; this relight reads schema 1"):
        decode_file(with_digest(body), Generation, path="p")
    record = json.loads(encode_file(BODIES[0]))["body"]
    record["draft"]["schema"] = 7
    with pytest.raises(UnknownFormatError, match="schema 7"):
        decode_file(with_digest(msgspec.json.encode(record)), RankRecord, path="p")


def test_an_unknown_field_is_refused_and_named() -> None:
    body = msgspec.json.encode({"kind": "pinned", "manifest_digest": "", "at": 1.0, "extra": 1})
    with pytest.raises(UnknownFormatError, match="extra"):
        decode_file(with_digest(body), Marker, path="p")


def test_an_unknown_item_of_a_list_is_refused() -> None:
    entry = IndexEntry("float32", (2,), IN_PIECES, (Piece(0, "w", (0,), (2,)),))
    raw = encode_index({"w": entry})
    assert decode_index(raw) == {"w": entry}
    for longer in (
        b'{"w":["float32",[2],0,[],1]}',
        b'{"w":["float32",[2],-2,[[0,"w",[0],[2],1]]]}',
        b'{"w":1}',
    ):
        with pytest.raises(UnknownFormatError, match="index"):
            decode_index(msgspec.Raw(longer))


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"nul", b'"x"'])
def test_what_is_not_the_body_of_its_kind_is_refused(body: bytes) -> None:
    with pytest.raises((UnknownFormatError, CorruptionError)):
        decode_file(with_digest(body), Marker, path="p")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_no_number_never_makes_a_record_unreadable(value: float) -> None:
    data = encode_file(sample_record(IMAGE, step=1, metrics={"loss": value, "lr": 0.5}))
    record, _ = decode_file(data, RankRecord, path="p")
    assert record.draft.metrics == {"loss": None, "lr": 0.5}
    assert encode_file(record) == data


class OneFile:
    """A backend that holds the same bytes under every name."""

    url = "file:///one"

    def __init__(self, body: msgspec.Struct) -> None:
        self.data = encode_file(body)

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        return self.data


RECORD = BODIES[0]
MANIFEST = build_manifest([(sample_record(IMAGE, step=3), "0" * 32)])


@pytest.mark.parametrize(
    ("read", "body", "error", "text"),
    [
        (lambda b: read_record(b, 4, 1, 0), RECORD, CorruptionError, "says step 3; its name says 4"),
        (lambda b: read_record(b, 3, 2, 0), RECORD, CorruptionError, "says generation 1; its name says 2"),
        (lambda b: read_record(b, 3, 1, 1), RECORD, CorruptionError, "says rank 0; its name says 1"),
        (
            lambda b: read_record(b, 3, 1, 0),
            msgspec.structs.replace(RECORD, block_bytes=4096),
            UnknownFormatError,
            "blocks of 4096 bytes",
        ),
        (
            lambda b: read_record(b, 3, 1, 0),
            msgspec.structs.replace(RECORD, digests=("0" * 32,) * 2),
            CorruptionError,
            "2 digests for 1 blocks",
        ),
        (
            lambda b: read_manifest(b, 3, 1),
            msgspec.structs.replace(MANIFEST, world_size=2),
            CorruptionError,
            "1 ranks listed, world size 2",
        ),
        (lambda b: read_generation(b, 3), BODIES[1], CorruptionError, "says generation 2; its name says 3"),
        (lambda b: read_marker(b, 3, 1, "pinned"), BODIES[2], CorruptionError, "says 'verified'"),
    ],
)
def test_a_file_in_a_place_that_is_not_its_own_is_refused(read, body, error, text: str) -> None:
    with pytest.raises(error, match=text):
        read(OneFile(body))
