"""The bar on stderr that says how far a verb is, which reads or writes a lot."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress"]


@contextmanager
def progress(doing: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr if that is a terminal; give what to call with each number of bytes done."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn(doing), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)
