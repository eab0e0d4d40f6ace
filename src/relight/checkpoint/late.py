"""Parts that the user builds after the restore: their saved state is kept until `TrainState.add` claims it."""

from __future__ import annotations

from dataclasses import replace

import torch

from relight.checkpoint.format import DTYPES
from relight.checkpoint.matching import Allowances, Matching, SavedState
from relight.checkpoint.sharding import LayoutBook, is_dtensor, local_box, local_part
from relight.checkpoint.state import TrainState, part_key
from relight.errors import StateMismatchError

__all__ = ["LateParts"]

_LATE = ("optimizer", "scheduler", "scaler", "data", "extra")


class LateParts:
    """What a checkpoint holds beyond the parts that the train state had when it was restored.

    The tensors of these parts are loaded to host memory at once, since the copy they come from may be gone later.
    """

    def __init__(self, saved: SavedState, allow: Allowances, book: LayoutBook) -> None:
        self._saved = saved
        self._allow = allow
        self._book = book
        self._tensors: dict[str, torch.Tensor] = {}
        self.unclaimed: list[str] = []

    def load(self, state: TrainState, parts: frozenset[str], *, is_exhaustive: bool) -> None:
        """Find what `state` does not have (of the wanted `parts`) and load it; no tensors if `is_exhaustive`."""
        live = live_keys(state)
        keys = {key for key in self._saved.parts if "/" not in key}
        if not is_exhaustive:
            keys |= {key.partition("/")[0] for key in self._saved.specs}
        self.unclaimed = sorted(
            key for key in keys - live if key.partition(".")[0] in parts and key.partition(".")[0] in _LATE
        )
        prefixes = tuple(f"{key}/" for key in self.unclaimed)
        if not prefixes:
            return
        wanted = [key for key in self._saved.specs if key.startswith(prefixes)]
        self._tensors = {
            key: torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
            for key, spec in ((key, self._saved.specs[key]) for key in wanted)
        }
        self._saved.fetch(list(self._tensors.items()))

    def claim(self, state: TrainState, name: str) -> None:
        """Put the saved state of `name` into the object that was just added under it.

        Raises:
            StateMismatchError: nothing was saved under this name, or it does not fit.
        """
        part = name.partition(".")[0]
        key = name if part in ("optimizer", "scheduler", "scaler", "data") else f"extra.{name}"
        if key not in self.unclaimed:
            if not self._allow.allows("missing", key):
                raise StateMismatchError(
                    f"{key}: added after restore, but the checkpoint holds no such part", path=key
                )
            return
        matching = Matching(
            state,
            replace(self._saved, fetch=self._copy),
            self._allow,
        )
        if part == "optimizer":
            matching.match_optimizer(name.partition(".")[2])
        elif part == "data":
            matching.match_data()
        elif part in ("scheduler", "scaler"):
            table = state.schedulers if part == "scheduler" else state.scalers
            rest = name.partition(".")[2]
            matching.match_values(part, {rest: table[rest]})
        else:
            matching.match_values("extra", {name: state.extra[name]})
        if part == "scheduler":
            # Building a scheduler rewrites the groups' learning rate; the saved groups hold the true one.
            matching.match_groups()
        matching.apply()
        self.unclaimed.remove(key)

    def _copy(self, wanted: list[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            for key, tensor in wanted:
                whole = self._tensors[key]
                if is_dtensor(tensor):
                    box = local_box(self._book.layout(key, tensor), tuple(tensor.shape), self._book.rank)
                    for dim, (start, size) in enumerate(zip(*box, strict=True)):
                        whole = whole.narrow(dim, start, size)
                local_part(tensor).copy_(whole)


def live_keys(state: TrainState) -> set[str]:
    """Return the names of the parts that `state` has."""
    keys = {part_key("optimizer", name) for name in state.optimizers}
    keys |= {part_key("scheduler", name) for name in state.schedulers}
    keys |= {part_key("scaler", name) for name in state.scalers}
    keys |= {f"extra.{name}" for name in state.extra}
    return keys | ({"data"} if state.data is not None else set())
