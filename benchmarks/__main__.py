"""Run the measurements one after another, each method in a process of its own, and write page, picture and numbers.

``python -m benchmarks`` is what `make bench` runs; ``--only stall`` runs one section and writes below scratch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.report import markdown, picture
from benchmarks.targets import OURS, lines

HERE = Path(__file__).parent
SCRATCH = HERE / "scratch"
# Below the directory of the run; each method saves there in turn.
PLACE = "place"
# How long a run waits, in all, for other work on the machine to end before a measurement starts all the same.
PATIENCE_SECONDS = 600.0
PEERS = (
    "torch.save",
    "DCP save",
    "DCP async, thread",
    "DCP async, thread, staged in background",
    "DCP async, process",
    "torch_checkpointing",
    "torchsnapshot, async",
)
# Where the way of saving makes no difference to the way of loading, one DCP stands for all.
LOADERS = ("torch.save", "DCP save", "torch_checkpointing", "torchsnapshot, async")


class Bench:
    """One run: the options, the results so far, and the way to measure a method in a process of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.directory = Path(options.directory).resolve()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.patience_seconds = PATIENCE_SECONDS
        self.size: dict[str, int] = {}
        self.results: dict[str, Any] = {}

    def prepare(self) -> None:
        """Find the batch whose forward and backward are longer than the copy of the state."""
        from benchmarks.workload import FULL, QUICK, Training, batch_for

        size = QUICK if self.options.quick else FULL
        wanted = 0.05 if self.options.quick else 0.6
        self.size = size.to_json() | {"batch": batch_for(size, compute_seconds=wanted)}
        training = Training(size)
        training.step()
        self.results = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": machine.describe(self.directory),
            "torch": version("torch"),
            "state_bytes": size.state_bytes,
            "num_tensors": len(training.tensors()),
            "compute_seconds": wanted,
            "busy_cores": [],
        }

    def measure(
        self, what: str, name: str, *, keep: bool = False, place: str = PLACE, **extra: Any
    ) -> dict[str, Any] | None:
        """Return the numbers of one method, or None (and say why) where it failed.

        The place where it saved is removed, unless `keep` is set: then the next call goes on there.
        """
        result = self.directory / "result.json"
        options = {"size": self.size, "repeats": 3 if self.options.quick else 9} | extra
        print(f"  {what:8} {name:40}", end="", flush=True)
        self.wait_for_quiet()
        started = time.monotonic()
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "benchmarks.worker",
                what,
                name,
                str(self.directory / place),
                json.dumps(options),
                str(result),
            ],
            cwd=HERE.parent,
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        print(f" {time.monotonic() - started:6.1f} s" if done.returncode == 0 else " failed", flush=True)
        if not keep:
            self.clear()
        if done.returncode != 0:
            print("\n".join(done.stderr.strip().splitlines()[-4:]))
            return None
        return json.loads(result.read_text(encoding="utf-8"))

    def wait_for_quiet(self) -> None:
        """Wait until nothing else works on this machine, while patience lasts, and note how much still does."""
        started = time.monotonic()
        while (busy := machine.busy_cores()) > 0.2 and time.monotonic() - started < self.patience_seconds:
            pass
        self.patience_seconds -= time.monotonic() - started
        self.results["busy_cores"].append(round(busy, 2))

    def restore(self, name: str, *, crash: bool, **extra: Any) -> dict[str, Any] | None:
        """Save in one process and restore in another; None where either failed.

        With `crash` the first one ends as if killed, and what it left in memory is there for the second. Without it,
        all of that is gone, and the files have been moved to a place that nothing in memory belongs to.
        """
        written = self.measure("write", name, keep=True, crash=crash, **extra)
        place = PLACE
        if written and not crash:
            end_keepers(self.directory / PLACE / "run")
            place = PLACE + "-moved"
            (self.directory / PLACE).rename(self.directory / place)
        numbers = written and self.measure(
            "restore", name, keep=True, place=place, crash=True, **written, **extra
        )
        self.clear()
        return numbers

    def restores(self, names: tuple[str, ...], **extra: Any) -> dict[str, Any]:
        """Measure restores of each method in turn."""
        found = {name: self.restore(name, **extra) for name in self.methods(names)}
        return {name: numbers for name, numbers in found.items() if numbers is not None}

    def clear(self) -> None:
        """End what works for the places of this run, and remove them."""
        for place in (self.directory / PLACE, self.directory / f"{PLACE}-moved"):
            end_keepers(place / "run")
            shutil.rmtree(place, ignore_errors=True)

    def methods(self, names: tuple[str, ...]) -> Iterator[str]:
        """Yield relight and the peers of `names`, less what the options leave out."""
        for name in (OURS, *names):
            if not self.options.methods or name in self.options.methods:
                yield name

    def each(self, what: str, names: tuple[str, ...], **extra: Any) -> dict[str, Any]:
        """Measure each method in turn."""
        found = {name: self.measure(what, name, **extra) for name in self.methods(names)}
        return {name: numbers for name, numbers in found.items() if numbers is not None}


def end_keepers(root: Path, *, grace_seconds: float = 20.0) -> None:
    """Ask the keepers of a run to end, and kill those that do not."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + grace_seconds
        for pid in machine.keepers_of(root):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sign)
        while machine.keepers_of(root) and time.monotonic() < deadline:
            time.sleep(0.05)


def stall(bench: Bench) -> None:
    """Measure stall, added loop time and processor time per save."""
    pairs = bench.options.pairs or (3 if bench.options.quick else 20)
    bench.results["loop"] = bench.each("loop", PEERS, pairs=pairs, steps=5)


def durable(bench: Bench) -> None:
    """Measure the time to durable, with fio before and after."""
    rates = [_fio(bench, write=True)]
    bench.results["durable"] = bench.each("durable", PEERS)
    bench.results["fio_write"] = _middle([*rates, _fio(bench, write=True)])


def restore(bench: Bench) -> None:
    """Measure restores into live state, with a memory copy before and after; relight's trainer was killed before."""
    size = bench.results["state_bytes"]
    before = {str(n): machine.memory_copy_bytes_per_second(size, num_threads=n) for n in (1, 2)}
    bench.results["restore"] = bench.restores(LOADERS, crash=True)
    after = {str(n): machine.memory_copy_bytes_per_second(size, num_threads=n) for n in (1, 2)}
    bench.results["memory_copy"] = {n: (before[n] + after[n]) / 2 for n in before}


def fresh(bench: Bench) -> None:
    """Measure restores in processes that have just begun; the one that saved was killed."""
    found: dict[str, Any] = {}
    for name in bench.methods(("torch.save", "DCP save, named")):
        if written := bench.measure("write", name, keep=True, crash=True):
            repeats = 2 if bench.options.quick else 7
            runs = [bench.measure("fresh", name, keep=True, crash=True, **written) for _ in range(repeats)]
            if all(runs):
                found[name] = {"seconds": [r["seconds"] for r in runs if r], "source": runs[-1]["source"]}
        bench.clear()
    bench.results["fresh"] = found


def disk(bench: Bench) -> None:
    """Measure restores from the disk, warm and cold, with fio before and after."""
    bench.results["warm"] = bench.restores(LOADERS, crash=False)
    if not machine.drop_caches():
        print("  a cold cache needs root: left out")
        return
    rates = [_fio(bench, write=False)]
    bench.results["cold"] = bench.restores(("torch.save", "DCP save"), crash=False, cold=True)
    bench.results["fio_read"] = _middle([*rates, _fio(bench, write=False)])


def small(bench: Bench) -> None:
    """Measure ten thousand small tensors against one large one."""
    found: dict[str, Any] = {}
    for key, shape in (
        ("many", {"count": 10_000, "each_bytes": 4096}),
        ("one", {"count": 1, "each_bytes": 40_960_000}),
    ):
        saved = bench.measure("durable", OURS, **shape)
        slot = bench.restore(OURS, crash=True, **shape)
        stored = bench.restore(OURS, crash=False, **shape)
        if saved and slot and stored:
            found[key] = {"save": saved["seconds"], "slot": slot["seconds"], "disk": stored["seconds"]}
    if len(found) == 2:
        bench.results["small"] = found


def memory(bench: Bench) -> None:
    """Measure resident memory over 200 saves of a tenth of the state."""
    size = bench.size | {"num_layers": bench.size["num_layers"] // 10, "batch": 16}
    if numbers := bench.measure("memory", OURS, size=size, saves=60 if bench.options.quick else 200):
        bench.results["memory"] = numbers


SECTIONS: dict[str, Callable[[Bench], None]] = {
    section.__name__: section for section in (stall, durable, restore, fresh, disk, small, memory)
}


def _fio(bench: Bench, *, write: bool) -> float | None:
    print(f"  fio      direct {'write' if write else 'read'}", flush=True)
    return machine.fio_bytes_per_second(bench.directory, write=write, size_bytes=bench.results["state_bytes"])


def _middle(rates: list[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return statistics.mean(known) if known else None


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        nargs="+",
        choices=sorted(SECTIONS),
        default=list(SECTIONS),
        metavar="SECTION",
        help=f"sections to run, of {', '.join(SECTIONS)}",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=[OURS, *PEERS, "DCP save, named"],
        metavar="METHOD",
        help="leave out all other methods",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a twentieth of the state, few repeats: shows that it runs"
    )
    parser.add_argument("--pairs", type=int, help="pairs of blocks for the added loop time (20)")
    parser.add_argument("--directory", default=str(SCRATCH), help="where to save; the disk that is measured")
    parser.add_argument(
        "--out", help="where to write page, picture and numbers (benchmarks/results for a whole run)"
    )
    return parser.parse_args(arguments)


def write_report(results: dict[str, Any], out: Path) -> None:
    """Write numbers, page and picture."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "speed.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (out / "speed.md").write_text(markdown(results), encoding="utf-8")
    picture(results, out / "speed.png")


def main() -> None:
    """Run the sections asked for; each line of the verdict is printed at the end."""
    options = parse(sys.argv[1:])
    is_whole = options.only == list(SECTIONS) and not options.quick and not options.methods
    out = Path(options.out or (HERE / "results" if is_whole else SCRATCH / "results"))
    bench = Bench(options)
    bench.prepare()
    try:
        for name in options.only:
            print(f"{name}:", flush=True)
            SECTIONS[name](bench)
            # After each section, so that a run that is broken off leaves what it found.
            write_report(bench.results, out)
    finally:
        bench.clear()
    for line in lines(bench.results):
        print(
            f"{'holds      ' if line.holds else 'falls short'}  {line.what}: {line.measured}; target: {line.target}"
        )
    print(f"written: {out}/speed.md, speed.png, speed.json")


if __name__ == "__main__":
    main()
