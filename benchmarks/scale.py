"""Planning, index and catalog at the size of the largest runs: ``python -m benchmarks.scale``.

No training and no tensors: a thousand shapes, layouts as rules, and up to 16,384 ranks of which one is played at a
time. Writes a page and the numbers behind it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.scale_jobs import Job, strategies
from benchmarks.scale_page import page
from relight.checkpoint.format import ImageLayout
from relight.manifest.catalog import Catalog
from relight.manifest.commit import build_manifest
from relight.manifest.index import ITEM_BYTES, StoredIndex
from relight.manifest.manifest import (
    BLOCK_BYTES,
    Manifest,
    decode_file,
    encode_file,
    encode_index,
)
from relight.manifest.names import image_name, record_name, step_dir
from relight.manifest.shard import Box
from relight.storage.backend import StoredFile
from relight.storage.local import LocalBackend

HERE = Path(__file__).parent
RANKS = (1024, 4096, 16_384)
STEPS = (1000, 2000, 3000)
RANKS_PER_NODE = 8
ROUND_TRIP_SECONDS = 0.001
LISTED_PER_ROUND_TRIP = 1000
REPEATS = 5

Results = dict[str, Any]


def seconds_of(call: Callable[[], object]) -> float:
    """Return the median time of a few calls."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def plans(num_ranks: int) -> Iterator[Results]:
    """Measure save plan, manifest and load plan of each strategy."""
    for strategy, after in zip(strategies(num_ranks), strategies(num_ranks // 2), strict=True):
        print(f"  {strategy.name}", flush=True)
        yield measure_plans(Job(strategy, num_ranks), Job(after, num_ranks // 2))


def measure_plans(job: Job, new: Job) -> Results:
    """Measure the plans of `job`, and those of the job that goes on from its checkpoint."""
    manifest = build_manifest([(record, "0" * 32) for record in job.records(1000, "0" * 32)])
    encoded = encode_file(manifest)
    savers, readers = ((0, one.num_ranks // 2 + 1, one.num_ranks - 1) for one in (job, new))
    found = [load_plan(manifest, new, rank) for rank in readers]
    return {
        "strategy": job.strategy.name,
        "manifest_bytes": len(encoded),
        "index_bytes": len(manifest.index),
        "save_seconds": max(seconds_of(partial(job.plan, rank)) for rank in savers),
        "index_seconds": seconds_of(lambda: encode_index(job.index)),
        "read_seconds": seconds_of(lambda: decode_file(encoded, Manifest, path="")),
        "load_seconds": max(seconds_of(partial(load_plan, manifest, new, rank)) for rank in readers),
        "load_pieces": max(map(len, found)),
        "load_ranks": max(len({rank for rank, _ in pieces}) for pieces in found),
        **(node_reads(manifest, job, new) if job.strategy.name != "DDP" else {}),
    }


def load_plan(manifest: Manifest, new: Job, rank: int) -> set[tuple[int, str]]:
    """Return which entries of which ranks' images `rank` of the new job needs, planned from nothing."""
    index = StoredIndex.of(manifest)
    return {(piece.rank, piece.name) for key in new.index for piece in index.pieces(key, new.box(key, rank))}


def node_reads(manifest: Manifest, job: Job, new: Job) -> Results:
    """Return what a node of the new job needs, and what it reads for that: whole blocks, since those have digests."""
    index = StoredIndex.of(manifest)
    needed: dict[tuple[str, Box], int] = {}
    names: dict[int, set[str]] = {}
    middle = new.num_ranks // 2 // RANKS_PER_NODE * RANKS_PER_NODE
    for rank in range(middle, middle + RANKS_PER_NODE):
        for key, entry in new.index.items():
            box = new.box(key, rank)
            needed[key, box] = box.num_elements * ITEM_BYTES[entry.dtype]
            for piece in index.pieces(key, box):
                names.setdefault(piece.rank, set()).add(piece.name)
    read_bytes = sum(block_bytes(job.plan(rank), wanted) for rank, wanted in names.items())
    return {
        "node_needs_bytes": sum(needed.values()),
        "node_reads_bytes": read_bytes,
        "node_images": len(names),
    }


def block_bytes(image: ImageLayout, names: set[str]) -> int:
    """Return the size of all blocks of an image that hold part of the entries `names`, or the header."""
    start = len(image.header)
    entries = json.loads(image.header[8:])
    blocks = set(range(-(-start // BLOCK_BYTES)))
    for name in names:
        first, stop = (start + offset for offset in entries[name]["data_offsets"])
        blocks.update(range(first // BLOCK_BYTES, -(-stop // BLOCK_BYTES)))
    return sum(min(BLOCK_BYTES, image.image_bytes - block * BLOCK_BYTES) for block in blocks)


class Distant(LocalBackend):
    """Local files behind a network: every call takes a round trip, a listing one for each thousand names."""

    def __init__(self, root: Path, *, round_trip_seconds: float) -> None:
        super().__init__(root)
        self.round_trip_seconds = round_trip_seconds
        self.num_round_trips = 0

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        self._travel(1)
        return super().get(name, max_bytes=max_bytes)

    def size_bytes(self, name: str) -> int | None:
        self._travel(1)
        return super().size_bytes(name)

    def list(self, prefix: str = "") -> list[StoredFile]:
        files = super().list(prefix)
        self._travel(-(-len(files) // LISTED_PER_ROUND_TRIP) or 1)
        return files

    def unfinished(self, prefix: str = "") -> Sequence[str]:
        found = super().unfinished(prefix)
        num_files = len(super().list(prefix))
        self._travel(-(-num_files // LISTED_PER_ROUND_TRIP) or 1)
        return found

    def folders(self, prefix: str = "") -> Sequence[str]:
        self._travel(1)
        return super().folders(prefix)

    def _travel(self, num: int) -> None:
        self.num_round_trips += num
        if self.round_trip_seconds:
            time.sleep(num * self.round_trip_seconds)


def store(root: Path, job: Job, step: int, run: str) -> None:
    """Write images without content (holes of the right size) and the records of one step, without syncing."""
    folder = root / step_dir(step, 1)
    folder.mkdir(parents=True)
    for record in job.records(step, run):
        path = root / record_name(step, 1, record.draft.rank)
        path.write_bytes(encode_file(record))
        with (root / image_name(step, 1, record.draft.rank)).open("wb") as image:
            image.truncate(record.draft.image_bytes)


def catalogs(num_ranks: int, directory: Path) -> Results:
    """Measure commit and decision on real files: three committed steps, and one that lacks a rank."""
    root = directory / "scale"
    shutil.rmtree(root, ignore_errors=True)
    try:
        return measure_catalog(num_ranks, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def measure_catalog(num_ranks: int, root: Path) -> Results:
    """Store, commit and look; the caller removes `root`."""
    job = Job(strategies(num_ranks)[0], num_ranks)
    near = Catalog(LocalBackend(root))
    run = near.claim(None).run
    found: Results = {"round_trip_seconds": ROUND_TRIP_SECONDS}
    for step in STEPS:
        store(root, job, step, run)
        if step == STEPS[-1]:
            found |= look_far(root, num_ranks, step)
        started = time.perf_counter()
        if near.commit(step, 1) is None:
            raise AssertionError(f"step {step} is whole but was not committed")
        found["commit_seconds"] = time.perf_counter() - started
    store(root, job, STEPS[-1] + 1000, run)
    (root / record_name(STEPS[-1] + 1000, 1, num_ranks - 3)).unlink()
    found["decide_seconds"] = seconds_of(near.candidates)
    if [info.step for info in near.candidates()] != sorted(STEPS, reverse=True):
        raise AssertionError("the candidates are not the committed steps")
    distant = Distant(root, round_trip_seconds=ROUND_TRIP_SECONDS)
    started = time.perf_counter()
    Catalog(distant).candidates()
    found |= {
        "decide_far_seconds": time.perf_counter() - started,
        "decide_far_round_trips": distant.num_round_trips,
    }
    return found


def look_far(root: Path, num_ranks: int, step: int) -> Results:
    """Measure what finders behind a network pay: one that comes too early, again, and one that commits."""
    missing = root / record_name(step, 1, num_ranks - 3)
    content = missing.read_bytes()
    missing.unlink()
    distant = Distant(root, round_trip_seconds=ROUND_TRIP_SECONDS)
    catalog = Catalog(distant)
    found: Results = {}
    for name in ("early", "again", "commit_far"):
        if name == "commit_far":
            missing.write_bytes(content)
        before, started = distant.num_round_trips, time.perf_counter()
        is_committed = catalog.commit(step, 1) is not None
        found[f"{name}_seconds"] = time.perf_counter() - started
        found[f"{name}_round_trips"] = distant.num_round_trips - before
        if is_committed != (name == "commit_far"):
            raise AssertionError(f"{name}: committed: {is_committed}")
    (root / step_dir(step, 1) / "manifest.json").unlink()
    return found


def main() -> None:
    """Measure every size and write page and numbers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=list(RANKS), help="world sizes; multiples of 512"
    )
    parser.add_argument("--directory", type=Path, default=HERE / "scratch", help="where files are written")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="where page and numbers go")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    results: Results = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine.describe(options.directory),
        "repeats": REPEATS,
        "sizes": [],
    }
    for num_ranks in options.ranks:
        print(f"{num_ranks} ranks:", flush=True)
        busy = machine.busy_cores()
        results["sizes"].append(
            {
                "num_ranks": num_ranks,
                "busy_cores": round(busy, 2),
                "plans": list(plans(num_ranks)),
                "catalog": catalogs(num_ranks, options.directory),
            }
        )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "scale.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (options.out / "scale.md").write_text(page(results), encoding="utf-8")
    print(page(results))
    print(f"written: {options.out}/scale.md, scale.json")


if __name__ == "__main__":
    main()
