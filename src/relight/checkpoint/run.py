"""The run that a checkpointer works for: its roots, catalogs, generation and event log."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from relight.checkpoint.group import RankGroup
from relight.clock import Clock
from relight.errors import ConfigError
from relight.events import Event, EventKind, EventLog
from relight.manifest.catalog import Catalog
from relight.manifest.manifest import Generation, Parent, encode_file
from relight.manifest.names import generation_name
from relight.storage.backend import open_backend
from relight.storage.local import local_path
from relight.storage.tiers import Tier

__all__ = ["Run"]


class Run:
    """One process's view of the run at `tiers`. Create on every rank.

    Attributes:
        durable_urls: the tiers beyond memory, nearest first; the last one's directory is the run's root.
        catalogs: one for each of them.
        generation: claimed by `claim`, None before.
        parent: the checkpoint that this generation builds on.

    Raises:
        ConfigError: ranks were given different roots, or there is no durable tier.
    """

    def __init__(self, tiers: tuple[Tier, ...], group: RankGroup, clock: Clock) -> None:
        self._group = group
        self._clock = clock
        self.durable_urls = tuple(tier.url for tier in tiers if tier.url != "ram")
        if not self.durable_urls:
            raise ConfigError('tiers hold no durable place; give a path beside "ram"')
        _check_roots([tier.url for tier in tiers], group)
        self.catalogs = [Catalog(open_backend(url)) for url in self.durable_urls]
        self.generation: Generation | None = None
        self.parent: Parent | None = None
        self.is_restored = False
        self.events = EventLog(self._events_path())

    @property
    def root_url(self) -> str:
        """The root on the most durable tier."""
        return self.durable_urls[-1]

    def claim(self) -> Generation:
        """Become the next generation, once; rank 0 claims and everyone hears. Call on every rank.

        Raises:
            ConfigError: the root holds checkpoints and nothing was restored: training would hide them.
        """
        if self.generation is None:
            claimed: Generation | None = None
            problem = ""
            if self._group.rank == 0:
                if not self.is_restored and any(catalog.committed() for catalog in self.catalogs):
                    problem = (
                        f"{self.root_url} holds checkpoints, but restore() was not called: call it before the first "
                        "step, or choose another root"
                    )
                else:
                    claimed = self._claim()
            told = self._group.gather({"claimed": msgspec.to_builtins(claimed), "problem": problem})[0]
            if told["problem"]:
                raise ConfigError(told["problem"], path=self.root_url)
            self.generation = msgspec.convert(told["claimed"], Generation)
            self.emit("run_started", None, world_size=self._group.world_size)
        return self.generation

    def protected(self) -> tuple[tuple[int, int], ...]:
        """Return the (step, generation) of this run that must stay until a newer one is durable."""
        if self.parent is None or self.parent.source is not None:
            return ()
        return ((self.parent.step, self.parent.generation),)

    def emit(self, kind: EventKind, step: int | None, **fields: Any) -> None:
        """Record an event of this rank."""
        generation = self.generation
        self.events.emit(
            Event(
                kind=kind,
                at=self._clock.now(),
                run=generation.run if generation is not None else None,
                generation=generation.generation if generation is not None else None,
                rank=self._group.rank,
                step=step,
                fields=fields,
            )
        )

    def _claim(self) -> Generation:
        claimed = self.catalogs[-1].claim(self.parent)
        for catalog in self.catalogs[:-1]:
            catalog.backend.put(generation_name(claimed.generation), encode_file(claimed), if_absent=True)
        return claimed

    def _events_path(self) -> Path | None:
        return local_path(self.root_url) / "events" / f"rank-{self._group.rank:05d}-{os.getpid()}.jsonl"


def _check_roots(urls: list[str], group: RankGroup) -> None:
    answers = group.gather(urls)
    if any(other != urls for other in answers):
        listed = "; ".join(f"rank {rank}: {', '.join(other)}" for rank, other in enumerate(answers))
        raise ConfigError(f"ranks were given different checkpoint roots: {listed}", path=urls[-1])
