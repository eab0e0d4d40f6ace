"""Copying tensors in pieces, each with a digest of what passed by, so that what was written can be compared."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import xxhash

from relight.manifest.assembly import CHUNK_BYTES, Tensor

__all__ = ["Copier"]


class Copier:
    """Copies with one buffer of `CHUNK_BYTES`.

    Args:
        advance: told the bytes of each piece, for progress.

    Attributes:
        digests: name -> xxh3-128 (hex) of each tensor that was copied.
    """

    def __init__(self, advance: Callable[[int], None] = lambda _: None) -> None:
        self._buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))
        self._advance = advance
        self.digests: dict[str, str] = {}

    def copy(self, tensor: Tensor, write: Callable[[memoryview], object]) -> None:
        """Give all bytes of `tensor` to `write`, in order."""
        self.digests[tensor.name] = self._pass(tensor, write)

    def digest(self, tensor: Tensor) -> str:
        """Return the digest of `tensor` as it is stored now."""
        return self._pass(tensor, lambda _: None)

    def _pass(self, tensor: Tensor, write: Callable[[memoryview], object]) -> str:
        state = xxhash.xxh3_128()
        for start in range(0, tensor.num_bytes, CHUNK_BYTES):
            view = self._buffer[: min(CHUNK_BYTES, tensor.num_bytes - start)]
            tensor.read(start, view)
            state.update(view)
            write(view)
            self._advance(view.nbytes)
        return state.hexdigest()
