"""What a process of its own measures for one method; each function returns plain numbers for `targets`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import children_of, cpu_seconds, drop_caches, read_through, resident_bytes
from benchmarks.methods import Method, load_method
from benchmarks.workload import Holder, Size, Tensors, Training

__all__ = ["MEASUREMENTS"]

WARM_SAVES = 3


def loop(name: str, directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Time blocks of steps, alternately with and without a save at their start.

    The order turns within every second pair, so that a drift of the machine cancels.
    """
    training = _begun(options)
    method = load_method(name)(training, directory)
    watch = _Watch(method)
    for _ in range(WARM_SAVES):
        watch.block(options["steps"], save=True)
    # Registered last, so it runs when every other hook of the optimizer has returned.
    training.optimizer.register_step_pre_hook(lambda *_: watch.mark())
    plain: list[dict[str, float | None]] = []
    saving: list[dict[str, float | None]] = []
    for pair in range(options["pairs"]):
        for save in (False, True) if pair % 2 == 0 else (True, False):
            (saving if save else plain).append(watch.block(options["steps"], save=save))
    method.close()
    return {"plain": plain, "saving": saving, "steps": options["steps"], "syncs": method.syncs}


class _Watch:
    """Times blocks of one method: the wall, the processor time of all its processes, and each part of the stall."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.marked = 0.0

    def mark(self) -> None:
        self.marked = time.perf_counter()

    def cpu(self) -> float:
        return cpu_seconds({os.getpid()} | children_of(os.getpid()) | self.method.helpers())

    def block(self, steps: int, *, save: bool) -> dict[str, float | None]:
        method, training = self.method, self.method.training
        saved = training.num_steps
        cpu = self.cpu()
        started = time.perf_counter()
        if save:
            method.begin(saved)
        call = time.perf_counter() - started
        waits = []
        for _ in range(steps):
            training.compute()
            reached = time.perf_counter()
            with method.guard():
                training.update()
            waits.append(self.marked - reached)
            method.after_update()
        wall = time.perf_counter() - started
        if save:
            method.wait(saved)
            method.settle(saved)
        # Only the first update after a save has something to wait for.
        return {
            "wall": wall,
            "call": call,
            "wait": waits[0],
            "own": method.stall_seconds() if save else None,
            "cpu": self.cpu() - cpu,
        }


def durable(name: str, directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Time from the call until the checkpoint is on the disk, with nothing else running."""
    training = _begun(options)
    method = load_method(name)(training, directory)
    seconds = []
    for _ in range(WARM_SAVES + options["repeats"]):
        step = training.num_steps
        started = time.perf_counter()
        method.begin(step)
        method.wait(step)
        seconds.append(time.perf_counter() - started)
        method.settle(step)
        # The update between two saves is part of any use, and what lets an engine overlap the next one.
        training.step()
        method.after_update()
    method.close()
    return {"seconds": seconds[WARM_SAVES:], "syncs": method.syncs}


def write(name: str, directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Save once, for a later process to find; with `crash` this one ends without a goodbye."""
    training = _begun(options)
    method = load_method(name)(training, directory)
    method.begin(training.num_steps)
    method.wait(training.num_steps)
    method.settle(training.num_steps)
    if not options.get("crash"):
        method.close()
    return {"digest": training.digest(), "step": training.num_steps}


def restore(name: str, directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Time restores into live tensors of what `write` saved; the page cache is filled, or dropped with `cold`."""
    training = _begun(options)
    method = load_method(name)(training, directory)
    seconds = []
    for _ in range(options["repeats"] + 1):
        training.scramble()
        if not options.get("cold"):
            read_through(directory)
        elif not drop_caches():
            raise PermissionError("dropping the page cache needs root")
        started = time.perf_counter()
        method.restore(options["step"])
        seconds.append(time.perf_counter() - started)
        _check(name, training, options)
    return {"seconds": seconds[1:], "source": method.source()}


def fresh(name: str, directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Time one restore in this process, which has just begun, of what `write` saved.

    The clock starts when model and optimizer stand, and stops when both moments of every weight are there.
    """
    training = Training(Size(**options["size"]))
    method_class = load_method(name)
    read_through(directory)
    started = time.perf_counter()
    method = method_class(training, directory)
    method.restore_fresh(options["step"])
    seconds = time.perf_counter() - started
    _check(name, training, options)
    return {"seconds": seconds, "source": method.source()}


def memory(name: str, directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Watch resident memory of the trainer and the keeper over many saves."""
    training = _begun(options)
    method = load_method(name)(training, directory)
    trainer, keeper = [], []
    for _ in range(options["saves"]):
        step = training.num_steps
        method.begin(step)
        training.step()
        method.after_update()
        method.wait(step)
        trainer.append(resident_bytes(os.getpid())["all"])
        used = [resident_bytes(pid) for pid in method.helpers()]
        keeper.append(sum(u["all"] - u["shared"] for u in used))
    method.close()
    return {"trainer": trainer, "keeper": keeper}


def _begun(options: dict[str, Any]) -> Holder:
    """Return the training that `options` describe, after its first step."""
    training: Holder
    if "count" in options:
        training = Tensors(options["count"], options["each_bytes"])
    else:
        training = Training(Size(**options["size"]))
    training.step()
    return training


def _check(name: str, training: Holder, options: dict[str, Any]) -> None:
    if training.digest() != options["digest"]:
        raise RuntimeError(f"{name} restored another state than was saved")


MEASUREMENTS: dict[str, Callable[[str, Path, dict[str, Any]], dict[str, Any]]] = {
    measurement.__name__: measurement for measurement in (loop, durable, write, restore, fresh, memory)
}

torch.set_num_threads(os.cpu_count() or 1)
