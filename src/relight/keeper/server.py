"""The keeper's wires: one aiohttp application on a Unix socket, and the loop that keeps the keeper alive.

The only file that imports aiohttp. Nothing here decides: requests go to `Node`, and so does every second.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import msgspec
from aiohttp import web

from relight.errors import ConfigError, KeeperUnavailableError, RelightError, WaitTimeoutError
from relight.keeper.ledger import FINAL_STATES
from relight.keeper.messages import (
    AcquireReply,
    AcquireRequest,
    AttachRequest,
    DetachRequest,
    Empty,
    ErrorReply,
    Inventory,
    SaveRequested,
    SlotRequest,
    StopRequest,
    WaitReply,
)
from relight.keeper.metrics import format_metrics
from relight.keeper.node import Node
from relight.keeper.slots import StepKey

__all__ = ["EXIT_NOT_DRAINED", "KeeperServer", "serve"]

EXIT_NOT_DRAINED = 75
"""Exit code after SIGTERM when the newest complete step could not be stored in time."""

_log = logging.getLogger("relight.keeper")

_BODY_MAX_BYTES = 256 * 1024
_KEEP_ALIVE_SECONDS = 30 * 86400.0
_WAIT_MAX_SECONDS = 600.0
_LOOK_UP_SECONDS = 1.0
_TICK_SECONDS = 1.0
_BUSY_TICK_SECONDS = 0.1

T = TypeVar("T")
Endpoint = Callable[[web.Request], Awaitable[web.StreamResponse]]


class KeeperServer:
    """HTTP in front of a `Node`: decode, ask, encode; long polls wait for changes."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._lookups = ThreadPoolExecutor(1, thread_name_prefix="relight-lookup")
        node.journal.on_change = self._tell_change
        self.woken = asyncio.Event()

    def application(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=_BODY_MAX_BYTES, middlewares=[_check_peer, _name_errors])
        app.add_routes(
            [
                web.get("/healthz", self._health),
                web.get("/status", self._status),
                web.get("/metrics", self._metrics),
                web.get("/wait", self._wait),
                web.get("/inventory", self._inventory),
                web.post("/attach", self._attach),
                web.post("/acquire", self._acquire),
                web.post("/release", self._release),
                web.post("/seal", self._seal),
                web.post("/detach", self._detach),
                web.post("/request-save", self._request_save),
                web.post("/stop", self._stop),
            ]
        )
        return app

    def close(self) -> None:
        """Tell no more changes; long polls end when the application does."""
        self.node.journal.on_change = lambda: None
        self._lookups.shutdown(wait=False, cancel_futures=True)

    async def _health(self, request: web.Request) -> web.Response:
        return _json(self.node.health(hold_seconds=_number(request, "hold_seconds", 0.0)))

    async def _status(self, _: web.Request) -> web.Response:
        return _json(self.node.status())

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=format_metrics(self.node.status()), content_type="text/plain")

    async def _attach(self, request: web.Request) -> web.Response:
        return _json(self.node.attach(await _body(request, AttachRequest)))

    async def _acquire(self, request: web.Request) -> web.Response:
        wish = await _body(request, AcquireRequest)
        index = await self._until(lambda: self.node.acquire(wish), wish.timeout_seconds)
        if index is None:
            raise WaitTimeoutError(f"no slot of rank {wish.rank} became free in {wish.timeout_seconds:g} s")
        return _json(AcquireReply(slot=index))

    async def _release(self, request: web.Request) -> web.Response:
        self.node.release(await _body(request, SlotRequest))
        return _json({})

    async def _seal(self, request: web.Request) -> web.Response:
        return _json(self.node.seal(await _body(request, SlotRequest)))

    async def _detach(self, request: web.Request) -> web.Response:
        self.node.detach(await _body(request, DetachRequest))
        self.woken.set()
        return _json({})

    async def _request_save(self, request: web.Request) -> web.Response:
        await _body(request, Empty)
        return _json(SaveRequested(num_save_requests=self.node.save_requests.add()))

    async def _stop(self, request: web.Request) -> web.Response:
        self.node.stop_wish = "drain" if (await _body(request, StopRequest)).drain else "now"
        self.woken.set()
        return _json({})

    async def _inventory(self, request: web.Request) -> web.Response:
        self.node.upkeep.rescan()
        await self._until(lambda: self.node.inventory()[1] or None, _number(request, "timeout", 60.0))
        return _json(Inventory(snapshots=self.node.inventory()[0]))

    async def _wait(self, request: web.Request) -> web.Response:
        key = self.node.key(int(_number(request, "step")), int(_number(request, "generation")))
        tier = request.query.get("tier")
        if self.node.state(key, tier).state == "unknown":
            found = await self._look_up(key, tier, _number(request, "timeout", 0.0))
            if found is not None:
                return _json(found)

        def ended() -> WaitReply | None:
            reply = self.node.state(key, tier)
            return reply if reply.state in FINAL_STATES else None

        reply = await self._until(ended, _number(request, "timeout", 0.0))
        return _json(reply if reply is not None else self.node.state(key, tier))

    async def _look_up(self, key: StepKey, tier: str | None, timeout_seconds: float) -> WaitReply | None:
        """Ask the tier itself, in a thread: one that hangs must cost the caller no more than its timeout."""
        found = self._loop.run_in_executor(self._lookups, self.node.look_up, key, tier)
        with suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(found), max(timeout_seconds, _LOOK_UP_SECONDS))
        return None

    async def _until(self, found: Callable[[], T | None], timeout_seconds: float) -> T | None:
        """Return what `found` returns as soon as it is not None, or None after the timeout."""
        deadline = time.monotonic() + min(timeout_seconds, _WAIT_MAX_SECONDS)
        while True:
            changed = self._changed
            result = found()
            left_seconds = deadline - time.monotonic()
            if result is not None or left_seconds <= 0:
                return result
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left_seconds)

    def _tell_change(self) -> None:
        # Called from any thread, also from this one; after the loop's end there is nobody to tell.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._pulse)

    def _pulse(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def serve(
    node: Node, listener: socket.socket, *, on_ready: Callable[[], None], on_tick: Callable[[], None]
) -> int:
    """Answer on `listener` until the keeper has to go; return its exit code.

    On return nobody is answered any more, threads have ended, and the slots are gone if nothing needs them.
    """
    server = KeeperServer(node)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, _terminate, node, server)
    runner = web.AppRunner(
        server.application(), access_log=None, keepalive_timeout=_KEEP_ALIVE_SECONDS, shutdown_timeout=1.0
    )
    await runner.setup()
    node.start()
    await web.SockSite(runner, listener).start()
    on_ready()
    try:
        while True:
            seconds = _BUSY_TICK_SECONDS if node.may_leave_soon else _TICK_SECONDS
            with suppress(TimeoutError):
                await asyncio.wait_for(server.woken.wait(), seconds)
            server.woken.clear()
            action = node.tick()
            on_tick()
            if action in ("leave", "leave_clean"):
                break
        # Whoever asks from here on must start another keeper.
        node.is_leaving = True
        code = _exit_code(node)
    finally:
        server.close()
        await runner.cleanup()
    node.close(clean=action == "leave_clean")
    return code


def _terminate(node: Node, server: KeeperServer) -> None:
    _log.info("SIGTERM: %g s to drain", node.settings.term_grace_seconds)
    node.terminate()
    server.woken.set()


def _exit_code(node: Node) -> int:
    if not node.is_terminating:
        return 0
    if node.is_newest_stored():
        _log.info("after SIGTERM: the newest complete step is stored")
        return 0
    _log.error("after SIGTERM: the newest complete step could not be stored in time")
    return EXIT_NOT_DRAINED


@web.middleware
async def _check_peer(request: web.Request, handler: Endpoint) -> web.StreamResponse:
    transport = request.transport
    peer = transport.get_extra_info("socket") if transport is not None else None
    if peer is None:
        raise web.HTTPForbidden
    _, uid, _ = struct.unpack(
        "3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    if uid != os.getuid():
        return _refuse(403, "ConfigError", f"user {uid} may not talk to the keeper of user {os.getuid()}")
    return await handler(request)


@web.middleware
async def _name_errors(request: web.Request, handler: Endpoint) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _refuse(error.status, "ConfigError", f"{request.method} {request.path}: {error.reason}")
    except KeeperUnavailableError as error:
        return _refuse(503, type(error).__name__, str(error))
    except ConfigError as error:
        return _refuse(400, type(error).__name__, str(error))
    except RelightError as error:
        return _refuse(409, type(error).__name__, str(error))


def _refuse(status: int, error: str, message: str) -> web.Response:
    return _json(ErrorReply(error=error, message=message), status=status)


def _json(body: object, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


async def _body(request: web.Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{request.path}: {error}") from error


def _number(request: web.Request, name: str, default: float | None = None) -> float:
    text = request.query.get(name)
    try:
        if text is not None:
            return float(text)
    except ValueError as error:
        raise ConfigError(f"{request.path}: {name}={text!r} is not a number") from error
    if default is None:
        raise ConfigError(f"{request.path}: {name} is missing")
    return default
