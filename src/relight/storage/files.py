"""The operating system's file calls that durability depends on, as one seam.

`LocalBackend` writes through a `Files` object; the test kit passes others that record calls, fill the disk,
lose what was not fsynced, or stop the process after the n-th call. Must not decide anything itself.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

__all__ = ["Files"]

_UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class Files:
    """Real file calls, one method each; errors are the operating system's own `OSError`."""

    def create(self, path: Path, *, direct: bool) -> int:
        """Create `path` exclusively for writing and return its descriptor; `direct` asks for direct I/O."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o644)

    def allocate(self, descriptor: int, num_bytes: int) -> None:
        """Reserve space for `num_bytes`, so that a full disk shows before anything is written.

        Does nothing on a file system that cannot reserve: the C library's emulation would write one byte per
        block, over the network where the file system is remote.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        while libc.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)) != 0:
            code = ctypes.get_errno()
            if code in _UNSUPPORTED:
                return
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))

    def write(self, descriptor: int, data: memoryview, offset_bytes: int) -> int:
        """Write some of `data` at `offset_bytes` and return how many bytes were taken."""
        return os.pwrite(descriptor, data, offset_bytes)

    def truncate(self, descriptor: int, num_bytes: int) -> None:
        """Cut or extend the file to `num_bytes`."""
        os.ftruncate(descriptor, num_bytes)

    def sync(self, descriptor: int) -> None:
        """Return once the file's content and size are on stable storage."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close the descriptor."""
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Replace `target` by `source` atomically."""
        os.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        """Give `source` the second name `target`; an existing target raises FileExistsError."""
        os.link(source, target, follow_symlinks=False)

    def unlink(self, path: Path) -> None:
        """Remove one name."""
        path.unlink()

    def make_dir(self, path: Path) -> None:
        """Create one directory; an existing one raises FileExistsError."""
        path.mkdir()

    def remove_dir(self, path: Path) -> None:
        """Remove one empty directory."""
        path.rmdir()

    def sync_dir(self, path: Path) -> None:
        """Return once the directory's entries are on stable storage."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
