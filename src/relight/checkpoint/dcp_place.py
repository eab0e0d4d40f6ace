"""Where a save of torch.distributed.checkpoint goes: the run's root, a step, and the generation that stores it.

A process is one incarnation of a run, so it claims one generation per root, however many writers it makes. A step
directory is never used twice: a step that is not above what this process has begun opens a new generation.
"""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass, field
from pathlib import PurePath

from relight.errors import ConfigError, FencedError
from relight.manifest.catalog import Catalog
from relight.manifest.lineage import trace
from relight.manifest.manifest import Generation, Parent
from relight.manifest.names import STEPS, parse_step_dir
from relight.storage.tiers import RAM, tier_url

__all__ = ["Place", "Root", "begin", "can_be_root", "ended", "note_loaded", "parse_root"]

_NAMED_STEP = re.compile(r"step[-_=](\d+)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """What a path or `checkpoint_id` stands for.

    Attributes:
        url: root of the run.
        step: the step that the name speaks of, or None.
        generation: set where the path is a checkpoint's own directory.
    """

    url: str
    step: int | None = None
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One checkpoint that is being written."""

    url: str
    run: str
    step: int
    generation: int
    parent: Parent | None


@dataclass(slots=True)
class _Claim:
    """What this process has done at one root.

    Attributes:
        last_step: the highest step that it began in its generation.
        begun: step -> the thread that began it, for steps that are not known to be committed.
    """

    generation: Generation
    last_step: int
    begun: dict[int, threading.Thread] = field(default_factory=dict)


_lock = threading.Lock()
# By process too: a forked child is another incarnation.
_claims: dict[tuple[int, str], _Claim] = {}
_loaded: dict[tuple[int, str], Parent] = {}


def can_be_root(place: str | os.PathLike[str]) -> bool:
    """Tell whether `parse_root` takes `place`."""
    try:
        parse_root(place)
    except ConfigError:
        return False
    return True


def parse_root(place: str | os.PathLike[str]) -> Root:
    """Return what `place` stands for.

    A directory that relight named (``step-000000001000.g0002``) is that checkpoint of the root above it. Any other
    place is a root of its own; a name that speaks of a step (``step-1000``, ``epoch=3-step=1000.ckpt``) says its
    number.

    Raises:
        ConfigError: there is no such kind of place.
    """
    url = tier_url(place)
    if url == RAM:
        raise ConfigError('"ram" is no place for torch.distributed.checkpoint; give a directory', tier=url)
    path = PurePath(url.removeprefix("file://"))
    known = parse_step_dir(path.name)
    if known is not None:
        return Root(url=tier_url(path.parent), step=known[0], generation=known[1])
    named = _NAMED_STEP.findall(path.name)
    return Root(url=url, step=int(named[-1]) if named else None)


def begin(catalog: Catalog, step: int | None) -> Place:
    """Choose the place of a save, on the rank that decides for all.

    What earlier saves of this process left unfinished at the root is removed first.

    Args:
        catalog: of the root.
        step: None for the next number that is free.

    Raises:
        FencedError: another process has claimed a newer generation that does not build on this one.
    """
    key = (os.getpid(), catalog.backend.url)
    with _lock:
        claim = _claims.get(key)
        steps = _stored_steps(catalog)
        if claim is not None:
            _remove_unfinished(catalog, claim)
        if step is None:
            step = 1 + max([0, *(number for number, _ in steps), *([claim.last_step] if claim else [])])
        if claim is None or step <= claim.last_step or not _is_known(catalog, claim.generation):
            catalog.tidy()
            parent = _parent(catalog, step, _loaded.pop(key, None))
            claim = _claims[key] = _Claim(catalog.claim(parent), step)
        elif (newer := _fenced_by(catalog, claim.generation.generation, step)) is not None:
            raise FencedError(
                f"{catalog.backend.url}: generation {newer} was claimed by another process, which does not build on "
                f"step {step} of generation {claim.generation.generation}; only one job may save there",
                step=step,
                tier=catalog.backend.url,
            )
        claim.last_step = step
        claim.begun[step] = threading.current_thread()
    return Place(
        url=catalog.backend.url,
        run=claim.generation.run,
        step=step,
        generation=claim.generation.generation,
        parent=claim.generation.parent,
    )


def ended(place: Place) -> None:
    """Note that the checkpoint at `place` is committed."""
    with _lock:
        claim = _claims.get((os.getpid(), place.url))
        if claim is not None:
            claim.begun.pop(place.step, None)


def note_loaded(url: str, step: int, generation: int) -> None:
    """Note what this process may continue from: the next generation that it claims builds on that.

    Of several the newest counts, since an older one may have been loaded just to look at it.
    """
    key = (os.getpid(), url)
    with _lock:
        known = _loaded.get(key)
        if known is None or known.step <= step:
            _loaded[key] = Parent(step=step, generation=generation)


def _stored_steps(catalog: Catalog) -> set[tuple[int, int]]:
    """Return (step, generation) of everything begun at the root, by names alone."""
    names = [*(file.name for file in catalog.backend.list(STEPS)), *catalog.backend.unfinished(STEPS)]
    places = (parse_step_dir(name.partition("/")[0]) for name in names)
    return {place for place in places if place is not None}


def _is_known(catalog: Catalog, generation: Generation) -> bool:
    """Tell whether the claim still stands: somebody may have removed the whole root meanwhile."""
    return any(
        (one.run, one.generation) == (generation.run, generation.generation) for one in catalog.generations()
    )


def _fenced_by(catalog: Catalog, generation: int, step: int) -> int | None:
    lineage = trace({one.generation: one.parent for one in catalog.generations()})
    return None if lineage.newest is None or lineage.holds(step, generation) else lineage.newest


def _parent(catalog: Catalog, step: int, loaded: Parent | None) -> Parent | None:
    """Return what a save of `step` builds on: what was loaded, else the newest checkpoint that is not beyond it.

    One of the very same step is among these, so that it counts until the new one is committed.
    """
    if loaded is not None and loaded.step <= step and catalog.is_committed(loaded.step, loaded.generation):
        return loaded
    before = (info for info in catalog.candidates(with_replicas_differ=True) if info.step <= step)
    newest = next(before, None)
    return None if newest is None else Parent(step=newest.step, generation=newest.generation)


def _remove_unfinished(catalog: Catalog, claim: _Claim) -> None:
    """Remove what failed saves of this process left: their images would fill the disk for every later save.

    A save is over when its thread has ended, or is the one that now begins another.
    """
    number = claim.generation.generation
    for step, thread in list(claim.begun.items()):
        if thread is threading.current_thread() or not thread.is_alive():
            del claim.begun[step]
            if not catalog.is_committed(step, number):
                catalog.remove(step, number)
