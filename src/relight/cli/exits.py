"""Exit codes, and the one place that turns errors into a line on stderr and a code."""

from __future__ import annotations

import sys

from relight.errors import (
    ConfigError,
    CopyError,
    MissingCopyError,
    RelightError,
    RetryableError,
    StopError,
)

__all__ = ["EXIT_CODES", "FOUND", "OK", "STOP", "UNAVAILABLE", "USAGE", "report", "warn"]

OK = 0
FOUND = 1
USAGE = 2
UNAVAILABLE = 3
STOP = 4

EXIT_CODES = """\
Exit codes: 0 all is well; 1 a problem or a difference was found; 2 wrong usage, or nothing there;
3 storage or keeper unavailable (try again); 4 stop and look."""


def report(error: RelightError) -> int:
    """Print `error` as one line on stderr and return the exit code for it."""
    print(f"relight: {' '.join(str(error).split())}", file=sys.stderr)
    match error:
        case MissingCopyError() | ConfigError():
            return USAGE
        case CopyError():
            return FOUND
        case RetryableError():
            return UNAVAILABLE
        case StopError():
            return STOP
        case _:
            return FOUND


def warn(message: str) -> None:
    """Print one line on stderr that does not change the exit code."""
    print(f"relight: warning: {' '.join(message.split())}", file=sys.stderr)
