"""What ranks and keeper say to each other: the bodies of requests and replies, as typed values.

Both sides import this file, so neither needs the other's dependencies. A body with an unknown field is refused.
"""

from __future__ import annotations

import os
from typing import Literal

import msgspec

__all__ = [
    "PROTOCOL",
    "RAM_TIER",
    "AcquireReply",
    "AcquireRequest",
    "AttachReply",
    "AttachRequest",
    "DetachRequest",
    "Empty",
    "ErrorReply",
    "FailureStatus",
    "Health",
    "HeldSnapshot",
    "Inventory",
    "KeeperStatus",
    "RankStatus",
    "RankTierStatus",
    "SaveRequested",
    "SealReply",
    "SlotRequest",
    "SlotStatus",
    "StepStatus",
    "StopRequest",
    "TierPlan",
    "TierState",
    "TierStatus",
    "WaitReply",
    "is_absolute_url",
]

PROTOCOL = 1
"""Version of this conversation; a client refuses a keeper that speaks another."""

RAM_TIER = "ram"
"""The tier that is the arena itself: durable once digested, committed once every rank is."""

TierState = Literal[
    "sealed", "digested", "draining", "durable", "committed", "verified", "skipped", "failed", "unknown"
]
"""How far a step has come on a tier. "skipped": not due there; "unknown": nobody sealed it, and it is not stored."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body; unknown fields are refused."""


def is_absolute_url(url: str) -> bool:
    """Return whether `url` means the same place in every process of this machine."""
    return "://" in url or os.path.isabs(url)


class Empty(_Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body that says nothing."""


class TierPlan(_Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tier to drain to, nearest first in a list of them.

    Attributes:
        url: absolute path or URL of the run's root there, or "ram".
        every: of the checkpoints that are sealed, drain each `every`-th; the first one always.
        keep: how many checkpoints stay.
        keep_every: steps divisible by it stay, beside the newest `keep`.
        bandwidth: limit for writing in bytes per second; None for no limit.
    """

    url: str
    every: int = 1
    keep: int = 3
    keep_every: int | None = None
    bandwidth: float | None = None


class AttachRequest(_Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank announces itself.

    Attributes:
        rank: global rank.
        world_size: ranks of this generation.
        pid: process to watch.
        tiers: where snapshots go; the same list for every rank.
        generation: generation this rank belongs to.
        run: its run; snapshots of another run that used the same root before are dropped.
        keep_best: metric and "min" or "max"; retention keeps the best step by it.
        protect: (step, generation) pairs that retention leaves until something newer is verified.
    """

    rank: int
    world_size: int
    pid: int
    tiers: tuple[TierPlan, ...]
    generation: int
    run: str = ""
    keep_best: tuple[str, Literal["min", "max"]] | None = None
    protect: tuple[tuple[int, int], ...] = ()


class AttachReply(_Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keeper's process id, and its count of requested saves so far."""

    pid: int
    num_save_requests: int


class AcquireRequest(_Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank asks for a slot to write to.

    Attributes:
        rank: global rank.
        timeout_seconds: how long to wait for one.
        num_slots: slots that this rank may have, at least 2.
        capacity_bytes: if given, a slot of another capacity is removed before it is handed out, so that its
            memory is free when the rank makes the new one.
        holding: the slots that the rank knows it was lent and has not sealed. What else was lent to it is taken back:
            the answer that lent it never arrived. None takes nothing back.
    """

    rank: int
    timeout_seconds: float
    num_slots: int = 2
    capacity_bytes: int | None = None
    holding: tuple[int, ...] | None = None


class AcquireReply(_Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Index of the slot that the rank may write to now; the file may have to be made."""

    slot: int


class SlotRequest(_Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank names one of its slots (to seal or release it)."""

    rank: int
    slot: int


class SealReply(_Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The step and generation that the keeper found in the sealed slot."""

    step: int
    generation: int


class DetachRequest(_Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank leaves; `clean` means that its training ended and nothing needs to outlive it in memory."""

    rank: int
    pid: int
    clean: bool


class StopRequest(_Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Stop the keeper: with `drain` once all sealed snapshots are stored, else at once; slots then stay as they are."""

    drain: bool


class SaveRequested(_Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many saves have been requested from outside, this one included."""

    num_save_requests: int


class Health(_Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who answers. `is_stopping` keepers take no new ranks."""

    protocol: int
    version: str
    pid: int
    root: str
    is_stopping: bool


class HeldSnapshot(_Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's snapshot that can be read from memory: slot `slot` of `rank` is DIGESTED."""

    rank: int
    slot: int
    step: int
    generation: int
    world_size: int
    image_bytes: int
    run_digest: int = 0


class Inventory(_Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All snapshots of this node that can be read from memory, by rank and slot."""

    snapshots: tuple[HeldSnapshot, ...]


class WaitReply(_Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a step stands on a tier; `message` says why when it failed."""

    state: TierState
    message: str | None = None


class RankStatus(_Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An attached process."""

    rank: int
    pid: int
    generation: int
    is_alive: bool


class SlotStatus(_Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A slot file: `state` as in its control page, or "broken"; `is_drained` when its rank may overwrite it."""

    rank: int
    slot: int
    state: str
    step: int
    generation: int
    world_size: int
    image_bytes: int
    capacity_bytes: int
    is_leased: bool
    is_drained: bool


class RankTierStatus(_Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far one rank's part of a step is on a tier, with the bytes stored and the seconds from seal to durable."""

    rank: int
    state: TierState
    stored_bytes: int
    seconds: float


class TierStatus(_Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step on one tier: the whole checkpoint's state, and each rank's."""

    url: str
    state: TierState
    message: str | None
    ranks: tuple[RankTierStatus, ...]


class StepStatus(_Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint that this keeper has worked on since it started (the newest 64)."""

    step: int
    generation: int
    world_size: int
    tiers: tuple[TierStatus, ...]


class FailureStatus(_Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An error met while storing, also one that a retry overcame (`is_final` is False then)."""

    step: int
    generation: int
    rank: int | None
    tier: str | None
    error: str
    message: str
    at: float
    is_final: bool


class KeeperStatus(_Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the keeper knows. `counters` are totals since its start, units in the names."""

    health: Health
    started_at: float
    tiers: tuple[TierPlan, ...]
    generation: int | None
    ranks: tuple[RankStatus, ...]
    slots: tuple[SlotStatus, ...]
    steps: tuple[StepStatus, ...]
    counters: dict[str, float]
    errors: tuple[FailureStatus, ...]


class ErrorReply(_Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of every 4xx and 5xx answer: the name of a class in `relight.errors`, and its message."""

    error: str
    message: str
