"""Archives of `torch.save`: a zip whose `data.pkl` says which tensors view which storages; read and written as bytes.

Storages are stored without compression, so a tensor is a range of the file. Reads any range of it without the rest.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from relight.errors import CorruptionError, RelightError, UnknownFormatError
from relight.manifest.assembly import ReadBytes, Tensor
from relight.manifest.foreign.opcodes import Call, Name, Reference, loads, sizes_of
from relight.manifest.foreign.strided import StridedView, is_contiguous
from relight.manifest.index import ITEM_BYTES
from relight.storage.backend import StorageBackend

__all__ = ["STORAGE_CLASSES", "Archive", "ArchivePlace", "ArchiveTensor", "walk"]

STORAGE_CLASSES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
"""dtype name -> the class that stands for its storage; other dtypes have untyped storages."""

_DTYPES = {cls: dtype for dtype, cls in STORAGE_CLASSES.items()} | {"UntypedStorage": "uint8"}
_MAX_PICKLE_BYTES = 2**30
_MAX_DEPTH = 64
_UTILS = "torch._utils"
_PLAIN_CLASSES = {
    Name("torch", "Tensor"),
    Name("torch._tensor", "Tensor"),
    Name("torch.nn.parameter", "Parameter"),
    Name("torch.nn.parameter", "Buffer"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivePlace:
    """Where an archive lies: file `name` of `backend`, from `start_bytes` on, `num_bytes` long."""

    backend: StorageBackend
    name: str
    start_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveTensor:
    """A tensor of an archive: the storage it views (equal ones compare equal), and how.

    Attributes:
        storage: (key of the storage, offset in elements, strides in elements).
    """

    dtype: str
    shape: tuple[int, ...]
    storage: tuple[str, int, tuple[int, ...]]
    read: ReadBytes

    def named(self, name: str, place: tuple[object, ...]) -> Tensor:
        """Return it as a tensor called `name` that is stored at `place`."""
        num_bytes = math.prod(self.shape) * ITEM_BYTES[self.dtype]
        return Tensor(
            name=name, dtype=self.dtype, shape=self.shape, num_bytes=num_bytes, read=self.read, place=place
        )


class Archive:
    """One archive, opened: `content` is what was saved, with an `ArchiveTensor` for each tensor.

    Args:
        place: where it lies.
        check: compare each storage that is read whole with the CRC-32 that the archive holds of it.

    Raises:
        CorruptionError: it cannot be read.
        UnknownFormatError: it holds a tensor that is not plain (sparse, quantised, a subclass), or is of an old form.
    """

    def __init__(self, place: ArchivePlace, *, check: bool = True) -> None:
        self._place = place
        self._check = check
        self._where = f"{place.backend.url}/{place.name}"
        try:
            with zipfile.ZipFile(io.BufferedReader(_Window(place), 2**16)) as opened:
                self._members = {info.filename.partition("/")[2]: info for info in opened.infolist()}
                self._refuse_other_forms()
                if self._member("data.pkl").file_size > _MAX_PICKLE_BYTES:
                    raise CorruptionError(f"{self._where}: data.pkl is too large", path=place.name)
                pickled = opened.read(self._member("data.pkl"))
                order = opened.read(self._members["byteorder"]) if "byteorder" in self._members else b"little"
        except RelightError:
            raise
        except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, zlib.error) as error:
            raise CorruptionError(
                f"{self._where} is not a whole archive of torch.save: {error}; save it again", path=place.name
            ) from error
        if order != b"little":
            raise UnknownFormatError(
                f"{self._where} was saved with byte order {order!r}; save it again on a little-endian machine",
                path=place.name,
            )
        self.content = self._resolve(loads(pickled, path=self._where), "", 0)

    def _refuse_other_forms(self) -> None:
        if "constants.pkl" in self._members:
            raise UnknownFormatError(
                f"{self._where} is a TorchScript program; save its state_dict() with torch.save",
                path=self._place.name,
            )

    def _member(self, name: str) -> zipfile.ZipInfo:
        if name not in self._members:
            raise CorruptionError(f"{self._where} holds no {name}", path=self._place.name)
        return self._members[name]

    def _resolve(self, value: Any, name: str, depth: int) -> Any:
        """Return `value` with tensors in place of the calls that would rebuild them."""
        if depth > _MAX_DEPTH:
            raise UnknownFormatError(
                f"{self._where}: nested more than {_MAX_DEPTH} deep", path=self._place.name
            )
        if isinstance(value, dict):
            return {key: self._resolve(item, _joined(name, key), depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._resolve(item, _joined(name, at), depth + 1) for at, item in enumerate(value)]
        if isinstance(value, Call) and isinstance(value.function, Name):
            return self._rebuild(value, name, depth)
        return value

    def _rebuild(self, call: Call, name: str, depth: int) -> Any:
        function, args = call.function, call.args
        is_wrapper = function.module == _UTILS and function.name in (
            "_rebuild_parameter",
            "_rebuild_parameter_with_state",
        )
        if args and (is_wrapper or function in _PLAIN_CLASSES):
            return self._resolve(args[0], name, depth + 1)
        if function == Name("torch._tensor", "_rebuild_from_type_v2") and len(args) == 4:
            if args[1] not in _PLAIN_CLASSES:
                raise self._not_plain(name, f"a {args[1]}")
            return self._resolve(Call(args[0], tuple(args[2])), name, depth + 1)
        if function.module == _UTILS and function.name in (
            "_rebuild_tensor",
            "_rebuild_tensor_v2",
            "_rebuild_tensor_v3",
        ):
            return self._tensor(function.name, args, name)
        if function.module == _UTILS and function.name.startswith("_rebuild"):
            raise self._not_plain(name, f"made by {function}")
        return call

    def _tensor(self, kind: str, args: Sequence[Any], name: str) -> ArchiveTensor:
        try:
            storage, offset, shape, strides = args[0].target, args[1], sizes_of(args[2]), sizes_of(args[3])
            _, cls, key, _, num_items = storage
            dtype = args[6].name if kind == "_rebuild_tensor_v3" else _DTYPES[cls.name]
            notes = args[7:8] if kind == "_rebuild_tensor_v3" else args[6:7]
            sizes = [offset, num_items, *shape, *strides]
            is_sound = isinstance(args[0], Reference) and len(shape) == len(strides) and isinstance(key, str)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise self._not_plain(name, "of a form that relight does not know") from error
        if not is_sound or any(not isinstance(size, int) or size < 0 for size in sizes):
            raise CorruptionError(
                f"{self._where}: tensor {name!r} has sizes that cannot be", path=self._place.name
            )
        if dtype not in ITEM_BYTES:
            raise self._not_plain(name, f"of dtype {dtype}")
        if any(isinstance(note, dict) and any(note.values()) for note in notes):
            raise self._not_plain(name, f"a lazy view ({', '.join(map(str, notes[0]))})")
        read = self._reader(name, key, dtype, (offset, shape, strides))
        return ArchiveTensor(dtype=dtype, shape=shape, storage=(key, offset, strides), read=read)

    def _reader(
        self, name: str, key: str, dtype: str, view: tuple[int, tuple[int, ...], tuple[int, ...]]
    ) -> ReadBytes:
        offset, shape, strides = view
        if not math.prod(shape):
            return _read_nothing
        member = self._member(f"data/{key}")
        item_bytes = ITEM_BYTES[dtype]
        reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
        needed = (offset + reach) * item_bytes
        if member.compress_type != zipfile.ZIP_STORED or needed > member.file_size:
            raise CorruptionError(
                f"{self._where}: the storage of tensor {name!r} has {member.file_size} bytes, {needed} are needed",
                path=self._place.name,
            )
        base = self._data_start(member)
        if not is_contiguous(shape, strides):
            return StridedView(
                backend=self._place.backend,
                name=self._place.name,
                base_bytes=base + offset * item_bytes,
                item_bytes=item_bytes,
                shape=shape,
                strides=strides,
            ).read
        read = partial(self._read, base + offset * item_bytes)
        is_whole = offset == 0 and math.prod(shape) * item_bytes == member.file_size
        return _Checked(read, member, f"{self._where}: tensor {name!r}") if self._check and is_whole else read

    def _data_start(self, member: zipfile.ZipInfo) -> int:
        """Return where in the file the content of `member` begins: behind its own header, which may be padded."""
        head = bytearray(30)
        at = self._place.start_bytes + member.header_offset
        self._place.backend.read_into(self._place.name, at, memoryview(head))
        start = at + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        end = self._place.start_bytes + self._place.num_bytes
        if head[:4] != b"PK\x03\x04" or start + member.file_size > end:
            raise CorruptionError(
                f"{self._where}: {member.filename} lies outside the archive", path=self._place.name
            )
        return start

    def _read(self, base_bytes: int, start_bytes: int, target: memoryview) -> None:
        self._place.backend.read_into(self._place.name, base_bytes + start_bytes, target)

    def _not_plain(self, name: str, what: str) -> UnknownFormatError:
        return UnknownFormatError(
            f"{self._where}: tensor {name!r} is {what}; save it again as a plain dense tensor", path=name
        )


class _Checked:
    """Reads a storage and, when it was read from its first byte to its last in order, compares its CRC-32."""

    def __init__(self, read: ReadBytes, member: zipfile.ZipInfo, what: str) -> None:
        self._read = read
        self._member = member
        self._what = what
        self._next = 0
        self._crc = 0

    def __call__(self, start_bytes: int, target: memoryview) -> None:
        self._read(start_bytes, target)
        if start_bytes == 0:
            self._next = self._crc = 0
        if start_bytes != self._next:
            return
        self._crc = zlib.crc32(target, self._crc)
        self._next += target.nbytes
        if self._next == self._member.file_size and self._crc != self._member.CRC:
            raise CorruptionError(
                f"{self._what} differs from its CRC-32; use another copy, or --ignore-crc if it was saved with "
                "torch.serialization.set_crc32_options(False)",
                path=self._member.filename,
            )


class _Window(io.RawIOBase):
    """The bytes of an archive as a file that can be read and sought."""

    def __init__(self, place: ArchivePlace) -> None:
        self._place = place
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._place.num_bytes}[whence]
        if base + offset < 0:
            raise ValueError("a position before the start")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, min(view.nbytes, self._place.num_bytes - self._at))]
        self._place.backend.read_into(self._place.name, self._place.start_bytes + self._at, view)
        self._at += view.nbytes
        return view.nbytes


def walk(content: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, leaf) of nested dicts and lists; an empty path where `content` itself is a leaf."""
    if isinstance(content, dict | list):
        pairs = content.items() if isinstance(content, Mapping) else enumerate(content)
        for key, value in pairs:
            for path, leaf in walk(value):
                yield (str(key), *path), leaf
    else:
        yield (), content


def _read_nothing(_start_bytes: int, _target: memoryview) -> None:
    """Stand for the reader of a tensor without elements."""


def _joined(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)
