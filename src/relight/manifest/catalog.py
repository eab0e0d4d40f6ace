"""The catalog of one tier: how checkpoints come to exist there, how they are found, checked and removed."""

from __future__ import annotations

import mmap
import uuid
from collections.abc import Collection
from contextlib import suppress
from typing import Literal

from relight.clock import Clock, SystemClock
from relight.errors import (
    CopyError,
    CorruptionError,
    DesyncError,
    MissingCopyError,
    StopError,
    UnknownFormatError,
)
from relight.manifest.commit import POINTS as COMMIT_POINTS
from relight.manifest.commit import commit_step
from relight.manifest.inventory import CheckpointInfo, Inventory, read_generations, take_inventory
from relight.manifest.lineage import trace
from relight.manifest.manifest import (
    BLOCK_BYTES,
    Generation,
    Manifest,
    Marker,
    Parent,
    RankRecord,
    digest_block,
    digest_in,
    encode_file,
)
from relight.manifest.names import (
    generation_name,
    image_name,
    manifest_name,
    marker_name,
    record_name,
    step_dir,
)
from relight.manifest.retention import POINTS as RETENTION_POINTS
from relight.manifest.retention import plan_retention, removable_incomplete, remove_step
from relight.manifest.stored import read_manifest, read_marker
from relight.manifest.verify import OnBlock, Problem, read_checked_record, verify_rank_files, verify_step
from relight.policy.checkpoint import Removal, RetentionRule
from relight.stages import reached
from relight.storage.backend import StorageBackend

__all__ = ["POINTS", "Catalog", "CheckpointInfo", "Inventory", "Problem", "step_dir"]

POINTS = (
    "catalog.generation_claimed",
    "catalog.image_stored",
    "catalog.record_stored",
    *COMMIT_POINTS,
    "catalog.marked_verified",
    *RETENTION_POINTS,
)
"""Every point that the catalog announces through `relight.stages`."""

_MAX_MISSED = 64


class Catalog:
    """The checkpoints of one run on one tier; any number of processes may have one.

    It keeps nothing but its backend and which file the last look at a step missed.

    Every method may raise `StorageUnavailableError`, writing ones also `StorageFullError`.
    """

    def __init__(self, backend: StorageBackend, clock: Clock | None = None) -> None:
        self.backend = backend
        self._clock = clock if clock is not None else SystemClock()
        self._missed: dict[tuple[int, int], str] = {}

    # Generations

    def claim(self, parent: Parent | None) -> Generation:
        """Become the next generation, which builds on `parent`; from now on commits off that lineage do not count.

        Durable after return; of several claims at once each gets its own number.

        Raises:
            CorruptionError: generations exist, but neither they nor a manifest can be read, so the run's identity
                is lost.
        """
        while True:
            known, numbers, problems = read_generations(self.backend)
            run = known[0].run if known else self._run_in_manifests() if numbers else uuid.uuid4().hex
            if run is None:
                raise CorruptionError(problems[0].message, path=problems[0].file, tier=self.backend.url)
            claimed = Generation(
                run=run,
                generation=numbers[-1] + 1 if numbers else 1,
                parent=parent,
                created_at=self._clock.now(),
            )
            if self.backend.put(generation_name(claimed.generation), encode_file(claimed), if_absent=True):
                reached("catalog.generation_claimed")
                return claimed

    def _run_in_manifests(self) -> str | None:
        """Return the run that the newest generation's manifest names: it stands in for lost generation files."""
        found = max(self.survey().checkpoints, key=lambda info: info.generation, default=None)
        return found.run if found is not None else None

    def tidy(self) -> list[tuple[int, int]]:
        """Settle what a crash or a power cut has left; for the start of a generation. Durable after return.

        Steps of the lineage that are stored whole but for their manifest are committed; a step that lacks something,
        or whose records do not belong together, is left alone. Interrupted writes of images are removed from verified
        steps, which need no more of them.

        Returns:
            (step, generation) of the steps that were committed.
        """
        inventory = self.survey()
        done = []
        for step, generation in inventory.incomplete:
            with suppress(CopyError, DesyncError, UnknownFormatError):
                if inventory.lineage.holds(step, generation) and self.commit(step, generation) is not None:
                    done.append((step, generation))
        for info in inventory.checkpoints:
            for name in self.backend.unfinished(f"{step_dir(info.step, info.generation)}/"):
                if info.verified and name.endswith(".safetensors"):
                    self.backend.delete(name)
        return done

    def generations(self) -> list[Generation]:
        """Return the generations that can be read, oldest first."""
        return read_generations(self.backend)[0]

    def run(self) -> str | None:
        """Return the identifier of the run that owns the root, or None when no generation was claimed there."""
        known = self.generations()
        return known[0].run if known else None

    def fenced_by(self, generation: int, step: int) -> int | None:
        """Return the newest generation if it does not build on `step` of `generation`, None if it does."""
        known, _, problems = read_generations(self.backend)
        # A generation file that cannot be read has stand-ins in the manifests, at the price of reading all of them.
        lineage = (
            self.survey().lineage if problems else trace({body.generation: body.parent for body in known})
        )
        return None if lineage.newest is None or lineage.holds(step, generation) else lineage.newest

    # Writing

    def put_image(self, step: int, generation: int, rank: int, image: memoryview | bytes) -> bool:
        """Store a rank's image; durable after return.

        Returns:
            False if the same image was there already.

        Raises:
            StopError: another image is there.
        """
        name = image_name(step, generation, rank)
        view = memoryview(image).cast("B")
        stored = self.backend.put(name, view, if_absent=True)
        if not stored and not self._holds(name, view):
            raise StopError(
                f"{self.backend.url}/{name} holds another image of this step; look at it",
                step=step,
                rank=rank,
            )
        reached("catalog.image_stored")
        return stored

    def put_record(self, record: RankRecord) -> str:
        """Store a rank's record, whose image is stored; durable after return. The same record again is no error.

        Returns:
            The digest of its body, which the manifest will name.

        Raises:
            StopError: another record is there.
        """
        draft = record.draft
        name = record_name(draft.step, draft.generation, draft.rank)
        encoded = encode_file(record)
        if not self.backend.put(name, encoded, if_absent=True) and self.backend.get(name) != encoded:
            raise StopError(
                f"{self.backend.url}/{name} holds another record of this step; look at it",
                step=draft.step,
                rank=draft.rank,
            )
        reached("catalog.record_stored")
        return digest_in(encoded)

    def commit(self, step: int, generation: int) -> Manifest | None:
        """Make the checkpoint exist if all its records and images are there.

        Durable after return; any number of processes may call it at once.

        Returns:
            The manifest, or None while something is missing.

        Raises:
            DesyncError: the ranks' records do not belong together.
            CorruptionError: a record's bytes or an image's size are not what was written.
        """
        place = (step, generation)
        found = commit_step(self.backend, step, generation, missed=self._missed.pop(place, None))
        if not isinstance(found, str):
            return found
        if len(self._missed) >= _MAX_MISSED:
            self._missed.clear()
        self._missed[place] = found
        return None

    # Finding

    def survey(self) -> Inventory:
        """Return everything that is stored; files that cannot be read become problems and hide nothing else."""
        return take_inventory(self.backend)

    def committed(self) -> list[CheckpointInfo]:
        """Return the committed checkpoints, newest step first; `survey` also says what could not be read."""
        return list(self.survey().checkpoints)

    def candidates(self, *, with_replicas_differ: bool = False) -> list[CheckpointInfo]:
        """Return the committed checkpoints that a restore may choose, newest first.

        These are the ones that the newest generation builds on, without those whose replicas differed unless asked.
        """
        return [
            info
            for info in self.survey().checkpoints
            if info.on_lineage and (with_replicas_differ or not info.replicas_differ)
        ]

    def incomplete(self) -> list[tuple[int, int]]:
        """Return (step, generation) of the step directories without a manifest, oldest first."""
        return list(self.survey().incomplete)

    def is_committed(self, step: int, generation: int) -> bool:
        """Tell whether the checkpoint exists."""
        return self.backend.size_bytes(manifest_name(step, generation)) is not None

    # Reading

    def manifest(self, step: int, generation: int) -> Manifest:
        """Return the manifest of a checkpoint.

        Raises:
            MissingCopyError: it is not committed.
            CorruptionError: its bytes differ from what was written.
            UnknownFormatError: another version of relight wrote it.
        """
        return read_manifest(self.backend, step, generation)[0]

    def record(self, step: int, generation: int, rank: int, manifest: Manifest) -> RankRecord:
        """Return the record of a rank, checked against the digest that the manifest names; raises as `manifest`."""
        return read_checked_record(self.backend, step, generation, rank, manifest)

    # Verifying

    def verify(self, step: int, generation: int, on_block: OnBlock | None = None) -> list[Problem]:
        """Read every byte of a checkpoint and return what differs from what was written; [] when all is good.

        Args:
            step: which checkpoint.
            generation: which checkpoint.
            on_block: called with the bytes of each image block that was checked.

        Raises:
            MissingCopyError: it is not committed.
        """
        return verify_step(self.backend, step, generation, on_block)

    def verify_rank(
        self, step: int, generation: int, rank: int, on_block: OnBlock | None = None
    ) -> list[Problem]:
        """Read every byte of one rank's record and image, committed or not, and return what is wrong with them."""
        return verify_rank_files(self.backend, step, generation, rank, on_block=on_block)

    def mark_verified(self, step: int, generation: int) -> None:
        """Note that `verify` found nothing, and remove what interrupted writes left; durable after return.

        Raises:
            MissingCopyError: the checkpoint is not committed.
        """
        self._mark("verified", step, generation)
        for name in self.backend.unfinished(f"{step_dir(step, generation)}/"):
            self.backend.delete(name)
        reached("catalog.marked_verified")

    def is_verified(self, step: int, generation: int) -> bool:
        """Tell whether the checkpoint is committed and marked as verified; the mark must name this very manifest."""
        try:
            _, digest = read_manifest(self.backend, step, generation)
            return read_marker(self.backend, step, generation, "verified").manifest_digest == digest
        except (CopyError, UnknownFormatError):
            return False

    # Keeping and removing

    def pin(self, step: int, generation: int) -> None:
        """Keep retention from removing the checkpoint; durable after return.

        Raises:
            MissingCopyError: the checkpoint is not committed.
        """
        self._mark("pinned", step, generation)

    def unpin(self, step: int, generation: int) -> None:
        """Let retention remove the checkpoint again; durable after return."""
        self.backend.delete(marker_name(step, generation, "pinned"))

    def remove(self, step: int, generation: int) -> None:
        """Remove a checkpoint, pinned or not; durable after return, absence is no error.

        Stopped at any instant, it leaves the whole checkpoint or none.
        """
        remove_step(self.backend, step, generation)

    def plan_retention(
        self, rule: RetentionRule, *, protect: Collection[tuple[int, int]] = ()
    ) -> list[Removal]:
        """Return what `apply_retention` would remove of the committed checkpoints, and why; changes nothing."""
        return plan_retention(self.survey(), rule, protect)

    def apply_retention(
        self, rule: RetentionRule, *, protect: Collection[tuple[int, int]] = ()
    ) -> list[CheckpointInfo]:
        """Remove the checkpoints that `rule` does not keep, and uncommitted directories that nobody can need.

        Only this run's own ones; never one without a newer verified one; never the pinned and protected ones.

        Args:
            rule: what to keep.
            protect: (step, generation) that stay whatever the rule says.

        Returns:
            The committed checkpoints that were removed, oldest first.
        """
        inventory = self.survey()
        removals = plan_retention(inventory, rule, protect)
        reached("retention.decided")
        infos = {(info.step, info.generation): info for info in inventory.checkpoints}
        for removal in removals:
            remove_step(self.backend, removal.step, removal.generation)
        for step, generation in removable_incomplete(inventory, protect):
            remove_step(self.backend, step, generation)
        return [infos[removal.step, removal.generation] for removal in removals]

    def _mark(self, kind: Literal["verified", "pinned"], step: int, generation: int) -> None:
        name = marker_name(step, generation, kind)
        _, digest = read_manifest(self.backend, step, generation)
        try:
            if read_marker(self.backend, step, generation, kind).manifest_digest == digest:
                return
            self.backend.delete(name)
        except MissingCopyError:
            pass
        except (CopyError, UnknownFormatError):
            self.backend.delete(name)
        marker = Marker(kind=kind, manifest_digest=digest, at=self._clock.now())
        # If absent, so that of several at once all find it there, whoever clears away what the others began.
        self.backend.put(name, encode_file(marker), if_absent=True)

    def _holds(self, name: str, view: memoryview) -> bool:
        """Tell whether the stored file `name` has the bytes of `view`."""
        if self.backend.size_bytes(name) != view.nbytes:
            return False
        buffer = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        for start in range(0, view.nbytes, BLOCK_BYTES):
            expected = view[start : start + BLOCK_BYTES]
            self.backend.read_into(name, start, buffer[: expected.nbytes])
            # Comparing views goes byte by byte in the interpreter; digests are a hundred times faster.
            if digest_block(buffer[: expected.nbytes]) != digest_block(expected):
                return False
        return True
