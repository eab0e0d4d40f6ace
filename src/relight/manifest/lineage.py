"""Which checkpoints the newest generation descends from: the rule that fences a stale one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relight.manifest.manifest import Parent

__all__ = ["Lineage", "trace"]


@dataclass(frozen=True, slots=True)
class Lineage:
    """The newest generation and its ancestors.

    Attributes:
        last_steps: generation -> the last of its steps that counts, None for all; newest generation first.
    """

    last_steps: Mapping[int, int | None]

    @property
    def newest(self) -> int | None:
        """The newest generation, None when there is none."""
        return next(iter(self.last_steps), None)

    def holds(self, step: int, generation: int) -> bool:
        """Tell whether a checkpoint of `step` made by `generation` is one that the newest generation builds on."""
        if generation not in self.last_steps:
            return False
        last = self.last_steps[generation]
        return last is None or step <= last


def trace(parents: Mapping[int, Parent | None]) -> Lineage:
    """Follow the parents from the newest generation down.

    All steps of the newest generation count, of its parent generation those up to the parent step, and so on. A
    parent in another run, a generation that is not in `parents`, and one that is not older than its child end it.
    """
    last_steps: dict[int, int | None] = {}
    generation = max(parents, default=None)
    last: int | None = None
    while generation is not None and generation in parents:
        last_steps[generation] = last
        parent = parents[generation]
        if parent is None or parent.source is not None or parent.generation >= generation:
            break
        last = parent.step if last is None else min(last, parent.step)
        generation = parent.generation
    return Lineage(last_steps)
