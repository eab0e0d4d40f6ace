"""Archives as `torch.save` writes them, written in pieces: nothing needs a whole tensor in memory."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from relight.manifest.assembly import Tensor
from relight.manifest.foreign.opcodes import Call, Name, Reference, dumps
from relight.manifest.foreign.staging import Output
from relight.manifest.foreign.torch_archive import STORAGE_CLASSES

__all__ = ["write_bare_tensor", "write_state_dict"]

_ALIGN_BYTES = 64
_LARGE_BYTES = 2**30
_PAD_ID = b"FB"

Copy = Callable[[Tensor, Callable[[memoryview], object]], None]


def write_state_dict(
    output: Output, tensors: Sequence[Tensor], aliases: Mapping[str, str], copy: Copy
) -> None:
    """Write a dict of tensors; a further name of a tensor shares its storage, as tied parameters do.

    Args:
        output: the file, empty.
        tensors: what to write, under their names.
        aliases: further name -> name of one of `tensors`.
        copy: gives a tensor's bytes.
    """
    content = {tensor.name: _rebuilt(tensor, str(number)) for number, tensor in enumerate(tensors)}
    content |= {further: content[kept] for further, kept in aliases.items()}
    _write_archive(output, content, tensors, copy)


def write_bare_tensor(output: Output, tensor: Tensor, copy: Copy) -> None:
    """Write one tensor alone behind what `output` holds already."""
    _write_archive(output, _rebuilt(tensor, "0"), [tensor], copy)


def _rebuilt(tensor: Tensor, key: str) -> Call:
    """Return what torch would pickle for a contiguous tensor that has storage `key` for itself."""
    num_items = math.prod(tensor.shape)
    strides = tuple(max(1, math.prod(tensor.shape[dim + 1 :])) for dim in range(len(tensor.shape)))
    hooks = Call(Name("collections", "OrderedDict"), ())
    cls = STORAGE_CLASSES.get(tensor.dtype)
    if cls is not None:
        storage = Reference(("storage", Name("torch", cls), key, "cpu", num_items))
        return Call(
            Name("torch._utils", "_rebuild_tensor_v2"), (storage, 0, tensor.shape, strides, False, hooks)
        )
    storage = Reference(("storage", Name("torch.storage", "UntypedStorage"), key, "cpu", tensor.num_bytes))
    return Call(
        Name("torch._utils", "_rebuild_tensor_v3"),
        (storage, 0, tensor.shape, strides, False, hooks, Name("torch", tensor.dtype)),
    )


def _write_archive(output: Output, content: Any, tensors: Sequence[Tensor], copy: Copy) -> None:
    window = _Window(output)
    with zipfile.ZipFile(window, "w", zipfile.ZIP_STORED) as archive:
        for name, data in (("data.pkl", dumps(content)), ("byteorder", b"little"), ("version", b"3\n")):
            with archive.open(_aligned(window, name, len(data)), "w") as member:
                member.write(data)
        for number, tensor in enumerate(tensors):
            info = _aligned(window, f"data/{number}", tensor.num_bytes)
            with archive.open(info, "w", force_zip64=tensor.num_bytes > _LARGE_BYTES) as member:
                copy(tensor, member.write)


def _aligned(window: _Window, name: str, num_bytes: int) -> zipfile.ZipInfo:
    """Return the entry that comes next, padded so that its content begins at a multiple of 64, as torch has it."""
    info = zipfile.ZipInfo(f"archive/{name}")
    fixed_bytes = 30 + len(info.filename) + len(_PAD_ID) + 2 + (20 if num_bytes > _LARGE_BYTES else 0)
    pad_bytes = -(window.tell() + fixed_bytes) % _ALIGN_BYTES
    info.extra = _PAD_ID + pad_bytes.to_bytes(2, "little") + bytes(pad_bytes)
    return info


class _Window(io.RawIOBase):
    """What is behind the present end of an output, as a file of its own."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._base = output.tell()

    def tell(self) -> int:
        return self._output.tell() - self._base

    def seek(self, offset: int, _whence: int = io.SEEK_SET) -> int:
        return self._output.seek(self._base + offset) - self._base

    def write(self, data: Any) -> int:
        return self._output.write(data)
