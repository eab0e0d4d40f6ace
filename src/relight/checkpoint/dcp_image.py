"""One rank's part of a save of torch.distributed.checkpoint: its items as a rank image, and what goes beside it."""

from __future__ import annotations

import io
import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from relight.checkpoint import context
from relight.checkpoint.dcp_exchange import ItemKey, StoredTensor, item_key
from relight.checkpoint.format import DTYPES, ImageLayout, TensorSpec, dtype_name, plan_image
from relight.checkpoint.replicas import ReplicaMode, device_digest
from relight.checkpoint.values import PerRank
from relight.errors import CodecError, StateMismatchError, UnknownFormatError
from relight.manifest.image import PAD_PREFIX
from relight.manifest.manifest import BLOCK_BYTES, digest_block
from relight.manifest.shard import Box, Piece, entry_name, whole

__all__ = ["RankContent", "RankImage", "collect", "fill_image", "page_buffer"]

SAMPLE_BYTES = 4096
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_RESERVED = "__metadata__"


def _bytes_at(parts: tuple[bytes, int]) -> io.BytesIO:
    stream = io.BytesIO(parts[0])
    stream.seek(parts[1])
    return stream


# State dicts of DCP hold streams of bytes, such as torchtitan's record of losses.
context.register_codec(
    io.BytesIO, name="BytesIO", encode=lambda stream: (stream.getvalue(), stream.tell()), decode=_bytes_at
)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of the image: what is planned, and how to get at its value when it is copied."""

    spec: TensorSpec
    value: Callable[[], torch.Tensor]


@dataclass(slots=True)
class RankContent:
    """What a rank stores; see `RankReport` for the fields of the same names.

    Attributes:
        local: specs of the tensors that lie within per-rank values.
        own: name -> typed JSON of this rank's per-rank values.
    """

    tensors: dict[str, list[StoredTensor]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    inner: list[str] = field(default_factory=list)
    local: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    digests: dict[ItemKey, str] = field(default_factory=dict)
    entries: list[_Entry] = field(default_factory=list)

    def layout(self) -> ImageLayout:
        """Return where each entry stands in the image."""
        return plan_image([entry.spec for entry in self.entries])


@dataclass(frozen=True, slots=True)
class RankImage:
    """A filled image and the digest of each of its blocks (hex)."""

    data: memoryview
    digests: tuple[str, ...]


def collect(
    items: Iterable[WriteItem],
    compare: Iterable[WriteItem],
    planner: SavePlanner,
    rank: int,
    mode: ReplicaMode,
) -> RankContent:
    """Look at what a rank stores, and digest what others have too; tensors that it stores are not touched yet.

    Args:
        items: what the plan gives this rank to store.
        compare: the rank's items that others have too.
        planner: gives the values.
        rank: this one, in the group that saves.
        mode: how much of a replica is digested.

    Raises:
        CodecError: a value has no codec.
        UnknownFormatError: a tensor cannot be stored, or has a name that an image cannot hold.
    """
    content = RankContent()
    for item in items:
        if item.type is WriteItemType.BYTE_IO:
            _add_object(content, item, planner, rank)
        else:
            _add_tensor(content, item, planner, rank)
    known = set(content.objects) | set(content.own)
    for item in compare:
        if item.type is not WriteItemType.BYTE_IO:
            if mode != "off":
                content.digests[item_key(item.index)] = _tensor_digest(_tensor_of(planner, item), mode)
            continue
        name = item.index.fqn
        value = _object_of(planner, item)
        if isinstance(value, PerRank):
            if name not in known:
                _add_own(content, name, value)
        elif mode != "off":
            content.digests[item_key(item.index)] = _object_digest(name, value, mode)
    names = [entry.spec.name for entry in content.entries]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UnknownFormatError(f"{twice}: two tensors of rank {rank} go by this name", path=twice)
    return content


def fill_image(content: RankContent, layout: ImageLayout, buffer: memoryview) -> RankImage:
    """Copy the tensors into an image and digest it.

    Args:
        content: as `collect` gave it.
        layout: of its entries.
        buffer: page-aligned memory that is large enough.

    Raises:
        StateMismatchError: the planner gives another dtype or shape than it planned.
    """
    data = buffer[: layout.image_bytes]
    data[: len(layout.header)] = layout.header
    for start, size in layout.pads:
        data[start : start + size] = bytes(size)
    raw = torch.frombuffer(data, dtype=torch.uint8)
    for entry, start in zip(content.entries, layout.offsets, strict=True):
        spec = entry.spec
        if not spec.num_bytes:
            continue
        tensor = entry.value()
        _check(spec.name, tensor, spec.dtype, spec.shape)
        with torch.no_grad():
            raw[start : start + spec.num_bytes].view(DTYPES[spec.dtype]).view(spec.shape).copy_(tensor)
    starts = range(0, layout.image_bytes, BLOCK_BYTES)
    return RankImage(data, tuple(digest_block(data[start : start + BLOCK_BYTES]) for start in starts))


def page_buffer(num_bytes: int) -> memoryview:
    """Return zeroed page-aligned memory; storage writes it past the page cache."""
    area = mmap.mmap(-1, max(1, num_bytes))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(area)


def _add_tensor(content: RankContent, item: WriteItem, planner: SavePlanner, rank: int) -> None:
    data = item.tensor_data
    name = item.index.fqn
    if data is None or data.chunk is None:
        raise UnknownFormatError(f"{name}: the planner gives no bounds for this tensor", path=name)
    if data.properties.layout is not torch.strided:
        raise UnknownFormatError(f"{name}: {data.properties.layout} tensors cannot be saved", path=name)
    dtype, shape = _dtype_of(name, data.properties.dtype), tuple(data.size)
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    if not box.num_elements:
        # Empty shards are not stored; of a tensor without elements, the one at its origin stands for it.
        if any(box.offsets) or 0 not in shape:
            return
        box = whole(shape)
    entry = _checked_name(entry_name(name, shape, box))
    content.tensors.setdefault(name, []).append(
        StoredTensor(dtype=dtype, shape=shape, piece=Piece(rank, entry, *box))
    )
    content.entries.append(_Entry(TensorSpec(entry, dtype, box.sizes), lambda: _tensor_of(planner, item)))


def _add_object(content: RankContent, item: WriteItem, planner: SavePlanner, rank: int) -> None:
    name = item.index.fqn
    value = _object_of(planner, item)
    if isinstance(value, PerRank):
        _add_own(content, name, value)
        return

    def store(path: str, tensor: torch.Tensor) -> str:
        key, spec = _add_inner(content, path, tensor)
        piece = Piece(rank, key, *whole(spec.shape))
        content.tensors[key] = [StoredTensor(dtype=spec.dtype, shape=spec.shape, piece=piece)]
        content.inner.append(key)
        return key

    content.objects[name] = context.encode(value, path=name, tensors=store)


def _add_own(content: RankContent, name: str, value: PerRank) -> None:
    def store(path: str, tensor: torch.Tensor) -> str:
        key, spec = _add_inner(content, path, tensor)
        content.local[key] = (spec.dtype, spec.shape)
        return key

    content.own[name] = context.encode(value.value, path=name, tensors=store)


def _add_inner(content: RankContent, path: str, tensor: torch.Tensor) -> tuple[str, TensorSpec]:
    """Add a tensor that lies within an object, under the path to it."""
    plain = _plain(path, tensor)
    spec = TensorSpec(_checked_name(path), _dtype_of(path, plain.dtype), tuple(plain.shape))
    content.entries.append(_Entry(spec, lambda: plain))
    return path, spec


def _tensor_of(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    value = planner.resolve_data(item)
    if not isinstance(value, torch.Tensor):
        raise UnknownFormatError(
            f"{item.index.fqn}: the planner gives a {type(value).__name__} for a tensor", path=item.index.fqn
        )
    return _plain(item.index.fqn, value)


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if hasattr(tensor, "wait") and hasattr(tensor, "trigger_wait"):
        tensor = tensor.trigger_wait()
    if type(tensor) not in _PLAIN and not isinstance(tensor, torch.nn.Parameter):
        raise UnknownFormatError(
            f"{name}: tensors of type {type(tensor).__name__} cannot be saved", path=name
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise UnknownFormatError(
            f"{name}: {tensor.layout} tensors on {tensor.device} cannot be saved", path=name
        )
    return tensor.detach()


def _object_of(planner: SavePlanner, item: WriteItem) -> Any:
    """Return what is to be stored under the item's name, before the planner turns it into bytes of a pickle."""
    if isinstance(planner, DefaultSavePlanner) and _has_stock_bytes(type(planner)):
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    name = item.index.fqn
    try:
        assert isinstance(data, io.BytesIO)
        data.seek(0)
        # The bytes come from the planner in this process; nothing but plain values is let through all the same.
        return torch.load(data, weights_only=True)
    except Exception as error:
        raise CodecError(
            f"{name}: {type(planner).__name__} makes bytes of it that hold more than plain values ({error}); relight "
            "stores values as typed JSON: let lookup_object return the value, and register a codec for its class with "
            "relight.register_codec(cls, name=..., encode=..., decode=...)",
            path=name,
        ) from error


def _has_stock_bytes(planner: type[DefaultSavePlanner]) -> bool:
    return all(
        getattr(planner, name) is getattr(DefaultSavePlanner, name)
        for name in ("resolve_data", "transform_object")
    )


def _dtype_of(name: str, dtype: torch.dtype) -> str:
    try:
        return dtype_name(dtype)
    except UnknownFormatError as error:
        raise UnknownFormatError(f"{name}: {error}", path=name) from None


def _checked_name(name: str) -> str:
    if name.startswith(PAD_PREFIX) or name == _RESERVED:
        raise UnknownFormatError(
            f"{name!r} is a name that images keep for themselves; rename the key", path=name
        )
    return name


def _check(name: str, tensor: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> None:
    if (tensor.dtype, tuple(tensor.shape)) != (DTYPES[dtype], shape):
        raise StateMismatchError(
            f"{name}: planned as {dtype} {shape}, the planner gives {tensor.dtype} {tuple(tensor.shape)}; a plan "
            "that was made for another state?",
            path=name,
        )


def _object_digest(name: str, value: Any, mode: ReplicaMode) -> str:
    parts: list[str] = []

    def take(path: str, tensor: torch.Tensor) -> str:
        parts.append(_tensor_digest(_plain(path, tensor), mode))
        return path

    parts.append(context.dumps(context.encode(value, path=name, tensors=take)).decode("ascii"))
    return xxhash.xxh3_64_hexdigest("\n".join(parts).encode())


def _tensor_digest(tensor: torch.Tensor, mode: ReplicaMode) -> str:
    """Return what equal tensors have in common: dtype, shape, and a digest of the bytes, or of samples of them."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    what = f"{tensor.dtype} {tuple(tensor.shape)} "
    if not flat.numel():
        return what
    if not flat.is_cpu:
        return what + device_digest(flat, sample_bytes=SAMPLE_BYTES if mode == "sample" else None)
    data = flat.view(torch.uint8).numpy().data
    if mode == "full" or data.nbytes <= 3 * SAMPLE_BYTES:
        return what + xxhash.xxh3_64_hexdigest(data)
    middle = (data.nbytes - SAMPLE_BYTES) // 2
    parts = (data[:SAMPLE_BYTES], data[middle : middle + SAMPLE_BYTES], data[-SAMPLE_BYTES:])
    return what + xxhash.xxh3_64_hexdigest(b"".join(parts))
