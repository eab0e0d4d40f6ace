"""The global order of samples: a keyed permutation with O(1) memory and O(1) random access.

The order is part of the checkpoint's meaning: for given (num_samples, seed, epoch) it must never change, so it is
built of integer arithmetic alone and draws from no library's generator.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from relight.checkpoint.rng import derive_seed

__all__ = ["SampleOrder"]

_ROUNDS = 8
# Below this size a Feistel network has too few keys to look uniform, and a table is as good as O(1).
_TABLE_LIMIT = 4096

_Positions = npt.NDArray[np.uint64]


class SampleOrder:
    """The permutation of ``range(num_samples)`` that belongs to (seed, epoch).

    Above 4096 samples: a generalised Feistel network over a grid of rows x columns that just covers the range
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002): alternating rounds add a keyed hash of one
    coordinate to the other, and a position that lands outside the range is sent through again. At or below: positions
    sorted by a keyed hash.
    """

    def __init__(self, num_samples: int, *, seed: int, epoch: int) -> None:
        self._num_samples = num_samples
        keys = [derive_seed("relight sample order", seed, epoch, round_) for round_ in range(_ROUNDS)]
        self._keys = np.array(keys, dtype=np.uint64)
        self._columns = np.uint64(max(1, math.isqrt(num_samples - 1) + 1))
        self._rows = np.uint64(-(-num_samples // int(self._columns)))
        self._table: _Positions | None = None
        if num_samples <= _TABLE_LIMIT:
            hashes = _mix(_mix(np.arange(num_samples, dtype=np.uint64) + self._keys[0]) ^ self._keys[1])
            self._table = np.argsort(hashes, kind="stable").astype(np.uint64)

    def ids_at(self, positions: npt.NDArray[np.int64]) -> list[int]:
        """Return the sample id at each of `positions` (int64, shape (n,), each in the range)."""
        places: _Positions = positions.astype(np.uint64)
        if self._table is not None:
            ids: list[int] = self._table[places].tolist()
            return ids
        places = self._permute(places)
        outside = np.flatnonzero(places >= self._num_samples)
        while outside.size:
            places[outside] = self._permute(places[outside])
            outside = outside[places[outside] >= self._num_samples]
        found: list[int] = places.tolist()
        return found

    def _permute(self, places: _Positions) -> _Positions:
        row, column = places // self._columns, places % self._columns
        for round_ in range(0, _ROUNDS, 2):
            row = (row + _mix(column + self._keys[round_]) % self._rows) % self._rows
            column = (column + _mix(row + self._keys[round_ + 1]) % self._columns) % self._columns
        return row * self._columns + column


def _mix(words: _Positions) -> _Positions:
    """Mix 64-bit words: the finaliser of splitmix64 (Steele, Lea and Flood, 2014), a bijection."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
