"""One keeper process per run and node: found, or started by whoever comes first; lock, then bind, then publish.

The starter's side imports neither the server nor the drain. Must not import torch.
"""

from __future__ import annotations

import fcntl
import os
import signal
import site
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from relight.errors import ConfigError, KeeperUnavailableError
from relight.keeper.arena import check_private
from relight.keeper.client import KeeperClient, socket_path
from relight.keeper.messages import is_absolute_url

__all__ = [
    "EXIT_BUSY",
    "KeeperFile",
    "ensure_keeper",
    "find_keeper",
    "hold_lock",
    "linger_seconds_from",
    "publish",
    "remove_folder",
    "trim_log",
    "unpublish",
]

EXIT_BUSY = 3
"""Exit code of a keeper that found another one at work."""

LINGER_SECONDS = 600.0
"""How long snapshots outlive lost workers, when nothing else is said."""

_HOLD_SECONDS = 60.0
_START_SECONDS = 20.0
_STARTS_MAX = 4
_PAUSE_SECONDS = 0.02
_LOG_MAX_BYTES = 2**20
_LOG_KEPT_BYTES = 2**18
_LOG_LINES = 15


class KeeperFile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``keeper.json``: the process that serves, since when, for which root; for people and tools."""

    pid: int
    started_at: float
    version: str
    root: str


def linger_seconds_from(environ: Mapping[str, str]) -> float:
    """Return RELIGHT_KEEPER_LINGER_SECONDS, or 600.

    Raises:
        ConfigError: it is set, but not to a number of seconds.
    """
    text = environ.get("RELIGHT_KEEPER_LINGER_SECONDS")
    if text is None:
        return LINGER_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"RELIGHT_KEEPER_LINGER_SECONDS={text!r} is not a number of seconds")
    return seconds


def find_keeper(folder: Path, *, hold_seconds: float = 0.0) -> KeeperClient | None:
    """Return a client of the keeper that serves `folder`, or None if there is none, or one that is leaving."""
    client = KeeperClient(folder)
    try:
        return None if client.health(hold_seconds=hold_seconds).is_stopping else client
    except KeeperUnavailableError:
        return None


def ensure_keeper(
    folder: Path,
    root_url: str,
    *,
    linger_seconds: float | None = None,
    argv_prefix: Sequence[str] | None = None,
    timeout_seconds: float = _START_SECONDS,
) -> KeeperClient:
    """Find or start the keeper of the run on this node; any number of processes may call it at once.

    After return a keeper answers, and stays for a minute even if nobody attaches. It is no child of this process.

    Args:
        folder: arena folder of the run; made if it is not there.
        root_url: absolute path or URL of the run's root.
        linger_seconds: how long snapshots outlive lost workers; None for RELIGHT_KEEPER_LINGER_SECONDS or 600.
        argv_prefix: command that runs the keeper, in place of ``python -m relight.keeper``.
        timeout_seconds: how long finding and starting may take.

    Raises:
        KeeperUnavailableError: it did not start in time, or failed; the message ends with its last log lines.
        ConfigError: `root_url` is relative, or the keeper that is there serves another root.
    """
    if not is_absolute_url(root_url):
        raise ConfigError(
            f"{root_url!r} is relative; the keeper runs elsewhere and needs an absolute path or URL"
        )
    argv = list(argv_prefix) if argv_prefix is not None else [sys.executable, "-m", "relight.keeper"]
    linger = linger_seconds if linger_seconds is not None else linger_seconds_from(os.environ)
    argv += ["--folder", str(folder), "--root", root_url, "--linger", repr(linger)]
    deadline = time.monotonic() + timeout_seconds
    num_started = 0
    while time.monotonic() < deadline:
        client = find_keeper(folder, hold_seconds=_HOLD_SECONDS)
        if client is not None:
            return _checked_root(client, root_url)
        if num_started == _STARTS_MAX:
            break
        _make_folder(folder)
        with hold_lock(folder / "start.lock") as is_held:
            if is_held and find_keeper(folder) is None and _start(folder, argv, deadline):
                num_started += 1
                continue
        time.sleep(_PAUSE_SECONDS)
    why = f"{num_started} that served died at once" if num_started else f"tried for {timeout_seconds:g} s"
    raise KeeperUnavailableError(f"no keeper in {folder}: {why}{_last_lines(folder)}")


@contextmanager
def hold_lock(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock on `path` for the block, without waiting; give whether it was got.

    The lock goes with the process, however that ends. A file that was removed meanwhile locks nobody out.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        yield False
        return
    try:
        yield _try_lock(descriptor) and _is_at(descriptor, path)
    finally:
        os.close(descriptor)


def publish(folder: Path, content: KeeperFile) -> None:
    """Say in ``keeper.json`` who serves; whole at any instant."""
    temp = folder / "keeper.json.tmp"
    temp.write_bytes(msgspec.json.encode(content) + b"\n")
    os.replace(temp, folder / "keeper.json")


def unpublish(folder: Path) -> None:
    """Remove what leads to this keeper; the caller holds the lock."""
    for name in ("keeper.json", socket_path(folder).name):
        with suppress(FileNotFoundError):
            (folder / name).unlink()


def remove_folder(folder: Path) -> bool:
    """Remove an arena folder without slots, unless somebody is starting a keeper in it; the caller holds its lock."""
    with hold_lock(folder / "start.lock") as is_held:
        if not is_held or next(folder.glob("rank-*"), None) is not None:
            return False
        for path in folder.iterdir():
            path.unlink()
        try:
            folder.rmdir()
        except OSError:
            # A keeper that was started by hand has come in between.
            return False
    return True


def trim_log(path: Path) -> None:
    """Cut a log that has grown over 1 MiB to its last 256 KiB; its writers append, so they go on behind that."""
    try:
        if path.stat().st_size <= _LOG_MAX_BYTES:
            return
        with path.open("rb+") as file:
            file.seek(-_LOG_KEPT_BYTES, os.SEEK_END)
            kept = file.read()
            file.truncate(0)
            file.seek(0)
            file.write(kept)
    except FileNotFoundError:
        return


def _checked_root(client: KeeperClient, root_url: str) -> KeeperClient:
    root = client.health().root
    if root != root_url:
        client.close()
        raise ConfigError(f"the keeper in {client.folder} serves {root}, not {root_url}")
    return client


def _make_folder(folder: Path) -> None:
    for path in (folder.parent, folder):
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
    check_private(folder)


def _start(folder: Path, argv: list[str], deadline: float) -> bool:
    """Start a keeper and return True once it serves, False if another one held the lock."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    log = os.open(folder / "keeper.log", flags, 0o600)
    try:
        # The process we start forks the keeper off and ends once that serves, so there is nothing to reap later.
        starter = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=_environment(),
            start_new_session=True,
            close_fds=True,
        )
    except OSError as error:
        raise KeeperUnavailableError(f"the keeper cannot be started: {error}") from error
    finally:
        os.close(log)
    try:
        code = starter.wait(max(0.0, deadline - time.monotonic()))
    except BaseException as error:
        with suppress(ProcessLookupError):
            os.killpg(starter.pid, signal.SIGKILL)
        starter.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise KeeperUnavailableError(f"the keeper did not start in time{_last_lines(folder)}") from error
        raise
    if code not in (0, EXIT_BUSY):
        raise KeeperUnavailableError(f"the keeper ended with code {code} at its start{_last_lines(folder)}")
    return code == 0


def _environment() -> dict[str, str]:
    """Return an environment in which ``-m relight.keeper`` finds this very package from any directory."""
    package_parent = str(Path(__file__).resolve().parents[2])
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    installed = {*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("purelib")}
    if package_parent not in {*paths, *installed}:
        paths.insert(0, package_parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        seen = path.stat()
    except FileNotFoundError:
        return False
    own = os.fstat(descriptor)
    return (seen.st_dev, seen.st_ino) == (own.st_dev, own.st_ino)


def _last_lines(folder: Path) -> str:
    try:
        with (folder / "keeper.log").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 16384))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return "; its log ends:\n" + "\n".join(lines[-_LOG_LINES:]) if lines else ""
