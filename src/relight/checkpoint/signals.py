"""How a process ends: signal handlers that leave the user's own in place, and a failing exit code."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

__all__ = ["SignalHook", "leave_with_failure"]


def leave_with_failure() -> NoReturn:
    """End the process with exit code 1 from within an atexit handler, whose errors the interpreter only prints.

    The handlers that are still to come run first.
    """
    atexit._run_exitfuncs()  # noqa: SLF001 - the public way would need to end this handler first
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(1)


class SignalHook:
    """Call `act` when the signal arrives, then what handled it before.

    Where nothing did and the signal's default is to end the process (`is_final`), it ends as by that signal. Only
    the main thread can install handlers; elsewhere this does nothing. A forked child does not act.
    """

    def __init__(self, number: signal.Signals, act: Callable[[], None], *, is_final: bool) -> None:
        self._number = number
        self._act = act
        self._is_final = is_final
        self._pid = os.getpid()
        self._previous: Any = None
        self.is_installed = threading.current_thread() is threading.main_thread()
        if self.is_installed:
            self._previous = signal.signal(number, self._handle)

    def remove(self) -> None:
        """Put the previous handler back, unless somebody installed another one since."""
        if not self.is_installed or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(self._number) == self._handle:
            signal.signal(self._number, self._previous if self._previous is not None else signal.SIG_DFL)
        self.is_installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_ours = os.getpid() == self._pid
        if is_ours:
            self._act()
        if callable(self._previous):
            self._previous(number, frame)
        elif self._is_final and self._previous in (signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
