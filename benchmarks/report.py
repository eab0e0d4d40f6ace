"""Print results as a Markdown page and as one picture."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.targets import OURS, Interval, added_cpu_seconds, added_seconds, lines, median, stall_seconds

__all__ = ["markdown", "picture"]

Results = dict[str, Any]


def markdown(results: Results) -> str:
    """Return the whole page."""
    parts = ["# Speed of relight", "", *_conditions(results), "", "## Targets", "", *_targets(results)]
    for title, table in _TABLES.items():
        if rows := list(table(results)):
            parts += ["", f"## {title}", "", *rows]
    return "\n".join(parts) + "\n"


def picture(results: Results, path: Path) -> None:
    """Draw the sections that were run, one panel each; less is better in all of them."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    panels = [(title, values) for title, values in _panels(results) if values]
    if not panels:
        return
    rows = (len(panels) + 1) // 2
    figure, axes = plt.subplots(rows, 2, figsize=(12, 2.9 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, values) in zip(axes.flat, panels, strict=False):
        _draw(axis, title, values)
    size = results["state_bytes"] / 1e9
    figure.suptitle(
        f"{size:.1f} GB AdamW state, one process, {results['machine']['processor']}; seconds, less is better"
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw(axis: Any, title: str, values: dict[str, float | Interval]) -> None:
    """Draw one panel: durations on a log scale, or medians with their intervals on a linear one."""
    from matplotlib import ticker

    names = list(values)[::-1]
    colors = ["#c8102e" if name == OURS else "#9aa5b1" for name in names]
    intervals = [value for name in names if isinstance(value := values[name], Interval)]
    seconds = [value.median if isinstance(value := values[name], Interval) else value for name in names]
    bars = axis.barh(names, seconds, color=colors)
    if intervals:
        # The whiskers take the place beside the bars.
        for name, value in zip(names, seconds, strict=True):
            axis.annotate(
                _short(value), (1.0, name), xycoords=axis.get_yaxis_transform(), fontsize=8, ha="right"
            )
        errors = [[i.median - i.low for i in intervals], [i.high - i.median for i in intervals]]
        axis.errorbar(seconds, names, xerr=errors, fmt="none", ecolor="#333333", capsize=3, linewidth=1)
        axis.axvline(0.0, color="#333333", linewidth=0.8)
        axis.margins(x=0.2)
    else:
        axis.bar_label(bars, [_short(value) for value in seconds], padding=3, fontsize=8)
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        axis.set_xlim(min(seconds) / 2, max(seconds) * 4)
    axis.set_title(title, fontsize=10, loc="left")
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _conditions(results: Results) -> Iterator[str]:
    machine = results["machine"]
    yield (
        f"{results['state_bytes'] / 1e9:.2f} GB of AdamW state in {results['num_tensors']} tensors, one process; "
        f"forward and backward {results['compute_seconds']:.2f} s. {machine['processor']}, {machine['memory']}, "
        f"{machine['file system']}, Linux {machine['kernel']}, Python {machine['python']}, torch {results['torch']}; "
        f"{results['date']}."
    )
    busy = results["busy_cores"]
    yield (
        f"Before each of the {len(busy)} measurements other work took {statistics.median(busy):.2f} cores (median), "
        f"{max(busy):.2f} at most."
    )
    yield ""
    yield (
        "Each method ran in its own process, on the same disk, after warm-up saves. Values are medians. "
        "`fsync added here` marks engines that do not flush by themselves: their files are flushed by the benchmark, "
        "inside the measured time to durable. Made by `make bench`."
    )


def _targets(results: Results) -> Iterator[str]:
    yield "| section | what | measured | target | |"
    yield "| --- | --- | --- | --- | --- |"
    for line in lines(results):
        verdict = "holds" if line.holds else "**falls short**"
        yield f"| {line.section} | {line.what} | {line.measured} | {line.target} | {verdict} |"


def _loop_table(results: Results) -> Iterator[str]:
    if "loop" not in results:
        return
    yield "| method | call, ms | stall, ms | added loop time per save [95% interval] | processor seconds per save |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for name, numbers in results["loop"].items():
        call = median([block["call"] for block in numbers["saving"]]) * 1e3
        cpu = added_cpu_seconds(numbers)
        yield (
            f"| {name} | {call:.1f} | {stall_seconds(numbers) * 1e3:.1f} | {added_seconds(numbers)} "
            f"| {cpu.median:.2f} [{cpu.low:.2f}, {cpu.high:.2f}] |"
        )


def _durable_table(results: Results) -> Iterator[str]:
    if "durable" not in results:
        return
    yield "| method | time to durable, s | least, most | GB/s | flush |"
    yield "| --- | ---: | ---: | ---: | --- |"
    for name, numbers in results["durable"].items():
        seconds = numbers["seconds"]
        rate = results["state_bytes"] / median(seconds) / 1e9
        spread = f"{min(seconds):.2f}, {max(seconds):.2f}"
        yield f"| {name} | {median(seconds):.2f} | {spread} | {rate:.2f} | {numbers['syncs']} |"
    if results.get("fio_write"):
        rate = results["fio_write"]
        seconds = results["state_bytes"] / rate
        yield f"| fio, direct write, 8 MB blocks | {seconds:.2f} | | {rate / 1e9:.2f} | at the end |"


def _restore_table(results: Results) -> Iterator[str]:
    sources = {
        "restore": "live state; relight from its RAM slot, others from a warm cache",
        "fresh": "fresh process and optimizer; relight from its RAM slot, others from a warm cache",
        "warm": "live state, from disk, warm cache",
        "cold": "live state, from disk, cold cache",
    }
    if not set(sources) & set(results):
        return
    yield "| situation | method | s | least, most | GB/s |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for key, title in sources.items():
        for name, numbers in results.get(key, {}).items():
            seconds = numbers["seconds"]
            rate = results["state_bytes"] / median(seconds) / 1e9
            label = f"{name} ({numbers['source']})" if name == OURS else name
            yield f"| {title} | {label} | {median(seconds):.3f} | {min(seconds):.3f}, {max(seconds):.3f} | {rate:.2f} |"
    if "memory_copy" in results:
        for threads, rate in results["memory_copy"].items():
            yield f"| | memory copy, {threads} thread(s) | {results['state_bytes'] / rate:.3f} | | {rate / 1e9:.2f} |"
    if results.get("fio_read"):
        rate = results["fio_read"]
        yield f"| | fio, direct read, 8 MB blocks | {results['state_bytes'] / rate:.3f} | | {rate / 1e9:.2f} |"


_TABLES = {
    "Stall and added loop time": _loop_table,
    "Time to durable, nothing else running": _durable_table,
    "Restore": _restore_table,
}


def _panels(results: Results) -> Iterator[tuple[str, dict[str, float | Interval]]]:
    loop = results.get("loop", {})
    yield "stall per save", {name: stall_seconds(numbers) for name, numbers in loop.items()}
    yield "added loop time per save, 95% interval", {name: added_seconds(of) for name, of in loop.items()}
    titles = {
        "durable": "time to durable",
        "restore": "restore into live state (relight: RAM slot)",
        "fresh": "restore into a fresh process (relight: RAM slot)",
        "warm": "restore from disk, warm cache",
        "cold": "restore from disk, cold cache",
    }
    for key, title in titles.items():
        yield title, {name: median(numbers["seconds"]) for name, numbers in results.get(key, {}).items()}


def _short(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if abs(seconds) < 0.1 else f"{seconds:.2f} s"
