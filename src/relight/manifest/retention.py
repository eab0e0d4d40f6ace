"""Removal: the manifest first, so that half a removal looks like nothing; and what of a tier may go."""

from __future__ import annotations

from collections.abc import Collection

from relight.manifest.inventory import CheckpointInfo, Inventory
from relight.manifest.names import manifest_name, record_name, step_dir
from relight.policy.checkpoint import Removal, RetentionRule, StoredCheckpoint, decide_retention
from relight.stages import reached
from relight.storage.backend import StorageBackend

__all__ = ["POINTS", "plan_retention", "removable_incomplete", "remove_step"]

POINTS = (
    "retention.decided",
    "remove.manifest_deleted",
    "remove.record_deleted",
    "remove.files_deleted",
)
"""Points announced while removing, in their order; the last three for each checkpoint."""


def plan_retention(
    inventory: Inventory, rule: RetentionRule, protect: Collection[tuple[int, int]]
) -> list[Removal]:
    """Return which committed checkpoints the rule removes, oldest first, with the reasons."""
    return decide_retention([_facts(info, inventory.run) for info in inventory.checkpoints], rule, protect)


def removable_incomplete(inventory: Inventory, protect: Collection[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the uncommitted step directories that nobody can need any more, oldest first.

    They are older than the newest commit, or of an older generation and off the lineage. One that may still be
    written (newer than the newest commit, and on the lineage) is never among them.
    """
    lineage = inventory.lineage
    newest = next((info for info in inventory.checkpoints if info.on_lineage), None)
    if newest is None or lineage.newest is None:
        return []
    return [
        (step, generation)
        for step, generation in inventory.incomplete
        if (step, generation) not in protect
        and generation <= lineage.newest
        and (step < newest.step or not lineage.holds(step, generation))
    ]


def remove_step(backend: StorageBackend, step: int, generation: int) -> None:
    """Remove a checkpoint or what is there of one; durable after return, absence is no error.

    Killed at any instant, what is left is either the whole checkpoint or one that does not exist and that no later
    `commit` brings back: rank 0's record goes before any image does.
    """
    backend.delete(manifest_name(step, generation))
    reached("remove.manifest_deleted")
    backend.delete(record_name(step, generation, 0))
    reached("remove.record_deleted")
    backend.delete(f"{step_dir(step, generation)}/")
    reached("remove.files_deleted")


def _facts(info: CheckpointInfo, run: str | None) -> StoredCheckpoint:
    return StoredCheckpoint(
        step=info.step,
        generation=info.generation,
        verified=info.verified,
        pinned=info.pinned,
        on_lineage=info.on_lineage,
        is_own=info.run == run,
        metrics=tuple(info.metrics.items()),
    )
