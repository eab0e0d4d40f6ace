"""The train state: five parts and what real runs add, as one table of tensors and one small typed context.

`TrainState` knows what the parts are and reads them; `matching.py` puts a saved state back. Reading never
changes training: no state_dict hooks, no fake optimizer step, no random draw.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from relight.checkpoint import context, rng
from relight.checkpoint.data import DataPart, attach_data
from relight.checkpoint.modules import ModuleView, module_tensors
from relight.checkpoint.optimizer_table import StateCollector
from relight.checkpoint.optimizers import OptimizerView
from relight.checkpoint.sharding import LayoutBook, is_dtensor
from relight.checkpoint.table import StateTable
from relight.checkpoint.values import PerRank, capture_value, is_module
from relight.errors import ConfigError

__all__ = ["PARTS", "TrainState"]

PARTS = ("model", "optimizer", "scheduler", "scaler", "data", "rng", "extra", "settings")
"""Names of the parts of a train state, as `Checkpointer.restore(parts=...)` takes them."""


def _named(value: Any, sort: str) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, Mapping) and sort != "extra":
        for name in value:
            if not isinstance(name, str) or not name or "/" in name:
                raise ConfigError(
                    f"{sort}= takes one object or a dict with names without '/', got key {name!r}"
                )
        return dict(value)
    return {"": value}


def part_key(part: str, name: str) -> str:
    """Return the key of a named object of a part: ``model`` for the only one, ``model.gen`` for one of several."""
    return f"{part}.{name}" if name else part


class TrainState:
    """Everything that is needed to resume a training run bit for bit.

    Args:
        model: a module, or a dict of several; wrappers (DDP, torch.compile) may be on or off at any time.
        optimizer: an optimizer, or a dict of several; matched by parameter name.
        scheduler: a learning-rate scheduler, or a dict of several.
        data: a DataLoader, an `ElasticSampler`, a `FileStream`, or anything with `state_dict` / `load_state_dict`.
        scaler: a gradient scaler.
        extra: name -> anything more: modules (EMA), tensors, generators, stateful objects, plain values.
            Values must be equal on all ranks unless wrapped in `PerRank`.
        settings: what shapes the trajectory (total steps, seeds, batch sizes, dataset): a change at restore is
            refused unless allowed.

    The random generators of Python, NumPy and torch (all devices) are always part of it.

    Raises:
        ConfigError: an argument is of a kind that cannot be saved; the message says what can.
    """

    def __init__(
        self,
        *,
        model: nn.Module | dict[str, nn.Module],
        optimizer: Optimizer | dict[str, Optimizer] | None = None,
        scheduler: Any = None,
        data: Any = None,
        scaler: Any = None,
        extra: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.models: dict[str, nn.Module] = _named(model, "model")
        for name, module in self.models.items():
            if not isinstance(module, nn.Module):
                raise ConfigError(f"model {name!r} must be an nn.Module, got {type(module).__name__}")
        self.optimizers: dict[str, Optimizer] = _named(optimizer, "optimizer")
        self.schedulers: dict[str, Any] = _named(scheduler, "scheduler")
        self.scalers: dict[str, Any] = _named(scaler, "scaler")
        self.extra: dict[str, Any] = extra if extra is not None else {}
        self.settings: dict[str, Any] = dict(settings or {})
        self.data: DataPart | None = None
        self._overlapped: set[str] = set()
        self._views: dict[str, OptimizerView] = {}
        self._module_views: dict[int, ModuleView] = {}
        self._late: Any = None
        self._book = LayoutBook(0, 1)
        self._collectors: dict[str, StateCollector] = {}
        for name in self.extra:
            _check_extra_name(name)
        for name in self.optimizers:
            self._view(name)
        if data is not None:
            self.data = attach_data(data, seed=int(self.settings.get("seed", 0)))

    def add(self, name: str, obj: Any, *, overlap: bool = False) -> None:
        """Add a part that is built late; after a restore its saved state is put in now.

        Args:
            name: ``"optimizer"``, ``"scheduler"``, ``"scaler"``, ``"data"`` (or ``"optimizer.gen"`` for one of
                several), else the name of an extra value.
            obj: the object.
            overlap: for extra values that change nowhere but in hooks that run after the optimizer's step:
                copy them during forward and backward like parameters.

        Raises:
            ConfigError: the name is taken.
            StateMismatchError: restored already, and the checkpoint holds nothing (or nothing fitting) under this name.
        """
        part, _, rest = name.partition(".")
        tables = {"optimizer": self.optimizers, "scheduler": self.schedulers, "scaler": self.scalers}
        if part in tables:
            _add_named(tables[part], rest, obj, name)
            if part == "optimizer":
                self._view(rest)
        elif name == "data":
            if self.data is not None:
                raise ConfigError("the train state has a data part already")
            self.data = attach_data(obj, seed=int(self.settings.get("seed", 0)))
        else:
            _check_extra_name(name)
            _add_named(self.extra, name, obj, name)
            self._overlapped |= {name} if overlap else set()
        if self._late is not None:
            self._late.claim(self, name)

    def collect(self, step: int, *, rank: int = 0, num_ranks: int = 1) -> StateTable:
        """Return the state as it is now, between two optimizer steps.

        Args:
            step: number of steps done.
            rank: of this process.
            num_ranks: with several, what a tensor is to the ranks follows from its placements,
                or from DistributedDataParallel above it; what nothing keeps equal belongs to its rank.
        """
        table = self.collect_tensors(rank=rank, num_ranks=num_ranks)
        everyone = self._book.everyone
        are_equal = num_ranks == 1 or self._has_shared()
        for part, objects in (("scheduler", self.schedulers), ("scaler", self.scalers)):
            for name, obj in objects.items():
                key = part_key(part, name)
                table.parts[key] = capture_value(obj, path=f"{key}/", sink=table.sink(everyone))
                if are_equal:
                    table.compared[key] = table.parts[key]
        for name, value in self.extra.items():
            if not is_module(value):
                key = f"extra.{name}"
                is_mine = isinstance(value, PerRank)
                sink = table.sink(None, "own") if is_mine else table.sink(everyone)
                table.parts[key] = capture_value(value, path=f"{key}/", sink=sink)
                if not is_mine:
                    table.compared[key] = table.parts[key]
        if self.data is not None:
            sink = table.sink(None, "own") if self.data.per_rank else table.sink(everyone)
            table.parts["data"] = context.encode(self.data.capture(step), path="data/", tensors=sink)
        table.parts["rng"] = context.encode(rng.capture_rng(), path="rng/")
        table.parts["settings"] = context.encode(self.all_settings(), path="settings/")
        table.compared["settings"] = table.parts["settings"]
        return table

    def collect_tensors(self, *, rank: int, num_ranks: int) -> StateTable:
        """Return models and optimizers alone, see `collect`; asks nothing of other parts."""
        table = StateTable(self.book(rank, num_ranks))
        for key, module, owner_of in self._modules():
            self._collect_module(table, key, module, is_owned=owner_of)
        self._collect_optimizers(table)
        return table

    def book(self, rank: int, num_ranks: int) -> LayoutBook:
        """Return the layouts seen so far by this rank of `num_ranks`."""
        if (self._book.rank, self._book.world_size) != (rank, num_ranks):
            self._book = LayoutBook(rank, num_ranks)
            self._collectors.clear()
        return self._book

    def collect_schedule(self) -> dict[str, Any]:
        """Return the parts that `scheduler.step()` changes, as they are now: schedulers and parameter groups."""
        table = StateTable(self._book)
        parts: dict[str, Any] = {}
        for name, obj in self.schedulers.items():
            key = part_key("scheduler", name)
            parts[key] = capture_value(obj, path=f"{key}/", sink=table.sink(self._book.everyone))
        for name in self.optimizers:
            parts[part_key("optimizer", name)] = self._view(name).encode_groups()
        return parts

    def schedule_counts(self) -> tuple[int, ...]:
        """Return how often each scheduler has stepped, to see whether one moved."""
        return tuple(
            int(getattr(obj, "_step_count", getattr(obj, "last_epoch", 0)))
            for obj in self.schedulers.values()
        )

    def await_late(self, late: Any) -> None:
        """Keep what a restore found beyond the present parts, for `add` to claim."""
        self._late = late

    def take_unclaimed(self) -> list[str]:
        """Return the restored parts that were never claimed, once; their memory is freed."""
        late, self._late = self._late, None
        return late.unclaimed if late is not None else []

    def all_settings(self) -> dict[str, Any]:
        """Return the user's settings and those of the data part (``data.global_batch`` and so on)."""
        of_data = self.data.settings() if self.data is not None else {}
        return {**self.settings, **{f"data.{key}": value for key, value in of_data.items()}}

    def view(self, name: str) -> OptimizerView:
        """Return the view of optimizer `name` ("" for the only one)."""
        return self._view(name)

    def _modules(self) -> Iterator[tuple[str, nn.Module, bool]]:
        for name, module in self.models.items():
            yield part_key("model", name), module, True
        for name, value in self.extra.items():
            if is_module(value):
                yield f"extra.{name}", value, name in self._overlapped

    def _collect_module(self, table: StateTable, key: str, module: nn.Module, *, is_owned: bool) -> None:
        view = self._module_view(module)
        found = view.tensors()
        owners = self._owners()
        is_declared = key.startswith("extra.") and is_owned
        for name, tensor in found.parameters.items():
            owner = owners.get(id(tensor), 0 if is_declared and self.optimizers else None)
            layout, kind = self._book.standing(f"{key}/{name}", tensor, is_shared=name in found.replicated)
            table.put(f"{key}/{name}", tensor, layout, kind, owner=owner)
        for name, tensor in found.buffers.items():
            # DDP hands rank 0's buffers to everyone at the next forward; until then each rank's are its own.
            layout = self._book.common_layout(f"{key}/{name}", tensor) if is_dtensor(tensor) else None
            owner = 0 if is_declared and self.optimizers else None
            table.put(f"{key}/{name}", tensor, layout, "buffer", owner=owner)
        table.aliases.update({f"{key}/{name}": f"{key}/{first}" for name, first in found.aliases.items()})
        for prefix, owner_module in view.extra_states():
            path = f"{key}/{prefix}/_extra_state/"
            sink = table.sink(self._book.everyone)
            table.parts[path] = context.encode(owner_module.get_extra_state(), path=path, tensors=sink)

    def _collect_optimizers(self, table: StateTable) -> None:
        shared = self._shared_parameters()
        for at, name in enumerate(self.optimizers):
            key = part_key("optimizer", name)
            view = self._view(name)
            collected = self._collectors.setdefault(key, StateCollector(view)).collect(
                table, self._book, shared, at
            )
            table.parts[key] = {
                "class": type(self.optimizers[name]).__qualname__,
                "groups": view.encode_groups(),
                "state": collected.encoded,
                "on_host": collected.on_host,
            }
            if any(layout is not None for layout in collected.layouts):
                table.compared[key] = table.parts[key]["groups"]

    def _shared_parameters(self) -> set[int]:
        """Return the ids of the parameters that DistributedDataParallel keeps equal."""
        if self._book.world_size == 1:
            return set()
        found = [self._module_view(module).tensors() for module in self.models.values()]
        return {id(one.parameters[name]) for one in found for name in one.replicated}

    def _has_shared(self) -> bool:
        """Return whether something keeps the ranks' parameters together, so that schedules must be equal too."""
        views = [self._module_view(module).tensors() for module in self.models.values()]
        return any(one.replicated or any(map(is_dtensor, one.parameters.values())) for one in views)

    def _module_view(self, module: nn.Module) -> ModuleView:
        view = self._module_views.get(id(module))
        if view is None or view.module is not module:
            view = self._module_views[id(module)] = ModuleView(module)
        return view

    def _owners(self) -> dict[int, int]:
        return {
            id(parameter): at
            for at, optimizer in enumerate(self.optimizers.values())
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def _view(self, name: str) -> OptimizerView:
        if name not in self._views:
            optimizer = self.optimizers[name]
            if not isinstance(optimizer, Optimizer):
                raise ConfigError(
                    f"optimizer {name!r} must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
                )
            self._views[name] = OptimizerView(
                optimizer, self._parameter_names(), f"{part_key('optimizer', name)}/"
            )
        return self._views[name]

    def _parameter_names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for model_name, module in self.models.items():
            prefix = f"{model_name}/" if model_name else ""
            for name, parameter in module_tensors(module).parameters.items():
                names.setdefault(id(parameter), prefix + name)
        return names


def _add_named(table: dict[str, Any], name: str, obj: Any, shown: str) -> None:
    if name in table:
        raise ConfigError(f"the train state has a part called {shown!r} already")
    table[name] = obj


def _check_extra_name(name: Any) -> None:
    if not isinstance(name, str) or not name or "/" in name or "." in name or name in PARTS:
        raise ConfigError(
            f"extra value name {name!r}: use a non-empty string without '/' and '.', not one of {PARTS}"
        )
