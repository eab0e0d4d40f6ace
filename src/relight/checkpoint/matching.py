"""Put a saved state back: every saved name against every live one, strictly, before a byte is loaded.

Nothing live is changed until all parts have been compared; then tensors are filled in place by `fetch`, and the
finishing calls run in an order that the parts need: values and schedulers, then parameter groups (a scheduler's
constructor may have rewritten the learning rate), random generators last.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from relight.checkpoint import context, rng
from relight.checkpoint.format import DTYPE_NAMES, DTYPES
from relight.checkpoint.modules import ModuleTensors, extra_states, module_tensors
from relight.checkpoint.sharding import local_part
from relight.checkpoint.state import TrainState, part_key
from relight.checkpoint.targets import OptimizerTargets
from relight.checkpoint.values import PerRank, is_module, restore_value
from relight.errors import SettingsChangedError, StateMismatchError
from relight.manifest.manifest import PER_RANK, IndexEntry

__all__ = ["Allowances", "Matching", "SavedState"]

Fetch = Callable[[list[tuple[str, torch.Tensor]]], None]
_MAX_LINES = 20


@dataclass(frozen=True, slots=True)
class Allowances:
    """Differences that the user accepts, as shell patterns on keys (with or without the part's prefix)."""

    missing: Sequence[str] = ()
    extra: Sequence[str] = ()
    changed: Sequence[str] = ()

    def allows(self, kind: str, key: str) -> bool:
        """Return whether a difference of `kind` ("missing", "extra", "changed") at `key` is accepted."""
        short = key.partition("/")[2] or key
        return any(
            fnmatch.fnmatchcase(key, pattern) or fnmatch.fnmatchcase(short, pattern)
            for pattern in getattr(self, kind)
        )


@dataclass(slots=True)
class SavedState:
    """What a checkpoint holds for this rank, tensors by description.

    Attributes:
        specs: key -> dtype name and shape; aliases resolve through `aliases`.
        parts: part name -> typed JSON.
        fetch: fills tensors by key.
        replicas_differ: what was not equal on all ranks although it should have been.
        world_size: number of ranks that saved it.
        rank: this rank.
        is_resized: whether another number of ranks saved it.
    """

    specs: dict[str, IndexEntry]
    aliases: dict[str, str]
    parts: dict[str, Any]
    fetch: Fetch
    replicas_differ: tuple[str, ...] = ()
    world_size: int = 1
    rank: int = 0
    is_resized: bool = False

    @property
    def is_own(self) -> bool:
        """Whether the per-rank values are those of this very rank; else they are rank 0's, for a rank that is new."""
        return self.rank < self.world_size


@dataclass(slots=True)
class Matching:
    """One comparison of a saved state with the live one; build it, call `match_*`, then `apply`."""

    state: TrainState
    saved: SavedState
    allow: Allowances = field(default_factory=Allowances)
    targets: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)
    first: list[Callable[[], Any]] = field(default_factory=list)
    last: list[Callable[[], Any]] = field(default_factory=list)

    def differ(self, kind: str, key: str, text: str) -> None:
        """Note a difference: recorded when allowed, a problem else."""
        (self.allowed if self.allow.allows(kind, key) else self.problems).append(f"{key}: {text}")

    def apply(self) -> None:
        """Raise if anything differs; else fill the tensors and finish.

        Raises:
            StateMismatchError: lists every difference, both sides.
        """
        if self.problems:
            shown = "\n  ".join(self.problems[:_MAX_LINES])
            more = (
                f"\n  and {len(self.problems) - _MAX_LINES} more" if len(self.problems) > _MAX_LINES else ""
            )
            raise StateMismatchError(
                f"checkpoint and train state differ in {len(self.problems)} places:\n  {shown}{more}\n"
                "allow single keys with allow_missing=, allow_extra= or allow_changed= of Checkpointer",
                path=self.problems[0].partition(":")[0],
            )
        self.saved.fetch(self.targets)
        for finish in (*self.first, *self.last):
            finish()

    def match_parts(self, parts: frozenset[str]) -> None:
        """Compare the wanted parts; parts that the train state does not have are left for later (`LateParts`)."""
        if "settings" in parts:
            self.match_settings()
        if "model" in parts:
            for name, module in self.state.models.items():
                self.match_module(part_key("model", name), module)
        if "optimizer" in parts:
            for name in self.state.optimizers:
                self.match_optimizer(name)
        if "scheduler" in parts:
            self.match_values("scheduler", self.state.schedulers)
        if "scaler" in parts:
            self.match_values("scaler", self.state.scalers)
        if "extra" in parts:
            self.match_values("extra", self.state.extra)
        if "data" in parts:
            self.match_data()
        if "rng" in parts:
            self.match_rng()
        if "model" in parts and not self.is_exhaustive:
            self._match_model_names()

    @property
    def is_exhaustive(self) -> bool:
        """Whether every saved tensor has found its place."""
        return len(self.targets) == len(self.saved.specs)

    def _match_model_names(self) -> None:
        models = tuple(f"{part_key('model', name)}/" for name in self.state.models)
        others = ("optimizer", "scheduler", "scaler", "extra", "data")
        strange = {
            key.partition("/")[0] for key in self.saved.specs if not key.startswith((*models, *others))
        }
        for key in sorted(strange):
            self.differ("extra", key, "a model in the checkpoint, not in the train state")

    def match_settings(self) -> None:
        """Compare the settings that shape the trajectory.

        Raises:
            SettingsChangedError: a value changed and is not allowed to; names every change, old -> new.
        """
        old = context.decode(self.saved.parts.get("settings", {}))
        new = self.state.all_settings()
        changes = {
            key: (old.get(key), new.get(key))
            for key in sorted({*old, *new})
            if key in old and key in new and not _equal(old[key], new[key])
        }
        refused = {key: pair for key, pair in changes.items() if not self.allow.allows("changed", key)}
        if refused:
            listed = ", ".join(f"{key} {was!r} -> {now!r}" for key, (was, now) in refused.items())
            raise SettingsChangedError(
                f"settings that shape the trajectory changed: {listed}; to go on with the new ones pass "
                f"allow_changed={tuple(refused)!r}",
                changes=refused,
            )
        self.allowed += [f"settings {key}: {was!r} -> {now!r}" for key, (was, now) in changes.items()]

    def match_module(self, key: str, module: nn.Module) -> None:
        """Compare one module's parameters, buffers and extra states with the saved ones under `key`."""
        found = module_tensors(module)
        prefix = f"{key}/"
        specs, saved_aliases, targets, names_of = (
            self.saved.specs,
            self.saved.aliases,
            self.targets,
            DTYPE_NAMES,
        )
        for table in (found.parameters, found.buffers):
            is_refused = self.saved.is_resized and table is found.parameters
            for short, tensor in table.items():
                name = prefix + short
                stored = saved_aliases.get(name, name) if saved_aliases else name
                spec = specs.get(stored)
                if spec is None:
                    self.differ(
                        "missing", name, f"in the model ({_spec_text(tensor)}), not in the checkpoint"
                    )
                elif spec.layout == PER_RANK:
                    self._match_own(name, stored, spec, tensor, is_refused=is_refused)
                elif spec.shape == tensor.shape and spec.dtype == names_of.get(tensor.dtype):
                    targets.append((stored, tensor))
                else:
                    saved = f"{spec.dtype} {list(spec.shape)}"
                    self.problems.append(f"{name}: saved {saved}, live {_spec_text(tensor)}")
        if not self.is_exhaustive or found.aliases:
            self._match_unknown(prefix, found)
        self._match_extra_states(key, module)

    def _match_own(
        self, name: str, stored: str, spec: IndexEntry, tensor: torch.Tensor, *, is_refused: bool
    ) -> None:
        """Match a tensor of which every saving rank held its own value; buffers of new ranks start from rank 0's."""
        held = local_part(tensor)
        if spec.shape != held.shape or spec.dtype != DTYPE_NAMES.get(held.dtype):
            saved = f"{spec.dtype} {list(spec.shape)} of each rank's own"
            self.problems.append(f"{name}: saved {saved}, live {_spec_text(held)}")
            return
        if is_refused:
            self._refuse_own(name)
        self.targets.append((stored, held))

    def _refuse_own(self, name: str) -> None:
        self.differ(
            "changed",
            name,
            f"each of the {self.saved.world_size} ranks that saved it held a value of its own, and none of them can "
            "speak for another number of ranks (allow_changed takes the same rank's, or rank 0's where it is new)",
        )

    def _match_unknown(self, prefix: str, found: ModuleTensors) -> None:
        """Note what the checkpoint holds of a module beyond the live tensors."""
        specs, saved_aliases = self.saved.specs, self.saved.aliases
        live = {prefix + name for table in (found.parameters, found.buffers) for name in table}
        aliases = {prefix + name for name in found.aliases}
        unknown = (specs.keys() - live) | (saved_aliases.keys() - live - specs.keys())
        for name in sorted(name for name in unknown - aliases if name.startswith(prefix)):
            if "/_extra_state/" not in name:
                self.differ("extra", name, "in the checkpoint, not in the model")
        for name in sorted(aliases):
            if name in specs:
                self.differ("extra", name, "tied in the model, stored as a tensor of its own")

    def _match_extra_states(self, key: str, module: nn.Module) -> None:
        wanted = {f"{key}/{prefix}/_extra_state/": owner for prefix, owner in extra_states(module)}
        present = {name for name in self.saved.parts if name.startswith(f"{key}/")}
        for name in sorted(present - set(wanted)):
            self.differ("extra", name, "extra state in the checkpoint, not in the model")
        for name, owner in wanted.items():
            if name not in present:
                self.differ("missing", name, "extra state of the model is not in the checkpoint")
                continue
            value = context.decode(self.saved.parts[name], tensors=self._new_tensor)
            self.first.append(partial(owner.set_extra_state, value))

    def match_optimizer(self, name: str) -> None:
        """Compare optimizer `name`'s groups by parameter name and prepare its state."""
        key = part_key("optimizer", name)
        saved = self.saved.parts.get(key)
        if saved is None:
            self.differ("missing", key, "in the train state, not in the checkpoint")
            return
        view = self.state.view(name)
        kind = type(view.optimizer).__qualname__
        if kind != saved["class"]:
            self.differ("changed", f"{key}.class", f"saved by {saved['class']}, live {kind}")
        try:
            match = view.check_groups(
                saved["groups"],
                lambda parameter: self.allow.allows("missing", parameter),
                lambda parameter: self.allow.allows("extra", parameter),
            )
        except StateMismatchError as error:
            self.problems.append(str(error))
            return
        tensor_of = self._optimizer_tensors(name, set(saved["on_host"]))
        if self.saved.is_resized:
            for own, spec in self.saved.specs.items():
                if spec.layout == PER_RANK and own.startswith(view.prefix):
                    self._refuse_own(own)
        view_state = saved["state"]
        self.first.append(lambda: view.restore_state(view_state, tensor_of.__getitem__))
        parameters = view.parameters()
        for parameter, value in view_state.items():
            if parameter in parameters:
                context.decode(value, tensors=tensor_of.make)
        self.last.append(lambda: view.restore_groups(saved["groups"], match))

    def match_groups(self) -> None:
        """Prepare to put the parameter groups' options back, without their state."""
        for name in self.state.optimizers:
            saved = self.saved.parts.get(part_key("optimizer", name))
            if saved is not None:
                view = self.state.view(name)
                match = view.check_groups(
                    saved["groups"],
                    lambda parameter: self.allow.allows("missing", parameter),
                    lambda parameter: self.allow.allows("extra", parameter),
                )
                self.last.append(partial(view.restore_groups, saved["groups"], match))

    def _optimizer_tensors(self, name: str, on_host: set[str]) -> OptimizerTargets:
        view = self.state.view(name)
        keys, tensors, _ = view.tensors()
        live = dict(zip(keys, tensors, strict=True))
        return OptimizerTargets(
            self.saved.specs, self.targets, live, view.parameters(), prefix=view.prefix, on_host=on_host
        )

    def match_values(self, part: str, objects: dict[str, Any]) -> None:
        """Compare schedulers, scalers or extras and prepare to put them back."""
        for name, current in objects.items():
            key = part_key(part, name)
            if self.saved.is_resized and isinstance(current, PerRank):
                self._refuse_own(key)
            if is_module(current):
                self.match_module(key, current)
            elif key not in self.saved.parts:
                self.differ("missing", key, "in the train state, not in the checkpoint")
            else:
                try:
                    put = restore_value(current, self.saved.parts[key], path=key, tensor_of=self._new_tensor)
                except StateMismatchError as error:
                    self.problems.append(str(error))
                    continue
                self.first.append(partial(_replace, objects, name, put))

    def match_data(self) -> None:
        """Prepare the data position."""
        if self.state.data is None:
            return
        if "data" not in self.saved.parts:
            self.differ("missing", "data", "in the train state, not in the checkpoint")
            return
        data = self.state.data
        if self.saved.is_resized and data.per_rank and not getattr(data, "can_change_world_size", False):
            self.differ(
                "changed",
                "data",
                f"this loader's position belongs to each of the {self.saved.world_size} ranks that saved it; use "
                "relight.ElasticSampler or relight.FileStream, or give the loader can_change_world_size = True if its "
                "state_dict is good on any number of ranks",
            )
        saved = context.decode(self.saved.parts["data"], tensors=self._new_tensor)
        self.first.append(lambda: data.restore(saved))

    def match_rng(self) -> None:
        """Prepare the random generators, to be put back after everything else."""
        if "rng" not in self.saved.parts:
            self.differ("missing", "rng", "the checkpoint holds no random generators")
            return
        saved = context.decode(self.saved.parts["rng"])
        if not self.saved.is_own:
            text = f"derived from rank 0's, since {self.saved.world_size} ranks saved it"
            self.allowed.append(f"rng of rank {self.saved.rank}: {text}")
            self.last.append(lambda: rng.derive_rng(saved, self.saved.rank))
            return
        self.last.append(lambda: rng.restore_rng(saved))

    def _new_tensor(self, key: str) -> torch.Tensor:
        if key not in self.saved.specs:
            raise StateMismatchError(
                f"{key}: the context names this tensor, the checkpoint does not hold it", path=key
            )
        spec = self.saved.specs[key]
        tensor = torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
        self.targets.append((key, tensor))
        return tensor


def _replace(objects: dict[str, Any], name: str, put: Callable[[], Any]) -> None:
    objects[name] = put()


def _spec_text(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _equal(left: Any, right: Any) -> bool:
    return bool(context.dumps(context.encode(left)) == context.dumps(context.encode(right)))
