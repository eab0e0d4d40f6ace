"""What a rank, the launcher and the CLI use to talk to the keeper of a run: HTTP over its Unix socket.

Only the standard library and msgspec: importing it costs a trainer next to nothing. Must not import the server.
"""

from __future__ import annotations

import http.client
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec

from relight import errors
from relight.errors import ConfigError, KeeperUnavailableError, RelightError
from relight.keeper.messages import (
    PROTOCOL,
    AcquireReply,
    AcquireRequest,
    AttachReply,
    AttachRequest,
    DetachRequest,
    ErrorReply,
    Health,
    HeldSnapshot,
    Inventory,
    KeeperStatus,
    SaveRequested,
    SealReply,
    SlotRequest,
    StopRequest,
    WaitReply,
)

__all__ = ["KeeperClient", "at_short_path", "socket_path"]

_SOCKET_PATH_MAX_BYTES = 100
_REPLY_MAX_BYTES = 16 * 2**20
_POLL_SECONDS = 20.0

T = TypeVar("T")


def socket_path(folder: Path) -> Path:
    """Return the path of the keeper's socket in the arena folder of a run."""
    return folder / "keeper.sock"


def at_short_path(path: Path, use: Callable[[str], T]) -> T:
    """Return `use(name)` with a name of `path` that fits into a socket address (108 bytes on Linux)."""
    if len(os.fsencode(path)) <= _SOCKET_PATH_MAX_BYTES:
        return use(str(path))
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return use(f"/proc/self/fd/{descriptor}/{path.name}")
    finally:
        os.close(descriptor)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_seconds: float) -> None:
        super().__init__("keeper", timeout=timeout_seconds)
        self.path = path
        self.pid = os.getpid()

    def connect(self) -> None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.settimeout(self.timeout)
            at_short_path(self.path, made.connect)
        except BaseException:
            made.close()
            raise
        self.sock = made

    def __del__(self) -> None:
        # A thread that ends takes its connection along without a word.
        if getattr(self, "sock", None) is not None:
            self.close()


class KeeperClient:
    """A keeper, as seen by one process; every method may be called from any thread, each has a connection of its own.

    Every method raises `KeeperUnavailableError` when the keeper does not answer in time or is gone, and the error
    that the keeper names when it refuses.

    Args:
        folder: the arena folder of the run.
        timeout_seconds: how long one answer may take, beyond what the request itself waits for.
    """

    def __init__(self, folder: Path, *, timeout_seconds: float = 30.0) -> None:
        self.folder = folder
        self.timeout_seconds = timeout_seconds
        self._local = threading.local()

    @property
    def requests_path(self) -> Path:
        """File to map: its first 8 bytes (little endian) count the saves requested from outside."""
        return self.folder / "requests"

    def health(self, *, hold_seconds: float = 0.0) -> Health:
        """Return who answers; an idle keeper promises not to leave for `hold_seconds`."""
        found = self._get("/healthz", Health, {"hold_seconds": hold_seconds})
        if found.protocol != PROTOCOL:
            raise ConfigError(
                f"the keeper in {self.folder} (process {found.pid}, relight {found.version}) speaks protocol "
                f"{found.protocol}, this relight {PROTOCOL}; stop it with `relight keeper stop`",
                path=str(self.folder),
            )
        return found

    def attach(self, request: AttachRequest) -> AttachReply:
        """Announce a rank; its process is watched from now on."""
        return self._post("/attach", request, AttachReply)

    def acquire(
        self,
        rank: int,
        *,
        timeout_seconds: float,
        num_slots: int = 2,
        capacity_bytes: int | None = None,
        holding: tuple[int, ...] | None = None,
    ) -> int | None:
        """Return the index of a slot that `rank` may write to, or None if none became free within `timeout_seconds`.

        The slot stays the rank's until it is sealed or released, or the process ends. What was lent to this rank
        beyond `holding` is taken back first: the keeper may have died, or the answer got lost, after it was lent.
        """
        request = AcquireRequest(
            rank=rank,
            timeout_seconds=timeout_seconds,
            num_slots=num_slots,
            capacity_bytes=capacity_bytes,
            holding=holding,
        )
        try:
            return self._post("/acquire", request, AcquireReply, waits_seconds=timeout_seconds).slot
        except errors.WaitTimeoutError:
            return None

    def release(self, rank: int, slot: int) -> None:
        """Give back an acquired slot without a snapshot in it."""
        self._post("/release", SlotRequest(rank=rank, slot=slot), dict)

    def seal(self, rank: int, slot: int) -> SealReply:
        """Tell that the slot is sealed; it is digested and drained from here on without this process."""
        return self._post("/seal", SlotRequest(rank=rank, slot=slot), SealReply)

    def status(self) -> KeeperStatus:
        """Return everything the keeper knows."""
        return self._get("/status", KeeperStatus)

    def wait(
        self, step: int, generation: int, *, tier: str | None = None, timeout_seconds: float
    ) -> WaitReply:
        """Wait until the step is committed, failed or skipped on `tier` (default: the last one).

        Returns:
            Where it stands then, or when `timeout_seconds` have passed.
        """
        left_seconds = timeout_seconds
        while True:
            poll_seconds = min(left_seconds, _POLL_SECONDS)
            query: dict[str, object] = {"step": step, "generation": generation, "timeout": poll_seconds}
            if tier is not None:
                query["tier"] = tier
            reply = self._get("/wait", WaitReply, query, waits_seconds=poll_seconds)
            left_seconds -= poll_seconds
            if reply.state in ("committed", "verified", "failed", "skipped") or left_seconds <= 0:
                return reply

    def inventory(self, *, timeout_seconds: float = 60.0) -> tuple[HeldSnapshot, ...]:
        """Return the snapshots that can be read from memory, once all sealed ones have digests."""
        query = {"timeout": timeout_seconds}
        return self._get("/inventory", Inventory, query, waits_seconds=timeout_seconds).snapshots

    def detach(self, rank: int, *, pid: int, clean: bool) -> None:
        """Leave; the keeper goes once all ranks left cleanly and everything is stored."""
        self._post("/detach", DetachRequest(rank=rank, pid=pid, clean=clean), dict)

    def request_save(self) -> int:
        """Ask all ranks for a save at their next step; return how many saves were requested so far."""
        return self._post("/request-save", None, SaveRequested).num_save_requests

    def stop(self, *, drain: bool) -> None:
        """Make the keeper stop; returns at once."""
        self._post("/stop", StopRequest(drain=drain), dict)

    def metrics(self) -> str:
        """Return the keeper's metrics in the Prometheus text format."""
        return self._ask("GET", "/metrics", None, 0.0).decode()

    def close(self) -> None:
        """Close this thread's connection; the next call opens a new one."""
        connection = getattr(self._local, "connection", None)
        self._local.connection = None
        if connection is not None and connection.pid == os.getpid():
            connection.close()

    def _get(
        self, path: str, kind: type[T], query: dict[str, Any] | None = None, *, waits_seconds: float = 0.0
    ) -> T:
        target = f"{path}?{urlencode(query)}" if query else path
        return self._decode(self._ask("GET", target, None, waits_seconds), kind)

    def _post(
        self, path: str, body: msgspec.Struct | None, kind: type[T], *, waits_seconds: float = 0.0
    ) -> T:
        encoded = b"{}" if body is None else msgspec.json.encode(body)
        return self._decode(self._ask("POST", path, encoded, waits_seconds), kind)

    def _decode(self, data: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.MsgspecError as error:
            raise KeeperUnavailableError(
                f"the keeper in {self.folder} gave no answer to read: {error}"
            ) from error

    def _ask(self, method: str, target: str, body: bytes | None, waits_seconds: float) -> bytes:
        reused, connection = self._connection(waits_seconds)
        try:
            status, data = self._exchange(connection, method, target, body)
        except (ConnectionError, http.client.HTTPException, OSError) as error:
            self.close()
            if reused and not isinstance(error, TimeoutError):
                # The keeper that this connection led to is gone; a new one may listen under the same name.
                return self._ask(method, target, body, waits_seconds)
            raise KeeperUnavailableError(
                f"the keeper in {self.folder} does not answer: {error!r}", path=str(self.folder)
            ) from error
        except BaseException:
            # Interrupted in the middle: the next answer on this connection would be this one's.
            self.close()
            raise
        if status >= 400:
            raise _error_of(status, data)
        return data

    def _connection(self, waits_seconds: float) -> tuple[bool, _UnixConnection]:
        timeout_seconds = self.timeout_seconds + waits_seconds
        connection: _UnixConnection | None = getattr(self._local, "connection", None)
        # A forked child must not talk on its parent's connection.
        if connection is not None and connection.sock is not None and connection.pid == os.getpid():
            connection.timeout = timeout_seconds
            connection.sock.settimeout(timeout_seconds)
            return True, connection
        self._local.connection = connection = _UnixConnection(socket_path(self.folder), timeout_seconds)
        return False, connection

    def _exchange(
        self, connection: _UnixConnection, method: str, target: str, body: bytes | None
    ) -> tuple[int, bytes]:
        headers = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, target, body=body, headers=headers)
        response = connection.getresponse()
        data = response.read(_REPLY_MAX_BYTES)
        if not response.isclosed():
            raise http.client.HTTPException(f"an answer of more than {_REPLY_MAX_BYTES} bytes")
        return response.status, data


def _error_of(status: int, data: bytes) -> RelightError:
    try:
        reply = msgspec.json.decode(data, type=ErrorReply)
    except msgspec.MsgspecError:
        return KeeperUnavailableError(f"the keeper answered with status {status}")
    kind = getattr(errors, reply.error, None)
    if not isinstance(kind, type) or not issubclass(kind, RelightError):
        kind = KeeperUnavailableError if status >= 500 else ConfigError
    return kind(reply.message)
