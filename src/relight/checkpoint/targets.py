"""Where the tensors of an optimizer's state are loaded to."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from relight.checkpoint.format import DTYPES
from relight.checkpoint.sharding import is_dtensor, local_part
from relight.errors import StateMismatchError
from relight.manifest.manifest import PER_RANK, IndexEntry

__all__ = ["OptimizerTargets"]


class OptimizerTargets:
    """State tensors of one optimizer: the live one where it fits, a new one on its parameter's device else."""

    def __init__(
        self,
        specs: Mapping[str, IndexEntry],
        targets: list[tuple[str, torch.Tensor]],
        live: dict[str, torch.Tensor],
        parameters: dict[str, torch.Tensor],
        *,
        prefix: str,
        on_host: set[str],
    ) -> None:
        self._specs = specs
        self._targets = targets
        self._live = live
        self._parameters = parameters
        self._prefix = prefix
        self._on_host = on_host
        self._made: dict[str, torch.Tensor] = {}

    def make(self, key: str) -> torch.Tensor:
        """Choose the tensor that `key` is loaded into, and note it as a target."""
        specs = self._specs
        if key not in specs:
            raise StateMismatchError(
                f"{key}: the context names this tensor, the checkpoint does not hold it", path=key
            )
        dtype, shape, is_own = DTYPES[specs[key].dtype], specs[key].shape, specs[key].layout == PER_RANK
        tensor = self._live.get(key)
        if is_own and tensor is not None:
            tensor = local_part(tensor)
        if tensor is None or tensor.dtype != dtype or tuple(tensor.shape) != shape:
            tensor = self._new(key, dtype, shape, is_own=is_own)
        self._made[key] = tensor
        self._targets.append((key, tensor))
        return tensor

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._made[key]

    def _new(self, key: str, dtype: torch.dtype, shape: tuple[int, ...], *, is_own: bool) -> torch.Tensor:
        parameter = self._parameters.get(key[len(self._prefix) :].rpartition("/")[0])
        if parameter is None or key in self._on_host:
            device = (
                parameter.device
                if parameter is not None and key not in self._on_host
                else torch.device("cpu")
            )
            return torch.empty(shape, dtype=dtype, device=device)
        if tuple(parameter.shape) == shape and not (is_own and is_dtensor(parameter)):
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype, device=parameter.device)
