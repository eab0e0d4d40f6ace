"""The training that every method saves: a stack of equal layers under AdamW, sized by options, on CPU."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["FULL", "QUICK", "Holder", "Size", "Tensors", "Training", "batch_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the state and the work of a step are."""

    num_layers: int
    width: int
    batch: int
    """Rows of a batch; `batch_for` finds one for a wanted duration."""

    @property
    def state_bytes(self) -> int:
        """Return the bytes of weights and both moments."""
        return self.num_layers * self.width * self.width * 4 * 3

    def to_json(self) -> dict[str, int]:
        """Return the fields for another process."""
        return asdict(self)


# 166 layers: 498 large tensors with the two moments of each, 1.0 GB in all.
FULL = Size(num_layers=166, width=708, batch=128)
# The same shape at a twentieth, to see that everything runs.
QUICK = Size(num_layers=166, width=160, batch=512)


class Residual(nn.Module):
    """Layers whose sum neither grows nor dies out, so that no step meets denormal numbers."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(size.width, size.width, bias=False) for _ in range(size.num_layers)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map rows [batch, width] to the same shape."""
        for layer in self.layers:
            rows = rows + 0.05 * layer(rows)
        return rows


class Holder:
    """Something whose tensors can be overwritten and told apart."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    num_steps: int = 0
    """Updates done."""

    def compute(self) -> None:
        """Run forward and backward."""

    def update(self) -> None:
        """Run the optimizer."""
        if self.optimizer is not None:
            self.optimizer.step()
        self.num_steps += 1

    def step(self) -> None:
        """Run one whole training step."""
        self.compute()
        self.update()

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor of the state, in a fixed order."""
        raise NotImplementedError

    def scramble(self) -> None:
        """Overwrite every tensor, so that a restore that does nothing is seen."""
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.fill_(-1.0)

    def digest(self) -> float:
        """Return a number that differs between states that differ in more than a permutation."""
        return float(sum(t.double().square().sum() * (1 + i % 7) for i, t in enumerate(self.tensors())))


class Training(Holder):
    """A model, its optimizer and one batch; under AdamW."""

    def __init__(self, size: Size, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.size = size
        self.model = Residual(size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.rows = torch.randn(size.batch, size.width)
        self.target = torch.randn(size.batch, size.width)

    def compute(self) -> None:
        """Run forward and backward; the gradients are kept between steps, so that no step allocates them anew."""
        self.optimizer.zero_grad(set_to_none=False)
        nn.functional.mse_loss(self.model(self.rows), self.target).backward()

    def tensors(self) -> list[torch.Tensor]:
        """Return weights and moments, in a fixed order; the moments are there after the first step."""
        moments = [
            self.optimizer.state[p][key] for p in self.model.parameters() for key in ("exp_avg", "exp_avg_sq")
        ]
        return [*(p.detach() for p in self.model.parameters()), *moments]

    def state_dict(self) -> dict[str, Any]:
        """Return live references to the whole state, as torch gives them."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class Tensors(Holder):
    """Equal tensors and no optimizer: a state with nothing to train."""

    def __init__(self, count: int, each_bytes: int) -> None:
        torch.manual_seed(0)
        self.model = nn.ParameterList(torch.randn(each_bytes // 4) for _ in range(count))
        self.optimizer = None

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor, in a fixed order."""
        return [p.detach() for p in self.model]


def batch_for(size: Size, *, compute_seconds: float) -> int:
    """Return the batch whose forward and backward take about `compute_seconds` on this machine now."""
    training = Training(size)
    training.compute()
    times = []
    for _ in range(3):
        started = time.perf_counter()
        training.compute()
        times.append(time.perf_counter() - started)
    return max(16, round(size.batch * compute_seconds / sorted(times)[1] / 16) * 16)
