"""This rank's dealings with the node's keeper: found or started, attached to, and started again when it dies."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from relight.checkpoint.slot_pool import SlotPool
from relight.errors import ConfigError, KeeperUnavailableError
from relight.keeper.arena import ArenaSlot, arena_dir
from relight.keeper.client import KeeperClient
from relight.keeper.messages import AttachRequest, HeldSnapshot, TierPlan, WaitReply
from relight.keeper.process import ensure_keeper
from relight.manifest.manifest import Generation
from relight.storage.tiers import tier_url

__all__ = ["Keeping"]

log = logging.getLogger("relight.checkpoint")

T = TypeVar("T")


class Keeping:
    """A rank's side of the keeper. Safe from the training and the snapshot thread.

    Args:
        root_url: the run's root on its most durable tier; ranks that pass the same one share a keeper.
        tiers: where snapshots are drained to, nearest first.
        on_restart: called with a reason when a keeper had to be started anew.
    """

    def __init__(
        self,
        *,
        root_url: str,
        rank: int,
        world_size: int,
        tiers: tuple[TierPlan, ...],
        num_slots: int,
        budget_bytes: int | None,
        keep_best: tuple[str, Literal["min", "max"]] | None,
        on_restart: Callable[[str], None],
        cuda: Any = None,
    ) -> None:
        self.root_url = root_url
        self.rank = rank
        self._world_size = world_size
        self._tiers = tiers
        self._num_slots = num_slots
        self._keep_best = keep_best
        self._on_restart = on_restart
        self._attached: AttachRequest | None = None
        self._is_attached = False
        self._holding: set[int] = set()
        self.client = self._ensure()
        self.slots = SlotPool(self.folder, rank, num_slots=num_slots, budget_bytes=budget_bytes, cuda=cuda)

    def belong(self, generation: Generation, protect: tuple[tuple[int, int], ...]) -> None:
        """Say which generation this rank is of; the keeper hears it with the next request."""
        self._attached = AttachRequest(
            rank=self.rank,
            world_size=self._world_size,
            pid=os.getpid(),
            tiers=self._tiers,
            generation=generation.generation,
            run=generation.run,
            keep_best=self._keep_best,
            protect=protect,
        )
        self._is_attached = False

    def acquire(self, capacity_bytes: int, *, timeout_seconds: float) -> tuple[int, ArenaSlot] | None:
        """Return a slot that may be written now, its memory touched, with its index; None if none is free yet.

        Raises:
            MemoryBudgetError: a new one does not fit.
        """
        index = self._asked(
            lambda client: client.acquire(
                self.rank,
                timeout_seconds=timeout_seconds,
                num_slots=self._num_slots,
                capacity_bytes=capacity_bytes,
                holding=tuple(self._holding),
            )
        )
        if index is None:
            return None
        # Only one that can be used counts as held; the keeper lends out the rest again.
        slot = self.slots.prepare(index, capacity_bytes)
        self._holding.add(index)
        return index, slot

    def release(self, index: int) -> None:
        """Give an acquired slot back unused; the keeper hears it with the next `acquire`."""
        self._holding.discard(index)

    def seal(self, index: int) -> None:
        """Hand a sealed slot over; a keeper that died meanwhile is started again and finds the slot by itself."""
        self._holding.discard(index)
        self._asked(lambda client: client.seal(self.rank, index))

    def look(self, step: int) -> WaitReply:
        """Return where `step` of this generation stands on the last tier, without waiting."""
        return self.wait(step, tier=None, timeout_seconds=0.0)

    def wait(self, step: int, *, tier: str | None, timeout_seconds: float) -> WaitReply:
        """Wait until the step is committed, failed or skipped on `tier`."""
        generation = self._attached_request().generation
        return self._asked(
            lambda client: client.wait(step, generation, tier=tier, timeout_seconds=timeout_seconds)
        )

    def tier_url(self, tier: str) -> str:
        """Return the URL of the tier that a user means.

        Raises:
            ConfigError: this run has no such tier.
        """
        url = tier_url(tier)
        known = [plan.url for plan in self._tiers]
        if url not in known:
            raise ConfigError(f"tier {tier!r} is none of this run's: {', '.join(known)}", tier=tier)
        return url

    def inventory(self) -> tuple[HeldSnapshot, ...]:
        """Return the snapshots of this node that can be read from memory."""
        return self._asked(lambda client: client.inventory())

    def detach(self, *, clean: bool) -> None:
        """Leave the keeper; one that is gone already is no error."""
        self.slots.forget()
        try:
            self.client.detach(self.rank, pid=os.getpid(), clean=clean)
        except KeeperUnavailableError as error:
            log.info("relight: keeper was gone at close: %s", error)
        self.client.close()

    def _ensure(self) -> KeeperClient:
        self.folder = arena_dir(self.root_url)
        return ensure_keeper(self.folder, self.root_url)

    def _attached_request(self) -> AttachRequest:
        if self._attached is None:
            raise KeeperUnavailableError("this rank is not attached to a keeper yet")
        return self._attached

    def _asked(self, ask: Callable[[KeeperClient], T]) -> T:
        try:
            return ask(self._attached_client())
        except KeeperUnavailableError as error:
            log.warning("relight: %s; starting a keeper again", error)
            self._on_restart(str(error))
        self._is_attached = False
        self.client = self._ensure()
        return ask(self._attached_client())

    def _attached_client(self) -> KeeperClient:
        if self._attached is not None and not self._is_attached:
            self.client.attach(self._attached)
            self._is_attached = True
        return self.client
