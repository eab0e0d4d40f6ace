"""What relight sees of the training loop through optimizer hooks: updates, half-done steps, moving schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from relight.checkpoint.state import TrainState

__all__ = ["LoopWatch"]

_WATCHED_PARAMETERS = 3


class LoopWatch:
    """Hooks on every optimizer of a train state.

    Args:
        state: whose optimizers are watched; late ones are picked up by `attach`.
        before_update: called in the pre-step hook of any optimizer, before it changes a parameter.
    """

    def __init__(self, state: TrainState, before_update: Callable[[], None]) -> None:
        self._state = state
        self._before_update = before_update
        self._handles: list[Any] = []
        self._watched: dict[str, Optimizer] = {}
        self._fired: dict[str, int] = {}
        self._fired_at_boundary: dict[str, int] = {}
        self._fired_in_step: dict[str, int] = {}
        self._has_gradients = False
        self._schedule_at_update: tuple[int, ...] | None = None
        self._moves_before_update = False
        self._num_updates = 0
        self._initial_schedule: tuple[int, ...] | None = None
        self.attach()

    def attach(self) -> None:
        """Watch optimizers that are not watched yet."""
        for name, optimizer in self._state.optimizers.items():
            if self._watched.get(name) is optimizer:
                continue
            self._watched[name] = optimizer
            self._fired[name] = 0
            self._handles.append(optimizer.register_step_pre_hook(self._pre_hook(name)))
            self._handles.append(optimizer.register_step_post_hook(self._post_hook))
            self._watch_gradients(optimizer)

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def boundary(self) -> None:
        """Note that a step has just been completed (called once per step by the checkpointer)."""
        for name, count in self._fired.items():
            self._fired_in_step[name] = count - self._fired_at_boundary.get(name, 0)
            self._fired_at_boundary[name] = count

    def guards(self, at: int) -> bool:
        """Return whether optimizer number `at` fired its hook in the step just completed, so guards its tensors.

        CUDA graphs that replay the update, or hand-written updates, never fire it.
        """
        name = list(self._state.optimizers)[at]
        return self._fired_in_step.get(name, 0) > 0

    @property
    def is_half_done(self) -> bool:
        """Whether gradients have been accumulated since the last update: inside an accumulation window."""
        return self._has_gradients

    @property
    def expects_schedule(self) -> bool:
        """Whether `scheduler.step()` for the step just done may still come, after the checkpointer's call.

        True when there are schedulers, none has moved since the last update, and this loop was not seen to step
        them ahead of the update (the order of torch before 1.1).
        """
        counts = self._state.schedule_counts()
        return bool(counts) and not self._moves_before_update and counts == self._schedule_at_update

    def _pre_hook(self, name: str) -> Callable[[Optimizer, Any, Any], None]:
        def hook(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
            self._fired[name] += 1
            counts = self._state.schedule_counts()
            known = self._initial_schedule
            # A scheduler added since then says nothing about the order.
            if self._num_updates == 0 and known is not None and len(known) == len(counts) and counts != known:
                self._moves_before_update = True
            self._num_updates += 1
            self._schedule_at_update = counts
            self._before_update()

        return hook

    def loop_starts(self) -> None:
        """Note that the loop starts now (after a restore): what moves before the first update moves ahead of it."""
        self._initial_schedule = self._state.schedule_counts()
        self._num_updates = 0

    @property
    def moves_before_update(self) -> bool:
        """Whether this loop steps its schedulers ahead of the optimizer."""
        return self._moves_before_update

    def _post_hook(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._has_gradients = False

    def _watch_gradients(self, optimizer: Optimizer) -> None:
        parameters = [
            p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.is_leaf
        ]
        if not parameters:
            return
        chosen = {0, len(parameters) // 2, len(parameters) - 1}
        for at in sorted(chosen)[:_WATCHED_PARAMETERS]:
            self._handles.append(parameters[at].register_post_accumulate_grad_hook(self._gradient_hook))

    def _gradient_hook(self, _parameter: torch.Tensor) -> None:
        self._has_gradients = True
