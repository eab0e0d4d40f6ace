"""The programs on docs/dcp.md are run as they stand there."""

from __future__ import annotations

import re
import sys
import types
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import relight.dcp
from relight.testing.trainers import note
from tests.dcp.ranks import make, shards, train
from tests.dcp.saving import steps_of
from tests.running import Home

PAGE = Path(__file__).resolve().parents[2] / "docs" / "dcp.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def block(word: str) -> str:
    (found,) = (one for one in BLOCKS if word in one)
    return found


def run_first_block() -> None:
    namespace: dict[str, Any] = {}
    exec(compile(block("fully_shard"), str(PAGE), "exec"), namespace)
    note(step=namespace["saved"]["step"])


@pytest.mark.multiprocess
def test_the_first_program_runs(home: Home) -> None:
    found = home.live(run_first_block, world_size=2, env={"RUN": home.root(), "MASTER_ADDR": "127.0.0.1"})
    assert found == [[{"step": 2}]] * 2
    assert steps_of(home.root()) == [(2, 1), (1, 1)]


class AsyncMode(StrEnum):
    """As torchtitan has it."""

    DISABLED = "disabled"
    ASYNC = "async"
    ASYNC_WITH_PINNED_MEM = "async_with_pinned_mem"


class Part:
    """A part of the state that knows how to load itself."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict({name: state[name] for name in self.state_dict()})


class Count:
    """torchtitan's train state."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class CheckpointManager:
    """Calls DCP in the order in which torchtitan's does; the page's class overrides what talks to it."""

    def __init__(self, folder: str, model: nn.Module, async_mode: AsyncMode) -> None:
        self.folder, self.async_mode = folder, async_mode
        self.pg = dist.new_group(backend="gloo")
        self.stager: Any = None
        self.states: dict[str, Any] = {"model": Part(model), "train_state": Count()}
        self.future: Any = None

    def save(self, step: int) -> None:
        self.states["train_state"].step = step
        if self.async_mode != AsyncMode.DISABLED and self.future is not None:
            self.future.result()
        flat = {**self.states["model"].state_dict(), "train_state": self.states["train_state"]}
        self.future = self.dcp_save(flat, f"{self.folder}/step-{step}", self.async_mode)  # type: ignore[attr-defined]

    def load(self) -> int:
        step = self._find_load_step()  # type: ignore[attr-defined]
        if step >= 0:
            flat = {**self.states["model"].state_dict(), "train_state": self.states["train_state"]}
            self.dcp_load(flat, f"{self.folder}/step-{step}", from_hf=False, from_quantized=False)  # type: ignore[attr-defined]
        return int(step)


def as_torchtitan(*, root: str, mode: str) -> None:
    """Save as torchtitan does, and load into another model."""
    for name in ("torchtitan", "torchtitan.components", "torchtitan.components.checkpoint"):
        sys.modules[name] = types.ModuleType(name)
    home = sys.modules["torchtitan.components.checkpoint"]
    home.MODEL, home.AsyncMode, home.CheckpointManager = "model", AsyncMode, CheckpointManager  # type: ignore[attr-defined]
    namespace: dict[str, Any] = {}
    exec(compile(block("RelightCheckpointManager"), str(PAGE), "exec"), namespace)
    manager = namespace["RelightCheckpointManager"]
    model = shards(make(0))
    saver = manager(root, model, AsyncMode(mode))
    if mode == "async_with_pinned_mem":
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        saver.stager = DefaultStager(StagingOptions(False, False, False, False))
    assert saver.load() == -1
    for step in (10, 20):
        saver.save(step)
        if mode != "disabled":
            saver.future.result()
    other = shards(make(1))
    loader = manager(root, other, AsyncMode.DISABLED)
    found = loader.load()
    same = all(
        torch.equal(one.full_tensor(), two.full_tensor())
        for one, two in zip(model.parameters(), other.parameters(), strict=True)
    )
    note(found=found, step=loader.states["train_state"].step, same=same)


@pytest.mark.multiprocess
@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_torchtitans_checkpoint_manager_works_with_the_class_on_the_page(home: Home, mode: str) -> None:
    root = home.root("checkpoint")
    found = home.live(as_torchtitan, world_size=2, root=root, mode=mode, env={"MASTER_ADDR": "127.0.0.1"})
    assert found == [[{"found": 20, "step": 20, "same": True}]] * 2
    # torchtitan lists everything in its folder, and reads a step out of every name.
    assert sorted(path.name for path in Path(root).iterdir()) == ["step-10", "step-20"]


def as_lightning(*, root: str) -> None:
    """Save and load as Lightning's sharded strategies do: part after part, and by the old helper for optimizers."""
    namespace: dict[str, Any] = {}
    exec(compile(block("distributed_checkpoint_save"), str(PAGE), "exec"), namespace)
    model = shards(make(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    path = Path(root)
    for _ in range(3):
        train(model, optimizer, 1)
        state = {
            "model": get_model_state_dict(model),
            "optimizer_0": get_optimizer_state_dict(model, optimizer),
        }
        namespace["distributed_checkpoint_save"](state, path)
        if dist.get_rank() == 0:
            torch.save({"epoch": 3}, path / "meta.pt")
        dist.barrier()
    other = shards(make(1))
    its = torch.optim.AdamW(other.parameters(), lr=0.5)
    weights = {"model": get_model_state_dict(other)}
    namespace["distributed_checkpoint_load"](weights, path)
    moments = {"optimizer_0": get_optimizer_state_dict(other, its)}
    namespace["distributed_checkpoint_load"](moments, path)
    reader = relight.dcp.Reader(path, allow_extra=["*"])
    old = load_sharded_optimizer_state_dict(weights["model"], "optimizer_0", storage_reader=reader)
    saved = get_optimizer_state_dict(model, optimizer)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    note(
        weights=all(
            torch.equal(weights["model"][name].full_tensor(), tensor.full_tensor())
            for name, tensor in get_model_state_dict(model).items()
        ),
        moments=all(
            torch.equal(
                moments["optimizer_0"]["state"][name]["exp_avg"].full_tensor(),
                saved["state"][name]["exp_avg"].full_tensor(),
            )
            for name in names
        ),
        old=len(old["optimizer_0"]["state"]),
        lr=moments["optimizer_0"]["param_groups"][0]["lr"],
    )


@pytest.mark.multiprocess
def test_lightnings_calls_work_with_the_functions_on_the_page(home: Home) -> None:
    root = home.root("last.ckpt")
    found = home.live(as_lightning, world_size=2, root=root)
    assert found == [[{"weights": True, "moments": True, "old": 3, "lr": 0.01}]] * 2
    assert [step for step, _ in steps_of(root)] == [3]
