"""The tiers as the keeper uses them: a catalog each, opened once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from relight.keeper.messages import TierPlan
from relight.keeper.slots import StepKey
from relight.manifest.catalog import Catalog
from relight.storage.backend import StorageBackend, open_backend

__all__ = ["TierStore", "TierStores"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStore:
    """An opened tier."""

    plan: TierPlan
    catalog: Catalog

    def remove_step(self, key: StepKey) -> None:
        """Remove everything of a step, unfinished writes too; the caller knows that it is not committed."""
        self.catalog.remove(key.step, key.generation)


class TierStores:
    """Opens each tier once; safe from any thread."""

    def __init__(self, open_tier: Callable[[str], StorageBackend] | None = None) -> None:
        self._open_tier = open_tier
        self._lock = threading.Lock()
        self._opened: dict[tuple[str, float | None], Catalog] = {}

    def open(self, plan: TierPlan) -> TierStore:
        """Return the store of `plan`.

        Raises:
            ConfigError: no backend for its URL.
        """
        with self._lock:
            key = (plan.url, plan.bandwidth)
            if key not in self._opened:
                self._opened[key] = Catalog(self._backend(plan))
            return TierStore(plan=plan, catalog=self._opened[key])

    def _backend(self, plan: TierPlan) -> StorageBackend:
        if self._open_tier is not None:
            return self._open_tier(plan.url)
        return open_backend(plan.url, bandwidth=plan.bandwidth)
