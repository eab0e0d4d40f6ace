"""Reading ranges of local files: from the page cache what it holds, the rest past it.

A cold restore through the page cache was measured at less than half the rate of direct reads; a warm one must
not go to the disk at all.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["PAGE_BYTES", "read_range"]

PAGE_BYTES = 4096
_DIRECT_MIN_BYTES = 2**20
_CALL_BYTES = 16 * 2**20


def read_range(descriptor: int, path: Path, offset_bytes: int, target: memoryview) -> int:
    """Fill `target` from the file at `offset_bytes` on; return how many bytes came, fewer only at the file's end.

    Args:
        descriptor: the file, open for reading.
        path: the same file, opened once more where direct I/O pays: large, and offset and `target` page aligned.
        offset_bytes: where in the file to begin.
        target: contiguous bytes.

    Raises:
        OSError: as the operating system reports it.
    """
    done = 0
    if target.nbytes >= _DIRECT_MIN_BYTES and not _is_cached(descriptor, offset_bytes):
        done = _read_direct(path, target, offset_bytes)
    while done < target.nbytes:
        taken = os.preadv(descriptor, [target[done : done + _CALL_BYTES]], offset_bytes + done)
        if taken == 0:
            break
        done += taken
    return done


def _is_cached(descriptor: int, offset_bytes: int) -> bool:
    """Tell whether the page cache holds the page at `offset_bytes`, which stands for the whole range.

    One page only: the kernel starts reading ahead for what it does not find, and that would compete with us.
    """
    try:
        return os.preadv(descriptor, [bytearray(1)], offset_bytes, os.RWF_NOWAIT) == 1
    except OSError:
        # EAGAIN says: not cached; EOPNOTSUPP: this file system cannot tell.
        return False


def _read_direct(path: Path, target: memoryview, offset_bytes: int) -> int:
    """Read whole pages past the page cache; return how many bytes came, 0 where that cannot be done."""
    whole_bytes = target.nbytes - target.nbytes % PAGE_BYTES
    if whole_bytes == 0 or offset_bytes % PAGE_BYTES:
        return 0
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return 0
        raise
    done = 0
    try:
        while done < whole_bytes:
            piece = target[done : min(done + _CALL_BYTES, whole_bytes)]
            taken = os.preadv(descriptor, [piece], offset_bytes + done)
            done += taken
            if taken == 0 or taken % PAGE_BYTES:
                break
    except OSError as error:
        # The address of `target` or the file system does not take it: the page cache takes anything.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
    return done
