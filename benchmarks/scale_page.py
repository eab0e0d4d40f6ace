"""The page of the measurements at scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["page"]

Results = dict[str, Any]


def page(results: Results) -> str:
    """Return the results as a Markdown page."""
    sizes = results["sizes"]
    largest = max(sizes, key=lambda size: size["num_ranks"])
    lines = [
        "# relight at scale",
        "",
        "`python -m benchmarks.scale`, "
        + ", ".join([results["date"], *(f"{key} {value}" for key, value in results["machine"].items())])
        + ".",
        "",
        "A thousand tensors (a model of 23e9 parameters, its AdamW moments and step counts) on up to 16,384 ranks. One",
        "rank is played at a time, from nothing: no plan is cached. Times are medians of several runs, of several",
        f"ranks the slowest; {results['repeats']} runs each.",
        "",
        f"## Targets, at {largest['num_ranks']:,} ranks",
        "",
        "| what | measured | target | holds |",
        "| --- | --- | --- | --- |",
        *targets(largest),
    ]
    lines += ["", *why_one_file(largest)]
    for title, columns in _PLAN_TABLES.items():
        lines += ["", f"## {title}", "", *plan_table(sizes, columns)]
    lines += [
        "",
        "## Catalog: FSDP, three committed steps and one that lacks a rank",
        "",
        *catalog_table(sizes),
    ]
    return "\n".join(lines) + "\n"


def why_one_file(size: Results) -> Iterator[str]:
    """Yield why the index is no file of its own, cut in parts."""
    plan = max(size["plans"], key=lambda one: one["manifest_bytes"])
    index, seconds = plan["index_bytes"] / 1e6, plan["read_seconds"]
    yield f"The index takes {index:.2f} MB whatever the number of ranks; the rest of the manifest is a size and a"
    yield f"digest for each rank. It is read in {seconds * 1e3:.0f} ms: an index in several files would save nothing."


def targets(size: Results) -> Iterator[str]:
    """Yield one row for each target."""
    worst = {
        key: max(plan[key] for plan in size["plans"])
        for key in ("manifest_bytes", "save_seconds", "load_seconds")
    }
    measured = {
        "manifest": (worst["manifest_bytes"], 20e6, f"{worst['manifest_bytes'] / 1e6:.2f} MB", "20 MB"),
        "save plan of one rank": _seconds_line(worst["save_seconds"]),
        f"load plan of one of {size['num_ranks'] // 2:,} ranks": _seconds_line(worst["load_seconds"]),
        "catalog finds the newest candidate": _seconds_line(size["catalog"]["decide_seconds"]),
    }
    for what, (value, most, text, target) in measured.items():
        yield f"| {what} | {text} | at most {target} | {'yes' if value <= most else 'NO'} |"


def _seconds_line(seconds: float) -> tuple[float, float, str, str]:
    return seconds, 1.0, f"{seconds * 1e3:.0f} ms", "1 s"


_PLAN_TABLES = {
    "Save plan": {
        "plan of one rank, ms": lambda plan: f"{plan['save_seconds'] * 1e3:.0f}",
        "index by rank 0, ms": lambda plan: f"{plan['index_seconds'] * 1e3:.1f}",
        "manifest, MB": lambda plan: f"{plan['manifest_bytes'] / 1e6:.2f}",
        "of that the index, MB": lambda plan: f"{plan['index_bytes'] / 1e6:.2f}",
    },
    "Load plan, after a change to half as many ranks": {
        "plan of one rank, ms": lambda plan: f"{plan['load_seconds'] * 1e3:.0f}",
        "pieces it reads": lambda plan: f"{plan['load_pieces']:,}",
        "from images of": lambda plan: f"{plan['load_ranks']:,} ranks",
        "reading the manifest, ms": lambda plan: f"{plan['read_seconds'] * 1e3:.0f}",
    },
    "Bytes of that for a node of 8 ranks: needed, and read in whole blocks, each once": {
        "needs, MB": lambda plan: f"{plan['node_needs_bytes'] / 1e6:,.0f}",
        "reads, MB": lambda plan: f"{plan['node_reads_bytes'] / 1e6:,.0f}",
        "from images of": lambda plan: f"{plan['node_images']:,} ranks",
    },
}


def plan_table(sizes: list[Results], columns: Mapping[str, Callable[[Results], str]]) -> Iterator[str]:
    """Yield a table with a row for each strategy and size."""
    yield f"| strategy | ranks | {' | '.join(columns)} |"
    yield "| --- " * (len(columns) + 2) + "|"
    for at in range(len(sizes[0]["plans"])):
        for size in sizes:
            plan = size["plans"][at]
            if "node_reads_bytes" not in plan and "needs, MB" in columns:
                # Under DDP every node needs all there is.
                continue
            cells = [
                plan["strategy"],
                f"{size['num_ranks']:,}",
                *(column(plan) for column in columns.values()),
            ]
            yield f"| {' | '.join(cells)} |"


def catalog_table(sizes: list[Results]) -> Iterator[str]:
    """Yield a table with a row for each thing that is asked of the catalog."""
    heads = " | ".join(f"{size['num_ranks']:,} ranks" for size in sizes)
    yield f"| what | {heads} |"
    yield "| --- " * (len(sizes) + 1) + "|"
    far = f"behind {sizes[0]['catalog']['round_trip_seconds'] * 1e3:.0f} ms"
    rows = {
        "newest candidate, local": ("decide", False),
        f"newest candidate, {far}": ("decide_far", True),
        "commit, local": ("commit", False),
        f"commit, {far}": ("commit_far", True),
        f"a finder that comes too early by one rank, {far}": ("early", True),
        f"the same one again, {far}": ("again", True),
    }
    for what, (name, has_trips) in rows.items():
        cells = []
        for size in sizes:
            found = size["catalog"]
            trips = found.get(f"{name}_round_trips")
            cells.append(
                f"{found[f'{name}_seconds']:.3f} s" + (f", {trips:,} round trips" if has_trips else "")
            )
        yield f"| {what} | {' | '.join(cells)} |"
