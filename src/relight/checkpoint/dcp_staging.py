"""Copies of live state for `dcp.async_save`, and the background process that DCP may write from.

DCP keeps one background process for good and never looks whether it lives: once it was killed, every later save
fails. It is replaced here, on all ranks at once, since the processes of all ranks form a group of their own.
"""

from __future__ import annotations

import datetime as dt
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint import staging

from relight.errors import ConfigError, DesyncError

__all__ = ["copy_state", "ensure_background"]

_log = logging.getLogger("relight.dcp")
_PROCESS = "_CHECKPOINT_PROCESS"
_SAVING = "_save_process"


def copy_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a copy on the host that no later change reaches: tensors, arrays and Python objects."""
    stager: Any
    if hasattr(staging, "DefaultStager"):
        options = staging.StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        stager = staging.DefaultStager(options)
    else:
        stager = staging.BlockingAsyncStager()
    try:
        copied: dict[str, Any] = stager.stage(state_dict)
    finally:
        if hasattr(stager, "close"):
            stager.close()
    return copied


def ensure_background(group: dist.ProcessGroup | None = None, *, timeout_seconds: float = 60.0) -> bool:
    """Make the next process-based `dcp.async_save` start new background processes if one of them is gone.

    Call on every rank of `group`, while no save is in flight. `relight.dcp.Writer` does it by itself where it stages;
    call it before `dcp.async_save` if you give that an `async_stager` of your own.

    Args:
        group: the one that is given to `dcp.async_save`; None for all ranks.
        timeout_seconds: how long to wait for the other ranks.

    Returns:
        Whether they are replaced; False also where there are none.

    Raises:
        DesyncError: a rank did not come within the timeout.
        ConfigError: the group cannot pass host memory.
    """
    process = getattr(executor, _PROCESS, None)
    if process is None:
        return False
    is_alive = bool(getattr(process, _SAVING).is_alive())
    if _all_true(is_alive, group, timeout_seconds):
        return False
    _log.warning(
        "the background process of an asynchronous save is gone on this or another rank; starting new ones"
    )
    # The last reference: DCP ends the process, should it live, when its object goes.
    setattr(executor, _PROCESS, None)
    return True


def _all_true(claim: bool, group: dist.ProcessGroup | None, timeout_seconds: float) -> bool:  # noqa: FBT001
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return claim
    if "cpu" not in dist.get_backend_config(group) and "gloo" not in str(dist.get_backend(group)):
        raise ConfigError(
            "asynchronous saves need a group that passes host memory; give relight.dcp.Writer(process_group=...) the "
            "one that dcp.async_save gets"
        )
    votes = torch.tensor([int(claim)])
    try:
        work = dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group, async_op=True)
        if work is not None:
            work.wait(dt.timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        raise DesyncError(
            f"another rank is gone or did not come to this save within {timeout_seconds:.0f} s: {error}; if only "
            "some ranks save, give relight.dcp.Writer(process_group=...) their group"
        ) from error
    return bool(votes.item())
