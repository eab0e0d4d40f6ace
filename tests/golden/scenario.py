"""One training script with every knob that the golden rule must hold for; it tells each step bit by bit."""

from __future__ import annotations

import hashlib
import os
import random
import signal
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset

import relight
from relight.testing.trainers import kill_at, note

__all__ = ["NUM_SAMPLES", "OPTIMIZERS", "SCHEDULERS", "train"]

NUM_SAMPLES = 48
TOTAL = 16
"""Optimizer steps of a whole run: two epochs of 6 and part of a third, at 8 samples each."""


class Noisy(Dataset[tuple[int, torch.Tensor]]):
    """Samples with noise from every global generator."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        noise = torch.rand(4) + random.random() + float(np.random.rand())  # noqa: NPY002
        return index, torch.arange(index, index + 4) / 64 + noise / 8


class Net(nn.Module):
    """Dropout, batch statistics, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.mid = nn.Linear(8, 8)
        self.out = nn.Linear(8, 8, bias=False)
        self.out.weight = self.mid.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.mid(self.drop(torch.relu(self.norm(self.into(x))))))


OPTIMIZERS: dict[str, Any] = {
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "SGD-plain": partial(torch.optim.SGD, lr=0.05),
    "Adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "AdamW-fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "AdamW-foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "AdamW-loop": partial(torch.optim.AdamW, lr=0.01, foreach=False),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, lr_decay=0.01),
    "LBFGS": partial(torch.optim.LBFGS, lr=0.1, max_iter=3, history_size=3, line_search_fn="strong_wolfe"),
}


def _chained(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.3, total_iters=5), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )


def _sequential(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
            lr_scheduler.CosineAnnealingLR(optimizer, 7),
            lr_scheduler.ExponentialLR(optimizer, 0.8),
        ],
        milestones=[5, 12],
    )


SCHEDULERS: dict[str, Any] = {
    "LambdaLR": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + 0.1 * step)),
    "MultiplicativeLR": partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda step: 0.9 + 0.001 * step),
    "StepLR": partial(lr_scheduler.StepLR, step_size=3, gamma=0.7),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[2, 6, 9], gamma=0.6),
    "ConstantLR": partial(lr_scheduler.ConstantLR, factor=0.25, total_iters=8),
    "LinearLR": partial(lr_scheduler.LinearLR, start_factor=0.2, total_iters=10),
    "ExponentialLR": partial(lr_scheduler.ExponentialLR, gamma=0.93),
    "PolynomialLR": partial(lr_scheduler.PolynomialLR, total_iters=14, power=1.5),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=9, eta_min=1e-3),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3, T_mult=2),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=TOTAL + 1),
    "CyclicLR": partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=3, mode="triangular2"),
    "ReduceLROnPlateau": partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=1, threshold=0.05),
    "ChainedScheduler": _chained,
    "SequentialLR": _sequential,
}


def _loader(kind: str, workers: int, micro: int, world_size: int) -> DataLoader[Any]:
    options: dict[str, Any] = {"batch_size": micro, "num_workers": workers}
    if workers:
        options["multiprocessing_context"] = "fork"
    if kind == "elastic":
        dataset = relight.per_sample_rng(Noisy(), 5) if workers else Noisy()
        sampler = relight.ElasticSampler(NUM_SAMPLES, global_batch=8, seed=11)
        return DataLoader(dataset, sampler=sampler, **options)
    if world_size > 1:
        sampler = torch.utils.data.DistributedSampler(Noisy(), shuffle=True)
        return DataLoader(Noisy(), sampler=sampler, **options)
    return DataLoader(Noisy(), shuffle=True, **options)


def train(
    root: str,
    *,
    optimizer: str = "AdamW-foreach",
    scheduler: str | None = None,
    data: str = "elastic",
    workers: int = 0,
    accumulate: int = 1,
    scaled: bool = False,
    mode: str = "overlap",
    schedule_last: bool = False,
    every: int = 1,
    kill_step: int | None = None,
    kill_point: str | None = None,
    kill_rank: int = 0,
    is_durable: bool = True,
) -> None:
    """Train to step 16, or until killed at the end of `kill_step` or at a named point of its save.

    Nothing is seeded but the model and what draws before the first step, so a resumed run owes all to the restore.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    net: nn.Module = Net()
    wrapped = nn.parallel.DistributedDataParallel(net) if world_size > 1 else net
    optim = OPTIMIZERS[optimizer](wrapped.parameters())
    schedule = SCHEDULERS[scheduler](optim) if scheduler is not None else None
    scaler = torch.amp.GradScaler("cpu", init_scale=16, growth_interval=4) if scaled else None
    loader = _loader(data, workers, 8 // world_size // accumulate, world_size)
    extra = {"generator": torch.Generator(), "seen": [0], "rank": relight.PerRank({"drawn": 0.0})}
    state = relight.TrainState(
        model=wrapped, optimizer=optim, scheduler=schedule, scaler=scaler, data=loader, extra=extra
    )
    with relight.Checkpointer(root, state, every=every, mode=mode, keep=100) as ckpt:
        step = ckpt.restore()
        note(restored=step)
        if step == 0:
            _seed(rank, extra["generator"])
        while step < TOTAL:
            ids: list[int] = []
            losses: list[str] = []
            for index, x in loader:
                ids += index.tolist()
                losses.append(_forward(wrapped, optim, scaler, x, accumulate))
                if len(losses) < accumulate:
                    continue
                _update(wrapped, optim, scaler, x)
                step += 1
                extra["seen"][0] += len(ids)
                extra["rank"].value["drawn"] = torch.rand(1, generator=extra["generator"]).item()
                if schedule is not None and not schedule_last:
                    _move(schedule, losses)
                if step == kill_step and rank == kill_rank and kill_point is not None:
                    kill_at(kill_point)
                note(**_bits(step, ids, losses, model=wrapped, optim=optim, scaler=scaler, extra=extra))
                ckpt.step(step, loss=float.fromhex(losses[-1]))
                if schedule is not None and schedule_last:
                    _move(schedule, losses)
                if step == kill_step and kill_point is None:
                    _die(ckpt, rank == kill_rank, is_durable=is_durable)
                ids, losses = [], []
                if step == TOTAL:
                    break


def _seed(rank: int, generator: torch.Generator) -> None:
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    np.random.seed(300 + rank)  # noqa: NPY002
    generator.manual_seed(400)


def _forward(model: nn.Module, optim: Any, scaler: Any, x: torch.Tensor, accumulate: int) -> str:
    if isinstance(optim, torch.optim.LBFGS):
        return "0x0.0p+0"
    loss = model(x).square().mean() / accumulate
    (scaler.scale(loss) if scaler is not None else loss).backward()
    return loss.item().hex()


def _update(model: nn.Module, optim: Any, scaler: Any, x: torch.Tensor) -> None:
    if isinstance(optim, torch.optim.LBFGS):

        def closure() -> torch.Tensor:
            optim.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optim.step(closure)
    elif scaler is not None:
        scaler.step(optim)
        scaler.update()
    else:
        optim.step()
    optim.zero_grad()


def _move(schedule: Any, losses: list[str]) -> None:
    if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
        loss = torch.tensor(float.fromhex(losses[-1]), dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(loss)
        schedule.step(loss.item())
    else:
        schedule.step()


def _bits(
    step: int,
    ids: list[int],
    losses: list[str],
    *,
    model: nn.Module,
    optim: Any,
    scaler: Any,
    extra: dict[str, Any],
) -> dict[str, Any]:
    """Return everything that must be equal, to the last bit."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    return {
        "step": step,
        "ids": ids,
        "losses": losses,
        "weights": digest.hexdigest(),
        "rates": [float(group["lr"]).hex() for group in optim.param_groups],
        "scale": scaler.get_scale() if scaler is not None else None,
        "draws": [torch.rand(1).item(), random.random(), float(np.random.rand())],  # noqa: NPY002
        "extra": [extra["seen"][0], extra["rank"].value["drawn"]],
    }


def _die(ckpt: relight.Checkpointer, is_victim: bool, *, is_durable: bool) -> None:
    if is_durable:
        ckpt.wait()
    if dist.is_initialized():
        dist.barrier()
    if is_victim:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
