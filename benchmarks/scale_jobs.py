"""Jobs at scale that are never run: a thousand tensors, the ways to spread them, plan and record of any rank."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from relight.checkpoint.format import ImageLayout, TensorSpec, plan_image
from relight.manifest.index import ITEM_BYTES
from relight.manifest.manifest import BLOCK_BYTES, EQUAL, IndexEntry, RankRecord, RecordDraft, encode_index
from relight.manifest.shard import Box, Layout, Spread, whole

__all__ = ["Job", "Strategy", "strategies", "tensors"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to spread the state.

    Attributes:
        layouts: kind of tensor -> layout. Kinds that are not there belong to each rank, and are equal on all: such as
            the step counts of sharded parameters, which torch gives no placements.
    """

    name: str
    layouts: Mapping[str, Layout]


def tensors() -> dict[str, tuple[str, Shape, str]]:
    """Return a thousand tensors of a model of 23e9 parameters under AdamW: key -> (dtype, shape, kind)."""
    hidden, wide, few, words = 8192, 28_672, 1024, 128_256
    shapes: dict[str, tuple[Shape, str]] = {
        "embed.weight": ((words, hidden), "column"),
        "head.weight": ((words, hidden), "column"),
        "norm.weight": ((hidden,), "vector"),
    }
    for at in range(27):
        layer = f"layers.{at}"
        for name, rows in (("q", hidden), ("k", few), ("v", few), ("gate", wide), ("up", wide)):
            shapes[f"{layer}.{name}.weight"] = ((rows, hidden), "column")
        shapes[f"{layer}.o.weight"] = ((hidden, hidden), "row")
        shapes[f"{layer}.down.weight"] = ((hidden, wide), "row")
        for name in ("norm_1", "norm_2"):
            shapes[f"{layer}.{name}.weight"] = ((hidden,), "vector")
    for at in range(4):
        # Not divisible by anything that ranks come in.
        shapes[f"adapter.{at}.weight"] = ((1009 + at, 77), "column")
    found: dict[str, tuple[str, Shape, str]] = {}
    for name, (shape, kind) in shapes.items():
        found[f"model/{name}"] = ("bfloat16", shape, kind)
        for moment in ("exp_avg", "exp_avg_sq"):
            found[f"optimizer/{name}/{moment}"] = ("float32", shape, kind)
        found[f"optimizer/{name}/step"] = ("float32", (), "scalar")
    return found


def strategies(num_ranks: int) -> list[Strategy]:
    """Return the ways to spread the state over `num_ranks`."""
    nodes, grid = (num_ranks // 256, 256), (num_ranks // 8, 8)
    flat, everyone = (num_ranks,), range(num_ranks)
    kinds = ("column", "row", "vector")
    return [
        Strategy(name="FSDP", layouts=dict.fromkeys(kinds, Layout.on(flat, everyone, ((0, 0),)))),
        Strategy(
            name=f"HSDP {nodes[0]} x {nodes[1]}",
            layouts=dict.fromkeys(kinds, Layout.on(nodes, everyone, ((1, 0),))),
        ),
        Strategy(
            name=f"FSDP x TP {grid[0]} x {grid[1]}",
            layouts={
                "column": Layout.on(grid, everyone, ((1, 0), (0, 0))),
                "row": Layout.on(grid, everyone, ((1, 1), (0, 0))),
                "vector": Layout.on(grid, everyone, ((0, 0),)),
            },
        ),
        Strategy(name="DDP", layouts=dict.fromkeys((*kinds, "scalar"), Layout.on(flat, everyone))),
    ]


class Job:
    """A job of `num_ranks` ranks that spread the thousand tensors by one strategy."""

    def __init__(self, strategy: Strategy, num_ranks: int) -> None:
        self.strategy = strategy
        self.num_ranks = num_ranks
        self.layouts = tuple(dict.fromkeys(strategy.layouts.values()))
        numbers = {kind: self.layouts.index(layout) for kind, layout in strategy.layouts.items()}
        self.index = {
            key: IndexEntry(dtype, shape, numbers.get(kind, EQUAL))
            for key, (dtype, shape, kind) in tensors().items()
        }
        self.local = {
            key: (entry.dtype, entry.shape) for key, entry in self.index.items() if entry.layout == EQUAL
        }

    def box(self, key: str, rank: int) -> Box:
        """Return what `rank` holds of a tensor."""
        entry = self.index[key]
        if entry.layout == EQUAL:
            return whole(entry.shape)
        layout = self.layouts[entry.layout]
        place = layout.coordinates(rank)
        if place is None:
            raise AssertionError(f"rank {rank} is not in the mesh")
        return layout.box(entry.shape, place)

    def plan(self, rank: int) -> ImageLayout:
        """Return the image of one rank, planned from nothing."""
        specs = [TensorSpec(key, *spec) for key, spec in self.local.items()]
        for number, layout in enumerate(self.layouts):
            spread = Spread(
                layout,
                [
                    (key, ITEM_BYTES[entry.dtype], entry.shape)
                    for key, entry in self.index.items()
                    if entry.layout == number
                ],
            )
            specs += [
                TensorSpec(piece.name, self.index[key].dtype, piece.sizes)
                for key, piece in spread.stored_by(rank).items()
            ]
        return plan_image(specs)

    def records(self, step: int, run: str) -> Iterator[RankRecord]:
        """Yield the record of each rank; all have an image of the same size, as rank 1 plans it."""
        image_bytes = self.plan(1).image_bytes
        context = msgspec.Raw(
            json.dumps({"rng": {"torch": {"$bytes": "A" * 6732}}, "data": {"samples": step}}).encode()
        )
        index = encode_index(self.index)
        for rank in range(self.num_ranks):
            yield RankRecord(
                draft=RecordDraft(
                    run=run,
                    step=step,
                    generation=1,
                    parent=None,
                    rank=rank,
                    world_size=self.num_ranks,
                    layout="0" * 32,
                    image_bytes=image_bytes,
                    saved_at=1.7e9 + rank / 1e6,
                    context=context,
                    index=index if rank == 0 else msgspec.Raw(b"{}"),
                    layouts=self.layouts if rank == 0 else (),
                    local=self.local,
                ),
                digests=(f"{rank:032x}",) * -(-image_bytes // BLOCK_BYTES),
            )
