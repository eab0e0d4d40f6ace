"""How much useful training to put between two checkpoints: Young, Daly and the exact optimum.

Symbols, all in seconds: C, the cost of a checkpoint, is the time for which it keeps training from going on (the
stall, not the time until it is durable: latency does not move the optimum); M is the mean time between failures
of the whole job; tau is the training between the end of one checkpoint and the start of the next.
Failures are taken as exponential and may also strike during a checkpoint or a recovery. Pure functions.
"""

from __future__ import annotations

import math

from relight.errors import ConfigError

__all__ = ["daly_interval_seconds", "optimal_interval_seconds", "young_interval_seconds"]

# Below this C/M the series of Daly is exact to the last bit, while the equation it solves loses its digits.
_SERIES_BELOW = 1e-10
# Above this C/M the exact interval equals M to the last bit.
_LIMIT_ABOVE = 36.0
_MAX_NEWTON_STEPS = 64


def young_interval_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """Return Young's first-order interval, tau = sqrt(2 C M).

    Good while C is much smaller than M; beyond that it is too long (at C = M / 18 by an eighth).

    Source: J. W. Young, "A first order approximation to the optimum checkpoint interval",
    Communications of the ACM 17 (1974).

    Raises:
        ConfigError: C is negative, M is not positive, or either is not finite.
    """
    _check(cost_seconds, mtbf_seconds)
    # Two roots: the product C M could leave the range of a float.
    return math.sqrt(2.0 * cost_seconds) * math.sqrt(mtbf_seconds)


def daly_interval_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """Return Daly's higher-order interval.

    With s = sqrt(C / (2 M)): tau = sqrt(2 C M) (1 + s / 3 + s**2 / 9) - C if C < 2 M, else tau = M.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22 (2006), equation 37.

    Raises:
        ConfigError: C is negative, M is not positive, or either is not finite.
    """
    young = young_interval_seconds(cost_seconds, mtbf_seconds)
    if cost_seconds >= 2.0 * mtbf_seconds:
        return mtbf_seconds
    s = math.sqrt(cost_seconds / mtbf_seconds / 2.0)
    return young * (1.0 + s / 3.0 + s * s / 9.0) - cost_seconds


def optimal_interval_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """Return the interval that maximises the expected share of useful training, exactly.

    The goodput G(tau) = tau / (exp(R/M) (M + D) (exp((tau + C)/M) - 1)), with recovery time R and downtime D, is
    greatest at tau = M (1 + W0(-exp(-1 - C/M))), whatever R and D are; W0 is the principal branch of Lambert's W.
    Here x = tau / M is found from the same condition, (1 - x) exp(x) = exp(-C/M), by Newton's method.

    Source: the expectation is that of Daly (2006, see `daly_interval_seconds`); the condition sets its derivative to 0.

    Raises:
        ConfigError: C is negative, M is not positive, or either is not finite.
    """
    _check(cost_seconds, mtbf_seconds)
    ratio = cost_seconds / mtbf_seconds
    if ratio < _SERIES_BELOW:
        return daly_interval_seconds(cost_seconds, mtbf_seconds)
    if ratio > _LIMIT_ABOVE:
        return mtbf_seconds
    return mtbf_seconds * _solve(ratio)


def _solve(ratio: float) -> float:
    """Return x in (0, 1) with log(1 - x) + x + ratio = 0.

    The left side is concave and falls, and it is negative at both starting points: Newton's method comes down to
    the root from the right and never crosses it, so the first step that does not go left is the last digit.
    """
    x = min(math.sqrt(2.0 * ratio), 1.0 - math.exp(-1.0 - ratio))
    for _ in range(_MAX_NEWTON_STEPS):
        following = x + (math.log1p(-x) + x + ratio) * (1.0 - x) / x
        if following >= x:
            break
        x = following
    return x


def _check(cost_seconds: float, mtbf_seconds: float) -> None:
    if not 0.0 <= cost_seconds < math.inf:
        raise ConfigError(f"cost_seconds must be finite and not negative, not {cost_seconds!r}")
    if not 0.0 < mtbf_seconds < math.inf:
        raise ConfigError(f"mtbf_seconds must be finite and positive, not {mtbf_seconds!r}")
