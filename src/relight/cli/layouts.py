"""How a tensor is spread over the ranks, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from relight.manifest.manifest import EQUAL, IN_PIECES, PER_RANK

if TYPE_CHECKING:
    from relight.manifest.index import StoredIndex
    from relight.manifest.shard import Layout

__all__ = ["Ownership", "layout_words", "ownership"]

Ownership = Literal["sharded", "replicated", "per-rank"]


def ownership(index: StoredIndex, key: str) -> Ownership:
    """Return whether the ranks share the tensor, all have it whole, or have a value each."""
    number = index.entries[key].layout
    if number == PER_RANK:
        return "per-rank"
    if number == EQUAL:
        return "replicated"
    return "sharded" if number == IN_PIECES or _cuts(index.layouts[number]) else "replicated"


def layout_words(index: StoredIndex, key: str) -> str:
    """Return the layout of a tensor in words, such as "sharded dim 0 over 4, replicated on 2"."""
    entry = index.entries[key]
    if entry.layout == PER_RANK:
        return "per rank"
    if entry.layout == EQUAL:
        return "per rank, all equal"
    if entry.layout == IN_PIECES:
        return f"in {len(entry.pieces)} pieces"
    layout = index.layouts[entry.layout]
    if layout.num_ranks == 1:
        return f"whole on rank {layout.rank_at((0,) * len(layout.mesh))}"
    cuts = [f"dim {dim} over {' x '.join(map(str, sizes))}" for dim, sizes in _cuts(layout).items()]
    words = ["sharded " + ", ".join(cuts)] if cuts else []
    if layout.num_replicas > 1:
        words.append(f"replicated on {layout.num_replicas}")
    return ", ".join(words)


def _cuts(layout: Layout) -> dict[int, list[int]]:
    """Return for each dim that is cut into how many parts, cut by cut."""
    cuts: dict[int, list[int]] = {}
    for axis, dim in layout.splits:
        if layout.mesh[axis] > 1:
            cuts.setdefault(dim, []).append(layout.mesh[axis])
    return cuts
