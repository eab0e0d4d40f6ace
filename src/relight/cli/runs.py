"""What the verbs share: opening a run, choosing a step, and printing as table or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from relight.cli.exits import warn
from relight.errors import MissingCopyError

if TYPE_CHECKING:
    from relight.manifest.catalog import Catalog, CheckpointInfo, Inventory

__all__ = ["choose_step", "open_run", "plain", "print_json", "print_table", "warn_of"]

_TEXT_CHARS = 60


def open_run(url: str) -> tuple[Catalog, Inventory]:
    """Return the catalog of the run at `url` and what is stored there.

    Raises:
        MissingCopyError: there is no run.
        ConfigError: `url` cannot be read.
    """
    from relight.manifest.catalog import Catalog
    from relight.manifest.names import parse_step_dir
    from relight.storage.backend import open_backend

    catalog = Catalog(open_backend(url))
    inventory = catalog.survey()
    if (
        inventory.checkpoints
        or inventory.incomplete
        or inventory.problems
        or inventory.lineage.newest is not None
    ):
        return catalog, inventory
    place = PurePath(url)
    if parse_step_dir(place.name) is not None:
        raise MissingCopyError(f"{url} is one checkpoint; give the root of its run: {place.parent}", path=url)
    raise MissingCopyError(
        f"{catalog.backend.url} holds no checkpoints of relight; give the root of a run", path=url
    )


def choose_step(
    inventory: Inventory, url: str, step: int | None, generation: int | None = None
) -> CheckpointInfo:
    """Return the newest restorable checkpoint, or the one of `step`; of two generations the one that counts.

    Raises:
        MissingCopyError: there is none.
    """
    fitting = [
        info
        for info in inventory.checkpoints
        if step in (None, info.step) and generation in (None, info.generation)
    ]
    if not fitting:
        known = sorted({info.step for info in inventory.checkpoints})
        listed = ", ".join(map(str, known[-5:])) or "none"
        what = "no checkpoint is committed" if step is None else f"step {step} is not committed"
        raise MissingCopyError(
            f"{url}: {what}; the newest committed steps are: {listed}", step=step, path=url
        )
    return next((info for info in fitting if info.on_lineage), fitting[0])


def warn_of(inventory: Inventory) -> None:
    """Print what could not be read as warnings."""
    for problem in inventory.problems:
        warn(problem.message)


def print_json(value: Any) -> None:
    """Print `value` as JSON on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print rows under headings, fitted to the terminal; in a pipe at full width and without lines or colours.

    Args:
        columns: the headings.
        rows: cells as text, one per column.
        right: headings of the columns to align right.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not sys.stdout.isatty():
        widths = [max(len(row[at]) for row in [columns, *rows]) for at in range(len(columns))]
        for row in [columns, *rows]:
            cells = [
                cell.rjust(width) if column in right else cell.ljust(width)
                for column, cell, width in zip(columns, row, widths, strict=True)
            ]
            print("  ".join(cells).rstrip())
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def plain(value: Any) -> Any:
    """Return typed JSON of a context as plain values to look at: tuples become lists, long content its size."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if not isinstance(value, dict):
        return f"{value[:_TEXT_CHARS]}..." if isinstance(value, str) and len(value) > _TEXT_CHARS else value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: plain(item) for key, item in value.items()}
    [(tag, inner)] = value.items()
    match tag:
        case "$tuple" | "$set" | "$frozenset" | "$size":
            return plain(inner)
        case "$int":
            return int(inner, 16)
        case "$bytes" | "$bytearray":
            return f"<{tag[1:]}, {len(inner) * 3 // 4} bytes>"
        case "$dict" if isinstance(inner, list):
            return {str(plain(key)): plain(item) for key, item in inner}
        case _:
            return f"<{tag[1:]} {json.dumps(inner)[:_TEXT_CHARS]}>"
