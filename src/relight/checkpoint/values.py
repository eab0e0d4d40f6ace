"""Extra values of the train state: modules, tensors, stateful objects, generators and plain Python values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from relight.checkpoint import context, rng
from relight.errors import StateMismatchError

__all__ = ["PerRank", "capture_value", "restore_value"]


class PerRank:
    """Mark an extra value as belonging to this rank alone: it may differ between ranks, and each gets its own back.

    ``extra={"pos": PerRank({"read": 0})}``; the value is in `.value`, also after a restore.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


def is_stateful(value: Any) -> bool:
    """Return whether `value` has both `state_dict` and `load_state_dict`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def capture_value(value: Any, *, path: str, sink: context.TensorSink) -> Any:
    """Return `value`'s state as typed JSON, with a tag for how it goes back; tensors go to `sink`.

    Modules are not handled here: their tensors stand in the table under their own names.
    """
    if isinstance(value, PerRank):
        return {"per_rank": capture_value(value.value, path=path, sink=sink)}
    if rng.is_generator(value):
        return {"generator": context.encode(rng.capture_generator(value), path=path)}
    if is_scaler(value):
        return {"stateful": context.encode(scaler_state(value), path=path, tensors=sink)}
    if is_stateful(value):
        return {"stateful": context.encode(value.state_dict(), path=path, tensors=sink)}
    return {"plain": context.encode(value, path=path, tensors=sink)}


def is_scaler(value: Any) -> bool:
    """Return whether `value` is a torch gradient scaler."""
    return isinstance(value, torch.amp.GradScaler)


def scaler_state(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """Return the scaler's state with its device scalars as tensors, so that reading it does not wait for the device.

    torch offers no public way to them; its own `state_dict` reads them with `item()`.
    """
    inside = vars(scaler)
    if inside["_scale"] is None or not scaler.is_enabled():
        return scaler.state_dict()
    names = ("growth_factor", "backoff_factor", "growth_interval")
    return {
        "scale": inside["_scale"],
        **{name: inside[f"_{name}"] for name in names},
        "_growth_tracker": inside["_growth_tracker"],
    }


def restore_value(
    current: Any, saved: Any, *, path: str, tensor_of: Callable[[str], torch.Tensor]
) -> Callable[[], Any]:
    """Check `saved` against `current` and decode it.

    Returns:
        A function to call once all tensors are filled: it puts the state into `current` (in place where the
        object can change) and returns the object to keep.

    Raises:
        StateMismatchError: the saved value is of another sort than the live one.
    """
    sort, body = next(iter(saved.items()))
    if isinstance(current, PerRank) != (sort == "per_rank"):
        raise StateMismatchError(f"{path}: per-rank on one side only (saved as {sort})", path=path)
    if isinstance(current, PerRank):
        return _put_per_rank(current, restore_value(current.value, body, path=path, tensor_of=tensor_of))
    live_sort = "generator" if rng.is_generator(current) else "stateful" if is_stateful(current) else "plain"
    if sort != live_sort:
        raise StateMismatchError(
            f"{path}: saved as {sort}, live object is {live_sort} ({type(current)})", path=path
        )
    decoded = context.decode(body, tensors=tensor_of)
    if sort == "generator":
        return lambda: _put(current, lambda: rng.restore_generator(current, decoded))
    if sort == "stateful":
        scalars = is_scaler(current)
        return lambda: _put(
            current, lambda: current.load_state_dict(_scalars(decoded) if scalars else decoded)
        )
    return lambda: put_plain(current, decoded, path=path)


def _put_per_rank(holder: PerRank, put: Callable[[], Any]) -> Callable[[], Any]:
    def finish() -> PerRank:
        holder.value = put()
        return holder

    return finish


def _put(current: Any, act: Callable[[], object]) -> Any:
    act()
    return current


def _scalars(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def put_plain(current: Any, saved: Any, *, path: str, is_top: bool = True) -> Any:
    """Put a plain value back: containers, arrays and tensors in place, so that every holder sees it; else return it."""
    if isinstance(current, torch.Tensor) and isinstance(saved, torch.Tensor):
        if current.shape != saved.shape or current.dtype != saved.dtype:
            if not is_top:
                return saved
            raise StateMismatchError(
                f"{path}: saved {saved.dtype} {tuple(saved.shape)}, live {current.dtype} {tuple(current.shape)}",
                path=path,
            )
        with torch.no_grad():
            current.copy_(saved)
        return current
    if type(current) is not type(saved):
        return saved
    if isinstance(current, dict):
        kept = {
            key: put_plain(current[key], value, path=path, is_top=False) if key in current else value
            for key, value in saved.items()
        }
        current.clear()
        current.update(kept)
        return current
    if isinstance(current, list | deque):
        current.clear()
        current.extend(saved)
        return current
    if isinstance(current, set | bytearray):
        current.clear()
        current.update(saved) if isinstance(current, set) else current.extend(saved)
        return current
    if isinstance(current, np.ndarray) and current.shape == saved.shape and current.dtype == saved.dtype:
        np.copyto(current, saved)
        return current
    return saved


def is_module(value: Any) -> bool:
    """Return whether `value` is an `nn.Module`, whose tensors keep their own names in the table."""
    return isinstance(value, nn.Module)
