"""When to save next, and which stored checkpoints to remove. Pure: facts in, decision and reason out."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from relight.errors import ConfigError
from relight.policy.interval import young_interval_seconds
from relight.units import parse_duration

__all__ = [
    "MAX_AUTO_SECONDS",
    "Cadence",
    "CadenceFacts",
    "Removal",
    "RetentionRule",
    "SaveDecision",
    "StoredCheckpoint",
    "decide_next_save",
    "decide_retention",
    "parse_every",
]

Place = tuple[int, int]
"""(step, generation) of a checkpoint."""

MAX_AUTO_SECONDS = 30 * 60.0
"""The longest that "auto" trains without a save: a failure then costs at most half an hour of work."""

_MIN_STEPS = 2
_ENOUGH_STEPS = 5
_DRAINS_PER_INTERVAL = 2.0
_TINY_SECONDS = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRule:
    """What to keep on one tier.

    Attributes:
        keep: how many of the newest verified checkpoints stay, at least 1.
        keep_every: checkpoints whose step is a multiple of this stay for good; None for none.
        keep_best: metric name and which end of it is better; the best verified checkpoint stays. None for none.
        sparse_tail: older checkpoints stay at distances that double, since silent corruption may be found late.
    """

    keep: int
    keep_every: int | None = None
    keep_best: tuple[str, Literal["min", "max"]] | None = None
    sparse_tail: bool = False

    def __post_init__(self) -> None:
        """Refuse rules that would leave nothing."""
        if self.keep < 1:
            raise ConfigError(f"keep={self.keep} would leave no checkpoint to restore; give 1 or more")
        if self.keep_every is not None and self.keep_every < 1:
            raise ConfigError(f"keep_every={self.keep_every}: give a number of steps, or None")
        if self.keep_best is not None and self.keep_best[1] not in ("min", "max"):
            raise ConfigError(f"keep_best={self.keep_best!r}: give (metric, 'min') or (metric, 'max')")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """The facts about one committed checkpoint that decide whether it stays.

    Attributes:
        is_own: this run made it; a checkpoint of another run under the same root is never removed.
        on_lineage: the newest generation builds on it.
        metrics: as passed when it was saved; values that are not numbers do not count.
    """

    step: int
    generation: int
    verified: bool
    pinned: bool = False
    on_lineage: bool = True
    is_own: bool = True
    metrics: tuple[tuple[str, float | None], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """One checkpoint to remove, and why."""

    step: int
    generation: int
    reason: str


def decide_retention(
    checkpoints: Sequence[StoredCheckpoint], rule: RetentionRule, protect: Collection[Place] = ()
) -> list[Removal]:
    """Return the checkpoints to remove, oldest first.

    The newest `keep` verified checkpoints of the lineage always stay, and so does everything newer than the oldest
    of them; while fewer are verified, everything stays. Pinned, protected and other runs' checkpoints stay too. A
    checkpoint that a later generation left behind goes once one of a later generation is verified.

    Args:
        checkpoints: all committed ones, in any order.
        rule: what to keep.
        protect: places that stay whatever the rule says, such as the one the run resumed from.
    """
    lineage = sorted(
        (c for c in checkpoints if c.on_lineage), key=lambda c: (c.step, c.generation), reverse=True
    )
    good = [c for c in lineage if c.verified]
    kept = _kept_places(lineage, good, rule)
    removals = []
    for checkpoint in sorted(checkpoints, key=lambda c: (c.step, c.generation)):
        place = (checkpoint.step, checkpoint.generation)
        if place in kept or place in protect or checkpoint.pinned or not checkpoint.is_own:
            continue
        if checkpoint.on_lineage:
            if len(good) < rule.keep or checkpoint.step >= good[rule.keep - 1].step:
                continue
            newer = sum(c.step > checkpoint.step for c in good)
            reason = f"{newer} newer verified, keep is {rule.keep}"
        else:
            later = [c.generation for c in good if c.generation > checkpoint.generation]
            if not later:
                continue
            reason = f"generation {max(later)} does not build on it"
        removals.append(Removal(step=checkpoint.step, generation=checkpoint.generation, reason=reason))
    return removals


def _kept_places(
    lineage: Sequence[StoredCheckpoint], good: Sequence[StoredCheckpoint], rule: RetentionRule
) -> set[Place]:
    """Return what the rule keeps beyond the newest ones; both sequences are newest first."""
    kept: set[Place] = set()
    if rule.keep_every is not None:
        kept |= {(c.step, c.generation) for c in lineage if c.step % rule.keep_every == 0}
    if rule.keep_best is not None:
        # One that is not verified yet may turn out to be the best; until then the best verified one stays as well.
        bests = (_best(good, *rule.keep_best), _best(lineage, *rule.keep_best))
        kept |= {(best.step, best.generation) for best in bests if best is not None}
    if rule.sparse_tail:
        kept |= _sparse_tail(good, rule.keep)
    return kept


def _best(
    newest_first: Sequence[StoredCheckpoint], metric: str, better: Literal["min", "max"]
) -> StoredCheckpoint | None:
    """Return the checkpoint with the best finite value of `metric`, the newest of equal ones."""
    sign = 1.0 if better == "min" else -1.0
    scored = [
        (sign * value, at)
        for at, checkpoint in enumerate(newest_first)
        for name, value in checkpoint.metrics
        if name == metric and value is not None and math.isfinite(value)
    ]
    return newest_first[min(scored)[1]] if scored else None


def _sparse_tail(newest_first: Sequence[StoredCheckpoint], keep: int) -> set[Place]:
    """Return the oldest checkpoint of each age range [d, 2d), [2d, 4d), ... behind the newest.

    d is the age of the first one that keep-last would drop. Keeping the oldest of a range lets it grow into the
    next one, so the tail never thins out; it holds about log2(steps / d) checkpoints.
    """
    if len(newest_first) <= keep:
        return set()
    newest = newest_first[0].step
    unit = max(1, newest - newest_first[keep].step)
    oldest_of: dict[int, StoredCheckpoint] = {}
    for checkpoint in newest_first[keep:]:
        oldest_of[((newest - checkpoint.step) // unit).bit_length()] = checkpoint
    return {(c.step, c.generation) for c in oldest_of.values()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """How often to save: every `steps`, or every `seconds`, or with neither as often as pays ("auto")."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is not a cadence."""
        if self.steps is not None and self.seconds is not None:
            raise ConfigError("a cadence is a number of steps or of seconds, not both")
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"every={self.steps}: give a number of steps of 1 or more")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ConfigError(f"every={self.seconds} seconds: give a positive duration")


@dataclass(frozen=True, slots=True, kw_only=True)
class CadenceFacts:
    """What is known when the next save is decided.

    Attributes:
        step: optimizer steps done.
        num_measured_steps: how many steps `step_seconds` rests on.
        step_seconds: typical time of a step, None while none was measured.
        save_cost_seconds: for how long a save keeps training from going on, None while none was measured.
        drain_seconds: how long a save takes until it is durable, None while none was measured.
        mtbf_seconds: expected time between failures of the whole job.
        seconds_since_save: training time since the last save, or since the start.
    """

    step: int
    num_measured_steps: int
    step_seconds: float | None
    save_cost_seconds: float | None
    drain_seconds: float | None
    mtbf_seconds: float
    seconds_since_save: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveDecision:
    """At `step` (a number of steps done) save, or, with `is_save` False, decide again with better measurements."""

    step: int
    is_save: bool


def parse_every(value: int | str) -> Cadence:
    """Return the cadence that a user wrote: a number of steps, a duration such as "10m", or "auto".

    Raises:
        ConfigError: it is none of these.
    """
    if value == "auto":
        return Cadence()
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f'every={value!r}: give a number of steps, a duration such as "10m", or "auto"')
    if isinstance(value, int):
        return Cadence(steps=value)
    if value.isdecimal():
        # What every command-line option delivers.
        return Cadence(steps=int(value))
    return Cadence(seconds=parse_duration(value))


def decide_next_save(cadence: Cadence, facts: CadenceFacts) -> tuple[SaveDecision, str]:
    """Return when to save next and why; to be asked at the start, after each save, and when a decision says so.

    A number of steps gives its multiples. A duration is turned into steps by the measured step time. "auto" takes
    Young's interval for the measured cost, at most half an hour, but at least two steps and twice the drain time (or
    saves would queue up); its first save comes at once, since only a save tells its cost.
    """
    if cadence.steps is not None:
        following = (facts.step // cadence.steps + 1) * cadence.steps
        return SaveDecision(step=following, is_save=True), f"every {cadence.steps} steps"
    if cadence.seconds is not None:
        return _after(cadence.seconds, facts, 1, f"every {cadence.seconds:g} s")
    if facts.save_cost_seconds is None:
        decision = SaveDecision(step=facts.step + _MIN_STEPS, is_save=True)
        return decision, "the first save measures the cost"
    return _after(*_auto_interval(facts))


def _auto_interval(facts: CadenceFacts) -> tuple[float, CadenceFacts, int, str]:
    cost_seconds = facts.save_cost_seconds or 0.0
    seconds = young_interval_seconds(cost_seconds, facts.mtbf_seconds)
    reason = (
        f"Young: {seconds:.3g} s for a cost of {cost_seconds:.3g} s and an MTBF of {facts.mtbf_seconds:.3g} s"
    )
    if seconds > MAX_AUTO_SECONDS:
        seconds, reason = MAX_AUTO_SECONDS, "at most half an hour of training at risk"
    drain_seconds = facts.drain_seconds or 0.0
    if seconds < _DRAINS_PER_INTERVAL * drain_seconds:
        seconds, reason = (
            _DRAINS_PER_INTERVAL * drain_seconds,
            f"twice the drain time of {drain_seconds:.3g} s",
        )
    return seconds, facts, _MIN_STEPS, reason


def _after(seconds: float, facts: CadenceFacts, min_steps: int, reason: str) -> tuple[SaveDecision, str]:
    """Turn an interval since the last save into a step, or into a second look while the step time is uncertain."""
    if facts.step_seconds is None:
        return SaveDecision(step=facts.step + 1, is_save=False), "no step was measured yet"
    left_seconds = seconds - facts.seconds_since_save
    # To the nearest step: rounding up or down each time would drift away from the interval.
    num_steps = max(min_steps, round(left_seconds / max(facts.step_seconds, _TINY_SECONDS)))
    sure_steps = facts.num_measured_steps + 1
    if facts.num_measured_steps < _ENOUGH_STEPS and num_steps > sure_steps:
        # The first steps are slow (warm-up, compilation): go as far as was measured, then look again.
        decision = SaveDecision(step=facts.step + sure_steps, is_save=False)
        return decision, f"{facts.num_measured_steps} measured steps are too few"
    return SaveDecision(step=facts.step + num_steps, is_save=True), reason
