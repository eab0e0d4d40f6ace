"""What the ranks of the tests of `relight.dcp` do; each function runs in processes of its own."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import relight
from relight.dcp import Reader, Writer
from relight.storage.local import LocalBackend, local_path
from relight.testing.files import FullDiskFiles
from relight.testing.trainers import kill_at, note

SHAPES = {"six": (6,), "one": (1,), "rows": (3, 5), "none": (0, 4), "cube": (1, 7, 3), "ten": (10, 6)}
"""Dims that are smaller than the number of ranks, or no multiple of it."""


def content(shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor whose every element says where it is."""
    return torch.arange(float(np.prod(shape))).view(shape)


def note_failure(act: Any) -> None:
    """Note what `act` raises on this rank: the kinds and texts of all ranks' errors."""
    try:
        act()
    except CheckpointException as error:
        found = {rank: (type(one).__name__, str(one)) for rank, (one, _) in error.failures.items()}
        note(failed=found)
    else:
        note(failed={})


# DTensors of any layout


def spread(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return `tensor` over all ranks: "plain", "0" or "1" (the dim that is cut), "grid", "hsdp", "copies"."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if layout == "plain" or world == 1:
        return tensor.clone()
    if layout in ("grid", "hsdp"):
        mesh = init_device_mesh("cpu", (2, world // 2))
        dim = min(1, tensor.dim() - 1)
        placements = [Replicate(), Shard(0)] if layout == "hsdp" else [Shard(0), Shard(dim)]
        return distribute_tensor(tensor, mesh, placements)
    mesh = init_device_mesh("cpu", (world,))
    placement = Replicate() if layout == "copies" else Shard(min(int(layout), tensor.dim() - 1))
    return distribute_tensor(tensor, mesh, [placement])


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_spread(*, root: str, layout: str) -> None:
    """Save tensors of awkward shapes in one layout."""
    state = {name: spread(content(shape), layout) for name, shape in SHAPES.items()}
    dcp.save({**state, "scalar": torch.tensor(0.5), "count": 3}, storage_writer=Writer(root))
    note(saved=layout)


def load_spread(*, root: str, layouts: list[str]) -> None:
    """Load them in several layouts, and note where something is wrong."""
    for layout in layouts:
        state = {name: spread(torch.zeros(shape), layout) for name, shape in SHAPES.items()}
        state |= {"scalar": torch.tensor(0.0), "count": 0}
        dcp.load(state, storage_reader=Reader(root))
        wrong = [
            name for name, shape in SHAPES.items() if not torch.equal(whole(state[name]), content(shape))
        ]
        note(layout=layout, wrong=wrong, scalar=state["scalar"].item(), count=state["count"])


def save_strided(*, root: str) -> None:
    """Save rows that two axes cut, the inner one first: what FSDP over tensor parallel holds."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    block = nn.Linear(6, 10, bias=False)
    with torch.no_grad():
        block.weight.copy_(content((10, 6)))
    model = nn.Sequential(block)
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    parallelize_module(model, mesh["model"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    dcp.save({"ten": model[0].weight}, storage_writer=Writer(root))
    note(local=model[0].weight.to_local()[:, 0].tolist())


def load_strided(*, root: str, layouts: list[str]) -> None:
    """Load the rows in several layouts."""
    for layout in layouts:
        state = {"ten": spread(torch.zeros(10, 6), layout)}
        dcp.load(state, storage_reader=Reader(root))
        note(layout=layout, is_right=torch.equal(whole(state["ten"]), content((10, 6))))


# Models


def make(seed: int) -> nn.Module:
    """Return a model with an uneven layer, a frozen parameter and a 0-dim one."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
    model[0].bias.requires_grad_(False)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Take equal steps on all ranks."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(4, 6, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def shards(model: nn.Module) -> nn.Module:
    """Return the model sharded over all ranks, or as it is on one."""
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)
    return model


def fsdp_save(*, root: str, how: str) -> None:
    """Train, save in one of three ways, train on, and note the weights of both times."""
    model = shards(make(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, 3)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "epoch": {"n": 3}}
    if how == "save":
        dcp.save(state, storage_writer=Writer(root))
        train(model, optimizer, 2)
    else:
        kind = AsyncCheckpointerType.PROCESS if how == "process" else AsyncCheckpointerType.THREAD
        group = dist.new_group(backend="gloo")
        writer = Writer(root, process_group=group)
        future = dcp.async_save(
            state, storage_writer=writer, process_group=group, async_checkpointer_type=kind
        )
        state["epoch"]["n"] = 99
        train(model, optimizer, 2)
        future.result()
    note(weights=digest(model))
    dist.barrier()


def fsdp_load(*, root: str) -> None:
    """Load into an untrained model on however many ranks, train on, and note the weights."""
    model = shards(make(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "epoch": {"n": 0}}
    dcp.load(state, storage_reader=Reader(root))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(model, optimizer, 2)
    note(weights=digest(model), epoch=state["epoch"]["n"])


def digest(model: nn.Module) -> list[str]:
    """Return the bits of the whole model, rounding away what the order of additions over ranks may change."""
    return [
        format(value, ".4f")
        for parameter in model.parameters()
        for value in whole(parameter.detach()).reshape(-1).tolist()
    ]


def sharded_tensors(*, root: str) -> None:
    """Save and load the ShardedTensors of FSDP1."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    world = dist.get_world_size()
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in range(world)])
    saved = sharded_tensor.rand(spec, 10, 4)
    dcp.save({"part": {"w": saved}}, storage_writer=Writer(root))
    fresh = sharded_tensor.zeros(spec, 10, 4)
    dcp.load({"part": {"w": fresh}}, storage_reader=Reader(root))
    same = [
        torch.equal(one.tensor, two.tensor)
        for one, two in zip(saved.local_shards(), fresh.local_shards(), strict=True)
    ]
    note(same=same)


# Values of single ranks


def collapse(*, root: str) -> None:
    """Save other values under one key on each rank."""
    rank = dist.get_rank()
    state = {"same": torch.ones(3), "w": torch.tensor([2.0 * rank, 1.0]), "pos": 223 - rank}
    note_failure(lambda: dcp.save(state, storage_writer=Writer(root)))


def one_flipped_bit(*, root: str, mark: bool) -> None:
    """Save a replicated tensor that is wrong in one bit on rank 2."""
    plain, copies = content((4, 4)), spread(content((4, 4)), "copies")
    if dist.get_rank() == 2:
        plain.view(torch.int32)[1, 2] ^= 1
        copies.to_local().view(torch.int32)[1, 2] ^= 1
    state = {"plain": plain, "copies": copies, "good": content((3,))}
    note_failure(lambda: dcp.save(state, storage_writer=Writer(root, mark_differing=mark)))


def own_values(*, root: str) -> None:
    """Save values that are marked as each rank's own, and load them again."""
    rank = dist.get_rank()
    rng = relight.PerRank((torch.full((3,), float(rank)), {"pos": 220 + rank}))
    dcp.save({"w": torch.ones(2), "rng": rng}, storage_writer=Writer(root))
    state = {"w": torch.zeros(2), "rng": relight.PerRank(None)}
    dcp.load(state, storage_reader=Reader(root))
    tensor, where = state["rng"].value
    note(tensor=tensor.tolist(), pos=where["pos"], w=state["w"].tolist())


def load_own_values(*, root: str) -> None:
    """Load them on another number of ranks."""
    note_failure(lambda: dcp.load({"w": torch.zeros(2), "rng": None}, storage_reader=Reader(root)))


def apart(*, root: str, steps: list[int]) -> None:
    """Save to places that differ between ranks."""
    rank = dist.get_rank()
    folder = f"{root}-{rank}" if not steps else root
    step = steps[rank] if steps else None
    note_failure(lambda: dcp.save({"w": torch.ones(2)}, storage_writer=Writer(folder, step=step)))


def unseen(*, root: str) -> None:
    """Save to a place that every rank has for itself."""
    rank = dist.get_rank()
    from relight.checkpoint import dcp_writer

    dcp_writer.open_backend = lambda url: LocalBackend(local_path(f"{url}-of-{rank}"))
    note_failure(lambda: dcp.save({"w": spread(content((4,)), "0")}, storage_writer=Writer(root)))


# What goes wrong


def full_disk(*, root: str) -> None:
    """Save once, then meet a full disk on rank 1, then save again."""
    from relight.checkpoint import dcp_writer

    state = {"w": spread(content((64, 64)), "0")}
    writer = Writer(root)
    dcp.save(state, storage_writer=writer)
    files = FullDiskFiles(2000 if dist.get_rank() == 1 else 10**9)
    open_backend = dcp_writer.open_backend
    dcp_writer.open_backend = lambda url: LocalBackend(local_path(url), files)
    note_failure(lambda: dcp.save(state, storage_writer=writer))
    dcp_writer.open_backend = open_backend
    dcp.save(state, storage_writer=writer)


def killed(*, root: str, point: str) -> None:
    """Save step 1, and die in the middle of step 2 on the last rank."""
    state = {"w": spread(content((8, 3)), "0"), "step": 1}
    dcp.save(state, storage_writer=Writer(root, step=1))
    rank = dist.get_rank()
    note(saved=1)
    if rank == (0 if point.startswith(("commit", "catalog.gen")) else dist.get_world_size() - 1):
        kill_at(point)
    dcp.save({**state, "step": 2}, storage_writer=Writer(root, step=2))


def go_on(*, root: str) -> None:
    """Load the newest checkpoint, and save the next step."""
    state = {"w": spread(torch.zeros(8, 3), "0"), "step": 0}
    dcp.load(state, storage_reader=Reader(root))
    note(loaded=state["step"], is_right=torch.equal(whole(state["w"]), content((8, 3))))
    state["step"] += 1
    dcp.save(state, storage_writer=Writer(root, step=state["step"]))


def background_killed(*, root: str) -> None:
    """Save by a background process, kill it on rank 1, and save twice more."""
    from torch.distributed.checkpoint import _async_process_executor as executor

    kind = AsyncCheckpointerType.PROCESS
    writer = Writer(root)

    def save(step: int) -> None:
        state = {"w": spread(torch.full((4, 2), float(step)), "0"), "step": step}
        dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind).result()
        note(saved=step)

    save(1)
    if dist.get_rank() == 1:
        process = executor._CHECKPOINT_PROCESS._save_process
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    save(2)
    save(3)


def generators(*, root: str) -> None:
    """Save each rank's random generators as its own, draw, load, and draw again."""
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    random.seed(rank)
    torch.rand(rank + 1)
    mine = relight.PerRank({"torch": torch.get_rng_state(), "python": random.getstate()})
    dcp.save({"w": torch.ones(1), "rng": mine}, storage_writer=Writer(root))
    drawn = [torch.rand(1).item(), random.random()]
    state = {"w": torch.zeros(1), "rng": None}
    dcp.load(state, storage_reader=Reader(root))
    torch.set_rng_state(state["rng"].value["torch"])
    random.setstate(state["rng"].value["python"])
    note(first=drawn, second=[torch.rand(1).item(), random.random()])


def staged(*, root: str) -> None:
    """Change everything in place while an asynchronous save has not begun to write."""
    gate = Path(f"{root}.gate")
    gate.touch()
    from relight.checkpoint import dcp_writer

    open_backend = dcp_writer.open_backend

    def wait(url: str) -> Any:
        while gate.exists():
            time.sleep(0.002)
        return open_backend(url)

    dcp_writer.open_backend = wait
    state = {
        "w": torch.ones(3),
        "scalar": torch.tensor(1.0),
        "array": np.ones(3),
        "list": [1, 2],
        "dict": {"n": 1},
        "in_tuple": ({"n": 1}, torch.ones(2)),
    }
    future = dcp.async_save(state, storage_writer=Writer(root))
    for _ in range(3):
        state["w"] += 1
        state["scalar"] += 1
        state["array"] += 1
    state["list"].append(3)
    state["dict"]["n"] = 5
    state["in_tuple"][0]["n"] = 5
    state["in_tuple"][1].add_(4)
    gate.unlink()
    future.result()
    fresh = {"w": torch.zeros(3), "scalar": torch.tensor(0.0), "array": None, "list": None, "dict": {"n": 0}}
    dcp.load({**fresh, "in_tuple": None}, storage_reader=Reader(root))
    loaded = {**fresh, "in_tuple": None}
    dcp.load(loaded, storage_reader=Reader(root))
    inner, tensor = loaded["in_tuple"]
    note(
        w=loaded["w"].tolist(),
        scalar=loaded["scalar"].item(),
        array=loaded["array"].tolist(),
        list=loaded["list"],
        dict=loaded["dict"],
        in_tuple=[inner, tensor.tolist()],
    )


def cached_plans(*, root: str) -> None:
    """Save with a planner that caches plans, in shapes and dtypes that change; load each."""
    from torch.distributed.checkpoint import DefaultSavePlanner

    for step, (rows, dtype) in enumerate(
        [(10, torch.float32), (10, torch.float32), (7, torch.float32), (7, torch.float64)]
    ):
        saved = content((rows, 6)).to(dtype) + step
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"w": spread(saved, "0"), "step": step}, storage_writer=Writer(root), planner=planner)
        state = {"w": spread(torch.zeros(rows, 6, dtype=dtype), "0"), "step": -1}
        dcp.load(state, storage_reader=Reader(root))
        note(step=state["step"], is_right=torch.equal(whole(state["w"]), saved))


def alone(*, root: str) -> None:
    """Save a sharded tensor as if there were no other rank."""
    state = {"w": spread(content((6, 2)), "0")}
    note_failure(lambda: dcp.save(state, storage_writer=Writer(f"{root}-{dist.get_rank()}"), no_dist=True))
