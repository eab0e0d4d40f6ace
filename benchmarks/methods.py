"""The engines that are compared, each behind the same six verbs and set up as well as its documentation allows.

Every peer gets what costs it least: a state dict of live references, staging buffers that are kept, no collective.
"""

from __future__ import annotations

import contextlib
import importlib
import shutil
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.machine import sync_tree
from benchmarks.workload import Holder

__all__ = ["PEERS", "Method", "load_method"]


class Method:
    """One way to save and restore a `Holder`; used by one process."""

    name: ClassVar[str]
    syncs: ClassVar[str] = "fsync by itself"
    """Who makes the files durable."""

    def __init__(self, training: Holder, directory: Path) -> None:
        self.training = training
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def path(self, step: int) -> Path:
        """Return where the checkpoint of `step` lies."""
        return self.directory / f"step-{step}"

    def begin(self, step: int) -> None:
        """Begin a save; for a synchronous engine this is all of it."""
        raise NotImplementedError

    def after_update(self) -> None:
        """Do what the engine asks for after each step of the optimizer."""

    def guard(self) -> AbstractContextManager[Any]:
        """Return what must surround `optimizer.step` while a save may be in flight."""
        return contextlib.nullcontext()

    def wait(self, step: int) -> None:
        """Return when the checkpoint is durable: complete and flushed to the disk."""
        raise NotImplementedError

    def settle(self, step: int) -> None:
        """Return when nothing of the save runs any more; older checkpoints are gone then."""
        sync_tree(self.directory)
        for other in self.directory.glob("step-*"):
            if other != self.path(step):
                shutil.rmtree(other)

    def restore(self, step: int) -> None:
        """Load the checkpoint into the live objects, which hold a state of the same shape."""
        raise NotImplementedError

    def restore_fresh(self, step: int) -> None:
        """Load the checkpoint into a model and an optimizer that has no state yet."""
        raise NotImplementedError

    def stall_seconds(self) -> float | None:
        """Return the engine's own figure for the last stall, if it has one."""
        return None

    def source(self) -> str:
        """Return where the last restore read from."""
        return "disk"

    def helpers(self) -> set[int]:
        """Return processes that work for this engine and are not descendants of this one."""
        return set()

    def close(self) -> None:
        """Give back threads, processes and memory."""


class TorchSave(Method):
    """`torch.save` of one file, then fsync."""

    name = "torch.save"
    syncs = "fsync added here"

    def begin(self, step: int) -> None:
        self.path(step).mkdir()
        torch.save(self.training.state_dict(), self.path(step) / "state.pt")
        sync_tree(self.path(step))

    def wait(self, step: int) -> None:
        pass

    def restore(self, step: int) -> None:
        loaded = torch.load(self.path(step) / "state.pt", weights_only=True)
        self.training.model.load_state_dict(loaded["model"])
        self.training.optimizer.load_state_dict(loaded["optimizer"])

    restore_fresh = restore


class DcpSave(Method):
    """`torch.distributed.checkpoint.save`."""

    name = "DCP save"

    def begin(self, step: int) -> None:
        _dcp().save(self.training.state_dict(), checkpoint_id=self.path(step), no_dist=True)

    def wait(self, step: int) -> None:
        pass

    def restore(self, step: int) -> None:
        state = self.training.state_dict()
        _dcp().load(state, checkpoint_id=self.path(step), no_dist=True)
        # The tensors were filled in place; this sets the plain values.
        self.training.model.load_state_dict(state["model"])
        self.training.optimizer.load_state_dict(state["optimizer"])

    def restore_fresh(self, step: int) -> None:
        """Follow the documented way, which makes the optimizer's state by a step that changes nothing."""
        helpers = importlib.import_module("torch.distributed.checkpoint.state_dict")
        model, optimizer = self.training.model, self.training.optimizer
        model_state, optimizer_state = helpers.get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        _dcp().load(state, checkpoint_id=self.path(step), no_dist=True)
        helpers.set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


class DcpFresh(DcpSave):
    """DCP as `restore_fresh` reads it: saved with the names that its helpers give."""

    name = "DCP save, named"

    def begin(self, step: int) -> None:
        helpers = importlib.import_module("torch.distributed.checkpoint.state_dict")
        model_state, optimizer_state = helpers.get_state_dict(self.training.model, self.training.optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        _dcp().save(state, checkpoint_id=self.path(step), no_dist=True)


class DcpThread(DcpSave):
    """`async_save` in a thread, as it comes."""

    name = "DCP async, thread"
    kind: ClassVar[str] = "THREAD"

    def __init__(self, training: Holder, directory: Path) -> None:
        super().__init__(training, directory)
        self.stager = self.make_stager()
        self.staged: Future[Any] | None = None
        self.saved: Future[Any] | None = None

    def make_stager(self) -> Any:
        """Return the stager to keep over all saves, or None for the default."""
        return None

    def begin(self, step: int) -> None:
        module = importlib.import_module("torch.distributed.checkpoint.state_dict_saver")
        response = module.async_save(
            self.training.state_dict(),
            checkpoint_id=self.path(step),
            no_dist=True,
            async_checkpointer_type=module.AsyncCheckpointerType[self.kind],
            async_stager=self.stager,
        )
        self.staged = getattr(response, "staging_completion", None)
        self.saved = getattr(response, "upload_completion", response)

    def guard(self) -> AbstractContextManager[Any]:
        if self.staged is not None:
            self.staged.result()
        return contextlib.nullcontext()

    def wait(self, step: int) -> None:
        self.saved.result()

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()


class DcpThreadStaged(DcpThread):
    """`async_save` in a thread, with buffers that are kept and filled during forward and backward."""

    name = "DCP async, thread, staged in background"
    stages_in_background = True

    def make_stager(self) -> Any:
        staging = importlib.import_module("torch.distributed.checkpoint.staging")
        return staging.DefaultStager(
            staging.StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=True,
                use_async_staging=self.stages_in_background,
                use_non_blocking_copy=False,
            )
        )


class DcpProcess(DcpThreadStaged):
    """`async_save` by a process, with shared buffers that are kept."""

    name = "DCP async, process"
    stages_in_background = False
    kind = "PROCESS"

    def __init__(self, training: Holder, directory: Path) -> None:
        super().__init__(training, directory)
        # Its writing process asks for the ranks of the group, however many there are.
        distributed = importlib.import_module("torch.distributed")
        if not distributed.is_initialized():
            distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)


class TorchCheckpointing(Method):
    """meta-pytorch/torch_checkpointing in its CPU configuration; direct I/O off, since some ext4 refuse it."""

    name = "torch_checkpointing"
    syncs = "fsync added here"

    def __init__(self, training: Holder, directory: Path) -> None:
        super().__init__(training, directory)
        package = importlib.import_module("torch_checkpointing")
        staging = package.CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        filesystem = importlib.import_module("torch_checkpointing.storage.filesystem")
        self.engine = package.CheckpointManager(
            package.CheckpointManager.Config(
                save=package.AsyncCheckpointSaverConfig(staging_config=staging),
                storage_config=filesystem.LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )
        self.saved: Future[Any] | None = None

    def begin(self, step: int) -> None:
        self.saved = self.engine.save(str(self.path(step)), self.training.state_dict())

    def guard(self) -> AbstractContextManager[Any]:
        return self.engine.lock()

    def wait(self, step: int) -> None:
        self.saved.result()
        sync_tree(self.path(step))

    def restore(self, step: int) -> None:
        loaded = self.engine.load(str(self.path(step)), into=self.training.state_dict())
        self.training.model.load_state_dict(loaded["model"])
        self.training.optimizer.load_state_dict(loaded["optimizer"])

    restore_fresh = restore

    def close(self) -> None:
        self.engine.close()


class TorchSnapshot(Method):
    """torchsnapshot's `async_take`."""

    name = "torchsnapshot, async"
    syncs = "fsync added here"

    def __init__(self, training: Holder, directory: Path) -> None:
        super().__init__(training, directory)
        self.snapshot = importlib.import_module("torchsnapshot").Snapshot
        self.app_state = {"model": training.model, "optimizer": training.optimizer}
        self.pending: Any = None

    def begin(self, step: int) -> None:
        self.pending = self.snapshot.async_take(str(self.path(step)), self.app_state)

    def wait(self, step: int) -> None:
        self.pending.wait()
        sync_tree(self.path(step))

    def restore(self, step: int) -> None:
        self.snapshot(str(self.path(step))).restore(self.app_state)

    restore_fresh = restore


def _dcp() -> Any:
    return importlib.import_module("torch.distributed.checkpoint")


PEERS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        TorchSave,
        DcpSave,
        DcpThread,
        DcpThreadStaged,
        DcpProcess,
        TorchCheckpointing,
        TorchSnapshot,
    )
}
"""Every peer by its name, in the order of the tables."""

_METHODS: dict[str, type[Method]] = {**PEERS, DcpFresh.name: DcpFresh}


def load_method(name: str) -> type[Method]:
    """Return the engine of that name."""
    if name == "relight":
        return importlib.import_module("benchmarks.ours").Relight
    return _METHODS[name]
