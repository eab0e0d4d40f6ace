"""One save of one rank, and what all ranks must agree on before it counts."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import torch

from relight.checkpoint import context
from relight.checkpoint.replicas import Digests, summary
from relight.checkpoint.save_plan import SavePlan
from relight.checkpoint.sharding import Kind
from relight.checkpoint.snapshot import Snapshot
from relight.checkpoint.table import StateTable
from relight.errors import DesyncError, OwnershipError
from relight.keeper.arena import ArenaSlot
from relight.manifest.manifest import Generation, RecordDraft, digest_block

__all__ = ["Outcome", "SaveJob", "check_votes", "compared_digests", "vote"]

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
        replicas: digests of the tensors that other ranks should hold too.
        equal: kinds of what belongs to each rank that all ranks were found to hold equal.
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
    replicas: Digests = field(default_factory=dict)
    equal: frozenset[Kind] = frozenset()
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
            image_bytes=self.plan.image.image_bytes,
            saved_at=self.saved_at,
            context=msgspec.Raw(context.dumps(self.final_parts())),
            metrics=self.metrics,
            index=self.plan.index(self.equal),
            layouts=self.plan.layouts if rank == 0 else (),
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
    digests: dict[str, str] = {}
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
        "replicas": summary(job.replicas),
        "next": proposal,
    }


def check_votes(votes: list[dict[str, Any]]) -> tuple[str, ...]:
    """Check that all ranks speak of the same save.

    Args:
        votes: of all ranks, by rank.

    Returns:
        Names of parts that should be equal on all ranks and are not (a schedule went astray).

    Raises:
        DesyncError: ranks differ in root, step, generation or layout.
        OwnershipError: extra values or settings differ that were not marked as per-rank.
    """
    for name, what in (("roots", "checkpoint roots"), ("step", "steps"), ("generation", "generations")):
        if any(other[name] != votes[0][name] for other in votes):
            listed = "; ".join(f"rank {rank}: {_text(other[name])}" for rank, other in enumerate(votes))
            raise DesyncError(f"ranks save to different {what}: {listed}")
    if any(other["layout"] != votes[0]["layout"] for other in votes):
        odd = [rank for rank, other in enumerate(votes) if other["layout"] != votes[0]["layout"]]
        raise DesyncError(
            f"tensors differ in name, dtype, shape or layout between rank 0 and ranks {odd}; "
            "what ranks share must be the same on all of them"
        )
    names = sorted({name for other in votes for name in other["digests"]})
    differ = [name for name in names if len({other["digests"].get(name) for other in votes}) > 1]
    mistakes = [name for name in differ if name.startswith("extra.") or name == "settings"]
    if mistakes:
        raise OwnershipError(
            f"values that count as equal on all ranks differ between ranks: {', '.join(mistakes)}; wrap values that "
            "belong to one rank: extra={name: relight.PerRank(value)}",
            path=mistakes[0],
        )
    return tuple(differ)


def _text(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)
