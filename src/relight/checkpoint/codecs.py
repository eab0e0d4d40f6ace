"""One codec for each Python, NumPy and torch type that the context may hold.

A codec turns a value into JSON-able parts and back; it calls `walk` for what lies inside. Values are looked
up by exact class, so a subclass (an IntEnum, a named tuple, np.float64) is never flattened into its parent.
Decoding builds values of the types named here and runs nothing else. Used by `context`; must not import it.
"""

from __future__ import annotations

import argparse
import base64
import collections
import datetime as dt
import decimal
import fractions
import json
import math
import pathlib
import struct
import types
import uuid
import zoneinfo
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["CODECS", "CODECS_BY_TAG", "PLAIN_INT_LIMIT", "Codec", "array_codec_of", "is_clean_text"]

PLAIN_INT_LIMIT = 2**53
"""Integers below this magnitude are plain JSON numbers; any JSON reader keeps them exact."""

Walk = Callable[[str, Any], Any]
"""Called as walk(label, child); encodes (or decodes) a child, whose path is the parent's path and label."""

_ARRAY_KINDS = "biufcmMSU"
_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "none": None,
    "bool": bool,
    "bytes": bytes,
    "dict": dict,
    "float": float,
    "int": int,
    "list": list,
    "set": set,
    "str": str,
    "tuple": tuple,
}
_PATH_TYPES: dict[str, type[pathlib.PurePath]] = {
    "Path": type(pathlib.Path()),
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """How one exact class becomes the payload of ``{"$tag": payload}`` and back."""

    tag: str
    cls: type
    encode: Callable[[Any, Walk], Any]
    decode: Callable[[Any, Walk], Any]


def is_clean_text(text: str) -> bool:
    """Return whether `text` has no surrogate code points, which JSON readers merge or refuse."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def array_codec_of(value: Any) -> Codec | None:
    """Return the codec of a NumPy scalar, of which there are many classes, or None if unsupported."""
    if isinstance(value, np.generic) and type(value).__module__ == "numpy" and _is_plain_dtype(value.dtype):
        return _SCALAR
    return None


def _is_plain_dtype(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in _ARRAY_KINDS and not dtype.hasobject and np.dtype(dtype.str) == dtype


def _require(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _from_base64(text: Any) -> bytes:
    return base64.b64decode(text, validate=True)


def _text_to_base64(text: str) -> str:
    return _to_base64(text.encode("utf-8", "surrogatepass"))


def _text_from_base64(data: Any) -> str:
    return _from_base64(data).decode("utf-8", "surrogatepass")


def _encode_list(items: Iterable[Any], walk: Walk) -> list[Any]:
    return [walk(str(index), item) for index, item in enumerate(items)]


def _encode_pairs(mapping: Any, walk: Walk) -> list[list[Any]]:
    pairs = []
    for index, (key, value) in enumerate(mapping.items()):
        label = key if type(key) is str else f"[{key}]" if type(key) is int else f"[#{index}]"
        pairs.append([walk(f"{label}.key", key), walk(label, value)])
    return pairs


def _decode_pairs(pairs: Any, walk: Walk) -> list[tuple[Any, Any]]:
    decoded = [(walk("key", key), walk("value", value)) for key, value in pairs]
    _require(len(dict(decoded)) == len(decoded), "a key appears twice")
    return decoded


def _encode_set(items: Any, walk: Walk) -> list[Any]:
    # A set has no order of its own; sorted text makes equal sets equal bytes.
    return sorted(_encode_list(items, walk), key=lambda item: json.dumps(item, sort_keys=True))


def _decode_list(payload: Any, walk: Walk) -> list[Any]:
    _require(type(payload) is list, "expected a list")
    return _encode_list(payload, walk)


def _decode_parts(count: int, payload: Any, walk: Walk) -> list[Any]:
    parts = _decode_list(payload, walk)
    _require(len(parts) == count, f"expected {count} parts, found {len(parts)}")
    return parts


def _encode_defaultdict(value: Any, walk: Walk) -> list[Any]:
    for name, factory in _FACTORIES.items():
        if value.default_factory is factory:
            return [name, _encode_pairs(value, walk)]
    raise ValueError(f"its default_factory {value.default_factory!r} is not one of {', '.join(_FACTORIES)}")


def _encode_range(value: Any, walk: Walk) -> list[Any]:
    return _encode_list((value.start, value.stop, value.step), walk)


def _encode_zone(zone: dt.tzinfo | None) -> Any:
    if zone is None:
        return None
    if type(zone) is zoneinfo.ZoneInfo and zone.key is not None:
        return ["zone", zone.key]
    if type(zone) is dt.timezone:
        offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
        return ["offset", offset.days, offset.seconds, offset.microseconds, *name]
    raise ValueError(f"its time zone {zone!r} is neither a dt.timezone nor a named ZoneInfo")


def _decode_zone(payload: Any) -> dt.tzinfo | None:
    match payload:
        case None:
            return None
        case ["zone", key]:
            return zoneinfo.ZoneInfo(key)
        case ["offset", days, seconds, microseconds, *name]:
            return dt.timezone(dt.timedelta(days, seconds, microseconds), *name)
    raise ValueError("unknown time zone")


def _encode_datetime(value: dt.datetime, _: Walk) -> list[Any]:
    return [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, _encode_zone(value.tzinfo)]


def _decode_datetime(payload: Any, _: Walk) -> dt.datetime:
    text, fold, zone = payload
    return dt.datetime.fromisoformat(text).replace(fold=fold, tzinfo=_decode_zone(zone))


def _encode_time(value: dt.time, _: Walk) -> list[Any]:
    return [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, _encode_zone(value.tzinfo)]


def _decode_time(payload: Any, _: Walk) -> dt.time:
    text, fold, zone = payload
    return dt.time.fromisoformat(text).replace(fold=fold, tzinfo=_decode_zone(zone))


def _encode_path(value: pathlib.PurePath, walk: Walk) -> list[Any]:
    name = next(name for name, cls in _PATH_TYPES.items() if cls is type(value))
    return [name, walk("path", str(value))]


def _encode_array(value: np.ndarray[Any, Any], _: Walk) -> list[Any]:
    _require(
        _is_plain_dtype(value.dtype), f"its dtype {value.dtype} is not numeric, boolean, time, bytes or text"
    )
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    data = value.T if order == "F" else value
    return [value.dtype.str, list(value.shape), order, _to_base64(data.tobytes())]


def _decode_array(payload: Any, _: Walk) -> np.ndarray[Any, Any]:
    name, shape, order, data = payload
    dtype = np.dtype(name)
    _require(type(name) is str and _is_plain_dtype(dtype), f"dtype {name!r} is not known")
    _require(order in ("C", "F") and all(type(size) is int and size >= 0 for size in shape), "bad shape")
    raw = _from_base64(data)
    _require(len(raw) == math.prod(shape) * dtype.itemsize, "data and shape differ in size")
    flat: np.ndarray[Any, Any] = np.empty(math.prod(shape), dtype)
    if raw:
        flat.view(np.uint8)[:] = np.frombuffer(raw, np.uint8)
    return flat.reshape(shape[::-1]).T if order == "F" else flat.reshape(shape)


def _decode_scalar(payload: Any, _: Walk) -> Any:
    name, data = payload
    dtype = np.dtype(name)
    _require(type(name) is str and _is_plain_dtype(dtype), f"dtype {name!r} is not known")
    raw = _from_base64(data)
    _require(len(raw) == dtype.itemsize > 0, "data and dtype differ in size")
    return np.frombuffer(raw, dtype)[0]


def _codecs() -> Iterable[Codec]:
    """Yield the codec of every supported class that `context` does not handle itself."""

    def leaf(tag: str, cls: type, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> Codec:
        return Codec(
            tag=tag, cls=cls, encode=lambda value, _: encode(value), decode=lambda part, _: decode(part)
        )

    def nested(
        tag: str, cls: type, encode: Callable[[Any, Walk], Any], decode: Callable[[Any, Walk], Any]
    ) -> Codec:
        return Codec(tag=tag, cls=cls, encode=encode, decode=decode)

    def sequence(tag: str, cls: type) -> Codec:
        return nested(tag, cls, _encode_list, lambda part, walk: cls(_decode_list(part, walk)))

    yield leaf("$int", int, hex, lambda text: int(text, 16))
    yield leaf("$float", float, lambda x: struct.pack(">d", x).hex(), _decode_float)
    yield leaf("$str", str, _text_to_base64, _text_from_base64)
    yield leaf("$bytes", bytes, _to_base64, _from_base64)
    yield leaf("$bytearray", bytearray, _to_base64, lambda data: bytearray(_from_base64(data)))
    yield nested(
        "$complex",
        complex,
        lambda value, walk: _encode_list((value.real, value.imag), walk),
        lambda part, walk: complex(*_decode_parts(2, part, walk)),
    )
    yield sequence("$tuple", tuple)
    yield nested("$set", set, _encode_set, lambda part, walk: set(_decode_list(part, walk)))
    yield nested("$frozenset", frozenset, _encode_set, lambda part, walk: frozenset(_decode_list(part, walk)))
    yield nested("$dict", dict, _encode_pairs, lambda part, walk: dict(_decode_pairs(part, walk)))
    for mapping in (collections.OrderedDict, collections.Counter):
        yield _mapping_codec(mapping)
    yield nested(
        "$defaultdict",
        collections.defaultdict,
        _encode_defaultdict,
        lambda part, walk: collections.defaultdict(_FACTORIES[part[0]], _decode_pairs(part[1], walk)),
    )
    yield nested(
        "$deque",
        collections.deque,
        lambda value, walk: [_encode_list(value, walk), value.maxlen],
        lambda part, walk: collections.deque(_decode_list(part[0], walk), part[1]),
    )
    yield nested("$range", range, _encode_range, lambda part, walk: range(*_decode_parts(3, part, walk)))
    yield nested("$slice", slice, _encode_range, lambda part, walk: slice(*_decode_parts(3, part, walk)))
    for namespace in (types.SimpleNamespace, argparse.Namespace):
        yield _namespace_codec(namespace)
    yield from _value_codecs(leaf)
    for path_type in _PATH_TYPES.values():
        yield nested(
            "$path", path_type, _encode_path, lambda part, walk: _PATH_TYPES[part[0]](walk("path", part[1]))
        )
    yield nested("$datetime", dt.datetime, _encode_datetime, _decode_datetime)
    yield nested("$time", dt.time, _encode_time, _decode_time)
    yield nested("$ndarray", np.ndarray, _encode_array, _decode_array)


def _value_codecs(leaf: Callable[..., Codec]) -> Iterable[Codec]:
    yield leaf("$date", dt.date, dt.date.isoformat, dt.date.fromisoformat)
    yield leaf(
        "$timedelta",
        dt.timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda part: dt.timedelta(*part),
    )
    yield leaf("$decimal", decimal.Decimal, str, decimal.Decimal)
    yield leaf(
        "$fraction",
        fractions.Fraction,
        lambda value: [hex(value.numerator), hex(value.denominator)],
        lambda part: fractions.Fraction(int(part[0], 16), int(part[1], 16)),
    )
    # Texts of NumPy are not scalars of a dtype: an array would pad them and drop trailing zeros.
    yield leaf(
        "$npstr", np.str_, lambda text: _text_to_base64(str(text)), lambda d: np.str_(_text_from_base64(d))
    )
    yield leaf("$npbytes", np.bytes_, _to_base64, lambda data: np.bytes_(_from_base64(data)))
    yield leaf("$uuid", uuid.UUID, str, uuid.UUID)
    yield leaf("$ellipsis", type(...), lambda _: None, lambda _: ...)
    yield leaf("$dtype", torch.dtype, lambda value: str(value).removeprefix("torch."), _DTYPES.__getitem__)
    yield leaf("$device", torch.device, str, _decode_device)
    yield leaf("$size", torch.Size, list, _decode_size)


def _decode_float(text: str) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(text))[0]
    return value


def _decode_device(text: Any) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise ValueError(f"unknown device {text!r}") from error


def _decode_size(sizes: Any) -> torch.Size:
    _require(all(type(size) is int for size in sizes), "sizes are integers")
    return torch.Size(sizes)


def _mapping_codec(cls: Any) -> Codec:
    return Codec(
        tag=f"${cls.__name__.lower()}",
        cls=cls,
        encode=_encode_pairs,
        decode=lambda part, walk: cls(dict(_decode_pairs(part, walk))),
    )


def _namespace_codec(cls: Any) -> Codec:
    def decode(part: Any, walk: Walk) -> Any:
        value = cls()
        vars(value).update(_decode_pairs(part, walk))
        return value

    tag = "$namespace" if cls is types.SimpleNamespace else "$arguments"
    return Codec(tag=tag, cls=cls, encode=lambda value, walk: _encode_pairs(vars(value), walk), decode=decode)


_SCALAR = Codec(
    tag="$npscalar",
    cls=np.generic,
    encode=lambda value, _: [value.dtype.str, _to_base64(value.tobytes())],
    decode=_decode_scalar,
)
CODECS: dict[type, Codec] = {codec.cls: codec for codec in _codecs()}
CODECS_BY_TAG: dict[str, Codec] = {codec.tag: codec for codec in (*CODECS.values(), _SCALAR)}
