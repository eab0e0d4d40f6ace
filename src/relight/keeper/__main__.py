"""The keeper's process: ``python -m relight.keeper --folder ARENA --root URL``. Started by `ensure_keeper`.

The process forks before it loads anything heavy, and ends once the fork serves (0), found another keeper at work (3),
or failed; so whoever started it knows, and the keeper is nobody's child.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import relight
from relight.keeper.arena import check_private
from relight.keeper.client import at_short_path, socket_path
from relight.keeper.process import (
    EXIT_BUSY,
    LINGER_SECONDS,
    KeeperFile,
    hold_lock,
    publish,
    remove_folder,
    trim_log,
    unpublish,
)

__all__ = ["main"]

_LOCK_SECONDS = 2.0
_PAUSE_SECONDS = 0.02
_BACKLOG = 512


def main(argv: Sequence[str] | None = None) -> int:
    """Run a keeper; in the forked process this never returns, it exits with the keeper's code."""
    options = _parse(argv)
    if options.foreground:
        return _run(options, on_ready=lambda _: None)
    read_end, write_end = os.pipe()
    if os.fork():
        os.close(write_end)
        told = os.read(read_end, 1)
        os._exit(told[0] if told else 1)
    os.close(read_end)

    def tell(code: int) -> None:
        os.write(write_end, bytes([code]))
        os.close(write_end)

    code = 1
    try:
        code = _run(options, on_ready=tell)
    except BaseException:
        logging.getLogger("relight.keeper").exception("the keeper ends by an error")
    finally:
        # Threads may hang in a dead file system; interpreter shutdown would wait for them.
        logging.shutdown()
        os._exit(code)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m relight.keeper", description="Hold and drain a run's snapshots."
    )
    parser.add_argument("--folder", type=Path, required=True, help="arena folder of the run")
    parser.add_argument("--root", required=True, help="absolute path or URL of the run's root")
    parser.add_argument(
        "--linger", type=float, default=LINGER_SECONDS, help="seconds that snapshots outlive lost workers"
    )
    parser.add_argument("--grace", type=float, default=30.0, help="seconds to drain after SIGTERM")
    parser.add_argument("--retry", type=float, default=60.0, help="seconds that a silent tier is tried again")
    parser.add_argument("--foreground", action="store_true", help="do not fork")
    return parser.parse_args(argv)


def _run(options: argparse.Namespace, *, on_ready: Callable[[int], None]) -> int:
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(threadName)s: %(message)s"
    )
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    folder: Path = options.folder
    check_private(folder)
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        with hold_lock(folder / "keeper.lock") as is_held:
            if is_held:
                return _serve(options, on_ready)
        if time.monotonic() > deadline:
            on_ready(EXIT_BUSY)
            return EXIT_BUSY
        time.sleep(_PAUSE_SECONDS)


def _serve(options: argparse.Namespace, on_ready: Callable[[int], None]) -> int:
    import asyncio

    from relight.keeper.drain import DrainSettings
    from relight.keeper.node import Node, NodeSettings
    from relight.keeper.server import serve

    folder: Path = options.folder
    unpublish(folder)
    node = Node(
        folder,
        options.root,
        version=relight.__version__,
        settings=NodeSettings(linger_seconds=options.linger, term_grace_seconds=options.grace),
        drain_settings=DrainSettings(retry_seconds=options.retry),
    )
    listener = _bind(folder)
    publish(
        folder,
        KeeperFile(pid=os.getpid(), started_at=time.time(), version=relight.__version__, root=options.root),
    )
    try:
        return asyncio.run(
            serve(
                node,
                listener,
                on_ready=lambda: on_ready(0),
                on_tick=lambda: trim_log(folder / "keeper.log"),
            )
        )
    finally:
        listener.close()
        unpublish(folder)
        if node.is_closed_clean:
            remove_folder(folder)


def _bind(folder: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path = socket_path(folder)
    at_short_path(path, listener.bind)
    os.chmod(path, 0o600)
    listener.listen(_BACKLOG)
    return listener


if __name__ == "__main__":
    sys.exit(main())
