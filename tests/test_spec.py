"""Failure priors: each says where it comes from and gives the mean time between failures of a job."""

from __future__ import annotations

import pytest

from relight.errors import ConfigError
from relight.spec import DEFAULT_FAILURE_PRIOR, FAILURE_PRIORS, FailurePrior


@pytest.mark.parametrize("name", sorted(FAILURE_PRIORS))
def test_every_prior_names_its_source_and_month(name: str) -> None:
    prior = FAILURE_PRIORS[name]
    assert prior.source
    assert len(prior.dated) == len("2024-07")


@pytest.mark.parametrize(
    ("num_devices", "hours"),
    [(1000, 10.0), (1024, 9.765625), (4096, 2.44140625), (16_384, 0.6103515625), (64, 156.25)],
)
def test_failures_of_the_parts_add_up(num_devices: int, hours: float) -> None:
    seconds = FAILURE_PRIORS["conservative"].job_mtbf_seconds(num_devices)
    assert seconds / 3600.0 == pytest.approx(hours, rel=1e-12)


def test_default_prior_reproduces_the_run_it_is_taken_from() -> None:
    hours = DEFAULT_FAILURE_PRIOR.job_mtbf_seconds(16_384) / 3600.0
    assert 54 * 24 / hours == pytest.approx(419, rel=1e-3)


def test_a_job_has_at_least_one_device() -> None:
    with pytest.raises(ConfigError, match="num_devices"):
        DEFAULT_FAILURE_PRIOR.job_mtbf_seconds(0)


@pytest.mark.parametrize("hours", [0.0, -1.0, float("nan"), float("inf")])
def test_a_prior_is_positive_and_finite(hours: float) -> None:
    with pytest.raises(ConfigError, match="device_mtbf_hours"):
        FailurePrior(name="x", device_mtbf_hours=hours, source="x", dated="2026-01")
