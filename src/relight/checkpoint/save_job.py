"""One save of one rank, and what all ranks must agree on before it counts."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import torch

from relight.checkpoint import context
from relight.checkpoint.save_plan import SavePlan
from relight.checkpoint.snapshot import Snapshot
from relight.checkpoint.state import StateTable
from relight.errors import DesyncError, OwnershipError
from relight.keeper.arena import ArenaSlot
from relight.manifest.manifest import Generation, RecordDraft, digest_block

__all__ = ["Comparison", "Outcome", "SaveJob", "check_votes", "compared_digests", "sampled_digests", "vote"]

REPLICA = "replica "
"""Prefix of the names of sampled tensors among the digests of a vote."""

_SAMPLE_ROWS_BYTES = 12288

Outcome = Literal["pending", "sealed", "skipped", "torn", "failed", "committed"]
"""What became of a save; "sealed" is on its way to the tiers, "committed" is durable on the last one."""


@dataclass(slots=True)
class SaveJob:
    """One save of this rank, from the call to the end of its snapshot.

    Attributes:
        step: number of optimizer steps done at the call.
        saved_at: wall-clock seconds of the call.
        metrics: what the user passed, by value.
        snapshot: None when there was no free slot: the rank then votes for skipping.
        digests: of everything that must be equal on all ranks, by name.
        schedule: schedulers and parameter groups as they are at release, if they moved after the call.
        copied: the live tensors are no longer needed.
        is_sealed: the slot is sealed; whatever happens now, the keeper that finds it stores it.
        released: the training loop has come far enough for the snapshot to be sealed.
        done: sealed, dropped or failed.
    """

    step: int
    saved_at: float
    metrics: dict[str, float]
    table: StateTable
    plan: SavePlan
    snapshot: Snapshot | None
    slot: ArenaSlot | None
    slot_index: int
    is_blocking: bool
    digests: dict[str, str] = field(default_factory=dict)
    replicas_differ: tuple[str, ...] = ()
    outcome: Outcome = "pending"
    is_sealed: bool = False
    message: str = ""
    stall_seconds: float = 0.0
    schedule: dict[str, Any] | None = None
    schedule_counts: tuple[int, ...] = ()
    copied: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    def draft(self, generation: Generation, *, rank: int, world_size: int) -> RecordDraft:
        """Return what this rank knows of its snapshot, to be sealed with it."""
        return RecordDraft(
            run=generation.run,
            step=self.step,
            generation=generation.generation,
            parent=generation.parent,
            rank=rank,
            world_size=world_size,
            layout=self.plan.fingerprint,
            image_bytes=self.plan.layout.image_bytes,
            saved_at=self.saved_at,
            context=msgspec.Raw(context.dumps(self.final_parts())),
            metrics=self.metrics,
            index=self.plan.index,
            aliases=self.table.aliases if rank == 0 else {},
            local=self.plan.local,
            replicas_differ=self.replicas_differ,
        )

    def final_parts(self) -> dict[str, Any]:
        """Return the context to store: as at the call, with the schedule as it was at release."""
        parts = dict(self.table.parts)
        for key, value in (self.schedule or {}).items():
            parts[key] = {**parts[key], "groups": value} if key.partition(".")[0] == "optimizer" else value
        return parts


def compared_digests(table: StateTable) -> dict[str, str]:
    """Return name -> digest of each value that must be equal on all ranks, tensors inside extras included."""
    digests = {}
    for name, value in table.compared.items():
        whole = [context.dumps(value)]
        prefix = f"{name}/"
        if name.startswith(("extra.", "scaler", "scheduler")):
            whole += [
                _tensor_bytes(tensor)
                for key, tensor in zip(table.keys, table.tensors, strict=True)
                if key.startswith(prefix)
            ]
        digests[name] = digest_block(b"\0".join(whole))[:16]
    return digests


class Comparison:
    """What the ranks compare over a run: small values at every save, some rows of each tensor when the plan is new."""

    def __init__(self, world_size: int, *, is_fresh: bool) -> None:
        self._world_size = world_size
        self._is_fresh = is_fresh
        self._plan: SavePlan | None = None

    def digests(self, table: StateTable, plan: SavePlan) -> dict[str, str]:
        """Return this rank's digests; nothing with one rank."""
        if self._world_size == 1:
            return {}
        is_new, self._plan = plan is not self._plan, plan
        return compared_digests(table) | (sampled_digests(table) if is_new else {})

    def check(self, votes: list[dict[str, Any]]) -> tuple[str, ...]:
        """Check the votes of all ranks; see `check_votes`."""
        is_fresh, self._is_fresh = self._is_fresh, False
        return check_votes(votes, is_fresh=is_fresh)


def sampled_digests(table: StateTable) -> dict[str, str]:
    """Return name -> digest of some rows of each replicated tensor, to find ranks that do not hold the same model.

    At most `_SAMPLE_ROWS_BYTES` of each, from its start, middle and end.
    """
    digests = {}
    for key, tensor, is_mine in zip(table.keys, table.tensors, table.is_per_rank, strict=True):
        if not is_mine and tensor.numel():
            flat = tensor.detach().reshape(-1)
            num = max(1, _SAMPLE_ROWS_BYTES // (3 * flat.element_size()))
            starts = (0, max(0, (flat.numel() - num) // 2), max(0, flat.numel() - num))
            parts = [_tensor_bytes(flat[start : start + num]) for start in starts]
            digests[f"{REPLICA}{key}"] = digest_block(b"".join(parts))[:12]
    return digests


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def vote(
    job: SaveJob, *, roots: tuple[str, ...], generation: int, is_ok: bool, proposal: Any
) -> dict[str, Any]:
    """Return what this rank tells the others about `job`."""
    return {
        "step": job.step,
        "roots": list(roots),
        "generation": generation,
        "layout": job.plan.fingerprint,
        "ok": is_ok,
        "digests": job.digests,
        "next": proposal,
    }


def check_votes(votes: list[dict[str, Any]], *, is_fresh: bool = False) -> tuple[str, ...]:
    """Check that all ranks speak of the same save.

    Args:
        votes: of all ranks, by rank.
        is_fresh: whether this is the first save of a run that restored nothing: tensors that differ then are no
            accident.

    Returns:
        Names of state that should be equal on all ranks and is not (a replica went astray).

    Raises:
        DesyncError: ranks differ in root, step, generation or layout.
        OwnershipError: extra values or settings differ that were not marked as per-rank; or, when `is_fresh`,
            the ranks hold different models.
    """
    for name, what in (("roots", "checkpoint roots"), ("step", "steps"), ("generation", "generations")):
        if any(other[name] != votes[0][name] for other in votes):
            listed = "; ".join(f"rank {rank}: {_text(other[name])}" for rank, other in enumerate(votes))
            raise DesyncError(f"ranks save to different {what}: {listed}")
    if any(other["layout"] != votes[0]["layout"] for other in votes):
        odd = [rank for rank, other in enumerate(votes) if other["layout"] != votes[0]["layout"]]
        raise DesyncError(f"replicated tensors differ in name, dtype or shape between rank 0 and ranks {odd}")
    names = sorted({name for other in votes for name in other["digests"]})
    differ = [name for name in names if len({other["digests"].get(name) for other in votes}) > 1]
    mistakes = [name for name in differ if name.startswith("extra.") or name == "settings"]
    if mistakes:
        raise OwnershipError(
            f"values that count as equal on all ranks differ between ranks: {', '.join(mistakes)}; wrap values that "
            "belong to one rank: extra={name: relight.PerRank(value)}",
            path=mistakes[0],
        )
    replicas = [name.removeprefix(REPLICA) for name in differ if name.startswith(REPLICA)]
    if replicas and is_fresh:
        raise OwnershipError(
            f"{len(replicas)} tensors differ between ranks that count as replicas of one model, such as "
            f"{replicas[0]}: start from equal values (DistributedDataParallel sees to it), or give each rank a "
            "Checkpointer root and a process group of its own",
            path=replicas[0],
        )
    return tuple(name.removeprefix(REPLICA) for name in differ)


def _text(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)
