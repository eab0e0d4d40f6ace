"""What all ranks agree on before a save counts: one small gather, and one more only when replicas differ."""

from __future__ import annotations

import logging
from collections.abc import Callable

from relight.checkpoint.cadence import SavePace
from relight.checkpoint.group import RankGroup
from relight.checkpoint.replicas import (
    Difference,
    ReplicaCheck,
    ReplicaMode,
    differing_groups,
    equal_kinds,
    name_differences,
    texts,
)
from relight.checkpoint.save_job import SaveJob, check_votes, vote
from relight.errors import OwnershipError
from relight.manifest.manifest import Generation

__all__ = ["Agreement"]

log = logging.getLogger("relight.checkpoint")

_MAX_REPORTED = 100


class Agreement:
    """The agreements of one rank over a run; its methods belong to the snapshot thread.

    Args:
        roots: URLs that every rank must save to.
        pace: gives and takes the step of the next save.
        mode: how much of the replicas is compared.
        emit: records an event: kind, step, fields.
    """

    def __init__(
        self,
        group: RankGroup,
        *,
        roots: tuple[str, ...],
        generation: Generation,
        pace: SavePace,
        mode: ReplicaMode,
        emit: Callable[..., None],
    ) -> None:
        self._group = group
        self._roots = roots
        self._generation = generation
        self._pace = pace
        self._check = ReplicaCheck(group.world_size, mode)
        self._emit = emit
        # Replicas that differ at the first save of a run that restored nothing are no accident.
        self._is_fresh = generation.parent is None

    def look(self, job: SaveJob) -> None:
        """Take the digests of the replicas, after the copy and before training may change them."""
        slot = job.slot
        if slot is None or self._check.mode == "off":
            return
        places = {entry.at: entry for entry in job.plan.entries if job.plan.kinds[entry.at] != "shared"}

        def stored(at: int) -> memoryview | None:
            entry = places.get(at)
            if entry is None:
                return None
            return slot.image[entry.offset_bytes : entry.offset_bytes + entry.num_bytes]

        job.replicas = self._check.digests(job.table, job.plan, stored)

    def reach(self, job: SaveJob, *, is_ok: bool) -> bool:
        """Return whether all ranks take part in the save; settles when the next one is, and whether replicas differ.

        Raises:
            DesyncError: ranks differ in root, step, generation or layout, or one is gone.
            OwnershipError: values differ that were not marked as per-rank, or the ranks train different models.
        """
        mine = vote(
            job,
            roots=self._roots,
            generation=self._generation.generation,
            is_ok=is_ok,
            proposal=self._pace.propose(job.step),
        )
        votes = self._group.gather(mine)
        differ = check_votes(votes)
        found: tuple[Difference, ...] = ()
        everyone = all(one["ok"] for one in votes)
        if everyone and self._check.mode != "off":
            summaries = [one["replicas"] for one in votes]
            job.equal = equal_kinds(summaries, job.plan.mesh_layouts)
            groups = differing_groups(summaries, job.plan.layouts)
            if groups:
                found = self._name(job, groups)
                differ += texts(found)
            self._is_fresh = False
        if differ:
            self._report(job, differ, found)
        job.replicas_differ = differ
        self._pace.accept(votes[0]["next"])
        return everyone

    def _name(self, job: SaveJob, groups: list[str]) -> tuple[Difference, ...]:
        found = name_differences(self._group, job.replicas, groups, job.plan.layouts)
        if self._is_fresh:
            raise OwnershipError(
                f"{len(found)} tensors differ between ranks that count as replicas of one model, such as "
                f"{found[0]}: start from equal values (DistributedDataParallel sees to it), or give each rank a "
                "Checkpointer root and a process group of its own",
                path=found[0].key,
            )
        return found

    def _report(self, job: SaveJob, differ: tuple[str, ...], found: tuple[Difference, ...]) -> None:
        tensors = [{"key": one.key, "ranks": list(one.ranks)} for one in found[:_MAX_REPORTED]]
        self._emit("replicas_differ", job.step, keys=list(differ), tensors=tensors, num_tensors=len(found))
        log.warning(
            "relight: step %d: replicas differ in %s; restore will not choose this step unless asked to",
            job.step,
            ", ".join(differ[:3]),
        )
