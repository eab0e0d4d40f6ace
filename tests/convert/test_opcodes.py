"""Pickled data is read as inert values, whatever it would do, and written so that torch's readers take it."""

from __future__ import annotations

import collections
import os
import pickle
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.errors import CopyError, RelightError, UnknownFormatError
from relight.manifest.foreign.opcodes import Call, Name, Reference, dumps, loads, sizes_of

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


class Evil:
    """Runs a command where pickled data is executed."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@given(plain, st.sampled_from([2, 3, 4, 5]))
def test_plain_values_come_back_from_every_protocol(value: Any, protocol: int) -> None:
    assert loads(pickle.dumps(value, protocol), path="x") == value


@given(plain)
def test_what_is_written_is_read_by_python_and_by_us(value: Any) -> None:
    assert pickle.loads(dumps(value)) == value
    assert loads(dumps(value), path="x") == value


def test_floats_bytes_and_sets_are_read() -> None:
    value = {"a": 1.5, "b": b"\0\1", "c": {1, 2}, "d": frozenset({3}), "e": bytearray(b"x")}
    assert loads(pickle.dumps(value, 5), path="x") == value


@pytest.mark.parametrize("protocol", [2, 4])
def test_ordered_dicts_come_back_as_dicts(protocol: int) -> None:
    value = collections.OrderedDict([("b", 1), ("a", 2)])
    value.attribute = "not content"  # type: ignore[attr-defined]
    assert loads(pickle.dumps(value, protocol), path="x") == {"b": 1, "a": 2}


def test_code_is_shown_and_never_run(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    found = loads(pickle.dumps({"x": Evil(f"touch {trace}")}, 4), path="x")["x"]
    assert (found.function, found.args) == (Name("posix", "system"), (f"touch {trace}",))
    assert not trace.exists()


def test_calls_names_and_references_are_written_as_torch_expects_them() -> None:
    value = (
        Call(Name("collections", "OrderedDict"), ()),
        Name("os.path", "join"),
        Call(Name("types", "SimpleNamespace"), (), {"a": 1}, is_new=True),
    )
    empty, function, made = pickle.loads(dumps(value))
    assert (empty, function, made.a) == (collections.OrderedDict(), os.path.join, 1)
    back = loads(dumps((Reference(("storage", 1)), value[2])), path="x")
    assert (back[0], back[1].state, back[1].is_new) == (Reference(("storage", 1)), {"a": 1}, True)


def test_sizes_are_read_from_tuples_and_from_calls() -> None:
    assert sizes_of((2, 3)) == (2, 3)
    assert sizes_of(Call(Name("torch", "Size"), ((4,),))) == (4,)
    with pytest.raises(TypeError):
        sizes_of(3)


def test_every_cut_is_found() -> None:
    data = pickle.dumps({"key": [1, 2.5, ("text", None)]}, 4)
    for length in range(len(data)):
        with pytest.raises(CopyError):
            loads(data[:length], path="x")


@given(st.binary(max_size=60))
def test_random_bytes_raise_only_our_errors(data: bytes) -> None:
    with suppress(RelightError):
        loads(b"\x80\x02" + data, path="x")


def test_marks_that_nothing_uses_are_popped_and_items_go_into_dicts_only() -> None:
    assert loads(b"\x80\x02N(K\x01K\x021.", path="x") is None
    with pytest.raises(CopyError, match="items are put into list"):
        loads(b"\x80\x02](K\x01K\x02u.", path="x")


def test_an_unknown_instruction_is_named() -> None:
    with pytest.raises(UnknownFormatError, match="EXT1"):
        loads(b"\x80\x02\x82" + struct.pack("<B", 1) + b".", path="x")
    with pytest.raises(UnknownFormatError, match="set"):
        dumps({1, 2})
