"""The tensor table: the train state at one instant, tensors live, everything else by value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from relight.checkpoint import context
from relight.checkpoint.sharding import Kind, LayoutBook, is_dtensor, local_part
from relight.manifest.shard import Layout

__all__ = ["StateTable"]


@dataclass(slots=True)
class StateTable:
    """The state at one instant: tensors still live, everything else already by value.

    Args:
        book: tells the layouts of DTensors.

    Attributes:
        keys, tensors: the tensor table; parallel lists. Of a DTensor this rank's part.
        shapes: global shapes; of what belongs to this rank its own.
        layouts: who holds what of each tensor; None for what belongs to this rank alone.
        kinds: what each tensor is to the ranks.
        owners: index of the optimizer whose step changes the tensor and whose hook therefore guards it; else None.
        parts: part name -> typed JSON of this rank.
        aliases: key -> key stored in its place.
        compared: names of `parts` entries (dotted for extras) that must be equal on all ranks, with their JSON.
    """

    book: LayoutBook = field(default_factory=lambda: LayoutBook(0, 1))
    keys: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)
    layouts: list[Layout | None] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    owners: list[int | None] = field(default_factory=list)
    parts: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    compared: dict[str, Any] = field(default_factory=dict)

    def put(
        self,
        key: str,
        tensor: torch.Tensor,
        layout: Layout | None,
        kind: Kind = "shared",
        *,
        owner: int | None = None,
    ) -> None:
        """Add one tensor; without a `layout` it belongs to this rank, and `kind` is not "shared"."""
        held = local_part(tensor)
        self.keys.append(key)
        self.tensors.append(held)
        self.shapes.append(tensor.shape if layout is not None else held.shape)
        self.layouts.append(layout)
        self.kinds.append(kind)
        self.owners.append(owner)

    def sink(self, layout: Layout | None, kind: Kind = "shared") -> context.TensorSink:
        """Return a sink for `context.encode` that stores tensors in this table under their path.

        A DTensor keeps its own layout, unless what holds it belongs to this rank.
        """

        def store(path: str, tensor: torch.Tensor) -> str:
            own = layout
            if layout is not None and is_dtensor(tensor):
                own = self.book.common_layout(path, tensor)
            self.put(path, tensor, own, "own" if own is None and layout is not None else kind)
            return path

        return store
