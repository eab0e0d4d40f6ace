"""What is stored under a run's root: committed checkpoints, unfinished ones, and what cannot be read."""

from __future__ import annotations

import datetime as dt
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from relight.errors import CopyError, CorruptionError, MissingCopyError, UnknownFormatError
from relight.manifest.lineage import Lineage, trace
from relight.manifest.manifest import Generation, Manifest, Parent
from relight.manifest.names import (
    GENERATIONS,
    STEPS,
    generation_name,
    manifest_name,
    marker_name,
    parse_generation_name,
    parse_step_dir,
)
from relight.manifest.stored import read_generation, read_manifest, read_marker
from relight.manifest.verify import Problem
from relight.storage.backend import StorageBackend

__all__ = ["CheckpointInfo", "Inventory", "read_generations", "take_inventory"]

_BAD = (CopyError, UnknownFormatError)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """One committed checkpoint, as its manifest and markers describe it.

    Attributes:
        step: optimizer steps done when it was saved.
        generation: the incarnation of the worker group that saved it.
        run: identifier of the run.
        bytes: what the images of all its ranks take.
        saved_at: wall-clock seconds at which the last rank's snapshot was taken; the commit has no time of its own,
            so that any finder writes the same manifest.
        verified: every byte was read back after the commit and was right.
        pinned: retention must not remove it.
        on_lineage: the newest generation builds on it, so it may be restored.
        world_size: number of ranks.
        metrics: what was passed to `Checkpointer.step`; None for values that were not finite.
        replicas_differ: keys whose values differed between replicas; not chosen for a restore unless asked.
        manifest_digest: xxh3-128 of the manifest's body, in hex.
    """

    step: int
    generation: int
    run: str
    bytes: int
    saved_at: float
    verified: bool
    pinned: bool
    on_lineage: bool
    world_size: int
    metrics: Mapping[str, float | None]
    replicas_differ: tuple[str, ...]
    manifest_digest: str

    @property
    def committed_at(self) -> str:
        """`saved_at` in ISO 8601, UTC."""
        return dt.datetime.fromtimestamp(self.saved_at, dt.UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """All that is stored under one root at about one instant.

    Attributes:
        checkpoints: committed ones, newest step first; of one step, the newest generation first.
        incomplete: (step, generation) of directories without a manifest, oldest first.
        problems: generation files, manifests and markers that cannot be read, and directories with a wrong name.
        lineage: what the newest generation builds on.
        run: identifier of the run, None while no generation was claimed.
    """

    checkpoints: tuple[CheckpointInfo, ...]
    incomplete: tuple[tuple[int, int], ...]
    problems: tuple[Problem, ...]
    lineage: Lineage
    run: str | None


def read_generations(backend: StorageBackend) -> tuple[list[Generation], list[int], list[Problem]]:
    """Return the readable generations in order, the numbers of all, and what cannot be read."""
    numbers = sorted(
        number
        for file in backend.list(GENERATIONS)
        if (number := parse_generation_name(file.name)) is not None
    )
    found: list[Generation] = []
    problems: list[Problem] = []
    for number in numbers:
        try:
            found.append(read_generation(backend, number))
        except _BAD as error:
            problems.append(Problem(file=generation_name(number), message=str(error)))
    return found, numbers, problems


def take_inventory(backend: StorageBackend) -> Inventory:
    """Look at everything stored. A broken file becomes a problem and hides nothing else.

    Raises:
        StorageUnavailableError: the tier does not answer.
    """
    generations, _, problems = read_generations(backend)
    manifests: dict[tuple[int, int], tuple[Manifest, str]] = {}
    incomplete: list[tuple[int, int]] = []
    for place in _step_places(backend, problems):
        try:
            manifests[place] = read_manifest(backend, *place)
        except MissingCopyError:
            incomplete.append(place)
        except _BAD as error:
            problems.append(Problem(file=manifest_name(*place), message=str(error)))
    run = generations[0].run if generations else None
    # Steps of another run that used this root before say nothing about this one's generations.
    own = [manifest for manifest, _ in manifests.values() if run in (None, manifest.run)]
    lineage = trace(_parents(generations, own))
    infos = [
        _describe(
            manifest,
            digest,
            # None: a root that was never claimed, whose steps are as good as any.
            lineage if run in (None, manifest.run) else Lineage({}),
            _read_marks(backend, place, digest, problems),
        )
        for place, (manifest, digest) in manifests.items()
    ]
    return Inventory(
        checkpoints=tuple(sorted(infos, key=lambda info: (info.step, info.generation), reverse=True)),
        incomplete=tuple(sorted(incomplete)),
        problems=tuple(problems),
        lineage=lineage,
        run=run,
    )


def _step_places(backend: StorageBackend, problems: list[Problem]) -> list[tuple[int, int]]:
    """Return (step, generation) of each step directory, without looking into any: they may hold very many files."""
    places = []
    for folder in backend.folders(STEPS):
        place = parse_step_dir(folder)
        if place is not None:
            places.append(place)
        else:
            message = f"{folder} is not the name of a checkpoint; left alone"
            problems.append(Problem(file=folder, message=message))
    return places


def _parents(generations: Sequence[Generation], manifests: Sequence[Manifest]) -> dict[int, Parent | None]:
    """Return each generation's parent; manifests carry it too and stand in for a generation file that is lost."""
    parents = {manifest.generation: manifest.parent for manifest in manifests}
    return parents | {body.generation: body.parent for body in generations}


def _read_marks(
    backend: StorageBackend,
    place: tuple[int, int],
    digest: str,
    problems: list[Problem],
) -> set[str]:
    """Return which markers ("verified", "pinned") of a checkpoint hold."""
    marks = set()
    for kind in ("verified", "pinned"):
        name = marker_name(*place, kind)
        try:
            if read_marker(backend, *place, kind).manifest_digest != digest:
                raise CorruptionError(f"{name} speaks of another manifest", path=name)
        except MissingCopyError:
            continue
        except _BAD as error:
            problems.append(Problem(file=name, message=str(error)))
            # A broken pin still protects; a broken proof proves nothing.
            if kind == "verified":
                continue
        marks.add(kind)
    return marks


def _describe(manifest: Manifest, digest: str, lineage: Lineage, marks: Container[str]) -> CheckpointInfo:
    return CheckpointInfo(
        step=manifest.step,
        generation=manifest.generation,
        run=manifest.run,
        bytes=sum(rank.image_bytes for rank in manifest.ranks),
        saved_at=manifest.saved_at,
        verified="verified" in marks,
        pinned="pinned" in marks,
        on_lineage=lineage.holds(manifest.step, manifest.generation),
        world_size=manifest.world_size,
        metrics=manifest.metrics,
        replicas_differ=manifest.replicas_differ,
        manifest_digest=digest,
    )
