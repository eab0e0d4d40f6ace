"""The restore of one rank: which candidates there are, the one that all ranks can load, and what was met on the way."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from relight.checkpoint.candidates import Candidate, Checkpoint, list_candidates, try_candidates
from relight.checkpoint.group import RankGroup
from relight.checkpoint.keeping import Keeping
from relight.checkpoint.late import LateParts
from relight.checkpoint.matching import Allowances, Matching
from relight.checkpoint.replicas import (
    ReplicaCheck,
    ReplicaMode,
    differing_groups,
    name_differences,
    summary,
)
from relight.checkpoint.run import Run
from relight.checkpoint.save_plan import plan_save
from relight.checkpoint.slot_pool import SlotPool
from relight.checkpoint.state import PARTS, TrainState
from relight.errors import CopyError, DesyncError, MissingCopyError
from relight.keeper.messages import HeldSnapshot
from relight.manifest.catalog import Catalog
from relight.manifest.manifest import Parent
from relight.storage.backend import open_backend

__all__ = ["Restored", "Restorer"]

log = logging.getLogger("relight.checkpoint")


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored, from which nearest place ("ram" or a URL), and how many bytes were read."""

    candidate: Candidate
    place: str
    bytes_read: int


class Restorer:
    """Restores into `state` on every rank together.

    Args:
        run: whose catalogs are read, and whose generation is claimed.
        keeping: the node's keeper, for what memory holds.
    """

    def __init__(
        self,
        state: TrainState,
        group: RankGroup,
        allow: Allowances,
        run: Run,
        keeping: Keeping,
        *,
        replica_mode: ReplicaMode = "full",
    ) -> None:
        self._state = state
        self._group = group
        self._allow = allow
        self._run = run
        self._keeping = keeping
        self._replicas = ReplicaCheck(group.world_size, replica_mode)
        self._emit = run.emit

    def start(
        self, *, step: int | None, source: str | None, parts: frozenset[str]
    ) -> tuple[int, Restored | None]:
        """Restore from this run, else from `source`, and become the next generation. See `Checkpointer.restore`.

        A restore of chosen parts does not claim yet: it may be an evaluation beside the running training.

        Returns:
            The step to go on from, and what was restored.
        """
        with _collector_paused():
            return self._start(step, source, parts)

    def _start(
        self, step: int | None, source: str | None, parts: frozenset[str]
    ) -> tuple[int, Restored | None]:
        is_whole = parts == frozenset(PARTS)
        held, slots = self._keeping.inventory(), self._keeping.slots
        own_step = step if source is None else None
        if self._group.rank == 0:
            for catalog in self._run.catalogs:
                for done, generation in catalog.tidy():
                    self._emit("save_committed", done, of_generation=generation, tier=catalog.backend.url)
        found = self.restore(self._run.catalogs, held, slots, step=own_step, parts=parts)
        origin: str | None = None
        if found is None and source is not None:
            origin = source
            found = self.restore([Catalog(open_backend(source))], (), None, step=step, parts=parts)
        if found is None and (step is not None or source is not None):
            which = f" at step {step}" if step is not None else ""
            where = origin or ", ".join(self._run.durable_urls)
            raise MissingCopyError(f"nothing to restore{which} in {where}", step=step)
        if found is not None:
            self._check_replicas(found.candidate.step)
        self._run.is_restored = True
        first_step = 0
        if found is not None:
            place = found.candidate
            self._run.parent = Parent(step=place.step, generation=place.generation, source=origin)
            first_step = 0 if origin is not None and not is_whole else place.step
        if found is None or is_whole:
            self._run.claim()
        if found is not None and self._state.data is not None and "data" not in parts:
            self._state.data.rebase(first_step)
        return first_step, found

    def restore(
        self,
        catalogs: Sequence[Catalog],
        held: Sequence[HeldSnapshot],
        slots: SlotPool | None,
        *,
        step: int | None,
        parts: frozenset[str],
    ) -> Restored | None:
        """Restore the newest candidate (or exactly `step`) that every rank can load; None if there is none.

        Raises:
            StateMismatchError, SettingsChangedError: saved and live state differ; nothing was changed.
        """
        listed = []
        if self._group.rank == 0:
            listed = list_candidates(catalogs, held, step=step, on_problem=partial(self._bad_copy, step))
        told = self._group.gather(msgspec.to_builtins(listed))[0]
        candidates = msgspec.convert(told, list[Candidate])
        results: list[Restored] = []

        def load(candidate: Candidate) -> None:
            results.append(
                self._load(candidate, catalogs, held, slots, parts=parts, is_asked_for=step is not None)
            )

        found = try_candidates(candidates, self._group, load, self._skipped)
        return results[-1] if found is not None else None

    def _load(
        self,
        candidate: Candidate,
        catalogs: Sequence[Catalog],
        held: Sequence[HeldSnapshot],
        slots: SlotPool | None,
        *,
        parts: frozenset[str],
        is_asked_for: bool,
    ) -> Restored:
        with Checkpoint(
            candidate, catalogs, slots.folder if slots is not None else None, held, slots
        ) as opened:
            book = self._state.book(self._group.rank, self._group.world_size)
            saved = opened.saved_state(book)
            if saved.replicas_differ and not is_asked_for:
                named = ", ".join(saved.replicas_differ[:3])
                raise CopyError(
                    f"replicas differed in {named}; restore(step={candidate.step}) takes it all the same",
                    step=candidate.step,
                )
            matching = Matching(self._state, saved, self._allow)
            if saved.is_resized:
                matching.allowed.append(
                    f"world_size: saved by {candidate.world_size} ranks, now {self._group.world_size}"
                )
            matching.match_parts(parts)
            late = LateParts(saved, self._allow, book)
            late.load(self._state, parts, is_exhaustive=matching.is_exhaustive)
            matching.apply()
            self._state.await_late(late)
            for text in matching.allowed:
                self._emit("mismatch_allowed", candidate.step, what=text)
            for text in opened.bad_copies():
                self._bad_copy(candidate.step, text)
            return Restored(candidate, opened.place(), opened.bytes_read)

    def _check_replicas(self, step: int) -> None:
        """Compare what replicas hold after the restore.

        Raises:
            DesyncError: they differ; names tensors and ranks.
        """
        if self._replicas.mode == "off":
            return
        table = self._state.collect_tensors(rank=self._group.rank, num_ranks=self._group.world_size)
        plan = plan_save(table, rank=self._group.rank, world_size=self._group.world_size)
        digests = self._replicas.digests(table, plan, lambda _: None)
        groups = differing_groups(self._group.gather(summary(digests)), plan.layouts)
        if groups:
            found = name_differences(self._group, digests, groups, plan.layouts)
            raise DesyncError(
                f"after the restore of step {step} replicas hold different values of {len(found)} tensors: "
                f"{', '.join(map(str, found[:3]))}; nothing was trained yet: restore again, and look at the memory of "
                "these ranks if it happens twice",
                step=step,
            )

    def _bad_copy(self, step: int | None, text: str) -> None:
        self._emit("copy_bad", step, what=text)
        log.warning("relight: bad copy passed over: %s", text)

    def _skipped(self, candidate: Candidate, reason: str) -> None:
        self._emit("candidate_skipped", candidate.step, reason=reason)
        log.warning("relight: step %d cannot be restored, trying an older one: %s", candidate.step, reason)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep the garbage collector from running: the index of many tensors sets it off, and torch is long to walk."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
