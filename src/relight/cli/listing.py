"""`relight ls` and `relight show`: what is stored."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from relight.cli.exits import OK
from relight.cli.runs import choose_step, open_run, plain, print_json, print_table, warn_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from relight.manifest.catalog import Catalog, CheckpointInfo, Inventory
    from relight.manifest.manifest import Manifest

__all__ = ["ls", "show"]


def ls(url: str, /, *, json: bool = False) -> int:
    """List the committed checkpoints of a run, newest first.

    Args:
        url: Root of the run.
        json: Print a JSON list instead of a table.
    """
    from relight.cli.keepers import steps_in_memory

    catalog, inventory = open_run(url)
    in_memory = steps_in_memory(catalog.backend.url)
    tiers = {
        (info.step, info.generation): [
            *(["ram"] if in_memory.get((info.step, info.generation), 0) >= info.world_size else []),
            catalog.backend.url,
        ]
        for info in inventory.checkpoints
    }
    warn_of(inventory)
    if json:
        print_json(
            [_as_json(info) | {"tiers": tiers[info.step, info.generation]} for info in inventory.checkpoints]
        )
        return OK
    _print_list(inventory, tiers)
    return OK


def show(
    url: str,
    /,
    *,
    step: int | None = None,
    generation: int | None = None,
    tensors: bool = False,
    json: bool = False,
) -> int:
    """Show what one checkpoint holds: parts, sizes, settings, position in the data, generations.

    Args:
        url: Root of the run.
        step: Which checkpoint; default: the newest that a restore would choose.
        generation: Of which generation, where several saved the same step.
        tensors: List every tensor.
        json: Print JSON instead of text.
    """
    catalog, inventory = open_run(url)
    info = choose_step(inventory, url, step, generation)
    warn_of(inventory)
    manifest = catalog.manifest(info.step, info.generation)
    listed = _tensors(catalog, manifest)
    found = _describe(catalog, info, manifest, listed)
    if json:
        print_json(found | ({"tensors": listed} if tensors else {}))
        return OK
    _print_description(found)
    if tensors:
        rows = [
            [entry["name"], entry["dtype"], _shape(entry["shape"]), entry["layout"], _size(entry["bytes"])]
            for entry in listed
        ]
        print()
        print_table(["tensor", "dtype", "shape", "layout", "size"], rows, right=["size"])
    return OK


def _as_json(info: CheckpointInfo) -> dict[str, Any]:
    return {
        "step": info.step,
        "generation": info.generation,
        "bytes": info.bytes,
        "committed": info.committed_at,
        "verified": info.verified,
        "pinned": info.pinned,
        "on_lineage": info.on_lineage,
        "world_size": info.world_size,
        "metrics": dict(info.metrics),
        "replicas_differ": list(info.replicas_differ),
    }


def _print_list(inventory: Inventory, tiers: Mapping[tuple[int, int], list[str]]) -> None:
    rows = [
        [
            str(info.step),
            str(info.generation),
            _size(info.bytes),
            info.committed_at[:19] + "Z",
            ", ".join("disk" if tier != "ram" else tier for tier in tiers[info.step, info.generation]),
            str(info.world_size),
            ", ".join(_remarks(info)),
            _metrics(info.metrics),
        ]
        for info in inventory.checkpoints
    ]
    columns = ["step", "generation", "size", "committed", "tiers", "ranks", "state", "metrics"]
    if rows:
        print_table(columns, rows, right=["step", "generation", "size", "ranks"])
    else:
        print("no checkpoint is committed")
    for step, generation in inventory.incomplete:
        print(f"unfinished: step {step} of generation {generation}")


def _remarks(info: CheckpointInfo) -> list[str]:
    marks = {
        "verified": info.verified,
        "pinned": info.pinned,
        "left behind": not info.on_lineage,
        "replicas differ": bool(info.replicas_differ),
    }
    return [mark for mark, holds in marks.items() if holds]


def _describe(
    catalog: Catalog, info: CheckpointInfo, manifest: Manifest, listed: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    import msgspec

    context = msgspec.json.decode(catalog.record(info.step, info.generation, 0, manifest).draft.context)
    return _as_json(info) | {
        "run": info.run,
        "layout": manifest.layout,
        "parent": msgspec.to_builtins(manifest.parent),
        "parts": _parts(listed, context),
        "settings": plain(context.get("settings", {})),
        "data": plain(context.get("data")),
        "rng": sorted(context.get("rng", {})),
        "generations": [
            {
                "generation": made.generation,
                "parent": msgspec.to_builtins(made.parent),
                "created": _iso(made.created_at),
            }
            for made in catalog.generations()
        ],
    }


def _parts(listed: Sequence[Mapping[str, Any]], context: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each part of the state with the tensors and bytes that it takes; small ones have none."""
    counts = {key.partition("/")[0]: [0, 0] for key in context}
    for entry in listed:
        count = counts.setdefault(entry["name"].partition("/")[0], [0, 0])
        count[0] += 1
        count[1] += entry["bytes"]
    return [{"part": part, "tensors": num, "bytes": size} for part, (num, size) in sorted(counts.items())]


def _tensors(catalog: Catalog, manifest: Manifest) -> list[dict[str, Any]]:
    """Return what there is to say of every tensor; of per-rank ones the bytes of all ranks together."""
    from relight.cli.layouts import layout_words, ownership
    from relight.manifest.index import StoredIndex

    index = StoredIndex.of(manifest)
    own_bytes: dict[str, int] = {}
    own: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank in range(manifest.world_size):
        for key, spec in catalog.record(
            manifest.step, manifest.generation, rank, manifest
        ).draft.local.items():
            own_bytes[key] = own_bytes.get(key, 0) + _tensor_bytes(*spec)
            own.setdefault(key, spec)
    found = {
        key: (entry.dtype, entry.shape, ownership(index, key), layout_words(index, key))
        for key, entry in index.entries.items()
    }
    # Keys that rank 0 does not have are in no index.
    found |= {key: (*spec, "per-rank", "per rank") for key, spec in own.items() if key not in found}
    return [
        {
            "name": key,
            "dtype": dtype,
            "shape": list(shape),
            "ownership": owner,
            "layout": words,
            "bytes": own_bytes[key] if key in own_bytes else _tensor_bytes(dtype, shape),
        }
        for key, (dtype, shape, owner, words) in sorted(found.items())
    ]


def _tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    from relight.errors import UnknownFormatError
    from relight.manifest.index import ITEM_BYTES

    if dtype not in ITEM_BYTES:
        raise UnknownFormatError(f"there are tensors of dtype {dtype}, which this relight does not know")
    return math.prod(shape) * ITEM_BYTES[dtype]


def _print_description(found: Mapping[str, Any]) -> None:
    parent = found["parent"]
    marks = [mark for mark in ("verified", "pinned") if found[mark]]
    marks += [] if found["on_lineage"] else ["left behind: the newest generation does not build on it"]
    lines = {
        "step": f"{found['step']} of generation {found['generation']}, {found['world_size']} ranks",
        "run": found["run"],
        "committed": found["committed"],
        "size": _size(found["bytes"]),
        "state": ", ".join(marks) or "not verified yet",
        "started from": "nothing" if parent is None else _parent(parent),
        "metrics": _metrics(found["metrics"]) or "none",
        "settings": _pairs(found["settings"]) or "none",
        "data": _pairs(found["data"]) or "no position",
        "rng": ", ".join(found["rng"]) or "none",
    }
    if found["replicas_differ"]:
        lines["differ"] = "replicas differ in " + ", ".join(found["replicas_differ"])
    for label, text in lines.items():
        print(f"{label + ':':<14}{text}")
    print()
    rows = [[part["part"], str(part["tensors"]), _size(part["bytes"])] for part in found["parts"]]
    print_table(["part", "tensors", "size"], rows, right=["tensors", "size"])
    print()
    rows = [
        [
            str(made["generation"]),
            made["created"],
            "nothing" if made["parent"] is None else _parent(made["parent"]),
        ]
        for made in found["generations"]
    ]
    print_table(["generation", "created", "started from"], rows, right=["generation"])


def _pairs(value: Any) -> str:
    """Return the entries of a dict that fit on a line: numbers, texts and short lists."""
    if not isinstance(value, dict):
        return "" if value is None else str(value)
    return ", ".join(f"{key}={item}" for key, item in value.items() if not isinstance(item, dict))


def _parent(parent: Mapping[str, Any]) -> str:
    source = f" of {parent['source']}" if parent.get("source") else ""
    return f"step {parent['step']} of generation {parent['generation']}{source}"


def _metrics(metrics: Mapping[str, float | None]) -> str:
    return ", ".join(
        f"{key}={'not finite' if value is None else format(value, '.5g')}" for key, value in metrics.items()
    )


def _shape(shape: list[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _size(num_bytes: int) -> str:
    from relight.units import format_bytes

    return format_bytes(num_bytes)


def _iso(at_seconds: float) -> str:
    import datetime as dt

    return dt.datetime.fromtimestamp(at_seconds, dt.UTC).isoformat(timespec="seconds")
