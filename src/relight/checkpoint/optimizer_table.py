"""An optimizer's state on its way into the tensor table: worked out once, and again when it is no longer the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from relight.checkpoint.optimizers import OptimizerView
from relight.checkpoint.sharding import Kind, LayoutBook, is_dtensor, local_part
from relight.checkpoint.table import StateTable
from relight.manifest.shard import Layout

__all__ = ["CollectedState", "StateCollector"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedState:
    """The structure of an optimizer's state, which stays as it is while its keys and layouts do.

    Attributes:
        shared: ids of the parameters that were kept equal on all ranks.
        encoded: the whole state as typed JSON.
        on_host: keys of tensors that live on the host though their parameter does not.
    """

    keys: list[str]
    layouts: list[Layout | None]
    kinds: list[Kind]
    shared: set[int]
    has_dtensors: bool
    encoded: Any
    on_host: list[str]


class StateCollector:
    """Puts the state of one optimizer into tables."""

    def __init__(self, view: OptimizerView) -> None:
        self._view = view
        self._known: CollectedState | None = None

    def collect(self, table: StateTable, book: LayoutBook, shared: set[int], at: int) -> CollectedState:
        """Add the state's tensors to `table`, guarded by optimizer number `at`; return what else there is to say.

        Args:
            table: what to add to.
            book: tells the layouts of DTensors.
            shared: ids of the parameters that DistributedDataParallel keeps equal on all ranks.
            at: the optimizer's number.
        """
        keys, tensors, is_plain = self._view.tensors()
        known = self._known if is_plain else None
        if known is None or not _is_current(known, keys, tensors, shared, book):
            known = self._encode(table, book, shared, at)
            self._known = known if is_plain and known.keys == keys else None
            return known
        held = list(map(local_part, tensors)) if known.has_dtensors else tensors
        table.keys += keys
        table.tensors += held
        table.shapes += [
            (tensor if layout is not None else part).shape
            for tensor, part, layout in zip(tensors, held, known.layouts, strict=True)
        ]
        table.layouts += known.layouts
        table.kinds += known.kinds
        table.owners += [at] * len(keys)
        return known

    def _encode(self, table: StateTable, book: LayoutBook, shared: set[int], at: int) -> CollectedState:
        start = len(table.keys)
        has_dtensors = False
        view, named = self._view, self._view.parameters()

        def store(path: str, tensor: torch.Tensor) -> str:
            nonlocal has_dtensors
            parameter = _parameter_of(path.removeprefix(view.prefix), named)
            layout, kind = book.standing(path, tensor, is_shared=id(parameter) in shared)
            if kind == "plain" and tensor.dim() == 0:
                kind = "scalar"
            elif kind == "plain" and is_dtensor(parameter):
                kind = "scratch"
            has_dtensors |= is_dtensor(tensor)
            table.put(path, tensor, layout, kind, owner=at)
            return path

        encoded = view.encode_state(store)
        return CollectedState(
            keys=table.keys[start:],
            layouts=table.layouts[start:],
            kinds=table.kinds[start:],
            shared=shared,
            has_dtensors=has_dtensors,
            encoded=encoded,
            on_host=view.host_keys(),
        )


def _is_current(
    known: CollectedState, keys: list[str], tensors: list[torch.Tensor], shared: set[int], book: LayoutBook
) -> bool:
    if known.keys != keys or known.shared != shared:
        return False
    return not known.has_dtensors or all(
        (book.layout(key, tensor) if is_dtensor(tensor) else book.everyone) is layout
        for key, tensor, layout in zip(keys, tensors, known.layouts, strict=True)
        if layout is not None
    )


def _parameter_of(name: str, named: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the parameter to whose state the entry `name` belongs; the entry may lie deep in a container."""
    while name and name not in named:
        name = name.rpartition("/")[0]
    return named.get(name)
