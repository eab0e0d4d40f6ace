"""Checkpoint intervals against published and separately computed values, and against the goodput they maximise."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.errors import ConfigError
from relight.policy.interval import daly_interval_seconds, optimal_interval_seconds, young_interval_seconds

FORMULAS = (young_interval_seconds, daly_interval_seconds, optimal_interval_seconds)

# Cost and mean time between failures in minutes, then Young, Daly and the exact optimum in minutes.
KNOWN = [
    (10.0, 180.0, 60.000000, 53.518519, 53.526904),
    (5.0, 180.0, 42.426407, 39.158546, 39.160632),
    (1.0, 180.0, 18.973666, 18.312855, 18.312938),
    (0.5, 185.6, 13.623509, 13.292215, 13.292235),
    (10.0, 60.0, 34.641016, 28.295100, 28.320515),
    (30.0, 60.0, 60.000000, 41.666667, 41.897426),
    (60.0, 180.0, 146.969385, 109.691040, 109.998034),
    (120.0, 60.0, 120.000000, 60.000000, 56.851854),
]


def goodput(interval: float, cost: float, mtbf: float, recovery: float) -> float:
    """Return the exact expected share of useful training, for exponential failures."""
    return interval / (math.exp(recovery / mtbf) * mtbf * math.expm1((interval + cost) / mtbf))


@pytest.mark.parametrize(("cost", "mtbf", "young", "daly", "exact"), KNOWN)
def test_intervals_equal_the_known_values(
    cost: float, mtbf: float, young: float, daly: float, exact: float
) -> None:
    minutes = [formula(cost * 60.0, mtbf * 60.0) / 60.0 for formula in FORMULAS]
    assert minutes == pytest.approx([young, daly, exact], abs=5e-7)


def test_interval_of_an_overlapped_save_uses_only_its_stall() -> None:
    values = [formula(5.0, 10_800.0) for formula in FORMULAS]
    assert values == pytest.approx([328.633535, 325.308654, 325.308688], abs=5e-7)


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (30.0, 0.599319),
        (50.0, 0.628308),
        (53.5269, 0.628739),
        (60.0, 0.627507),
        (80.0, 0.613062),
        (120.0, 0.563321),
    ],
)
def test_goodput_of_these_tests_equals_the_known_values(interval: float, expected: float) -> None:
    assert goodput(interval, 10.0, 180.0, 20.0) == pytest.approx(expected, abs=5e-7)


@given(ratio=st.floats(min_value=1e-6, max_value=30.0), recovery=st.floats(min_value=0.0, max_value=5.0))
def test_no_other_interval_gives_more_goodput_whatever_the_recovery_time(
    ratio: float, recovery: float
) -> None:
    best = optimal_interval_seconds(ratio, 1.0)
    greatest = goodput(best, ratio, 1.0, recovery)
    assert greatest >= goodput(best * 1.01, ratio, 1.0, recovery)
    assert greatest >= goodput(best * 0.99, ratio, 1.0, recovery)


@given(ratio=st.floats(min_value=1e-9, max_value=30.0))
def test_optimum_solves_its_equation(ratio: float) -> None:
    x = optimal_interval_seconds(ratio, 1.0)
    assert (1.0 - x) * math.exp(x) == pytest.approx(math.exp(-ratio), rel=1e-9, abs=1e-15)


@given(cost=st.floats(min_value=1e-12, max_value=1e12), mtbf=st.floats(min_value=1e-3, max_value=1e12))
def test_optimum_is_at_most_young_and_at_most_the_mtbf(cost: float, mtbf: float) -> None:
    bound = min(young_interval_seconds(cost, mtbf), mtbf)
    assert 0.0 < optimal_interval_seconds(cost, mtbf) <= bound * (1 + 1e-12)


@given(exponent=st.floats(min_value=-14.0, max_value=3.0))
def test_optimum_grows_with_the_cost_across_all_branches(exponent: float) -> None:
    cost = 10.0**exponent
    assert optimal_interval_seconds(cost * 1.01, 1.0) >= optimal_interval_seconds(cost, 1.0)


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_free_checkpoint_is_taken_all_the_time(formula: object) -> None:
    assert formula(0.0, 3600.0) == 0.0  # type: ignore[operator]


def test_hopeless_jobs_get_an_interval_not_an_overflow() -> None:
    assert optimal_interval_seconds(800.0, 1.0) == 1.0


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize(
    ("cost", "mtbf"),
    [
        (-1.0, 1.0),
        (math.nan, 1.0),
        (math.inf, 1.0),
        (1.0, 0.0),
        (1.0, -1.0),
        (1.0, math.nan),
        (1.0, math.inf),
    ],
)
def test_what_is_no_time_is_refused(formula: object, cost: float, mtbf: float) -> None:
    with pytest.raises(ConfigError, match="_seconds must be finite"):
        formula(cost, mtbf)  # type: ignore[operator]
