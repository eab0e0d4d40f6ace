"""Names of the stored files of a run, relative to its root; numbers in names are read as numbers, not as text."""

from __future__ import annotations

import re

__all__ = [
    "GENERATIONS",
    "STEPS",
    "generation_name",
    "image_name",
    "manifest_name",
    "marker_name",
    "parse_generation_name",
    "parse_step_dir",
    "record_name",
    "step_dir",
]

GENERATIONS = "generations/"
"""Prefix of the names of generation files."""

STEPS = "step-"
"""Prefix of the names of step directories."""

_STEP_DIR = re.compile(r"step-(\d{12,})\.g(\d{4,})", re.ASCII)
_GENERATION = re.compile(r"generations/g(\d{4,})\.json", re.ASCII)


def step_dir(step: int, generation: int) -> str:
    """Return the directory of a checkpoint; steps of more than 12 digits make it longer."""
    return f"step-{step:012d}.g{generation:04d}"


def parse_step_dir(name: str) -> tuple[int, int] | None:
    """Return the (step, generation) that `name` stands for, None unless `step_dir` makes exactly that name."""
    found = _STEP_DIR.fullmatch(name)
    if found is None:
        return None
    step, generation = int(found[1]), int(found[2])
    return (step, generation) if step_dir(step, generation) == name else None


def image_name(step: int, generation: int, rank: int) -> str:
    """Return the name of a rank's image."""
    return f"{step_dir(step, generation)}/rank-{rank:05d}.safetensors"


def record_name(step: int, generation: int, rank: int) -> str:
    """Return the name of a rank's record."""
    return f"{step_dir(step, generation)}/rank-{rank:05d}.json"


def manifest_name(step: int, generation: int) -> str:
    """Return the name of the manifest, whose presence makes the checkpoint exist."""
    return f"{step_dir(step, generation)}/manifest.json"


def marker_name(step: int, generation: int, kind: str) -> str:
    """Return the name of a marker; `kind` is "verified" or "pinned"."""
    return f"{step_dir(step, generation)}/{kind}.json"


def generation_name(generation: int) -> str:
    """Return the name of a generation's file."""
    return f"generations/g{generation:04d}.json"


def parse_generation_name(name: str) -> int | None:
    """Return the number of the generation whose file has this name, or None."""
    found = _GENERATION.fullmatch(name)
    if found is None or generation_name(int(found[1])) != name:
        return None
    return int(found[1])
