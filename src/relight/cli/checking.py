"""`relight verify` and `relight diff`: what differs from what was written, and from each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relight.cli.exits import FOUND, OK
from relight.cli.progress import progress
from relight.cli.runs import choose_step, open_run, print_json

if TYPE_CHECKING:
    from relight.cli.comparing import Side
    from relight.manifest.catalog import Inventory, Problem

__all__ = ["diff", "verify"]


def verify(url: str, /, *, step: int | None = None, mark: bool = False, json: bool = False) -> int:
    """Read every byte of the checkpoints and compare it with its digest.

    Exits with 0 when all is good, with 1 when not: each bad file is named, and the block of an image.

    Args:
        url: Root of the run.
        step: Check this checkpoint only; default: all, and the generation files.
        mark: Note the good ones as verified, so that retention counts them.
        json: Print JSON instead of text.
    """
    catalog, inventory = open_run(url)
    places = _places(inventory, step)
    if not places and step is not None:
        choose_step(inventory, url, step)
    problems = [] if step is not None else list(inventory.problems)
    checked = []
    total_bytes = sum(i.bytes for i in inventory.checkpoints if (i.step, i.generation) in places)
    with progress("verifying", total_bytes) as advance:
        for place in places:
            found = catalog.verify(*place, advance)
            checked.append((place, not found))
            problems += [problem for problem in found if problem not in problems]
            if mark and not found:
                catalog.mark_verified(*place)
    if json:
        print_json(_as_json(checked, problems))
    else:
        _print_verdict(checked, problems)
    return FOUND if problems else OK


def diff(url: str, left: str, right: str | None = None, /, *, json: bool = False) -> int:
    """Compare two checkpoints: every tensor, and the rest of the state.

    Tensors are compared by name, dtype, shape and every byte, whatever the number of ranks.

    Exits with 0 when they are equal, with 1 when they differ.

    Args:
        url: Root of the run; with one more operand only, also the left side, by its newest step.
        left: A step, another run's URL (its newest step), or URL@STEP.
        right: As left; both are then compared.
        json: Print JSON instead of text.
    """
    from relight.cli.comparing import compare

    first, second = (
        (_side(url, url), _side(url, left)) if right is None else (_side(url, left), _side(url, right))
    )
    total_bytes = first.info.bytes + second.info.bytes
    with progress("comparing", total_bytes) as advance:
        found = compare(first, second, advance)
    if json:
        print_json(
            {
                "left": {"url": first.url, "step": first.info.step, "generation": first.info.generation},
                "right": {"url": second.url, "step": second.info.step, "generation": second.info.generation},
                "equal": not found,
                "differences": [{"kind": d.kind, "key": d.key, "message": d.message} for d in found],
            }
        )
    else:
        for difference in found:
            print(f"{difference.kind:<8} {difference.key}: {difference.message}")
        print("equal" if not found else f"{len(found)} difference{'s' if len(found) > 1 else ''}")
    return FOUND if found else OK


def _places(inventory: Inventory, step: int | None) -> list[tuple[int, int]]:
    """Return where there is a manifest, readable or not, oldest first."""
    from relight.manifest.names import manifest_name, parse_step_dir

    places = {(info.step, info.generation) for info in inventory.checkpoints}
    for problem in inventory.problems:
        place = parse_step_dir(problem.file.partition("/")[0])
        if place is not None and problem.file == manifest_name(*place):
            places.add(place)
    return sorted(place for place in places if step in (None, place[0]))


def _as_json(checked: list[tuple[tuple[int, int], bool]], problems: list[Problem]) -> dict[str, object]:
    return {
        "good": not problems,
        "checkpoints": [
            {"step": step, "generation": generation, "good": is_good}
            for (step, generation), is_good in checked
        ],
        "problems": [
            {"file": problem.file, "block": problem.block, "message": problem.message} for problem in problems
        ],
    }


def _print_verdict(checked: list[tuple[tuple[int, int], bool]], problems: list[Problem]) -> None:
    for (step, generation), is_good in checked:
        print(f"step {step} of generation {generation}: {'good' if is_good else 'BAD'}")
    for problem in problems:
        print(f"  {problem.message}")
    if not checked and not problems:
        print("no checkpoint is committed")


def _side(url: str, operand: str) -> Side:
    from relight.cli.comparing import Side

    place, at, number = operand.rpartition("@")
    if operand.isdecimal():
        place, step = url, int(operand)
    elif at and number.isdecimal():
        step = int(number)
    else:
        place, step = operand, None
    catalog, inventory = open_run(place)
    info = choose_step(inventory, place, step)
    return Side(url=catalog.backend.url, catalog=catalog, info=info)
