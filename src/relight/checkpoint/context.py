"""The context: small non-tensor state of one rank as typed JSON, without pickle.

`encode` maps a Python value to JSON: what JSON can hold as it is stays as it is, everything else becomes a
dict with one key that starts with "$" and names the type. `decode` is the exact inverse, types included, and
executes nothing that the file names. `codecs` holds one codec per known class; users register theirs here.
Objects that are reached by two ways come back as two equal objects; reference cycles are refused.
"""

from __future__ import annotations

import binascii
import dataclasses
import enum
import json
import math
import struct
import zoneinfo
from collections.abc import Callable
from decimal import InvalidOperation
from typing import Any, Final, TypeVar

import numpy as np
import torch

from relight.checkpoint.codecs import CODECS, CODECS_BY_TAG, PLAIN_INT_LIMIT, array_codec_of, is_clean_text
from relight.checkpoint.sharding import is_dtensor
from relight.errors import CodecError, ConfigError, CorruptionError, StateMismatchError, UnknownFormatError

__all__ = [
    "TensorSink",
    "TensorSource",
    "decode",
    "dumps",
    "encode",
    "loads",
    "register_codec",
    "register_dataclass",
    "register_enum",
]

TensorSink = Callable[[str, torch.Tensor], str]
"""Called as sink(path, tensor); stores the tensor, which may alias live memory, and returns its key."""

TensorSource = Callable[[str], torch.Tensor]
"""Called as source(key); returns the tensor that a sink stored under that key."""

INLINE_ARRAY_BYTES: Final = 4096
MAX_DEPTH: Final = 64

_T = TypeVar("_T", bound=type)
_MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    binascii.Error,
    struct.error,
    InvalidOperation,
    OSError,
    zoneinfo.ZoneInfoNotFoundError,
)
_TENSOR_ARRAY_DTYPES = frozenset(map(np.dtype, ("?", "b", "h", "i", "q", "B", "e", "f", "d", "F", "D")))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Registration:
    cls: type
    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_by_class: dict[type, _Registration] = {}
_by_name: dict[str, _Registration] = {}


def encode(value: Any, *, path: str = "", tensors: TensorSink | None = None) -> Any:
    """Turn `value` into JSON-able data from which `decode` rebuilds it exactly, types and bits included.

    Args:
        value: None, bool, int, float, str, bytes, complex, the standard containers, paths, dates, Decimal,
            UUID, torch dtypes, devices and sizes, NumPy scalars and arrays, tensors, registered classes.
        path: where `value` lies in the train state; it prefixes the paths of errors and tensors, in which
            the keys and indices on the way down are joined by "/".
        tensors: takes the tensors, and NumPy arrays of 4096 bytes or more. Paths are unique within one call.

    Raises:
        CodecError: a value has no codec (the message names its path and how to register one), contains
            itself, is nested deeper than 64 levels, or is a tensor while there is no sink.
    """
    return _Encoder(tensors).encode(path, value)


def decode(value: Any, *, tensors: TensorSource | None = None) -> Any:
    """Rebuild what `encode` was given; the inverse of `encode`.

    Raises:
        UnknownFormatError: a tag or a registered name is unknown here, or a payload is malformed.
        StateMismatchError: a registered class has other fields or members than the saved one.
    """
    return _Decoder(tensors).decode("", value)


def dumps(value: Any) -> bytes:
    """Serialise what `encode` returned as ASCII JSON; equal values give equal bytes."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def loads(data: bytes) -> Any:
    """Parse ASCII JSON strictly: no NaN, no repeated key, no trailing bytes.

    Raises:
        CorruptionError: `data` is not such JSON.
    """
    try:
        return json.loads(
            data.decode("ascii"), parse_constant=_refuse_constant, object_pairs_hook=_object_without_repeats
        )
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"context is not valid JSON: {error}") from error


def register_codec(
    cls: type, *, name: str, encode: Callable[[Any], Any], decode: Callable[[Any], Any]
) -> None:
    """Let instances of exactly `cls` be part of the context.

    Register under the same name wherever such a checkpoint is read. Registering a class of the same module
    and qualified name again replaces it.

    Args:
        cls: the class; subclasses need their own registration.
        name: what the checkpoint calls it; never change it while checkpoints exist.
        encode: maps an instance to a value that this module can encode.
        decode: maps that value back to an instance; runs on restore, so it must trust nothing in it.

    Raises:
        ConfigError: the class has a built-in codec, or `name` belongs to another class.
    """
    if cls in CODECS or cls in (type(None), bool, list) or issubclass(cls, torch.Tensor):
        raise ConfigError(f"{cls.__qualname__} has a built-in codec and cannot be registered")
    taken = _by_name.get(name)
    if taken is not None and _full_name(taken.cls) != _full_name(cls):
        raise ConfigError(
            f"codec name {name!r} belongs to {_full_name(taken.cls)}; choose another for {cls!r}"
        )
    registration = _Registration(cls=cls, name=name, encode=encode, decode=decode)
    _by_class[cls] = registration
    _by_name[name] = registration


def register_dataclass(cls: _T, name: str | None = None) -> _T:
    """Register a dataclass, field by field; usable as a decorator. Restoring does not call `__init__`.

    Raises:
        ConfigError: `cls` is not a dataclass, or the name is taken.
    """
    if not dataclasses.is_dataclass(cls):
        raise ConfigError(f"{cls!r} is not a dataclass")
    fields = [field.name for field in dataclasses.fields(cls)]

    def encode_fields(value: Any) -> dict[str, Any]:
        unset = [field for field in fields if not hasattr(value, field)]
        if unset:
            raise ValueError(f"its fields {', '.join(unset)} are not set")
        strangers = sorted(set(getattr(value, "__dict__", ())) - set(fields))
        if strangers:
            raise ValueError(f"it carries attributes that are not fields: {', '.join(strangers)}")
        return {field: getattr(value, field) for field in fields}

    def decode_fields(saved: dict[str, Any]) -> Any:
        if set(saved) != set(fields):
            raise StateMismatchError(
                f"{_full_name(cls)} has fields {sorted(fields)}, the saved one has {sorted(saved)}"
            )
        value = object.__new__(cls)
        for field in fields:
            object.__setattr__(value, field, saved[field])
        return value

    register_codec(cls, name=name or _full_name(cls), encode=encode_fields, decode=decode_fields)
    return cls


def register_enum(cls: _T, name: str | None = None) -> _T:
    """Register an enum, by member name (flags by value); usable as a decorator.

    Raises:
        ConfigError: `cls` is not an enum, or the name is taken.
    """
    if not issubclass(cls, enum.Enum):
        raise ConfigError(f"{cls!r} is not an enum")
    is_flag = issubclass(cls, enum.Flag)

    def decode_member(saved: Any) -> Any:
        try:
            return cls(saved) if is_flag else cls[saved]
        except (KeyError, ValueError) as error:
            raise StateMismatchError(f"{_full_name(cls)} has no member {saved!r}") from error

    def encode_member(member: enum.Enum) -> Any:
        return member.value if is_flag else member.name

    register_codec(cls, name=name or _full_name(cls), encode=encode_member, decode=decode_member)
    return cls


class _Encoder:
    """One call of `encode`: the way down to the present value, and the tensor paths already used."""

    def __init__(self, tensors: TensorSink | None) -> None:
        self._tensors = tensors
        self._above: set[int] = set()
        self._used_paths: set[str] = set()

    def encode(self, path: str, value: Any) -> Any:
        cls = type(value)
        if value is None or cls is bool or _is_plain(value):
            return value
        if id(value) in self._above:
            raise CodecError(f"{path or 'value'} contains itself; break the cycle", path=path)
        if len(self._above) >= MAX_DEPTH:
            raise CodecError(f"{path} is nested deeper than {MAX_DEPTH} levels", path=path)
        self._above.add(id(value))
        try:
            return self._encode_tagged(path, value)
        finally:
            self._above.discard(id(value))

    def _encode_tagged(self, path: str, value: Any) -> Any:
        cls = type(value)

        def walk(label: str, child: Any) -> Any:
            return self.encode(f"{path}/{label}" if path and path[-1] != "/" else path + label, child)

        if cls is list:
            return [walk(str(index), item) for index, item in enumerate(value)]
        if cls is dict and all(type(key) is str and key[:1] != "$" and is_clean_text(key) for key in value):
            return {key: walk(key, item) for key, item in value.items()}
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(path, value)
        if cls is np.ndarray and self._tensors is not None and _fits_tensor(value):
            return self._encode_large_array(path, value)
        registration = _by_class.get(cls)
        codec = CODECS.get(cls) or array_codec_of(value)
        if registration is None and codec is None:
            raise CodecError(_no_codec(path, cls), path=path)
        try:
            if registration is not None:
                return {"$object": [registration.name, walk("value", registration.encode(value))]}
            assert codec is not None
            return {codec.tag: codec.encode(value, walk)}
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise CodecError(
                f"{path or 'value'}: {cls.__qualname__} cannot be saved: {error}", path=path
            ) from error

    def _encode_tensor(self, path: str, value: torch.Tensor) -> Any:
        if type(value) is torch.nn.Parameter:
            return {"$parameter": [self._store(path, value.detach()), value.requires_grad]}
        if type(value) is not torch.Tensor and not is_dtensor(value):
            raise CodecError(_no_codec(path, type(value)), path=path)
        tag = "$leaf" if value.requires_grad else "$tensor"
        return {tag: self._store(path, value.detach())}

    def _encode_large_array(self, path: str, value: np.ndarray[Any, Any]) -> Any:
        in_fortran_order = value.flags.f_contiguous and not value.flags.c_contiguous
        data = np.ascontiguousarray(value.T if in_fortran_order else value)
        # torch warns about memory that it could write to although NumPy forbids it.
        data = data if data.flags.writeable else data.copy()
        return {
            "$ndarray_tensor_f" if in_fortran_order else "$ndarray_tensor": self._store(
                path, torch.from_numpy(data)
            )
        }

    def _store(self, path: str, tensor: torch.Tensor) -> str:
        if self._tensors is None:
            raise CodecError(f"{path or 'value'} is a tensor, which cannot be stored here", path=path)
        unique, number = path, 1
        # Keys such as "a/b" and "a" -> "b" can spell one path.
        while unique in self._used_paths:
            number += 1
            unique = f"{path}#{number}"
        self._used_paths.add(unique)
        return self._tensors(unique, tensor)


class _Decoder:
    """One call of `decode`."""

    def __init__(self, tensors: TensorSource | None) -> None:
        self._tensors = tensors
        self._depth = 0

    def decode(self, _: str, value: Any) -> Any:
        self._depth += 1
        try:
            if self._depth > 2 * MAX_DEPTH:
                raise UnknownFormatError("context is nested too deeply")
            if type(value) is list:
                return [self.decode("", item) for item in value]
            if type(value) is dict:
                return self._decode_dict(value)
            if value is None or type(value) is bool or type(value) is str or _is_number(value):
                return value
            raise UnknownFormatError(f"context holds {value!r}, which is no plain JSON value")
        finally:
            self._depth -= 1

    def _decode_dict(self, value: dict[str, Any]) -> Any:
        tags = [key for key in value if type(key) is not str or key[:1] == "$"]
        if not tags:
            return {key: self.decode("", item) for key, item in value.items()}
        tag = tags[0]
        if len(value) > 1:
            raise UnknownFormatError(f"context tag {tag!r} shares its object with other keys")
        try:
            return self._decode_tagged(tag, value[tag])
        except _MALFORMED as error:
            if isinstance(error, ConfigError):
                raise
            raise UnknownFormatError(f"context value tagged {tag} is malformed: {error}") from error

    def _decode_tagged(self, tag: str, payload: Any) -> Any:
        codec = CODECS_BY_TAG.get(tag)
        if codec is not None:
            return codec.decode(payload, self.decode)
        match tag:
            case "$tensor":
                return self._fetch(payload)
            case "$leaf":
                return self._fetch(payload).detach().requires_grad_()
            case "$parameter":
                key, requires_grad = payload
                return torch.nn.Parameter(self._fetch(key), requires_grad=bool(requires_grad))
            case "$ndarray_tensor":
                return self._fetch(payload).numpy()
            case "$ndarray_tensor_f":
                return self._fetch(payload).numpy().T
            case "$object":
                return self._decode_object(*payload)
        raise UnknownFormatError(f"context tag {tag!r} is not known to this version of relight")

    def _decode_object(self, name: str, payload: Any) -> Any:
        registration = _by_name.get(name)
        if registration is None:
            raise UnknownFormatError(
                f"no codec named {name!r}; register it before restore with"
                " relight.register_codec(cls, name=..., encode=..., decode=...)"
            )
        return registration.decode(self.decode("", payload))

    def _fetch(self, key: Any) -> torch.Tensor:
        if self._tensors is None:
            raise UnknownFormatError(f"context refers to tensor {key!r}, but there is no source of tensors")
        if type(key) is not str:
            raise UnknownFormatError(f"context refers to a tensor by {key!r}, which is no key")
        return self._tensors(key)


def _is_plain(value: Any) -> bool:
    cls = type(value)
    if cls is str:
        return is_clean_text(value)
    if cls is int:
        return bool(-PLAIN_INT_LIMIT < value < PLAIN_INT_LIMIT)
    return cls is float and bool(math.isfinite(value) and (value != 0.0 or math.copysign(1.0, value) > 0))


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _fits_tensor(value: np.ndarray[Any, Any]) -> bool:
    return value.nbytes >= INLINE_ARRAY_BYTES and value.dtype.isnative and value.dtype in _TENSOR_ARRAY_DTYPES


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _no_codec(path: str, cls: type) -> str:
    how = f'relight.register_codec({cls.__qualname__}, name="...", encode=..., decode=...)'
    return f"{path or 'value'} is a {_full_name(cls)}, which has no codec; register one with {how}"


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not allowed")


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result
