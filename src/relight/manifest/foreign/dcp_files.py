"""Directories of `torch.distributed.checkpoint`: `.metadata` says where each box of a tensor lies in the data files.

The metadata is pickled objects of torch; they are read and written as inert values. Each box is a small archive of
`torch.save` within a data file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from relight.errors import CopyError, CorruptionError, MissingCopyError, UnknownFormatError
from relight.manifest.assembly import Assembly, ReadBytes, Tensor
from relight.manifest.foreign.opcodes import Call, Name, dumps, loads, sizes_of
from relight.manifest.foreign.source import Found, Source
from relight.manifest.foreign.staging import Stage
from relight.manifest.foreign.torch_archive import Archive, ArchivePlace, ArchiveTensor, walk
from relight.manifest.foreign.torch_writer import write_bare_tensor
from relight.manifest.index import ITEM_BYTES
from relight.manifest.shard import Box, cover_once, whole
from relight.storage.backend import StorageBackend

__all__ = ["METADATA_NAME", "read_dcp", "write_dcp"]

METADATA_NAME = ".metadata"
"""The file that makes a directory a checkpoint of torch.distributed.checkpoint."""

_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE_MODULE = "torch.distributed.checkpoint.filesystem"
_MAX_METADATA_BYTES = 2**32

Copy = Callable[[Tensor, Callable[[memoryview], object]], None]


def read_dcp(backend: StorageBackend, *, check: bool = True) -> Source:
    """Return what a directory of torch.distributed.checkpoint holds; executes nothing.

    Byte items are opened too: tensors in them are given, and everything else is skipped and named.

    Args:
        backend: the directory.
        check: compare each box that is read whole with the CRC-32 that it carries.

    Raises:
        MissingCopyError: there is no ``.metadata``, or no data file of a name that it says.
        CorruptionError: something cannot be read, or boxes do not cover their tensor once.
        UnknownFormatError: a tensor has a dtype or form that relight does not know, or files are transformed.
    """
    return _Directory(backend, check=check).source()


class _Directory:
    def __init__(self, backend: StorageBackend, *, check: bool) -> None:
        self._backend = backend
        self._check = check
        self._where = f"{backend.url}/{METADATA_NAME}"
        try:
            metadata = loads(
                backend.get(METADATA_NAME, max_bytes=_MAX_METADATA_BYTES), path=self._where
            ).state
            self._items = {str(name): _call(item) for name, item in metadata["state_dict_metadata"].items()}
            self._paths: Mapping[str, Any] = metadata.get("planner_data") or {}
            self._stored = {
                (index.state["fqn"], _sizes(index.state.get("offset"))): info.state
                for index, info in metadata["storage_data"].items()
            }
            files = {str(info["relative_path"]) for info in self._stored.values()}
        except (AttributeError, KeyError, TypeError) as error:
            raise CorruptionError(
                f"{self._where} is not what torch.distributed.checkpoint writes: {error!r}",
                path=METADATA_NAME,
            ) from error
        for name in sorted(files):
            if backend.size_bytes(name) is None:
                raise MissingCopyError(
                    f"{backend.url}/{name} is not there, but .metadata names it", path=name
                )

    def source(self) -> Source:
        found: list[Found] = []
        skipped: list[tuple[str, str]] = []
        aliases: dict[tuple[str, ...], tuple[str, ...]] = {}
        kept: dict[tuple[object, ...], tuple[str, ...]] = {}
        for name, item in self._items.items():
            if item.is_of(_MODULE, "BytesStorageMetadata"):
                for path, leaf in self._bytes_item(name):
                    if isinstance(leaf, ArchiveTensor):
                        tensor = leaf.named(".".join(path), self._place_of(name, None))
                        found.append(Found(path=path, tensor=tensor))
                    else:
                        skipped.append((".".join(path), leaf))
            elif item.is_of(_MODULE, "TensorStorageMetadata"):
                tensor, boxes = self._tensor(name, item)
                stored = (
                    tensor.dtype,
                    tensor.shape,
                    *((box, self._place_of(name, box.offsets)) for box in boxes),
                )
                path = self._path(name)
                is_known = bool(boxes) and all((name, box.offsets) in self._stored for box in boxes)
                if is_known and kept.setdefault(stored, path) != path:
                    aliases[path] = kept[stored]
                else:
                    found.append(Found(path=path, tensor=tensor))
            else:
                raise UnknownFormatError(
                    f"{self._where}: {name!r} is a {item.function}, which relight does not know", path=name
                )
        return Source(format="dcp", tensors=found, aliases=aliases, skipped=skipped)

    def _path(self, name: str) -> tuple[str, ...]:
        """Return the keys of nested dicts that were joined to `name` when it was saved."""
        path = self._paths.get(name) if isinstance(self._paths, Mapping) else None
        return tuple(map(str, path)) if isinstance(path, list | tuple) and path else (name,)

    def _tensor(self, name: str, item: Call) -> tuple[Tensor, list[Box]]:
        """Return the tensor and its boxes."""
        try:
            dtype = item.state["properties"].state[0].name
            shape = sizes_of(item.state["size"])
            boxes = [
                Box(sizes_of(chunk.state["offsets"]), sizes_of(chunk.state["sizes"]))
                for chunk in item.state["chunks"]
            ]
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise CorruptionError(
                f"{self._where}: the description of {name!r} cannot be read", path=name
            ) from error
        if dtype not in ITEM_BYTES:
            raise UnknownFormatError(
                f"{self._where}: {name!r} has dtype {dtype}; known: {', '.join(ITEM_BYTES)}", path=name
            )
        item_bytes = ITEM_BYTES[dtype]
        if not cover_once(shape, boxes):
            # What is missing would be whatever memory held.
            raise CorruptionError(
                f"{self._where}: the {len(boxes)} boxes of {name!r} do not cover {list(shape)} once; save it again",
                path=name,
            )
        if any((name, box.offsets) not in self._stored for box in boxes if box.num_elements):
            raise CorruptionError(f"{self._where} does not say where all boxes of {name!r} are", path=name)
        readers: list[tuple[Box, ReadBytes]] = [
            (box, _Lazy(self, name, box, dtype)) for box in boxes if box.num_elements
        ]
        read = readers[0][1] if len(readers) == 1 else Assembly(shape, item_bytes, readers).read
        place = self._place_of(name, boxes[0].offsets if boxes else None)
        num_bytes = math.prod(shape) * item_bytes
        tensor = Tensor(name=name, dtype=dtype, shape=shape, num_bytes=num_bytes, read=read, place=place)
        return tensor, boxes

    def _place_of(self, name: str, offsets: tuple[int, ...] | None) -> tuple[object, ...]:
        info = self._stored.get((name, offsets)) or {}
        return (info.get("relative_path", ""), info.get("offset", 0))

    def archive(self, name: str, offsets: tuple[int, ...] | None) -> Archive:
        """Open the archive of one item."""
        info = self._stored.get((name, offsets))
        if info is None:
            raise CorruptionError(f"{self._where} does not say where {name!r} at {offsets} is", path=name)
        if info.get("transform_descriptors"):
            raise UnknownFormatError(
                f"{name!r} was transformed by {info['transform_descriptors']} when it was saved; load it with "
                "torch.distributed.checkpoint and save it without extensions",
                path=name,
            )
        file_name, start, length = (info.get(field) for field in ("relative_path", "offset", "length"))
        if not (
            isinstance(file_name, str) and isinstance(start, int) and isinstance(length, int) and start >= 0
        ):
            raise CorruptionError(f"{self._where}: the place of {name!r} cannot be", path=name)
        place = ArchivePlace(backend=self._backend, name=file_name, start_bytes=start, num_bytes=length)
        return Archive(place, check=self._check)

    def _bytes_item(self, name: str) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Yield (path, tensor or reason) of what a byte item holds."""
        path = self._path(name)
        try:
            content = self.archive(name, None).content
        except (CopyError, UnknownFormatError) as error:
            yield path, f"a byte item that cannot be loaded as weights: {error}"
            return
        for rest, leaf in walk(content):
            if isinstance(leaf, ArchiveTensor):
                yield (*path, *rest), leaf
            else:
                yield (*path, *rest), describe(leaf)


class _Lazy:
    """Reads one box; its archive is opened when the first byte is asked for, and forgotten with the last one."""

    def __init__(self, directory: _Directory, name: str, box: Box, dtype: str) -> None:
        self._directory = directory
        self._name = name
        self._box = box
        self._dtype = dtype
        self._read: ReadBytes | None = None

    def __call__(self, start_bytes: int, target: memoryview) -> None:
        if self._read is None:
            self._read = self._open()
        self._read(start_bytes, target)
        if start_bytes + target.nbytes == self._box.num_elements * ITEM_BYTES[self._dtype]:
            self._read = None

    def _open(self) -> ReadBytes:
        found = self._directory.archive(self._name, self._box.offsets).content
        if (
            not isinstance(found, ArchiveTensor)
            or found.dtype != self._dtype
            or found.shape != self._box.sizes
        ):
            raise CorruptionError(
                f"{self._name!r} at {self._box.offsets}: the data file does not hold {self._dtype} of "
                f"{list(self._box.sizes)}, as .metadata says",
                path=self._name,
            )
        return found.read


def describe(leaf: Any) -> str:
    """Return what a leaf that is no tensor is, in a few words."""
    if isinstance(leaf, Call):
        return f"no tensor but a {leaf.function} object"
    text = repr(leaf)
    return f"no tensor but {type(leaf).__name__} {text if len(text) <= 40 else text[:37] + '...'}"


def _call(value: Any) -> Call:
    if not isinstance(value, Call):
        raise TypeError(f"{type(value).__name__} where an object should be")
    return value


def _sizes(value: Any) -> tuple[int, ...] | None:
    return None if value is None else sizes_of(value)


def write_dcp(
    stage: Stage, tensors: Sequence[Tensor], aliases: Mapping[str, str], copy: Copy, *, file_bytes: int
) -> None:
    """Write a directory that `torch.distributed.checkpoint.load` reads; each tensor is one box.

    Args:
        stage: where to.
        tensors: what to write, under their names.
        aliases: further name -> name of one of `tensors`; both names point to the same place.
        copy: gives a tensor's bytes.
        file_bytes: a data file that holds so much already gets no more tensors.
    """
    infos: dict[str, Call] = {}
    left = list(reversed(tensors))
    number = 0
    while left:
        file_name = f"__0_{number}.distcp"
        with stage.output(file_name) as output:
            while left and (output.tell() == 0 or output.tell() + left[-1].num_bytes <= file_bytes):
                tensor = left.pop()
                start = output.tell()
                write_bare_tensor(output, tensor, copy)
                infos[tensor.name] = _object(
                    _STORAGE_MODULE,
                    "_StorageInfo",
                    {"relative_path": file_name, "offset": start, "length": output.tell() - start},
                )
        number += 1
    with stage.output(METADATA_NAME) as output:
        output.write(dumps(_metadata(tensors, aliases, infos)))


def _metadata(tensors: Sequence[Tensor], aliases: Mapping[str, str], infos: Mapping[str, Call]) -> Call:
    by_name = {tensor.name: tensor for tensor in tensors}
    kept = {name: name for name in by_name} | dict(aliases)
    state = {
        "state_dict_metadata": {name: _described(by_name[first]) for name, first in kept.items()},
        "planner_data": {name: (name,) for name in kept},
        "storage_data": {
            _object(_MODULE, "MetadataIndex", {"fqn": name, "index": 0, "offset": _torch_size(_start(by_name[first]))}):
            infos[first]
            for name, first in kept.items()
        },
        "storage_meta": None,
        "version": "1.0.0",
    }  # fmt: skip
    return _object(_MODULE, "Metadata", state)


def _described(tensor: Tensor) -> Call:
    properties = (
        Name("torch", tensor.dtype),
        Call(Name("torch.serialization", "_get_layout"), ("torch.strided",)),
        False,
        Call(Name(_MODULE, "_MEM_FORMAT_ENCODING"), (0,)),
        False,
    )
    box = {"offsets": _torch_size(_start(tensor)), "sizes": _torch_size(tensor.shape)}
    state = {
        "properties": _object(_MODULE, "TensorProperties", properties),
        "size": _torch_size(tensor.shape),
        "chunks": [_object(_MODULE, "ChunkStorageMetadata", box)],
    }
    return _object(_MODULE, "TensorStorageMetadata", state)


def _start(tensor: Tensor) -> tuple[int, ...]:
    return whole(tensor.shape).offsets


def _torch_size(sizes: tuple[int, ...]) -> Call:
    return Call(Name("torch", "Size"), (sizes,))


def _object(module: str, name: str, state: Any) -> Call:
    return Call(Name(module, name), (), state, is_new=True)
