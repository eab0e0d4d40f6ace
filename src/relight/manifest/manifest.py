"""Rank record and manifest: the typed JSON that makes a set of rank images a checkpoint.

A stored file is ``{"digest":"<32 hex>","body":<body>}`` and a newline, byte for byte; the digest is xxh3-128 of
the body's bytes. Reading refuses anything else, so every flipped byte is found. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar

import msgspec
import xxhash

from relight.errors import CorruptionError, UnknownFormatError
from relight.manifest.shard import Layout, Piece

__all__ = [
    "BLOCK_BYTES",
    "EQUAL",
    "IN_PIECES",
    "PER_RANK",
    "SCHEMA",
    "Generation",
    "IndexEntry",
    "Manifest",
    "Marker",
    "Parent",
    "RankRecord",
    "RankSummary",
    "RecordDraft",
    "decode_file",
    "decode_index",
    "digest_block",
    "digest_in",
    "encode_file",
    "encode_index",
]

SCHEMA = 1
"""Version of the format on storage; a reader refuses any other."""

BLOCK_BYTES = 16 * 2**20
"""Size of one digest block of a rank image; the last block of an image may be shorter."""

_HEAD = b'{"digest":"'
_MIDDLE = b'","body":'
_TAIL = b"}\n"
_DIGEST_CHARS = 32


class Parent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoint that a generation started from: `step` of `generation`, of this run or of `source` (a URL)."""

    step: int
    generation: int
    source: str | None = None


class Generation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One incarnation of the worker group; `parent` is None when it started fresh."""

    schema: int = SCHEMA
    run: str
    generation: int
    parent: Parent | None
    created_at: float


PER_RANK = -1
"""`IndexEntry.layout` of a tensor of which every rank stores its own value."""

IN_PIECES = -2
"""`IndexEntry.layout` of a tensor that is stored in boxes which no rule gives."""

EQUAL = -3
"""`IndexEntry.layout` of a tensor of which every rank stores its own value, all found equal when it was saved."""


class IndexEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Where a tensor is stored.

    Attributes:
        dtype: relight's dtype name, as torch spells it without the prefix ("bfloat16", "complex128").
        shape: global shape.
        layout: position in the `layouts` beside the index, which say by a rule who stores what; or `PER_RANK`:
            every rank's image holds its own value under the key; or `EQUAL`: these values are equal, so that any
            one of them is the tensor; or `IN_PIECES`.
        pieces: for `IN_PIECES`, the boxes that together cover the tensor once; else empty.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: int
    pieces: tuple[Piece, ...] = ()


def encode_index(index: dict[str, IndexEntry]) -> msgspec.Raw:
    """Return the stored form of a global index."""
    return msgspec.Raw(msgspec.json.encode(index, order="deterministic"))


def decode_index(raw: msgspec.Raw) -> dict[str, IndexEntry]:
    """Return the global index of a record or manifest; it is kept encoded until somebody needs it, since it is large.

    Raises:
        UnknownFormatError: it is not what `encode_index` writes.
    """
    try:
        return _INDEX.decode(raw)
    except msgspec.MsgspecError as error:
        raise UnknownFormatError(f"the index of tensors cannot be read: {error}") from error


_INDEX = msgspec.json.Decoder(dict[str, IndexEntry])


class RecordDraft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank knows of its snapshot at seal time; the keeper adds digests and makes it a `RankRecord`.

    Attributes:
        run: identifier of the run (equal in all generations).
        layout: fingerprint of the whole layout; equal on all ranks of one checkpoint.
        saved_at: wall-clock seconds at which the snapshot was taken.
        context: the small non-tensor state of this rank, typed JSON.
        metrics: what the user passed to `Checkpointer.step`; None where that was nan or infinite, which JSON
            cannot say (encoding makes it so).
        index: the global index, see `decode_index`; on rank 0 only, empty elsewhere.
        layouts: the layouts that `index` speaks of; on rank 0 only.
        aliases: tensor key -> key that is stored in its place (tied parameters); on rank 0 only.
        local: keys of this rank's per-rank tensors -> (dtype, shape); they may differ between ranks.
        replicas_differ: keys whose values differed between ranks.
    """

    schema: int = SCHEMA
    run: str
    step: int
    generation: int
    parent: Parent | None
    rank: int
    world_size: int
    layout: str
    image_bytes: int
    saved_at: float
    context: msgspec.Raw
    metrics: Mapping[str, float | None] = {}
    index: msgspec.Raw = msgspec.Raw(b"{}")
    layouts: tuple[Layout, ...] = ()
    aliases: dict[str, str] = {}
    local: dict[str, tuple[str, tuple[int, ...]]] = {}
    replicas_differ: tuple[str, ...] = ()


class RankRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank's part of a checkpoint: the draft, and the digest of every block of its image (xxh3-128, hex)."""

    draft: RecordDraft
    block_bytes: int = BLOCK_BYTES
    digests: tuple[str, ...]


class RankSummary(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the manifest says of one rank: bytes of its image, and the digest of its record's body."""

    image_bytes: int
    record_digest: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The commit record: the checkpoint exists if and only if this file does.

    A function of the rank records alone, so that any finder writes the same bytes: `saved_at` is the latest
    record's; metrics, index, layouts and aliases are rank 0's, `replicas_differ` is the sorted union.
    """

    schema: int = SCHEMA
    run: str
    step: int
    generation: int
    parent: Parent | None
    world_size: int
    layout: str
    saved_at: float
    ranks: tuple[RankSummary, ...]
    metrics: Mapping[str, float | None]
    index: msgspec.Raw
    layouts: tuple[Layout, ...]
    aliases: dict[str, str]
    replicas_differ: tuple[str, ...]


class Marker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A small fact about a committed step beside its manifest ("verified", "pinned"): when, and of which manifest."""

    kind: Literal["verified", "pinned"]
    manifest_digest: str
    at: float


T = TypeVar("T")


def digest_block(data: memoryview | bytes) -> str:
    """Return the xxh3-128 digest of `data` as 32 hex digits; releases the interpreter lock while hashing."""
    return xxhash.xxh3_128_hexdigest(data)


def encode_file(body: msgspec.Struct) -> bytes:
    """Return the stored form of `body`, its digest in front; equal bodies give equal bytes."""
    encoded = msgspec.json.encode(body, order="deterministic")
    return _HEAD + digest_block(encoded).encode() + _MIDDLE + encoded + _TAIL


def digest_in(data: bytes) -> str:
    """Return the digest that a stored file carries in front, unchecked."""
    return data[len(_HEAD) : len(_HEAD) + _DIGEST_CHARS].decode("ascii", "replace")


def decode_file(data: bytes, kind: type[T], *, path: str) -> tuple[T, str]:
    """Check and decode a stored file.

    Returns:
        The body and its digest.

    Raises:
        CorruptionError: any byte differs from what was written.
        UnknownFormatError: written by a version with another schema, or with unknown fields.
    """
    start = len(_HEAD) + _DIGEST_CHARS + len(_MIDDLE)
    digest = digest_in(data)
    body = data[start : -len(_TAIL)]
    if (
        data != _HEAD + digest.encode("ascii", "replace") + _MIDDLE + body + _TAIL
        or digest_block(body) != digest
    ):
        raise CorruptionError(f"{path}: bytes differ from the digest written with them", path=path)
    schema = _schema_of(body, path)
    if schema is not None and schema != SCHEMA:
        raise UnknownFormatError(f"{path}: schema {schema}; this relight reads schema {SCHEMA}", path=path)
    try:
        return msgspec.json.decode(body, type=kind), digest
    except msgspec.MsgspecError as error:
        raise UnknownFormatError(
            f"{path}: {error}; written by another version of relight?", path=path
        ) from error


class _Draft(msgspec.Struct):
    schema: int | None = None


class _Versioned(msgspec.Struct):
    schema: int | None = None
    draft: _Draft | None = None


def _schema_of(body: bytes, path: str) -> int | None:
    try:
        seen = msgspec.json.decode(body, type=_Versioned)
    except msgspec.MsgspecError as error:
        raise UnknownFormatError(f"{path}: no schema version can be read: {error}", path=path) from error
    return seen.draft.schema if seen.draft is not None else seen.schema
