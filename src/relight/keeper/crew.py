"""Named threads that work off a queue; an error in a task is recorded and ends the task, never the thread."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["Crew"]

_log = logging.getLogger("relight.keeper")

Task = Callable[[], None]


class Crew:
    """A few threads that share one queue. Started at the first task; `close` ends them.

    Args:
        name: threads are called ``<name>-0``, ``<name>-1``, ...
        num_threads: how many tasks may run at once.
        nice: added to the threads' nice value where the system allows it per thread.
        newest_first: take the task that was put last; may be changed at any time.
        on_error: called in the thread with every error that a task did not handle.
        on_death: called in the thread when it ends by anything but `close`.
    """

    def __init__(
        self,
        name: str,
        num_threads: int,
        *,
        on_error: Callable[[str, Exception], None],
        on_death: Callable[[str, BaseException], None],
        nice: int = 0,
        newest_first: bool = False,
    ) -> None:
        self.name = name
        self.newest_first = newest_first
        self._num_threads = num_threads
        self._nice = nice
        self._on_error = on_error
        self._on_death = on_death
        self._tasks: deque[Task] = deque()
        self._changed = threading.Condition()
        self._num_active = 0
        self._is_closing = False
        self._threads: list[threading.Thread] = []

    @property
    def is_busy(self) -> bool:
        """Whether a task is queued or running."""
        with self._changed:
            return bool(self._tasks) or self._num_active > 0

    def put(self, task: Task) -> None:
        """Queue `task`; after `close` it is dropped."""
        with self._changed:
            if self._is_closing:
                return
            self._tasks.append(task)
            if len(self._threads) < min(self._num_threads, self._num_active + len(self._tasks)):
                self._start_thread()
            self._changed.notify_all()

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Return True once nothing is queued or running, False when that takes longer than `timeout_seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._tasks and not self._num_active, timeout_seconds)

    def close(self, *, timeout_seconds: float) -> bool:
        """Drop what is queued and wait for what runs; return whether all threads have ended."""
        with self._changed:
            self._is_closing = True
            self._tasks.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _start_thread(self) -> None:
        # Daemons: a write that hangs on a dead file system must not keep the process from leaving.
        name = f"{self.name}-{len(self._threads)}"
        thread = threading.Thread(target=self._live, args=(name,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _live(self, name: str) -> None:
        try:
            _be_nice(self._nice)
            self._work(name)
        except BaseException as error:
            self._on_death(name, error)
            raise

    def _work(self, name: str) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._tasks) or self._is_closing)
                if not self._tasks:
                    return
                task = self._tasks.pop() if self.newest_first else self._tasks.popleft()
                self._num_active += 1
            try:
                task()
            except Exception as error:  # noqa: BLE001 - the boundary of a task; recorded
                _log.exception("%s: a task failed", name)
                self._on_error(name, error)
            finally:
                # Its frames may hold views of slots; they must not live until the next task comes.
                del task
                with self._changed:
                    self._num_active -= 1
                    self._changed.notify_all()


def _be_nice(nice: int) -> None:
    if nice:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
        except OSError as error:
            _log.info("thread priority stays as it is: %s", error)
