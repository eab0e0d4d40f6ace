"""What the machine itself can do (disk, memory) and what processes use (processor time, resident memory)."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "busy_cores",
    "children_of",
    "cpu_seconds",
    "describe",
    "drop_caches",
    "fio_bytes_per_second",
    "keepers_of",
    "memory_copy_bytes_per_second",
    "read_through",
    "resident_bytes",
    "sync_tree",
]

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def fio_bytes_per_second(directory: Path, *, write: bool, size_bytes: int, repeats: int = 5) -> float | None:
    """Return fio's median rate for one sequential file with direct I/O, or None where fio is not installed."""
    if shutil.which("fio") is None:
        return None
    target = directory / "fio.bin"
    common = ["fio", "--name=x", f"--filename={target}", "--direct=1", "--ioengine=psync", "--bs=8M"]
    # fio's direct I/O wants whole blocks.
    common += [f"--size={size_bytes // 2**23 * 2**23}", "--output-format=json"]
    if not write:
        subprocess.run([*common, "--rw=write", "--end_fsync=1"], check=True, capture_output=True)
    rates = []
    for _ in range(repeats):
        if write:
            target.unlink(missing_ok=True)
        else:
            drop_caches()
        mode = ["--rw=write", "--end_fsync=1"] if write else ["--rw=read"]
        done = subprocess.run([*common, *mode], check=True, capture_output=True, text=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["write" if write else "read"]
        rates.append(job["io_bytes"] / (job["runtime"] / 1000.0))
    target.unlink(missing_ok=True)
    return statistics.median(rates)


def drop_caches() -> bool:
    """Forget every clean page of the page cache; False where this needs rights that are not there."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        return False
    return True


def memory_copy_bytes_per_second(size_bytes: int, *, num_threads: int = 1, repeats: int = 9) -> float:
    """Return the median rate of a plain copy between two touched buffers, split over `num_threads`."""
    source, target = bytearray(size_bytes), bytearray(size_bytes)
    share = size_bytes // num_threads
    base = [ctypes.addressof((ctypes.c_char * size_bytes).from_buffer(b)) for b in (source, target)]

    def copy(index: int) -> None:
        ctypes.memmove(base[1] + index * share, base[0] + index * share, share)

    seconds = []
    for _ in range(repeats + 2):
        threads = [threading.Thread(target=copy, args=(i,)) for i in range(1, num_threads)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        copy(0)
        for thread in threads:
            thread.join()
        seconds.append(time.perf_counter() - started)
    return share * num_threads / statistics.median(seconds[2:])


def read_through(path: Path) -> None:
    """Read every file below `path` once, so that the page cache holds it."""
    buffer = bytearray(2**23)
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def sync_tree(path: Path) -> None:
    """Flush every file and directory at and below `path` to the disk."""
    for entry in [path, *path.rglob("*")]:
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def busy_cores(*, over_seconds: float = 1.0) -> float:
    """Return how many cores were at work on average over the next `over_seconds`, whoever they worked for."""
    (busy, started) = (_busy_ticks(), time.monotonic())
    time.sleep(over_seconds)
    return (_busy_ticks() - busy) / _TICKS_PER_SECOND / (time.monotonic() - started)


def children_of(pid: int) -> set[int]:
    """Return every living descendant of `pid`."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found: set[int] = set()
    todo = [pid]
    while todo:
        below = parents.get(todo.pop(), [])
        found.update(below)
        todo += below
    return found


def keepers_of(root: Path) -> set[int]:
    """Return the processes that keep snapshots of the run at `root`."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"relight.keeper" in words and any(word.endswith(str(root).encode()) for word in words):
            found.add(int(entry.name))
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return user plus system time of `pids`, of those that still live."""
    stats = [fields for pid in pids if (fields := _stat(pid))]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / _TICKS_PER_SECOND


def resident_bytes(pid: int) -> dict[str, int]:
    """Return resident memory of a process: all of it, and the part that is shared memory (``RssShmem``)."""
    fields = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        if ":" in line
    )
    return {
        "all": int(fields["VmRSS"].split()[0]) * 1024,
        "shared": int(fields["RssShmem"].split()[0]) * 1024,
    }


def describe(directory: Path) -> dict[str, str]:
    """Return what a reader must know of the machine to judge the numbers."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        "unknown",
    )
    memory_kib = next(
        (int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0
    )
    mounts = [line.split() for line in _lines("/proc/mounts")]
    here = str(directory.resolve())
    mount = max(
        (m for m in mounts if here.startswith(m[1])), key=lambda m: len(m[1]), default=["", "", "unknown"]
    )
    return {
        "processor": f"{os.cpu_count()} x {model}",
        "memory": f"{memory_kib / 2**20:.0f} GiB",
        "file system": mount[2],
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _busy_ticks() -> int:
    user, nice, system, _idle, _waiting, irq, softirq, steal, *_ = (
        int(f) for f in _lines("/proc/stat")[0].split()[1:]
    )
    return user + nice + system + irq + softirq + steal


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines()


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat that follow the name, or None if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()
