"""Facts about clusters that the engine decides with before it has measured its own: how often a device fails.

A prior is used only until measurements override it, and is always printed with its source.
Must not import anything of relight but errors, units, clock and stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from relight.errors import ConfigError

__all__ = ["DEFAULT_FAILURE_PRIOR", "FAILURE_PRIORS", "FailurePrior"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePrior:
    """Mean time between failures of one device (GPU, or process on a CPU machine), with its source.

    All causes that stop a job count, spread evenly over its devices.
    """

    name: str
    device_mtbf_hours: float
    source: str
    dated: str
    """Month of the source, YYYY-MM."""

    def __post_init__(self) -> None:
        if not 0 < self.device_mtbf_hours < float("inf"):
            raise ConfigError(
                f"device_mtbf_hours must be positive and finite, not {self.device_mtbf_hours!r}"
            )

    def job_mtbf_seconds(self, num_devices: int) -> float:
        """Return the mean time between failures of a job on `num_devices` devices, in seconds.

        Failures of the parts are taken as independent: M = m / N. Small jobs also die of causes that do not
        grow with their size, so for a few devices this is optimistic.

        Raises:
            ConfigError: `num_devices` is less than 1.
        """
        if num_devices < 1:
            raise ConfigError(f"num_devices must be at least 1, not {num_devices!r}")
        return self.device_mtbf_hours * 3600.0 / num_devices


DEFAULT_FAILURE_PRIOR = FailurePrior(
    name="llama3-405b",
    device_mtbf_hours=50_677.0,
    source="The Llama 3 Herd of Models, section 3.3.4: 419 unexpected interruptions in 54 days on 16,384 H100",
    dated="2024-07",
)

_CONSERVATIVE = FailurePrior(
    name="conservative",
    device_mtbf_hours=10_000.0,
    source="round figure near the OPT-175B logbook: about 110 failures in two months on 992 A100 (13,200 h)",
    dated="2022-05",
)

FAILURE_PRIORS = MappingProxyType({prior.name: prior for prior in (DEFAULT_FAILURE_PRIOR, _CONSERVATIVE)})
"""Every prior by its name."""
