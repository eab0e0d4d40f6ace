"""One command line: which verb, its arguments read by cyclopts, its errors as a line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import relight
from relight.cli.exits import EXIT_CODES, OK, USAGE, report
from relight.cli.verbs import choose_verb, load_verb, overview
from relight.errors import RelightError

__all__ = ["run"]

_INTERRUPTED = 130


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code; errors go to stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(words)
        sys.stdout.flush()
    except RelightError as error:
        return report(error)
    except BrokenPipeError:
        # The reader (head, less) has seen enough; nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return _INTERRUPTED
    return code


def _run(words: list[str]) -> int:
    # The overview answers before anything is loaded that could take a while.
    if words in ([], ["--help"], ["-h"], ["help"]):
        print(overview())
        return OK
    if words == ["--version"]:
        print(f"relight {relight.__version__}")
        return OK
    verb, rest = choose_verb(words)
    from cyclopts import App, CycloptsError

    app = App(
        name=f"relight {verb}",
        help_epilogue=EXIT_CODES,
        help_format="plaintext",
        version_flags=(),
        suppress_keyboard_interrupt=False,
    )
    app.default(load_verb(verb))
    try:
        code = app(rest, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        print(f"relight {verb}: {' '.join(str(error).split())}", file=sys.stderr)
        print(f"try: relight {verb} --help", file=sys.stderr)
        return USAGE
    # None: help was asked for.
    return code if isinstance(code, int) else OK
