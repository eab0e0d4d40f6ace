"""Optimizer state by parameter name: read without touching it, put back without the stock loader's dtype casts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from relight.checkpoint import context
from relight.errors import ConfigError, StateMismatchError

__all__ = ["OptimizerView"]

_PARAMS = "params"
_NAMES = "param_names"


class OptimizerView:
    """One optimizer, its parameters named through the modules that own them.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        names: id of a parameter -> canonical name.
        prefix: key prefix in the tensor table, such as ``"optimizer/"``.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], prefix: str) -> None:
        self.optimizer = optimizer
        self.prefix = prefix
        self._names: dict[int, str] = dict(names)
        self._cache: _StateCache | None = None
        self._name_parameters()

    def _name_parameters(self) -> None:
        for at, group in enumerate(self.optimizer.param_groups):
            given = group.get(_NAMES)
            for index, parameter in enumerate(group[_PARAMS]):
                if id(parameter) in self._names:
                    continue
                if given is None:
                    raise ConfigError(
                        f"{self.prefix}: parameter {index} of group {at} (shape {tuple(parameter.shape)}) belongs to "
                        "no model given to TrainState, so its state has no name; pass its module in model={...}, or "
                        "build the optimizer from named_parameters()",
                        path=self.prefix,
                    )
                self._names[id(parameter)] = given[index]

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return name -> parameter, in the optimizer's order."""
        return {self._names[id(p)]: p for group in self.optimizer.param_groups for p in group[_PARAMS]}

    def tensors(self) -> tuple[list[str], list[torch.Tensor], bool]:
        """Return the keys and tensors of the state, and whether every value in it is a plain tensor.

        The keys are worked out once and again when the state has grown, shrunk or been replaced.
        """
        tables = list(self.optimizer.state.values())
        sizes = list(map(len, tables))
        if self._cache is not None:
            keys, places, seen, seen_sizes = self._cache
            if sizes == seen_sizes and all(map(operator.is_, tables, seen)):
                try:
                    values = [table[key] for table, key in places]
                except KeyError:
                    values = []
                if len(values) == len(keys) and all(map(_is_tensor, values)):
                    return keys, values, True
        return self._walk_state(tables, sizes)

    def _walk_state(
        self, tables: list[dict[Any, Any]], sizes: list[int]
    ) -> tuple[list[str], list[torch.Tensor], bool]:
        keys: list[str] = []
        places: list[tuple[dict[Any, Any], Any]] = []
        is_plain = True
        for parameter, entries in self.optimizer.state.items():
            name = self._names.get(id(parameter)) if isinstance(parameter, torch.Tensor) else None
            if name is None or not isinstance(entries, dict):
                is_plain = False
                continue
            for key, value in entries.items():
                if _is_tensor(value) and isinstance(key, str):
                    keys.append(f"{self.prefix}{name}/{key}")
                    places.append((entries, key))
                else:
                    is_plain = False
        self._cache = (keys, places, tables, sizes) if is_plain else None
        return keys, [table[key] for table, key in places], is_plain

    def encode_state(self, sink: context.TensorSink) -> Any:
        """Return the structure of the whole state as typed JSON; tensors go to `sink` under their key."""
        encoded: dict[str, Any] = {}
        for parameter, entries in self.optimizer.state.items():
            name = self._names.get(id(parameter)) if isinstance(parameter, torch.Tensor) else None
            if name is None:
                raise ConfigError(
                    f"{self.prefix}: state is kept under {parameter!r:.80}, which is no parameter with a name",
                    path=self.prefix,
                )
            encoded[name] = context.encode(dict(entries), path=f"{self.prefix}{name}", tensors=sink)
        return encoded

    def host_keys(self) -> list[str]:
        """Return the keys of state tensors that live on the host though their parameter does not (Adam's `step`)."""
        if all(parameter.device.type == "cpu" for parameter in self.parameters().values()):
            return []
        keys, tensors, _ = self.tensors()
        return [key for key, tensor in zip(keys, tensors, strict=True) if tensor.device.type == "cpu"]

    def encode_groups(self) -> list[Any]:
        """Return the parameter groups as typed JSON: names of the parameters, and every other key whatever it is."""
        return [
            {
                "params": [self._names[id(p)] for p in group[_PARAMS]],
                "options": context.encode(
                    {key: _by_value(value) for key, value in group.items() if key not in (_PARAMS, _NAMES)},
                    path=f"{self.prefix}group[{at}]",
                ),
            }
            for at, group in enumerate(self.optimizer.param_groups)
        ]

    def check_groups(
        self, saved: list[Any], is_new: Callable[[str], bool], is_gone: Callable[[str], bool]
    ) -> dict[int, int]:
        """Match saved groups to live ones by the names of their parameters.

        Args:
            saved: as `encode_groups` gave them.
            is_new: whether a live parameter may be missing from the checkpoint.
            is_gone: whether a saved parameter may be missing here.

        Returns:
            Index of a saved group -> index of the live group.

        Raises:
            StateMismatchError: a parameter is in another group, is missing, or is new.
        """
        live: dict[frozenset[str], int] = {}
        for at, group in enumerate(self.optimizer.param_groups):
            names = frozenset(
                name for name in (self._names[id(p)] for p in group[_PARAMS]) if not is_new(name)
            )
            if names:
                live[names] = at
        match: dict[int, int] = {}
        moved: list[str] = []
        for at, group in enumerate(saved):
            names = frozenset(name for name in group["params"] if not is_gone(name))
            if names in live:
                match[at] = live[names]
            else:
                moved += sorted(names)
        if moved or len(match) != len(live):
            raise StateMismatchError(_group_report(self.prefix, saved, live, moved), path=self.prefix)
        return match

    def restore_groups(self, saved: list[Any], match: dict[int, int]) -> None:
        """Put every saved option back into its group (as matched); options that only the live group has stay."""
        for at, live_at in match.items():
            group = self.optimizer.param_groups[live_at]
            for key, value in context.decode(saved[at]["options"]).items():
                current = group.get(key)
                if isinstance(value, _TensorOption):
                    group[key] = value.rebuild(current)
                elif isinstance(current, torch.Tensor) and isinstance(value, int | float):
                    current.fill_(value)
                    continue
                group[key] = value

    def restore_state(self, encoded: dict[str, Any], tensor_of: Callable[[str], torch.Tensor]) -> None:
        """Replace the optimizer's state by the saved one; `tensor_of(key)` gives the tensors, filled or yet to be.

        Saved state of parameters that this optimizer does not hold is left out: `check_groups` has judged them.
        """
        parameters = self.parameters()
        fresh = {
            parameters[name]: context.decode(value, tensors=tensor_of)
            for name, value in encoded.items()
            if name in parameters
        }
        for parameter in list(self.optimizer.state):
            if parameter not in fresh:
                del self.optimizer.state[parameter]
        for parameter, entries in fresh.items():
            self.optimizer.state[parameter] = entries


def _group_report(prefix: str, saved: list[Any], live: dict[frozenset[str], int], moved: list[str]) -> str:
    lines = [
        f"{prefix}: parameter groups differ between checkpoint and optimizer; matched by parameter name:"
    ]
    where_saved = {name: at for at, group in enumerate(saved) for name in group["params"]}
    where_live = {name: at for names, at in live.items() for name in names}
    for name in (moved or sorted(where_live))[:10]:
        there = where_live.get(name)
        if there != where_saved.get(name):
            lines.append(f"  {name}: saved in group {where_saved.get(name)}, live in group {there}")
    gone = sorted(set(where_saved) - set(where_live))
    new = sorted(set(where_live) - set(where_saved))
    lines += [f"  only in the checkpoint: {', '.join(gone[:10])}"] if gone else []
    lines += [f"  only in the optimizer: {', '.join(new[:10])}"] if new else []
    return "\n".join(lines)


def _by_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _TensorOption.of(value)
    return value


_StateCache = tuple[list[str], list[tuple[dict[Any, Any], Any]], list[dict[Any, Any]], list[int]]
"""Keys, where each tensor is, the dict of each parameter, and their sizes."""


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class _TensorOption:
    """A group option that is a tensor (a learning rate under capturable optimizers), stored by value."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], data: bytes) -> None:
        self.dtype = dtype
        self.shape = shape
        self.data = data

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _TensorOption:
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return cls(tensor.dtype, tuple(tensor.shape), flat.numpy().tobytes())

    def rebuild(self, current: Any) -> torch.Tensor:
        raw = torch.frombuffer(bytearray(self.data), dtype=torch.uint8)
        value = raw.view(self.dtype).reshape(self.shape)
        if (
            isinstance(current, torch.Tensor)
            and current.shape == value.shape
            and current.dtype == value.dtype
        ):
            current.copy_(value)
            return current
        return value


context.register_codec(
    _TensorOption,
    name="relight.tensor_option",
    encode=lambda option: (option.dtype, option.shape, option.data),
    decode=lambda value: _TensorOption(*value),
)
