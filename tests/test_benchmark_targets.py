"""The verdicts of the benchmark on made-up numbers: what is compared with what, and when a target counts as reached."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.report import markdown
from benchmarks.targets import added_seconds, bootstrap, lines, stall_seconds


def block(
    wall: float, *, call: float = 0.0, wait: float = 0.0001, own: float | None = None
) -> dict[str, Any]:
    return {"wall": wall, "call": call, "wait": wait, "own": own, "cpu": wall}


def loop(added: float, *, call: float, wait: float = 0.0001, noise: float = 0.0) -> dict[str, Any]:
    pairs = [(3.0 + 0.1 * i, 3.0 + 0.1 * i + added + noise * (-1) ** i) for i in range(20)]
    return {
        "plain": [block(plain) for plain, _ in pairs],
        "saving": [block(saving, call=call, wait=wait, own=call) for _, saving in pairs],
        "steps": 5,
        "syncs": "fsync by itself",
    }


def verdicts(results: dict[str, Any]) -> list[bool]:
    return [line.holds for line in lines(results)]


def test_drift_of_the_machine_cancels_between_neighbouring_blocks() -> None:
    assert added_seconds(loop(0.5, call=0.1)).median == pytest.approx(0.5)


def test_interval_holds_the_median_and_repeats() -> None:
    values = [float(v) for v in range(21)]
    interval = bootstrap(values)
    assert interval.low <= interval.median == 10.0 <= interval.high
    assert bootstrap(values) == interval


def test_stall_is_the_call_and_what_the_hook_adds_to_it() -> None:
    assert stall_seconds(loop(0.0, call=0.001, wait=0.0021)) == pytest.approx(0.003)


def test_stall_over_three_milliseconds_falls_short() -> None:
    peers = {"DCP save": loop(1.0, call=1.0)}
    assert verdicts({"loop": {"relight": loop(0.0, call=0.002), **peers}}) == [True, True]
    assert verdicts({"loop": {"relight": loop(0.0, call=0.004), **peers}}) == [False, True]


@pytest.mark.parametrize(
    ("added", "noise", "holds"),
    [(0.24, 0.0, True), (0.26, 0.0, False), (0.26, 1.0, True), (-0.01, 0.0, True)],
)
def test_added_time_is_held_against_the_best_peer(added: float, noise: float, holds: bool) -> None:
    peers = {"torch.save": loop(1.5, call=1.4), "DCP save": loop(1.0, call=1.0)}
    results = {"loop": {"relight": loop(added, call=0.001, noise=noise), **peers}}
    assert verdicts(results)[1] is holds
    assert "DCP save" in lines(results)[1].measured


def test_time_to_durable_is_held_against_the_best_peer_and_the_disk() -> None:
    numbers = {
        "relight": {"seconds": [0.5]},
        "torch.save": {"seconds": [0.9]},
        "DCP save": {"seconds": [1.2]},
    }
    results = {"durable": numbers, "state_bytes": 10**9, "fio_write": 2.0e9}
    assert verdicts(results) == [False, True]


def test_page_names_every_target_and_verdict() -> None:
    results = {
        "loop": {"relight": loop(0.0, call=0.004), "DCP save": loop(1.0, call=1.0)},
        "machine": dict.fromkeys(("processor", "memory", "file system", "kernel", "python"), "x"),
        "state_bytes": 10**9,
        "num_tensors": 498,
        "compute_seconds": 0.6,
        "busy_cores": [0.0],
        "torch": "x",
        "date": "2026-01-01",
    }
    page = markdown(results)
    assert page.count("**falls short**") == 1
    assert page.count("| holds |") == 1
