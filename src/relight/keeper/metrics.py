"""The keeper's numbers in the Prometheus text format (version 0.0.4); pure."""

from __future__ import annotations

from collections.abc import Sequence

from relight.keeper.messages import KeeperStatus

__all__ = ["format_metrics"]

_HELP = {
    "saves_durable": "Rank images stored with their record, on any tier.",
    "saves_committed": "Checkpoints committed, counted on each tier.",
    "saves_verified": "Checkpoints read back without a fault, counted on each tier.",
    "saves_failed": "Checkpoints that could not be stored, or read back badly, counted on each tier.",
    "failures": "Errors that ended a store.",
    "retries": "Errors that were followed by another try.",
    "stored_bytes": "Bytes of rank images written to tiers.",
    "store_seconds": "Seconds spent in writing rank images.",
    "digested_bytes": "Bytes hashed in sealed slots.",
    "digest_seconds": "Seconds spent in hashing sealed slots.",
    "checkpoints_removed": "Checkpoints removed by retention.",
    "retention_errors": "Runs of retention that ended with an error.",
}


def format_metrics(status: KeeperStatus) -> str:
    """Return counters and gauges; each line ends with a newline."""
    lines: list[str] = []
    for name, text in _HELP.items():
        _add(lines, f"{name}_total", "counter", text, [("", status.counters.get(name, 0))])
    states: dict[str, int] = {}
    for slot in status.slots:
        states[slot.state] = states.get(slot.state, 0) + 1
    by_state = [(f'{{state="{state}"}}', count) for state, count in sorted(states.items())]
    _add(lines, "slots", "gauge", "Arena slots by state.", by_state)
    held_bytes = sum(slot.capacity_bytes for slot in status.slots)
    _add(lines, "arena_bytes", "gauge", "Shared memory of all slots.", [("", held_bytes)])
    num_alive = sum(rank.is_alive for rank in status.ranks)
    _add(lines, "ranks_attached", "gauge", "Attached processes that run.", [("", num_alive)])
    newest = max((tier_step for tier_step in _stored(status)), default=-1)
    _add(
        lines,
        "newest_committed_step",
        "gauge",
        "Newest committed step of this keeper, -1 for none.",
        [("", newest)],
    )
    _add(lines, "start_time_seconds", "gauge", "Wall time of the keeper's start.", [("", status.started_at)])
    return "".join(lines)


def _stored(status: KeeperStatus) -> list[int]:
    return [
        step.step
        for step in status.steps
        if any(tier.state in ("committed", "verified") for tier in step.tiers)
    ]


def _add(lines: list[str], name: str, kind: str, text: str, samples: Sequence[tuple[str, float]]) -> None:
    lines.append(f"# HELP relight_keeper_{name} {text}\n# TYPE relight_keeper_{name} {kind}\n")
    lines += [f"relight_keeper_{name}{labels} {value:.17g}\n" for labels, value in samples]
