"""Turn measured numbers into lines of measured value, target and verdict; pure functions of the results."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = [
    "OURS",
    "Interval",
    "Line",
    "added_cpu_seconds",
    "added_seconds",
    "lines",
    "median",
    "stall_seconds",
]

OURS = "relight"
Results = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One claim: what was measured, what was wanted, and whether it holds."""

    section: str
    what: str
    measured: str
    target: str
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A median with its 95 percent bootstrap interval, in seconds."""

    median: float
    low: float
    high: float

    @property
    def includes_zero(self) -> bool:
        """Tell whether no difference at all is among the likely values."""
        return self.low <= 0.0 <= self.high

    def __str__(self) -> str:
        return f"{self.median * 1e3:.0f} ms [{self.low * 1e3:.0f}, {self.high * 1e3:.0f}]"


def median(values: list[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def bootstrap(values: list[float], *, resamples: int = 5000, seed: int = 0) -> Interval:
    """Return the median of `values` and the 2.5 and 97.5 percentiles of the medians of resamples."""
    draw = random.Random(seed)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(resamples))
    return Interval(
        median=median(values),
        low=medians[round(0.025 * resamples)],
        high=medians[round(0.975 * resamples) - 1],
    )


def added_seconds(numbers: dict[str, Any]) -> Interval:
    """Return how much longer a block takes with a save than without, over pairs of neighbouring blocks."""
    pairs = zip(numbers["saving"], numbers["plain"], strict=True)
    return bootstrap([saving["wall"] - plain["wall"] for saving, plain in pairs])


def added_cpu_seconds(numbers: dict[str, Any]) -> Interval:
    """Return the processor time that a save costs, all processes of the engine included."""
    pairs = zip(numbers["saving"], numbers["plain"], strict=True)
    return bootstrap([saving["cpu"] - plain["cpu"] for saving, plain in pairs])


def stall_seconds(numbers: dict[str, Any]) -> float:
    """Return the median time for which a save kept training from going on, measured around the engine.

    That is the call, plus the way into the optimizer's update, less what that way takes without a save.
    """
    idle = median([block["wait"] for block in numbers["plain"]])
    return median([block["call"] + max(0.0, block["wait"] - idle) for block in numbers["saving"]])


def lines(results: Results) -> list[Line]:
    """Return every line that `results` has the numbers for."""
    return [line for section in _SECTIONS if section in results for line in _SECTIONS[section](results)]


def _best(numbers: dict[str, Any], value: Any) -> tuple[str, Any]:
    """Return the peer with the least `value`, and that value."""
    found = {name: value(of) for name, of in numbers.items() if name != OURS}
    name = min(found, key=lambda n: getattr(found[n], "median", found[n]))
    return name, found[name]


def _stall_lines(results: Results) -> Iterator[Line]:
    numbers = results["loop"]
    if OURS not in numbers:
        return
    stall = stall_seconds(numbers[OURS])
    own = median([block["own"] for block in numbers[OURS]["saving"]])
    yield Line(
        section="stall",
        what="stall per save: call plus wait in the optimizer's hook",
        measured=f"{stall * 1e3:.2f} ms (its own figure: {own * 1e3:.2f} ms)",
        target="at most 3 ms",
        holds=max(stall, own) <= 0.003,
    )
    if len(numbers) == 1:
        return
    ours = added_seconds(numbers[OURS])
    num_pairs = len(numbers[OURS]["plain"])
    name, peer = _best(numbers, added_seconds)
    yield Line(
        section="stall",
        what=f"added loop time per save, {num_pairs} pairs of blocks of {numbers[OURS]['steps']} steps",
        measured=f"{ours}; best peer {name}: {peer}",
        target="at most 1/4 of the best peer's, or the interval includes 0 and the peer's does not",
        holds=ours.median <= peer.median / 4 or (ours.includes_zero and not peer.includes_zero),
    )


def _durable_lines(results: Results) -> Iterator[Line]:
    numbers = results["durable"]
    if OURS not in numbers:
        return
    ours = median(numbers[OURS]["seconds"])
    if len(numbers) > 1:
        name, peer = _best(numbers, lambda of: median(of["seconds"]))
        yield _ratio("durable", "time to durable", ours, peer, name, least=2.0)
    if results.get("fio_write"):
        yield _share(
            "durable",
            "bytes to durable per second",
            results["state_bytes"] / ours,
            results["fio_write"],
            "fio's direct write",
            least=0.80,
        )


def _restore_lines(results: Results) -> Iterator[Line]:
    numbers = results["restore"]
    if OURS not in numbers:
        return
    ours = median(numbers[OURS]["seconds"])
    copy = results["memory_copy"]
    yield _share(
        "restore",
        "restore from the RAM slot into live state, digests checked",
        results["state_bytes"] / ours,
        copy["1"],
        f"a memory copy by one thread (by two: {copy['2'] / 1e9:.1f} GB/s)",
        least=0.60,
    )
    if "DCP save" in numbers:
        yield _ratio(
            "restore", "the same", ours, median(numbers["DCP save"]["seconds"]), "DCP load, warm", least=8.0
        )


def _fresh_lines(results: Results) -> Iterator[Line]:
    numbers = results["fresh"]
    if {OURS, "DCP save, named"} <= set(numbers):
        peer = median(numbers["DCP save, named"]["seconds"])
        yield _ratio(
            "fresh",
            "restore into a fresh process with a fresh optimizer",
            median(numbers[OURS]["seconds"]),
            peer,
            "DCP load",
            least=3.0,
        )


def _cold_lines(results: Results) -> Iterator[Line]:
    numbers = results["cold"]
    if OURS in numbers and results.get("fio_read"):
        rate = results["state_bytes"] / median(numbers[OURS]["seconds"])
        yield _share(
            "disk",
            "restore from disk, cold cache",
            rate,
            results["fio_read"],
            "fio's direct read",
            least=0.85,
        )


def _warm_lines(results: Results) -> Iterator[Line]:
    numbers = results["warm"]
    if {OURS, "DCP save"} <= set(numbers):
        ours, peer = (median(numbers[name]["seconds"]) for name in (OURS, "DCP save"))
        yield _ratio("disk", "restore from disk, warm cache", ours, peer, "DCP load", least=3.0)


def _small_lines(results: Results) -> Iterator[Line]:
    many, one = results["small"]["many"], results["small"]["one"]
    for key, what in (("save", "save"), ("disk", "restore from disk")):
        ours, large = median(many[key]), median(one[key])
        yield Line(
            section="small",
            what=f"10,000 tensors of 4 KB: {what}",
            measured=f"{ours * 1e3:.0f} ms, {ours / large:.1f} x one tensor ({large * 1e3:.0f} ms)",
            target="at most 5 x one tensor of the same total",
            holds=ours <= 5 * large,
        )
    slot = median(many["slot"])
    yield Line(
        section="small",
        what="10,000 tensors of 4 KB: restore from the RAM slot",
        measured=f"{slot * 1e3:.0f} ms (one tensor: {median(one['slot']) * 1e3:.0f} ms)",
        target="at most 50 ms",
        holds=slot <= 0.050,
    )


def _memory_lines(results: Results) -> Iterator[Line]:
    trainer, keeper = results["memory"]["trainer"], results["memory"]["keeper"]
    yield Line(
        section="memory",
        what="the keeper's memory beside the arena, peak",
        measured=f"{max(keeper) / 1e6:.0f} MB",
        target="at most 64 MB",
        holds=0 < max(keeper) <= 64e6,
    )
    # The first saves touch buffers that are kept; a leak of even one small tensor a save would show after them.
    early, late = median(trainer[10:30]), median(trainer[-20:])
    yield Line(
        section="memory",
        what=f"growth of the trainer over {len(trainer)} saves, from the 20th",
        measured=f"{(late - early) / 1e6:.1f} MB ({early / 1e6:.0f} to {late / 1e6:.0f} MB)",
        target="nothing that grows: at most 5 MB",
        holds=late - early <= 5e6,
    )


def _ratio(section: str, what: str, ours: float, peer: float, name: str, *, least: float) -> Line:
    return Line(
        section=section,
        what=what,
        measured=f"{ours * 1e3:.0f} ms, {peer / ours:.1f} x faster than {name} ({peer * 1e3:.0f} ms)",
        target=f"at least {least:g} x",
        holds=peer / ours >= least,
    )


def _share(section: str, what: str, rate: float, bound: float, name: str, *, least: float) -> Line:
    return Line(
        section=section,
        what=what,
        measured=f"{rate / 1e9:.2f} GB/s, {rate / bound:.0%} of {name} ({bound / 1e9:.2f} GB/s)",
        target=f"at least {least:.0%}",
        holds=rate / bound >= least,
    )


_SECTIONS = {
    "loop": _stall_lines,
    "durable": _durable_lines,
    "restore": _restore_lines,
    "fresh": _fresh_lines,
    "cold": _cold_lines,
    "warm": _warm_lines,
    "small": _small_lines,
    "memory": _memory_lines,
}
