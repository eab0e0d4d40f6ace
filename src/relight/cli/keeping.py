"""`relight prune`, `pin` and `unpin`: what stays and what goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from relight.cli.exits import OK, warn
from relight.cli.runs import choose_step, open_run, print_json, print_table, warn_of
from relight.errors import ConfigError

if TYPE_CHECKING:
    from relight.manifest.catalog import Inventory

__all__ = ["pin", "prune", "unpin"]


def prune(
    url: str,
    /,
    *,
    keep: int = 3,
    keep_every: int | None = None,
    keep_best: str | None = None,
    sparse_tail: bool = False,
    dry_run: bool = False,
    json: bool = False,
) -> int:
    """Remove checkpoints that need not be kept, and unfinished directories that nobody can need.

    Pinned checkpoints stay, and so does everything newer than the oldest of the newest verified ones that are kept.

    Args:
        url: Root of the run.
        keep: How many of the newest verified checkpoints stay.
        keep_every: Steps that are multiples of this stay too.
        keep_best: METRIC:min or METRIC:max; the best checkpoint by that metric stays too.
        sparse_tail: Keep older ones at distances that double.
        dry_run: Say what would go, and remove nothing.
        json: Print JSON instead of a table.
    """
    from relight.policy.checkpoint import RetentionRule

    rule = RetentionRule(
        keep=keep, keep_every=keep_every, keep_best=_best_rule(keep_best), sparse_tail=sparse_tail
    )
    catalog, inventory = open_run(url)
    warn_of(inventory)
    removals = catalog.plan_retention(rule)
    if not dry_run:
        # Asked once more under the hood: what is removed is decided on what is there then.
        gone = {(info.step, info.generation) for info in catalog.apply_retention(rule)}
        removals = [removal for removal in removals if (removal.step, removal.generation) in gone]
    if json:
        found = [{"step": r.step, "generation": r.generation, "reason": r.reason} for r in removals]
        print_json({"removed": found, "dry_run": dry_run})
        return OK
    sizes = {(info.step, info.generation): info.bytes for info in inventory.checkpoints}
    rows = [
        [str(r.step), str(r.generation), _size(sizes.get((r.step, r.generation), 0)), r.reason]
        for r in removals
    ]
    if rows:
        print_table(["step", "generation", "size", "why"], rows, right=["step", "generation", "size"])
    total = sum(sizes.get((r.step, r.generation), 0) for r in removals)
    print(f"{'would remove' if dry_run else 'removed'} {len(rows)} checkpoints, {_size(total)}")
    _warn_of_unverified(inventory, url, keep)
    return OK


def pin(url: str, step: int, /, *, generation: int | None = None) -> int:
    """Keep a checkpoint whatever the retention rules say.

    Args:
        url: Root of the run.
        step: Which checkpoint.
        generation: Of which generation, where several saved the same step.
    """
    catalog, inventory = open_run(url)
    info = choose_step(inventory, url, step, generation)
    catalog.pin(info.step, info.generation)
    print(f"pinned step {info.step} of generation {info.generation}")
    return OK


def unpin(url: str, step: int, /, *, generation: int | None = None) -> int:
    """Let the retention rules remove a checkpoint again.

    Args:
        url: Root of the run.
        step: Which checkpoint.
        generation: Of which generation, where several saved the same step.
    """
    catalog, inventory = open_run(url)
    info = choose_step(inventory, url, step, generation)
    catalog.unpin(info.step, info.generation)
    print(f"unpinned step {info.step} of generation {info.generation}")
    return OK


def _best_rule(text: str | None) -> tuple[str, Literal["min", "max"]] | None:
    if text is None:
        return None
    metric, _, better = text.rpartition(":")
    if not metric or better not in ("min", "max"):
        raise ConfigError(f"--keep-best {text}: write METRIC:min or METRIC:max, such as loss:min")
    return metric, cast("Literal['min', 'max']", better)


def _warn_of_unverified(inventory: Inventory, url: str, keep: int) -> None:
    lineage = [info for info in inventory.checkpoints if info.on_lineage]
    num_verified = sum(info.verified for info in lineage)
    if num_verified < min(keep, len(lineage)):
        warn(
            f"only {num_verified} of {len(lineage)} checkpoints are verified, and only those count; "
            f"`relight verify {url} --mark` checks and marks the others"
        )


def _size(num_bytes: int) -> str:
    from relight.units import format_bytes

    return format_bytes(num_bytes)
