"""safetensors files, single or several with an index as Hugging Face lays them out: read and written in pieces."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from relight.errors import CorruptionError, UnknownFormatError
from relight.manifest.assembly import Tensor
from relight.manifest.foreign.source import Found, Source
from relight.manifest.foreign.staging import Output
from relight.manifest.image import (
    ImageTensor,
    SafetensorsHeader,
    parse_safetensors,
    safetensors_header_bytes,
)
from relight.manifest.image_plan import STORED_DTYPES
from relight.manifest.index import ITEM_BYTES
from relight.storage.backend import StorageBackend

__all__ = [
    "INDEX_NAME",
    "encode_index_file",
    "ordered",
    "read_index_file",
    "read_safetensors",
    "shard_names",
    "split_shards",
    "write_safetensors",
]

INDEX_NAME = "model.safetensors.index.json"
"""What Hugging Face calls the file that says which shard holds which tensor."""

_PAIRS = "relight.complex128"
_DTYPES = {stored: dtype for dtype, stored in STORED_DTYPES.items() if dtype != "complex128"}
_MAX_INDEX_BYTES = 2**30

Copy = Callable[[Tensor, Callable[[memoryview], object]], None]
"""Called as copy(tensor, write): gives the bytes of a tensor to `write`, piece by piece."""


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def read_safetensors(
    backend: StorageBackend, names: Sequence[str], *, weight_map: Mapping[str, str] | None = None
) -> Source:
    """Return the tensors of safetensors files.

    Padding entries of relight's own images are left out. Entries of ``__metadata__`` that map a further name to that
    of a tensor in the same file are tied names, as the safetensors library notes them.

    Args:
        backend: where the files are.
        names: the files.
        weight_map: tensor name -> file, which must agree with what the files hold.

    Raises:
        CorruptionError: a file cannot be read, or is not what the index says.
        MissingCopyError: a file is not there.
        UnknownFormatError: a tensor has a dtype that relight does not know.
    """
    found: list[Found] = []
    aliases: dict[tuple[str, ...], tuple[str, ...]] = {}
    held: dict[str, str] = {}
    for number, name in enumerate(names):
        header = _read_header(backend, name)
        pairs = _names_in(header.metadata.get(_PAIRS, "[]"))
        for key, stored in header.tensors.items():
            if key in held:
                raise CorruptionError(f"{key!r} is in {held[key]} and in {name}", path=name)
            held[key] = name
            tensor = _tensor(
                backend, name, key, stored, is_pair=key in pairs, place=(number, stored.start_bytes)
            )
            found.append(Found(path=(key,), tensor=tensor))
        for further, kept in header.metadata.items():
            if kept in header.tensors and further not in header.tensors:
                aliases[(further,)] = (kept,)
    if weight_map is not None:
        _compare(weight_map, held, {path[0]: kept[0] for path, kept in aliases.items()})
    kind = "safetensors" if weight_map is None else "hf"
    return Source(format=kind, tensors=found, aliases=aliases)


def read_index_file(backend: StorageBackend, name: str) -> dict[str, str]:
    """Return the weight map (tensor name -> file name) of an index file.

    Raises:
        CorruptionError: it cannot be read.
    """
    try:
        return msgspec.json.decode(backend.get(name, max_bytes=_MAX_INDEX_BYTES), type=_Index).weight_map
    except msgspec.MsgspecError as error:
        raise CorruptionError(
            f"{backend.url}/{name} is no index of safetensors files: {error}", path=name
        ) from error


def encode_index_file(shards: Sequence[tuple[str, Sequence[Tensor]]]) -> bytes:
    """Return the index file of shards, each a file name and its tensors."""
    total = sum(tensor.num_bytes for _, tensors in shards for tensor in tensors)
    weight_map = {tensor.name: name for name, tensors in shards for tensor in tensors}
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(content, indent=2).encode() + b"\n"


def shard_names(num_shards: int) -> list[str]:
    """Return the file names of a model in so many shards."""
    if num_shards == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{num_shards:05d}.safetensors" for number in range(1, num_shards + 1)]


def split_shards(tensors: Iterable[Tensor], shard_bytes: int) -> list[list[Tensor]]:
    """Cut `tensors` into runs of at most `shard_bytes`; a larger tensor gets a shard of its own."""
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    return shards


def ordered(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors with larger items first, so that each begins at a multiple of its item size."""
    return sorted(tensors, key=lambda tensor: -min(ITEM_BYTES[tensor.dtype], 8))


def write_safetensors(
    output: Output, tensors: Sequence[Tensor], aliases: Mapping[str, str], copy: Copy
) -> None:
    """Write one file; complex128 is stored as pairs of F64, which the metadata names.

    Args:
        output: the file, empty.
        tensors: in the order of `ordered`.
        aliases: further name -> name of one of `tensors`; noted in the metadata, as the safetensors library does.
        copy: gives a tensor's bytes.
    """
    notes = {"format": "pt", **aliases}
    pairs = [tensor.name for tensor in tensors if tensor.dtype == "complex128"]
    if pairs:
        notes[_PAIRS] = json.dumps(pairs)
    header: dict[str, object] = {"__metadata__": notes}
    at = 0
    for tensor in tensors:
        shape = [*tensor.shape, 2] if tensor.dtype == "complex128" else list(tensor.shape)
        header[tensor.name] = {
            "dtype": STORED_DTYPES[tensor.dtype],
            "shape": shape,
            "data_offsets": [at, at + tensor.num_bytes],
        }
        at += tensor.num_bytes
    encoded = json.dumps(header, separators=(",", ":")).encode("ascii")
    encoded += b" " * (-len(encoded) % 8)
    output.write(len(encoded).to_bytes(8, "little") + encoded)
    for tensor in tensors:
        copy(tensor, output.write)


def _read_header(backend: StorageBackend, name: str) -> SafetensorsHeader:
    size_bytes = backend.size_bytes(name)
    first = bytearray(8)
    backend.read_into(name, 0, memoryview(first))
    header = bytearray(safetensors_header_bytes(first, size_bytes=size_bytes or 0, path=name))
    backend.read_into(name, 8, memoryview(header))
    return parse_safetensors(header, size_bytes=size_bytes or 0, path=f"{backend.url}/{name}")


def _tensor(
    backend: StorageBackend,
    name: str,
    key: str,
    stored: ImageTensor,
    *,
    is_pair: bool,
    place: tuple[object, ...],
) -> Tensor:
    dtype, shape = _DTYPES.get(stored.dtype), stored.shape
    if dtype is None:
        raise UnknownFormatError(
            f"{backend.url}/{name}: tensor {key!r} has dtype {stored.dtype}; known: {', '.join(_DTYPES)}",
            path=key,
        )
    if is_pair and dtype == "float64" and shape[-1:] == (2,):
        dtype, shape = "complex128", shape[:-1]
    num_bytes = stored.end_bytes - stored.start_bytes
    if any(size < 0 for size in shape) or num_bytes != math.prod(shape) * ITEM_BYTES[dtype]:
        raise CorruptionError(
            f"{backend.url}/{name}: tensor {key!r} of {dtype} {list(shape)} cannot have {num_bytes} bytes",
            path=key,
        )
    read = partial(_read, backend, name, stored.start_bytes)
    return Tensor(name=key, dtype=dtype, shape=shape, num_bytes=num_bytes, read=read, place=place)


def _read(backend: StorageBackend, name: str, base_bytes: int, start_bytes: int, target: memoryview) -> None:
    backend.read_into(name, base_bytes + start_bytes, target)


def _names_in(text: str) -> frozenset[str]:
    try:
        return frozenset(msgspec.json.decode(text, type=list[str]))
    except msgspec.MsgspecError:
        return frozenset()


def _compare(weight_map: Mapping[str, str], held: Mapping[str, str], aliases: Mapping[str, str]) -> None:
    """Refuse an index that does not say what the files hold; tied names may be in either."""
    for key, name in weight_map.items():
        if held.get(aliases.get(key, key)) != name:
            raise CorruptionError(f"the index says that {name} holds {key!r}; it does not", path=name)
    extra = next((key for key in held if key not in weight_map), None)
    if extra is not None:
        raise CorruptionError(
            f"{held[extra]} holds {extra!r}, which the index does not name", path=held[extra]
        )
