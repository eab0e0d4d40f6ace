"""Tensors of an `nn.Module` under canonical names: wrappers leave no trace, ties are found, nothing is copied."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from relight.errors import StateMismatchError

__all__ = ["ModuleTensors", "ModuleView", "extra_states", "module_tensors"]

# Names that torch's own wrappers give to what they wrap; a trailing underscore-name cannot clash with user names
# by accident, and "module" is only dropped below the two wrapper classes that use it.
_WRAPPER_NAMES = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


@dataclass(slots=True)
class ModuleTensors:
    """Parameters and persistent buffers of a module by canonical name.

    Attributes:
        parameters: name -> parameter, first name of each tied parameter only.
        buffers: name -> persistent buffer, likewise.
        aliases: further name of a tied tensor -> its first name.
        replicated: names of the parameters that DistributedDataParallel keeps equal on all ranks.
    """

    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    replicated: set[str] = field(default_factory=set)


def module_tensors(module: nn.Module) -> ModuleTensors:
    """Return the tensors of `module` by canonical name.

    `module.` of (Distributed)DataParallel, `_orig_mod.` of torch.compile and the prefixes of FSDP and activation
    checkpointing are dropped. Lazy parameters that are not materialised yet raise.

    Raises:
        StateMismatchError: two tensors end up with one name, or a parameter is not materialised.
    """
    _reshard(module)
    found = ModuleTensors()
    first_name: dict[int, str] = {}
    parameters, buffers = found.parameters, found.buffers
    for prefix, owner, is_replicated in _walk(module, "", is_replicated=False):
        for short, tensor in owner._parameters.items():
            if tensor is None:
                continue
            name = prefix + short
            known = first_name.setdefault(id(tensor), name)
            if known != name:
                found.aliases[name] = known
                continue
            if name in parameters or isinstance(tensor, UninitializedTensorMixin):
                raise _unusable(name, tensor)
            parameters[name] = tensor
            if is_replicated:
                found.replicated.add(name)
        for short, buffer in owner._buffers.items():
            if buffer is None or short in owner._non_persistent_buffers_set:
                continue
            name = prefix + short
            known = first_name.setdefault(id(buffer), name)
            if known != name:
                found.aliases[name] = known
                continue
            if name in parameters or name in buffers:
                raise _unusable(name, buffer)
            buffers[name] = buffer
    return found


def _reshard(module: nn.Module) -> None:
    """Have FSDP register its sharded parameters again where a forward without backward has left the gathered ones."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and hasattr(fsdp, "FSDPModule"):
        for one in module.modules():
            if isinstance(one, fsdp.FSDPModule):
                one.reshard()


def _unusable(name: str, tensor: torch.Tensor) -> StateMismatchError:
    if isinstance(tensor, UninitializedTensorMixin):
        message = f"{name} is a lazy parameter: run one forward before TrainState"
    else:
        message = f"two tensors are called {name} once wrapper prefixes are dropped"
    return StateMismatchError(message, path=name)


def extra_states(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (canonical prefix without the dot, module) for every submodule that defines `get_extra_state`."""
    for prefix, owner, _ in _walk(module, "", is_replicated=False):
        if type(owner).get_extra_state is not nn.Module.get_extra_state:
            yield prefix.removesuffix("."), owner


def _walk(module: nn.Module, prefix: str, *, is_replicated: bool) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield (prefix, module, whether DistributedDataParallel keeps its parameters equal on all ranks)."""
    is_shared = is_replicated or isinstance(module, DistributedDataParallel)
    yield prefix, module, is_shared
    is_parallel = isinstance(module, DataParallel | DistributedDataParallel)
    for name, child in module._modules.items():
        if child is None:
            continue
        dropped = name in _WRAPPER_NAMES or (is_parallel and name == "module")
        yield from _walk(child, prefix if dropped else f"{prefix}{name}.", is_replicated=is_shared)


class ModuleView:
    """A module whose tensors are looked up again and again: the walk is done once, and again when it must be.

    Looking up costs a fraction of the walk. Every place that a tensor or a submodule came from is looked at anew, so
    a replaced, added or removed one is seen.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._walk_again()

    def tensors(self) -> ModuleTensors:
        """Return the tensors by canonical name, as `module_tensors` would; the caller must not change the result."""
        if not self._is_current():
            self._walk_again()
        return self._found

    def extra_states(self) -> list[tuple[str, nn.Module]]:
        """Return what `extra_states` yields, as of the last `tensors`."""
        return self._extra_states

    def _walk_again(self) -> None:
        self._extra_states = list(extra_states(self.module))
        self._found = module_tensors(self.module)
        owners = [owner for _, owner, _ in _walk(self.module, "", is_replicated=False)]
        tables = [(owner._parameters, owner._buffers, owner._modules) for owner in owners]
        self._tables = [table for three in tables for table in three]
        self._contents = [list(table.values()) for table in self._tables]
        self._persistence = [
            (owner, len(owner._non_persistent_buffers_set)) for owner in owners if owner._buffers
        ]

    def _is_current(self) -> bool:
        for table, seen in zip(self._tables, self._contents, strict=True):
            if len(table) != len(seen) or not all(map(operator.is_, table.values(), seen)):
                return False
        return all(len(owner._non_persistent_buffers_set) == num for owner, num in self._persistence)
