"""What each of several ranks does to save a model in shards: with torch's own checkpoint engine, and with relight."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import relight

__all__ = ["save_run", "save_shards", "whole_tensors"]

PLACEMENTS = {
    "rows": (Shard(0),),
    "columns": (Shard(1),),
    "uneven": (Shard(0),),
    "copies": (Replicate(),),
    "empty on the last": (Shard(0),),
}
SHAPES = {"rows": (6, 4), "columns": (5, 6), "uneven": (5, 3), "copies": (4, 2), "empty on the last": (1, 3)}


def whole_tensors() -> dict[str, torch.Tensor]:
    """Return what the ranks share, equal on all."""
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def save_shards(path: str) -> None:
    """Save each tensor as this rank holds it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {name: distribute_tensor(one, mesh, PLACEMENTS[name]) for name, one in whole_tensors().items()}
    dcp.save({"model": state}, checkpoint_id=path)


def save_run(root: str, whole: str) -> None:
    """Save a model that is spread over all ranks after one step, and beside it what it is as a whole."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    with relight.Checkpointer(root, relight.TrainState(model=net, optimizer=optimizer)) as checkpointer:
        checkpointer.restore()
        checkpointer.save(1)
        checkpointer.wait(1)
    found = {name: one.full_tensor() for name, one in net.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(found, whole)
