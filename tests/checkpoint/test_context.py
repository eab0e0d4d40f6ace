"""Typed JSON: what goes in comes out, types and bits included, and nothing is executed."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import math
import pathlib
import struct
import types
import uuid
import zoneinfo
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from relight.checkpoint import context
from relight.errors import CodecError, ConfigError, CorruptionError, StateMismatchError, UnknownFormatError


class Shelf:
    """A sink and source of tensors."""

    def __init__(self):
        self.tensors = {}

    def put(self, path, tensor):
        assert path not in self.tensors
        self.tensors[path] = tensor.clone()
        return path

    def get(self, key):
        return self.tensors[key]


def round_trip(value, *, path=""):
    shelf = Shelf()
    data = context.dumps(context.encode(value, path=path, tensors=shelf.put))
    return context.decode(context.loads(data), tensors=shelf.get)


def assert_same(actual, expected):
    """Compare types and values all the way down, NaN payloads and the sign of zero included."""
    assert type(actual) is type(expected)
    if isinstance(expected, float):
        assert struct.pack(">d", actual) == struct.pack(">d", expected)
    elif isinstance(expected, complex):
        assert_same([actual.real, actual.imag], [expected.real, expected.imag])
    elif isinstance(expected, np.ndarray | np.number | np.datetime64):
        assert (actual.dtype, actual.shape, actual.tobytes()) == (
            expected.dtype,
            expected.shape,
            expected.tobytes(),
        )
    elif isinstance(expected, list | tuple | collections.deque):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert_same(list(actual.items()), list(expected.items()))
    elif isinstance(expected, Point):
        assert_same([actual.x, actual.y, actual.total], [expected.x, expected.y, expected.total])
    elif isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    else:
        assert actual == expected


class Colour(enum.Enum):
    RED = (1, 2)
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: object = None
    total: float = dataclasses.field(init=False, default=0.5)


context.register_enum(Colour)
context.register_enum(Level)
context.register_enum(Access)
context.register_dataclass(Point)

hashable_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters())
    | st.binary()
    | st.decimals(allow_nan=False)
    | st.dates()
    | st.timedeltas()
    | st.uuids()
    | st.fractions()
    | st.sampled_from([*Colour, *Level, *Access, torch.float32, torch.device("cuda", 3), torch.Size([2, 0])])
)
leaves = (
    hashable_leaves
    | st.floats()
    | st.complex_numbers()
    | st.datetimes(timezones=st.none() | st.timezones() | st.just(dt.UTC))
    | st.binary().map(bytearray)
    | hnp.arrays(
        hnp.scalar_dtypes() | hnp.byte_string_dtypes() | hnp.unicode_string_dtypes(),
        hnp.array_shapes(min_dims=0),
    )
    | hnp.arrays(hnp.scalar_dtypes(), ()).map(lambda array: array[()])
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(st.characters()), inner)
        | st.dictionaries(hashable_leaves, inner)
        | st.dictionaries(hashable_leaves, inner).map(collections.OrderedDict)
        | st.sets(hashable_leaves)
        | st.frozensets(hashable_leaves)
        | st.builds(collections.deque, st.lists(inner), st.none() | st.integers(0, 5))
        | st.builds(Point, st.integers(), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=200)
@given(values)
def test_every_value_comes_back_with_type_and_bits(value):
    assert_same(round_trip(value), value)


@given(values)
def test_encoding_is_deterministic_and_decoded_values_encode_the_same(value):
    once = context.dumps(context.encode(value, tensors=Shelf().put))
    assert once == context.dumps(context.encode(round_trip(value), tensors=Shelf().put))


@pytest.mark.parametrize(
    "value",
    [
        2**53,
        -(2**53),
        2**53 - 1,
        pytest.param(10**5000, id="huge"),
        -0.0,
        math.inf,
        struct.unpack(">d", bytes.fromhex("fff8dead0000beef"))[0],
        1.0,
        1e22,
        5e-324,
        "\ud83d\ude00",
        "\ud83d",
        "\U0001f600",
        "$tensor",
        {"$tensor": 1},
        {"$": 1, "a": 2},
        {1: "a", "1": "b", None: "c", (1, 2): "d", 2.5: "e", b"x": 1},
        {"\ud800": 1},
        range(10**30, 0, -3),
        slice(None, 4, 10**20),
        slice("a", None),
        collections.Counter({"a": 2, "b": -1}),
        collections.defaultdict(list, {"a": [1]}),
        collections.defaultdict(None, {1: 2}),
        collections.deque([1, 2], maxlen=2),
        pathlib.Path("/a/b\udcff"),
        pathlib.PureWindowsPath("c:\\x"),
        dt.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
        dt.time(1, 2, 3, 4, tzinfo=dt.timezone(dt.timedelta(hours=-3), "X")),
        decimal.Decimal("-0E-400"),
        decimal.Decimal("1.10"),
        fractions.Fraction(-3, 10**40),
        uuid.UUID(int=5),
        types.SimpleNamespace(a=1, b=(2,)),
        argparse.Namespace(lr=0.1, path=pathlib.Path("x")),
        ...,
        torch.Size([]),
        torch.float8_e4m3fn,
        torch.device("meta"),
        np.float64(1.5),
        np.int64(3),
        np.bool_(True),
        np.datetime64("2026-01-01T00:00", "m"),
        np.str_("ab"),
        np.str_(""),
        np.bytes_(b"a\0\0"),
        np.array(["", ""]),
        np.longdouble("1.1"),
        np.zeros((0, 3), np.float32),
        np.arange(6, dtype=">i4").reshape(2, 3),
        Access.READ | Access.WRITE,
    ],
    ids=lambda value: repr(value)[:40],
)
def test_special_values_keep_type_and_bits(value):
    assert_same(round_trip([value])[0], value)


@pytest.mark.parametrize(
    "value",
    [{"hist": []}, {"hist": [{"a": 1}, {"b": torch.tensor([1.5])}]}, {}, (), [[], {}], {"x": {}}, [(), [()]]],
    ids=repr,
)
def test_a18_containers_keep_their_saved_structure(value):
    assert_same(round_trip(value), value)


def test_a01_plain_python_values_come_back():
    value = {"epoch": 20, "name": "x", "flag": True, "none": None, "t": (1, 2), "raw": b"\x00\xff"}
    assert_same(round_trip(value), value)


def test_plain_values_map_to_themselves():
    value = {"a": [1, 2.5, "x", None, True], "b": {}}
    assert context.encode(value) == value


def test_fortran_order_is_kept():
    for size in (3, 100):
        array = np.asfortranarray(np.random.default_rng(0).random((size, size + 1)))
        back = round_trip(array)
        assert_same(back, array)
        assert back.flags.f_contiguous
        assert back.flags.writeable


def test_large_arrays_go_to_the_sink_and_small_ones_do_not():
    shelf = Shelf()
    large = np.arange(1024, dtype=np.float32)
    large.flags.writeable = False
    value = {"big": large, "small": large[:1023], "strided": np.arange(2048, dtype=np.float32)[::2]}
    encoded = context.encode(value, path="extra", tensors=shelf.put)
    assert encoded["big"] == {"$ndarray_tensor": "extra/big"}
    assert sorted(shelf.tensors) == ["extra/big", "extra/strided"]
    assert_same(context.decode(encoded, tensors=shelf.get), value)


def test_arrays_without_a_sink_are_written_inline():
    array = np.arange(5000, dtype=np.int64)
    assert_same(context.decode(context.loads(context.dumps(context.encode(array)))), array)


def test_tensors_go_to_the_sink_under_unique_paths():
    shelf = Shelf()
    value = {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}, "m": {1: torch.ones(2), "1": torch.zeros(2)}}
    encoded = context.encode(value, path="extra", tensors=shelf.put)
    assert list(shelf.tensors) == ["extra/a/b", "extra/a/b#2", "extra/m/[1]", "extra/m/1"]
    assert_same(context.decode(encoded, tensors=shelf.get), value)


def test_parameters_and_leaves_keep_requires_grad():
    value = [torch.nn.Parameter(torch.ones(2), requires_grad=False), torch.ones(1, requires_grad=True)]
    back = round_trip(value)
    assert_same(back, value)
    assert [item.requires_grad for item in back] == [False, True]


def test_a_tensor_without_a_sink_is_refused():
    with pytest.raises(CodecError, match="extra/ema is a tensor"):
        context.encode({"ema": torch.ones(1)}, path="extra")


class Named(NamedTuple):
    a: int
    b: int


class Unregistered:
    pass


class Text(enum.StrEnum):
    A = "a"


class MyDict(dict):
    pass


class MyTensor(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "value",
    [
        Named(1, 2),
        Unregistered(),
        Text.A,
        MyDict(a=1),
        torch.ones(1).as_subclass(MyTensor),
        lambda: None,
        open,
        int,
        np.ma.masked_array([1]),
        memoryview(b"a"),
        torch.Generator(),
        collections.defaultdict(lambda: 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unknown_types_and_subclasses_are_refused_by_path(value):
    with pytest.raises(CodecError) as caught:
        context.encode({"deep": [0, value]}, path="extra", tensors=Shelf().put)
    assert caught.value.path == "extra/deep/1"
    assert type(value).__name__ in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()]),
        np.zeros(2, [("a", "i4")]),
        dt.datetime(2026, 1, 1, tzinfo=type("Zone", (dt.tzinfo,), {})()),
    ],
)
def test_known_types_with_unsupported_content_are_refused(value):
    with pytest.raises(CodecError, match="cannot be saved"):
        context.encode(value)


def test_the_refusal_says_how_to_register():
    with pytest.raises(CodecError, match=r"relight\.register_codec\(Unregistered, name="):
        context.encode(Unregistered())


def test_cycles_and_bottomless_values_are_refused():
    cycle = {"a": []}
    cycle["a"].append(cycle)
    with pytest.raises(CodecError, match="contains itself"):
        context.encode(cycle, path="extra")
    deep = []
    for _ in range(500):
        deep = [deep]
    with pytest.raises(CodecError, match="nested deeper"):
        context.encode(deep)


def test_a_shared_object_is_no_cycle():
    shared = [1]
    assert round_trip([shared, shared]) == [[1], [1]]


def test_the_deepest_allowed_value_comes_back():
    deep = 0
    for level in range(context.MAX_DEPTH):
        deep = {1: deep} if level % 2 else (deep,)
    assert_same(round_trip(deep), deep)


def test_registered_codec_round_trips_and_needs_registration_to_decode():
    class Box:
        def __init__(self, content):
            self.content = content

    context.register_codec(
        Box, name="test.Box", encode=lambda box: (box.content,), decode=lambda saved: Box(*saved)
    )
    back = round_trip({"box": Box(torch.ones(2))})
    assert torch.equal(back["box"].content, torch.ones(2))
    with pytest.raises(UnknownFormatError, match=r"test\.Other"):
        context.decode({"$object": ["test.Other", 1]})


def test_registration_conflicts_are_refused():
    with pytest.raises(ConfigError, match="built-in codec"):
        context.register_codec(dict, name="x", encode=dict, decode=dict)
    context.register_codec(Shelf, name="test.taken", encode=vars, decode=vars)
    with pytest.raises(ConfigError, match="belongs to"):
        context.register_codec(MyDict, name="test.taken", encode=dict, decode=MyDict)
    with pytest.raises(ConfigError, match="not a dataclass"):
        context.register_dataclass(MyDict)
    with pytest.raises(ConfigError, match="not an enum"):
        context.register_enum(MyDict)


def test_a_dataclass_with_changed_fields_is_reported():
    encoded = context.encode(Point(1))
    del encoded["$object"][1]["total"]
    with pytest.raises(StateMismatchError, match="'total'"):
        context.decode(encoded)


def test_an_enum_without_the_saved_member_is_reported():
    with pytest.raises(StateMismatchError, match="GREEN"):
        context.decode({"$object": [f"{Colour.__module__}.Colour", "GREEN"]})


@pytest.mark.parametrize(
    "value",
    [
        {"$strange": 1},
        {"$int": 5},
        {"$int": "0x"},
        {"$float": "00"},
        {"$tuple": {"a": 1}},
        {"$tuple": "ab"},
        {"$dict": [[1]]},
        {"$dict": [[1, 2], [1, 3]]},
        {"$dict": [[[], 2]]},
        {"$set": [[1]]},
        {"$range": [1, 2]},
        {"$dtype": "int"},
        {"$dtype": "ops"},
        {"$device": "nowhere"},
        {"$ndarray": ["|O", [1], "C", "AAAAAAAAAAA="]},
        {"$ndarray": ["<i4", [10**12], "C", ""]},
        {"$ndarray": ["<i4", [-1, -1], "C", "AAAAAA=="]},
        {"$npscalar": ["<i4", ""]},
        {"$path": ["os", "x"]},
        {"$defaultdict": ["exec", []]},
        {"$datetime": ["2026-01-01", 0, ["zone", "../../etc/passwd"]]},
        {"$tensor": "missing-source"},
        {"$int": "0x1", "a": 1},
        {"a": 1, "$x": 2},
        {"$object": ["builtins.eval", "1"]},
        (1,),
        float("nan"),
    ],
    ids=repr,
)
def test_unknown_or_malformed_content_is_refused(value):
    with pytest.raises(UnknownFormatError):
        context.decode(value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"NaN",
        b"[Infinity]",
        b'{"a":1,"a":2}',
        b"1 2",
        b"\xff",
        '"\u00fc"'.encode(),
        b"[" * 100_000,
    ],
    ids=lambda data: repr(data[:12]),
)
def test_loads_is_strict(data):
    with pytest.raises(CorruptionError):
        context.loads(data)


def test_dumps_refuses_what_encode_does_not_return():
    with pytest.raises(ValueError, match="not JSON compliant"):
        context.dumps(math.nan)
