"""Writing one local file whole: temporary name, content made durable, then the final name in one step.

Must not decide where files go or what an error means to the caller: errors are the operating system's own.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from relight.storage.file_read import PAGE_BYTES
from relight.storage.files import Files

__all__ = ["NAME_MAX_BYTES", "TEMP_PREFIX", "write_blocks", "write_whole"]

TEMP_PREFIX = ".tmp-"
"""What names of unfinished writes begin with; no stored name may have a part that does."""

NAME_MAX_BYTES = 255
"""The longest file name of the usual file systems."""

_DIRECT_MIN_BYTES = 2**20
_CALL_BYTES = 8 * 2**20


def write_whole(files: Files, path: Path, view: memoryview, *, if_absent: bool) -> bool:
    """Store `view` as `path`, whose directory exists; the content is durable, the name once its directory is synced.

    No reader sees part of it at any instant, and on failure the temporary file is removed.

    Returns:
        False if `if_absent` and there is a file of that name by now, which stays as it is.

    Raises:
        OSError: as the operating system reports it.
    """
    temp = path.with_name(_temp_name(path.name))
    try:
        _write_temp(files, temp, view)
        return _publish(files, temp, path, if_absent=if_absent)
    except BaseException:
        with suppress(OSError):
            files.unlink(temp)
        raise


def write_blocks(
    files: Files, path: Path, size_bytes: int, blocks: Iterable[memoryview], *, if_absent: bool
) -> bool:
    """Store `blocks`, one behind the other, as `path`; else as `write_whole`. What `blocks` raises leaves nothing.

    Args:
        files: the file calls.
        path: the file, whose directory exists.
        size_bytes: what the blocks have together.
        blocks: the content; one at a time is in memory.
        if_absent: as for `write_whole`.
    """
    temp = path.with_name(_temp_name(path.name))
    try:
        descriptor = files.create(temp, direct=False)
        try:
            if size_bytes:
                files.allocate(descriptor, size_bytes)
            done = 0
            for block in blocks:
                _write_span(files, descriptor, block, done, direct=False)
                done += block.nbytes
            files.truncate(descriptor, done)
            files.sync(descriptor)
        finally:
            files.close(descriptor)
        return _publish(files, temp, path, if_absent=if_absent)
    except BaseException:
        with suppress(OSError):
            files.unlink(temp)
        raise


def _temp_name(name: str) -> str:
    head = f"{TEMP_PREFIX}{secrets.token_hex(8)}-"
    return head + os.fsdecode(os.fsencode(name)[: NAME_MAX_BYTES - len(head)])


def _publish(files: Files, temp: Path, path: Path, *, if_absent: bool) -> bool:
    if not if_absent:
        files.rename(temp, path)
        return True
    stored = True
    try:
        files.link(temp, path)
    except FileNotFoundError:
        raise
    except OSError as error:
        # Over a network the answer to a link that was made may be lost, and the retry then finds its own link.
        stored = temp.stat().st_nlink == 2
        if not stored and not isinstance(error, FileExistsError):
            raise
    files.unlink(temp)
    return stored


def _write_temp(files: Files, temp: Path, view: memoryview) -> None:
    if view.nbytes >= _DIRECT_MIN_BYTES:
        try:
            return _write_content(files, temp, view, direct=True)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        # The buffer's address or the file system does not take direct I/O; some make the file before they refuse.
        with suppress(FileNotFoundError):
            files.unlink(temp)
    return _write_content(files, temp, view, direct=False)


def _write_content(files: Files, temp: Path, view: memoryview, *, direct: bool) -> None:
    descriptor = files.create(temp, direct=direct)
    try:
        if view.nbytes:
            files.allocate(descriptor, view.nbytes)
        whole_bytes = view.nbytes - (view.nbytes % PAGE_BYTES if direct else 0)
        _write_span(files, descriptor, view[:whole_bytes], 0, direct=direct)
        if whole_bytes < view.nbytes:
            _write_span(files, descriptor, _padded(view[whole_bytes:]), whole_bytes, direct=direct)
            files.truncate(descriptor, view.nbytes)
        files.sync(descriptor)
    except BaseException:
        with suppress(OSError):
            files.close(descriptor)
        raise
    files.close(descriptor)


def _write_span(files: Files, descriptor: int, view: memoryview, offset_bytes: int, *, direct: bool) -> None:
    done = 0
    while done < view.nbytes:
        taken = files.write(descriptor, view[done : done + _CALL_BYTES], offset_bytes + done)
        if direct:
            # A short direct write may end inside a page; the rest must start at a page again.
            taken -= taken % PAGE_BYTES
        if taken <= 0:
            raise OSError(errno.EINVAL if direct else errno.EIO, "the file system took no bytes")
        done += taken


def _padded(tail: memoryview) -> memoryview:
    """Return `tail` in a page of its own, zeros behind it: direct I/O takes whole pages at page addresses only."""
    page = mmap.mmap(-1, PAGE_BYTES)
    page[: tail.nbytes] = tail.tobytes()
    return memoryview(page)
