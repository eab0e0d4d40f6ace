"""Pickled data as inert values: what a program would call or construct is shown, never called or constructed.

torch's own files hold such data. `loads` runs the stack machine on names alone: a class or function is a `Name`, a
call of one is a `Call`. `dumps` writes the same values for readers of torch. Must not import what would execute it.
"""

from __future__ import annotations

import itertools
import pickletools
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from relight.errors import CorruptionError, RelightError, UnknownFormatError

__all__ = ["Call", "Name", "Reference", "dumps", "loads", "sizes_of"]


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function, by the module it is looked up in and its name there."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Call:
    """What calling `function` with `args` would give, and the `state` that would be put into it.

    Attributes:
        is_new: whether `function` is a class whose instance is made without its constructor.
    """

    function: Any
    args: tuple[Any, ...]
    state: Any = None
    is_new: bool = False

    def is_of(self, module: str, name: str) -> bool:
        """Tell whether it is a call of that function."""
        return bool(self.function == Name(module, name))


@dataclass(frozen=True, slots=True)
class Reference:
    """What stands outside of the pickled data, such as the storage of a tensor."""

    target: Any


_ORDERED = Name("collections", "OrderedDict")
_DICTS = (_ORDERED, Name("collections", "defaultdict"), Name("collections", "Counter"))
_LITERALS = {
    "NONE": None,
    "NEWTRUE": True,
    "NEWFALSE": False,
}
_WITH_VALUE = frozenset(
    {
        "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
        "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BINSTRING", "SHORT_BINSTRING", "BYTEARRAY8", "INT", "LONG",
        "FLOAT", "UNICODE", "STRING",
    }
)  # fmt: skip
_IGNORED = frozenset({"PROTO", "FRAME"})


def loads(data: bytes, *, path: str) -> Any:
    """Return what `data` describes, as plain values, `Name`, `Call` and `Reference`; executes nothing.

    Dicts of the standard library's kinds come back as dicts, `OrderedDict` included.

    Raises:
        CorruptionError: it is not pickled data.
        UnknownFormatError: it uses an instruction that no known writer of checkpoints does.
    """
    machine = _Machine(path)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name != "STOP":
                machine.run(opcode.name, argument)
        return machine.stack.pop()
    except RelightError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise CorruptionError(f"{path} is not readable pickled data: {error}", path=path) from error


class _Machine:
    """The stack machine of pickled data; `run` carries out one instruction."""

    def __init__(self, path: str) -> None:
        self.stack: list[Any] = []
        self._path = path
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self, opcode: str, argument: Any) -> None:
        if opcode in _WITH_VALUE:
            self.stack.append(argument)
        elif opcode in _LITERALS:
            self.stack.append(_LITERALS[opcode])
        elif opcode not in _IGNORED:
            step = _STEPS.get(opcode)
            if step is None:
                raise UnknownFormatError(
                    f"{self._path}: instruction {opcode} is in no checkpoint of torch", path=self._path
                )
            step(self, argument)

    def mark(self, _: Any) -> None:
        self._marks.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self._marks.pop()
        return items

    def pop_mark(self, _: Any) -> None:
        self.since_mark()

    def collect(self, make: Callable[[list[Any]], Any]) -> None:
        items = self.since_mark()
        self.stack.append(make(items))

    def push_tuple(self, size: int) -> None:
        items = tuple(self.stack[len(self.stack) - size :])
        if len(items) != size:
            raise IndexError("a tuple of more than there is")
        del self.stack[len(self.stack) - size :]
        self.stack.append(items)

    def put(self, at: int | None) -> None:
        self._memo[len(self._memo) if at is None else at] = self.stack[-1]

    def get(self, at: int) -> None:
        self.stack.append(self._memo[at])

    def name(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self.stack.append(Name(module, name))

    def stack_name(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(Name(str(module), str(name)))

    def call(self, _: Any) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        if function in _DICTS:
            # The only argument of these that carries content is a list of pairs.
            pairs = args[0] if function == _ORDERED and args else ()
            self.stack.append(dict(pairs))
        else:
            self.stack.append(Call(function, tuple(args)))

    def make(self, _: Any) -> None:
        args, cls = self.stack.pop(), self.stack.pop()
        self.stack.append(Call(cls, tuple(args), is_new=True))

    def build(self, _: Any) -> None:
        state = self.stack.pop()
        # Attributes of an OrderedDict, such as torch's _metadata, are no content.
        if isinstance(self.stack[-1], Call):
            self.stack[-1].state = state

    def set_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise TypeError(f"items are put into {type(target).__name__}")
        target.update(zip(pairs[::2], pairs[1::2], strict=True))

    def set_item(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def append(self, _: Any) -> None:
        item = self.stack.pop()
        self.stack[-1].append(item)

    def reference(self, _: Any) -> None:
        self.stack.append(Reference(self.stack.pop()))


_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine.mark,
    "POP": lambda machine, _: machine.stack.pop(),
    "POP_MARK": _Machine.pop_mark,
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_TUPLE": lambda machine, _: machine.stack.append(()),
    "EMPTY_SET": lambda machine, _: machine.stack.append(set()),
    "TUPLE1": lambda machine, _: machine.push_tuple(1),
    "TUPLE2": lambda machine, _: machine.push_tuple(2),
    "TUPLE3": lambda machine, _: machine.push_tuple(3),
    "TUPLE": lambda machine, _: machine.collect(tuple),
    "FROZENSET": lambda machine, _: machine.collect(frozenset),
    "PUT": _Machine.put,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.put,
    "GET": _Machine.get,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.stack_name,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.make,
    "BUILD": _Machine.build,
    "SETITEM": _Machine.set_item,
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "APPEND": _Machine.append,
    "APPENDS": lambda machine, _: _extend(machine),
    "ADDITEMS": lambda machine, _: _add(machine),
    "BINPERSID": _Machine.reference,
}


def _extend(machine: _Machine) -> None:
    items = machine.since_mark()
    machine.stack[-1].extend(items)


def _add(machine: _Machine) -> None:
    items = machine.since_mark()
    machine.stack[-1].update(items)


def sizes_of(value: Any) -> tuple[int, ...]:
    """Return the sizes that a tuple, a list or a call of `torch.Size` holds; TypeError where it is none of these."""
    return tuple(value.args[0]) if isinstance(value, Call) and value.args else tuple(value)


def dumps(value: Any) -> bytes:
    """Return `value` in protocol 2, which every torch reads: None, bool, int, str, tuple, list, dict and the above."""
    out = bytearray(b"\x80\x02")
    _write(out, value)
    return bytes(out + b".")


def _write(out: bytearray, value: Any) -> None:
    match value:
        case None | bool() | int() | str():
            _write_plain(out, value)
        case tuple() | list() | dict():
            _write_items(out, value)
        case Name():
            out += b"c" + f"{value.module}\n{value.name}\n".encode()
        case Reference():
            _write(out, value.target)
            out += b"Q"
        case Call():
            _write(out, value.function)
            _write(out, value.args)
            out += b"\x81" if value.is_new else b"R"
            if value.state is not None:
                _write(out, value.state)
                out += b"b"
        case _:
            raise UnknownFormatError(f"{type(value).__name__} is in no checkpoint that is written")


def _write_plain(out: bytearray, value: bool | int | str | None) -> None:  # noqa: FBT001 - any value of these
    if value is None:
        out += b"N"
    elif isinstance(value, bool):
        out += b"\x88" if value else b"\x89"
    elif isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        out += b"X" + struct.pack("<I", len(text)) + text
    elif -(2**31) <= value < 2**31:
        out += b"J" + struct.pack("<i", value)
    else:
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        out += b"\x8a" + bytes([len(data)]) + data


def _write_items(out: bytearray, value: tuple[Any, ...] | list[Any] | dict[Any, Any]) -> None:
    start, end = (b"(", b"t") if isinstance(value, tuple) else (b"](", b"e")
    items: Iterable[Any] = value
    if isinstance(value, dict):
        start, end = b"}(", b"u"
        items = itertools.chain.from_iterable(value.items())
    out += start
    for item in items:
        _write(out, item)
    out += end
