"""One training under every way to spread a model over ranks; it tells each step bit by bit."""

from __future__ import annotations

import hashlib
import os
import signal
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset

import relight
from relight.checkpoint.group import RankGroup
from relight.checkpoint.matching import Allowances
from relight.checkpoint.restoring import Restorer
from relight.checkpoint.state import PARTS
from relight.manifest.catalog import Catalog
from relight.storage.backend import open_backend
from relight.testing.trainers import kill_at, note

__all__ = ["LAYOUTS", "Net", "full_digest", "mesh_of", "restore_each", "save_one", "spread", "train"]

NUM_SAMPLES = 48
TOTAL = 10
GLOBAL_BATCH = 12

LAYOUTS = ("plain", "ddp", "fsdp", "tp", "fsdp_tp", "hsdp")


class Rows(Dataset[tuple[int, torch.Tensor]]):
    """Samples that are functions of their index."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.arange(index, index + 6, dtype=torch.float32) / 64


class Block(nn.Module):
    """Two layers around a dropout, as tensor parallelism cuts them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 12)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(12, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.relu(self.up(x))))


class Net(nn.Module):
    """Sizes that no number of ranks divides, a tied weight, a frozen one, and buffers of no and of zero dims."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Linear(7, 5).requires_grad_(False)
        self.out = nn.Linear(5, 5, bias=False)
        self.again = nn.Linear(5, 5, bias=False)
        self.again.weight = self.out.weight
        self.register_buffer("count", torch.tensor(0.0))
        self.register_buffer("nothing", torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.into(x))
        for block in self.blocks:
            x = block(x)
        self.count += 1
        return self.again(torch.relu(self.out(self.frozen(x))))


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of all ranks; a single rank gets a process group of its own first."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def spread(net: Net, layout: str, world_size: int) -> nn.Module:
    """Return `net` spread over all ranks."""
    if layout == "plain" or (world_size == 1 and layout == "ddp"):
        return net
    if layout == "ddp":
        # torch fills its buckets anew after the first step of a process, unless it looks for unused parameters; on more
        # than two ranks the place in a bucket decides the order of a sum. See docs/assumptions.md.
        return nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    if layout in ("fsdp_tp", "hsdp"):
        mesh = mesh_of((2, world_size // 2), ("outer", "inner"))
    else:
        mesh = mesh_of((world_size,), ("outer",))
    if layout in ("tp", "fsdp_tp"):
        for block in net.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["inner"] if layout == "fsdp_tp" else mesh, plan)
    if layout != "tp":
        data_mesh = mesh["outer"] if layout == "fsdp_tp" else mesh
        for block in net.blocks:
            fully_shard(block, mesh=data_mesh)
        fully_shard(net, mesh=data_mesh)
    return net


def optimizer_of(model: nn.Module, *, foreach: bool = False) -> torch.optim.Optimizer:
    """Return AdamW over what is trained; tensors of several meshes cannot go through one foreach call."""
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return torch.optim.AdamW(trained, lr=0.01, foreach=foreach)


def data_rank(layout: str, rank: int, world_size: int) -> tuple[int, int]:
    """Return which part of a batch a rank takes: (number, of how many)."""
    if layout in ("plain", "tp"):
        return 0, 1
    return (rank // (world_size // 2), 2) if layout == "fsdp_tp" else (rank, world_size)


def train(
    root: str,
    *,
    layout: str,
    every: int = 2,
    mode: str = "overlap",
    kill_step: int | None = None,
    kill_point: str | None = None,
    kill_rank: int = 0,
) -> None:
    """Train to step 10, or until killed at the end of `kill_step`, or at a named point of a save after it."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = spread(Net(), layout, world_size)
    optimizer = optimizer_of(model, foreach=layout not in ("tp", "fsdp_tp"))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    part, num_parts = data_rank(layout, rank, world_size)
    sampler = relight.ElasticSampler(
        NUM_SAMPLES, global_batch=GLOBAL_BATCH, seed=3, rank=part, world_size=num_parts
    )
    loader = DataLoader(Rows(), sampler=sampler, batch_size=GLOBAL_BATCH // num_parts)
    state = relight.TrainState(model=model, optimizer=optimizer, scheduler=schedule, data=loader)
    with relight.Checkpointer(root, state, every=every, mode=mode, keep=100) as ckpt:
        step = ckpt.restore()
        note(restored=step)
        if step == 0:
            # Ranks that hold parts of one sample must drop the same of it.
            torch.manual_seed(100 + part)
        while step < TOTAL:
            for index, x in loader:
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                step += 1
                if step == kill_step and rank == kill_rank and kill_point is not None:
                    kill_at(kill_point)
                note(
                    step=step,
                    ids=index.tolist(),
                    loss=loss.item().hex(),
                    # Gathering every tensor takes longer than the step; a difference of any step is there for good.
                    weights=full_digest(model, optimizer) if step % 5 == 0 else None,
                    draw=torch.rand(1).item(),
                )
                ckpt.step(step, loss=loss.item())
                if step == kill_step and kill_point is None:
                    ckpt.wait()
                    if dist.is_initialized():
                        dist.barrier()
                    if rank == kill_rank:
                        os.kill(os.getpid(), signal.SIGKILL)
                    signal.pause()
                if step == TOTAL:
                    break


def full_digest(model: nn.Module, optimizer: Any = None) -> str:
    """Return a digest of every global tensor of the model and of the optimizer's state, by name."""
    digest = hashlib.sha256()
    names = {id(p): name.removeprefix("module.") for name, p in model.named_parameters()}
    tensors = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    if optimizer is not None:
        for parameter, entries in optimizer.state.items():
            tensors |= {f"{names[id(parameter)]}/{key}": value for key, value in entries.items()}
    for name in sorted(tensors):
        tensor = tensors[name]
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(name.encode() + full.detach().numpy().tobytes())
    return digest.hexdigest()


def save_one(root: str, *, layout: str) -> None:
    """Train one step under a layout, save it, and tell what was saved."""
    world_size = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = spread(Net(), layout, world_size)
    optimizer = optimizer_of(model)
    model(torch.ones(4, 6)).square().mean().backward()
    optimizer.step()
    state = relight.TrainState(model=model, optimizer=optimizer)
    with relight.Checkpointer(root, state, every=10**9) as ckpt:
        ckpt.restore()
        ckpt.save(1)
        ckpt.wait(1)
    note(weights=full_digest(model, optimizer))


def restore_each(*, layout: str, sources: list[str]) -> None:
    """Restore each of `sources` (roots) into a model of other values, tell it, and train one more step."""
    world_size = int(os.environ["WORLD_SIZE"])
    if layout not in ("plain", "ddp"):
        mesh_of((world_size,), ("outer",))
    group = RankGroup(timeout_seconds=60)
    run: Any = SimpleNamespace(emit=lambda *_, **__: None)
    for number, source in enumerate(sources):
        torch.manual_seed(number + 1)
        model = spread(Net(), layout, world_size)
        optimizer = optimizer_of(model)
        if number % 2:
            # Into state that is there, and into an optimizer that has none yet.
            model(torch.ones(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = relight.TrainState(model=model, optimizer=optimizer)
        # Without a Checkpointer, since each would start a keeper.
        restorer = Restorer(state, group, Allowances(), run, cast("Any", None))
        found = restorer.restore([Catalog(open_backend(source))], (), None, step=None, parts=frozenset(PARTS))
        assert found is not None
        restored = full_digest(model, optimizer)
        loss = model(torch.ones(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        note(source=source, step=found.candidate.step, weights=restored, loss=loss.item())
