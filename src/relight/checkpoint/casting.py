"""Floating tensors in another dtype, cast piece by piece as they are read; only on demand, and never to infinity."""

from __future__ import annotations

from functools import partial

import torch

from relight.checkpoint.format import DTYPES
from relight.errors import ConfigError, StateMismatchError
from relight.manifest.assembly import Tensor
from relight.manifest.index import ITEM_BYTES

__all__ = ["FLOATS", "cast_tensor"]

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""The dtypes that are cast, and that can be cast to."""

_PART_ITEMS = 2**20


def cast_tensor(tensor: Tensor, dtype: str) -> Tensor:
    """Return `tensor` in `dtype`, rounded to the nearest value when it is read; one that has no `FLOATS` as it is.

    Reading raises `StateMismatchError` where a finite value would become infinite.

    Raises:
        ConfigError: `dtype` is none of `FLOATS`.
    """
    if dtype not in FLOATS:
        raise ConfigError(f"--dtype {dtype}: choose one of {', '.join(FLOATS)}")
    if tensor.dtype not in FLOATS or tensor.dtype == dtype:
        return tensor
    return Tensor(
        name=tensor.name,
        dtype=dtype,
        shape=tensor.shape,
        num_bytes=tensor.num_bytes // ITEM_BYTES[tensor.dtype] * ITEM_BYTES[dtype],
        read=partial(_read, tensor, dtype),
        place=tensor.place,
    )


def _read(tensor: Tensor, dtype: str, start_bytes: int, target: memoryview) -> None:
    item_bytes, item_bytes_before = ITEM_BYTES[dtype], ITEM_BYTES[tensor.dtype]
    first, num_items = start_bytes // item_bytes, target.nbytes // item_bytes
    for at in range(0, num_items, _PART_ITEMS):
        count = min(_PART_ITEMS, num_items - at)
        stored = bytearray(count * item_bytes_before)
        tensor.read((first + at) * item_bytes_before, memoryview(stored))
        values = torch.frombuffer(stored, dtype=DTYPES[tensor.dtype])
        cast = torch.frombuffer(target[at * item_bytes : (at + count) * item_bytes], dtype=DTYPES[dtype])
        cast.copy_(values)
        if bool((cast.isinf() & ~values.isinf()).any()):
            raise StateMismatchError(
                f"{tensor.name}: a value is too large for {dtype}; export it as {tensor.dtype}",
                path=tensor.name,
            )
