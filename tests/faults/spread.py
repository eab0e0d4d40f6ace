"""What the processes of the tests of kind (d) run: sharded tensors saved under one layout, restored under another."""

from __future__ import annotations

import os
import struct
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import relight
from relight.errors import DesyncError
from relight.testing.trainers import note
from tests.golden.sharded import mesh_of

SHAPES = [(6,), (1,), (3, 5), (0, 4), (1, 7, 3), (2, 2), (5, 1)]


def _world() -> int:
    return int(os.environ["WORLD_SIZE"])


def _full(tensor: torch.Tensor) -> list[float]:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().flatten().tolist()


def shapes_model(*, is_sharded: bool, fill: float | None = None) -> nn.Module:
    """Return a module with a parameter of each of `SHAPES`, sharded on dim 0 over all ranks."""
    model = nn.Module()
    mesh = mesh_of((_world(),), ("data",)) if is_sharded else None
    for number, shape in enumerate(SHAPES):
        values = torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 100 * number
        if fill is not None:
            values = torch.full(shape, fill)
        sharded = distribute_tensor(values, mesh, [Shard(0)]) if mesh is not None else values
        model.register_parameter(f"p{number}", nn.Parameter(sharded))
    return model


def save_shapes(root: str) -> None:
    with relight.Checkpointer(root, relight.TrainState(model=shapes_model(is_sharded=True))) as ckpt:
        ckpt.restore()
        ckpt.save(1)


def restore_shapes(root: str, source: str, *, is_sharded: bool) -> None:
    model = shapes_model(is_sharded=is_sharded, fill=-1.0)
    with relight.Checkpointer(root, relight.TrainState(model=model)) as ckpt:
        ckpt.restore(source=source)
    note(values=[_full(parameter) for parameter in model.parameters()])


class Scaled(nn.Module):
    """A layer and a learned temperature of no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.temperature


def scalar_run(root: str, *, mode: str, stop: int | None, source: str | None = None) -> None:
    """Train a sharded model with a scalar parameter to step 4; all ranks see the same rows."""
    torch.manual_seed(0)
    model = Scaled()
    if _world() > 1:
        fully_shard(model, mesh=mesh_of((_world(),), ("data",)), ignored_params={model.temperature})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    state = relight.TrainState(model=model, optimizer=optimizer)
    with relight.Checkpointer(root, state, every=2, mode=mode, keep=10) as ckpt:
        for step in range(ckpt.restore(source=source), stop or 4):
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step(step + 1)
    note(values={name: _full(parameter) for name, parameter in model.named_parameters()})


class Fused(nn.Module):
    """One layer whose rows both parallelisms cut."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.proj = nn.Linear(2, rows, bias=False)


def strided_model(rows: int, mesh_shape: tuple[int, int] | None) -> nn.Module:
    """Return a layer with rows 0, 1, ...; on a mesh, tensor parallel inside and FSDP outside."""
    model = Fused(rows)
    with torch.no_grad():
        model.proj.weight.copy_(torch.arange(rows * 2.0).reshape(rows, 2))
    if mesh_shape is not None:
        mesh = mesh_of(mesh_shape, ("data", "tensor"))
        parallelize_module(model, mesh["tensor"], {"proj": ColwiseParallel()})
        fully_shard(model.proj, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    return model


def save_strided(root: str, *, rows: int, mesh_shape: list[int]) -> None:
    model = strided_model(rows, (mesh_shape[0], mesh_shape[1]))
    with relight.Checkpointer(root, relight.TrainState(model=model)) as ckpt:
        ckpt.restore()
        ckpt.save(1)


def restore_strided(root: str, source: str, *, rows: int, mesh_shape: list[int] | None) -> None:
    """Restore, and tell which rows this rank holds by its local values: the truth that no `full_tensor` can bend."""
    shape = (mesh_shape[0], mesh_shape[1]) if mesh_shape is not None else None
    expected = strided_model(rows, shape).proj.weight
    model = strided_model(rows, shape)
    local = model.proj.weight
    for one in (expected, local):
        assert isinstance(one, DTensor) == (shape is not None)
    held, wanted = (one._local_tensor if isinstance(one, DTensor) else one for one in (local, expected))
    with torch.no_grad():
        held.fill_(-1)
    with relight.Checkpointer(root, relight.TrainState(model=model)) as ckpt:
        ckpt.restore(source=source)
    note(held=held.tolist(), wanted=wanted.tolist())


def uneven_run(root: str, *, stop: int, source: str | None = None) -> None:
    """Train a model whose rows do not divide by the ranks; tell its values."""
    torch.manual_seed(0)
    model = nn.Linear(2, 10)
    if _world() > 1:
        fully_shard(model, mesh=mesh_of((_world(),), ("data",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = relight.TrainState(model=model, optimizer=optimizer)
    with relight.Checkpointer(root, state, every=2, keep=10) as ckpt:
        for step in range(ckpt.restore(source=source), stop):
            model(torch.ones(2, 2)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step(step + 1)
    moments = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    note(values=[_full(tensor) for tensor in (*model.parameters(), *moments)])


def replicated_run(root: str, *, stop: int, flip_rank: int | None = None, flip_step: int = 0) -> None:
    """Train under DDP; one rank's weight may lose a bit after `flip_step`."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = relight.TrainState(model=model, optimizer=optimizer)
    with relight.Checkpointer(root, state, every=1, keep=10) as ckpt:
        start = ckpt.restore()
        note(restored=start)
        for step in range(start, stop):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step + 1 == flip_step and rank == flip_rank:
                flip_bit(model.module.weight)
            ckpt.step(step + 1)


def flip_bit(weight: torch.Tensor) -> None:
    """Flip the lowest bit of one element."""
    raw = weight.detach().view(torch.int32)
    raw[1, 2] ^= 1


def corrupted_restore(root: str) -> None:
    """Restore while a hook changes one element on rank 1 behind relight's back."""
    from relight.checkpoint import candidates

    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    state = relight.TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    fetch = candidates.Checkpoint._fetch

    def bad_fetch(self: Any, wanted: Any, *rest: Any) -> None:
        fetch(self, wanted, *rest)
        if dist.get_rank() == 1:
            flip_bit(model.module.weight)

    candidates.Checkpoint._fetch = bad_fetch  # type: ignore[method-assign]
    with relight.Checkpointer(root, state) as ckpt:
        try:
            ckpt.restore()
        except DesyncError as error:
            note(error=str(error))


def scratch_run(root: str, *, stop: int, allow: tuple[str, ...] = (), source: str | None = None) -> None:
    """Keep a vector without placements beside a sharded parameter, different on each rank."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = nn.Linear(2, 4, bias=False)
    if _world() > 1:
        fully_shard(model, mesh=mesh_of((_world(),), ("data",)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    state = relight.TrainState(model=model, optimizer=optimizer)
    with relight.Checkpointer(root, state, every=1, keep=10, allow_changed=allow) as ckpt:
        try:
            start = ckpt.restore(source=source)
        except relight.errors.StateMismatchError as error:
            note(error=str(error))
            return
        for step in range(start, stop):
            model(torch.ones(2, 2)).square().mean().backward()
            optimizer.step()
            optimizer.state[model.weight]["scratch"] = torch.full((3,), float(rank))
            ckpt.step(step + 1)
        note(start=start, scratch=optimizer.state[model.weight]["scratch"].tolist())


def float_bits(value: float) -> int:
    """Return the bits of a float32."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])
