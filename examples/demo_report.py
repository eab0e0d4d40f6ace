"""What the demo shows of its two runs: equality bit by bit, stalls, times to resume, the loss curve."""

from __future__ import annotations

import itertools
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_lives import NUM_RANKS, Life, Run

from relight.events import Event, read_events

_COLORS = ("#1f77b4", "#2ca02c", "#9467bd", "#8c564b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Equality:
    """Every loss of the killed run against the uninterrupted one's, by (rank, step), and the final weights."""

    num_compared: int
    num_replayed: int
    differing: tuple[tuple[int, int], ...]
    missing: tuple[tuple[int, int], ...]
    same_weights: bool

    @property
    def holds(self) -> bool:
        return self.same_weights and not self.differing and not self.missing


def compare(run: Run, straight: Sequence[Life], other: Run, killed: Sequence[Life]) -> Equality:
    """Compare loss bits of every step and rank, replayed steps included, and the digests of the final weights."""
    expected = {(line.rank, line.step): line.bits for life in straight for line in life.lines}
    seen = [((line.rank, line.step), line.bits) for life in killed for line in life.lines]
    due = {(rank, step) for rank in range(NUM_RANKS) for step in range(1, run.steps + 1)}
    return Equality(
        num_compared=len(seen),
        num_replayed=len(seen) - len({key for key, _ in seen}),
        differing=tuple(sorted({key for key, bits in seen if expected.get(key) != bits})),
        missing=tuple(sorted(due - ({key for key, _ in seen} & expected.keys()))),
        same_weights=_digest(run) == _digest(other) != "",
    )


def _digest(run: Run) -> str:
    return run.digest_file.read_text().strip() if run.digest_file.exists() else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """How a life came back after a kill.

    Attributes:
        first_step: seconds from the SIGKILL until a step was done again on all ranks.
        from_step: the step it went on from.
        source: where the snapshot was read.
        num_repeated: steps that had to be done again.
        parts: what the seconds went into, one after another; None where it is not known.
    """

    first_step: float
    from_step: int
    source: str
    num_repeated: int
    parts: tuple[tuple[str, float | None], ...]


def resume_of(dead: Life, heir: Life, events: Sequence[Event]) -> Resume:
    """Return how `heir` came back after the kill that ended `dead`."""
    assert dead.kill is not None
    mine = [event for event in events if heir.started_at <= event.at <= heir.ended_at]
    began = [event.at for event in mine if event.kind == "restore_started"]
    done = [event for event in mine if event.kind == "restore_done"]
    first = min(line.step for line in heir.lines)
    instants = [
        ("torchrun ends", dead.ended_at),
        ("torchrun starts", heir.worker_started_at),
        ("imports, model", min(began, default=None)),
        ("restore", max((event.at for event in done), default=None)),
        ("first step", max(line.at for line in heir.lines if line.step == first)),
    ]
    parts: list[tuple[str, float | None]] = []
    last = dead.kill.at
    for name, at in instants:
        parts.append((name, None if at is None else at - last))
        last = last if at is None else at
    return Resume(
        first_step=last - dead.kill.at,
        from_step=first - 1,
        source=", ".join(sorted({"ram" if event.fields["place"] == "ram" else "disk" for event in done}))
        or "?",
        num_repeated=max(line.step for line in dead.lines) - (first - 1),
        parts=tuple(parts),
    )


def run_events(run: Run) -> list[Event]:
    """Return the events of a run in the order of time."""
    return sorted(read_events(run.checkpoints / "events"), key=lambda event: event.at)


def stalls_seconds(run: Run, events: Sequence[Event]) -> tuple[list[float], list[float]]:
    """Return how long saves kept a rank from training: of those beside a next step, and of the last, which has none."""
    sealed = [event for event in events if event.kind == "save_sealed"]
    beside = [float(event.fields["stall_seconds"]) for event in sealed if event.step != run.steps]
    last = [float(event.fields["stall_seconds"]) for event in sealed if event.step == run.steps]
    return beside, last


def checkpoint_bytes(run: Run) -> int:
    """Return the size of the newest checkpoint on disk, all files."""
    committed = sorted(run.checkpoints.glob("step-*/manifest.json"))
    return sum(file.stat().st_size for file in committed[-1].parent.iterdir()) if committed else 0


def step_seconds(lives: Sequence[Life]) -> float:
    """Return the median time of a step."""
    times = [line.at for life in lives for line in life.lines if line.rank == 0]
    return statistics.median(after - before for before, after in itertools.pairwise(times))


def _losses(lives: Sequence[Life]) -> list[tuple[list[int], list[float]]]:
    """Return per life its steps and the mean loss of the ranks; a step that not all ranks finished is left out."""
    found = []
    for life in lives:
        by_step: dict[int, list[float]] = {}
        for line in life.lines:
            by_step.setdefault(line.step, []).append(line.loss)
        steps = [step for step, each in sorted(by_step.items()) if len(each) == NUM_RANKS]
        found.append((steps, [sum(by_step[step]) / NUM_RANKS for step in steps]))
    return found


def draw_png(path: Path, straight: Sequence[Life], killed: Sequence[Life]) -> None:
    """Draw the loss of both runs by step, and the killed run's progress in time, with the kills marked."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 8), dpi=120, layout="constrained")
    top.plot(*_losses(straight)[0], color="#d0d0d0", linewidth=7, label="uninterrupted run")
    began = killed[0].lines[0].at
    for life, (steps, losses) in zip(killed, _losses(killed), strict=True):
        # Rings of falling size: a step that two lives did shows both, one inside the other.
        ring = {
            "marker": "o",
            "fillstyle": "none",
            "markersize": max(2, 10 - 3 * life.number),
            "linewidth": 1,
        }
        color = _COLORS[(life.number - 1) % len(_COLORS)]
        top.plot(steps, losses, color=color, label=f"killed run, life {life.number}", **ring)
        mine = [line for line in life.lines if line.rank == 0]
        bottom.plot([line.at - began for line in mine], [line.step for line in mine], color=color, **ring)
    for dead, heir in itertools.pairwise(killed):
        _mark_kill(top, bottom, dead, heir, began)
    top.set(xlabel="optimizer step", ylabel="training loss (nats per byte)")
    top.set_title("Loss of the uninterrupted and of the killed run")
    bottom.set(xlabel="time since the first step (s)", ylabel="optimizer step")
    bottom.set_title("The killed run in time: work lost, time to resume")
    top.legend(loc="center right", frameon=False)
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)


def _mark_kill(top: Any, bottom: Any, dead: Life, heir: Life, began: float) -> None:
    assert dead.kill is not None
    red = {"color": "#d62728", "fontsize": 9, "va": "top"}
    step, killed_at, resumed_at = dead.kill.after_step + 0.5, dead.kill.at - began, heir.lines[0].at - began
    top.axvline(step, color="#d62728", linestyle="--", linewidth=1)
    top.text(step, 0.98, f" SIGKILL in\n {dead.kill.cut}", transform=top.get_xaxis_transform(), **red)
    bottom.axvspan(killed_at, resumed_at, color="#d62728", alpha=0.12, linewidth=0)
    label = f" SIGKILL, {resumed_at - killed_at:.1f} s\n to the next step"
    bottom.text(killed_at, 0.98, label, transform=bottom.get_xaxis_transform(), **red)


def draw_terminal(straight: Sequence[Life], killed: Sequence[Life]) -> str:
    """Return the loss curve as text, at most 100 columns wide; in colour only for a terminal."""
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.theme("simple")
    figure.canvas("default")
    figure.plot_size(min(100, shutil.get_terminal_size((100, 24)).columns), 20)
    figure.label("optimizer step", "x").label("training loss, nats per byte", "y").legend(active=False)
    steps, losses = _losses(straight)[0]
    figure.ruler("x").ticks(range(0, steps[-1] + 1, max(1, steps[-1] // 6)))
    figure.draw(figure.signal(steps, losses, marker=plotext.marker("braille", "gray")).lines())
    for life, curve in zip(killed, _losses(killed), strict=True):
        mark = plotext.marker(str(life.number), ("blue", "green", "magenta", "cyan")[(life.number - 1) % 4])
        figure.draw(figure.signal(*curve, marker=mark))
    for kill in (life.kill for life in killed if life.kill is not None):
        ends = [kill.after_step + 0.5] * 2, [min(losses), max(losses)]
        figure.draw(figure.signal(*ends, marker=plotext.marker("|", "red")).lines())
    legend = "   line: uninterrupted run   digits: lives of the killed run   vertical: SIGKILL"
    return str(figure.build().string(colorless=not sys.stdout.isatty())) + legend
