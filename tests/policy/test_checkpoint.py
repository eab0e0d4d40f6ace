"""What is kept, as exact lists of surviving steps; and at which step the next save comes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.errors import ConfigError
from relight.policy.checkpoint import (
    Cadence,
    CadenceFacts,
    RetentionRule,
    SaveDecision,
    StoredCheckpoint,
    decide_next_save,
    decide_retention,
    parse_every,
)


def checkpoint(step: int, generation: int = 1, *, verified: bool = True, **facts) -> StoredCheckpoint:
    return StoredCheckpoint(step=step, generation=generation, verified=verified, **facts)


def survivors(checkpoints: list[StoredCheckpoint], rule: RetentionRule, protect=()) -> list[int]:
    removed = {(r.step, r.generation) for r in decide_retention(checkpoints, rule, protect)}
    return sorted(c.step for c in checkpoints if (c.step, c.generation) not in removed)


def run_of_saves(steps: range, rule: RetentionRule, **facts: Callable[[int], object]) -> list[int]:
    """Save at each step, verify at once, apply the rule each time; return the steps that are left."""
    stored: list[StoredCheckpoint] = []
    for step in steps:
        stored.append(checkpoint(step, **{name: value(step) for name, value in facts.items()}))
        kept = survivors(stored, rule)
        stored = [c for c in stored if c.step in kept]
    return [c.step for c in stored]


@pytest.mark.parametrize(
    ("steps", "keep", "left"),
    [
        ([98, 99, 100, 101], 2, [100, 101]),
        ([9, 10], 1, [10]),
        ([999_999_999_999, 10**12, 10**12 + 1], 2, [10**12, 10**12 + 1]),
        ([9000, 9100, 9900, 10000], 3, [9100, 9900, 10000]),
    ],
)
def test_hb01_the_newest_steps_by_number_stay(steps: list[int], keep: int, left: list[int]) -> None:
    for order in (steps, steps[::-1], sorted(steps, key=str)):
        assert survivors([checkpoint(step) for step in order], RetentionRule(keep=keep)) == left


def test_keep_last_over_a_run() -> None:
    assert run_of_saves(range(1, 51), RetentionRule(keep=3)) == [48, 49, 50]


def test_keep_every_stays_beside_the_newest() -> None:
    assert run_of_saves(range(1, 51), RetentionRule(keep=2, keep_every=10)) == [10, 20, 30, 40, 49, 50]
    assert run_of_saves(range(2, 45, 2), RetentionRule(keep=2, keep_every=15)) == [30, 42, 44]


def test_the_sparse_tail_doubles_its_distances() -> None:
    assert run_of_saves(range(1, 51), RetentionRule(keep=2, sparse_tail=True)) == [1, 33, 41, 45, 47, 49, 50]
    thousand = run_of_saves(range(1, 1001), RetentionRule(keep=1, sparse_tail=True))
    assert thousand == [1, 513, 769, 897, 961, 977, 985, 993, 997, 999, 1000]


def test_keep_best_survives_by_its_metric() -> None:
    losses = {1: 3.0, 2: 1.5, 3: float("nan"), 4: 2.0, 5: 1.5, 6: 1.9, 7: 1.8, 8: None}
    facts = {"metrics": lambda step: (("loss", losses[step]),)}
    assert run_of_saves(range(1, 9), RetentionRule(keep=1, keep_best=("loss", "min")), **facts) == [5, 8]
    assert run_of_saves(range(1, 9), RetentionRule(keep=1, keep_best=("loss", "max")), **facts) == [1, 8]
    assert run_of_saves(range(1, 9), RetentionRule(keep=1, keep_best=("other", "max")), **facts) == [8]


def test_hb02_nothing_goes_before_a_newer_one_is_verified() -> None:
    rule = RetentionRule(keep=1)
    assert survivors([checkpoint(1), checkpoint(2, verified=False)], rule) == [1, 2]
    assert survivors([checkpoint(1, verified=False), checkpoint(2, verified=False)], rule) == [1, 2]
    assert survivors([checkpoint(1), checkpoint(2)], rule) == [2]
    assert survivors([checkpoint(1, verified=False), checkpoint(2)], rule) == [2]


def test_checkpoints_that_are_not_verified_do_not_count() -> None:
    stored = [checkpoint(step, verified=step in (2, 4, 6)) for step in range(1, 8)]
    assert survivors(stored, RetentionRule(keep=2)) == [4, 5, 6, 7]


def test_pinned_protected_and_foreign_checkpoints_stay() -> None:
    stored = [
        checkpoint(1, pinned=True),
        checkpoint(2),
        checkpoint(3, is_own=False),
        checkpoint(4),
        checkpoint(5),
    ]
    assert survivors(stored, RetentionRule(keep=1), protect={(2, 1)}) == [1, 2, 3, 5]


def test_what_a_later_generation_left_behind_goes_once_that_one_has_a_verified_checkpoint() -> None:
    left_behind = [checkpoint(step, on_lineage=step <= 50) for step in (40, 50, 60, 70)]
    rule = RetentionRule(keep=5)
    assert survivors(left_behind, rule) == [40, 50, 60, 70]
    assert survivors([*left_behind, checkpoint(60, 2, verified=False)], rule) == [40, 50, 60, 60, 70]
    assert survivors([*left_behind, checkpoint(55, 2)], rule) == [40, 50, 55]


def test_every_removal_says_why() -> None:
    removals = decide_retention([checkpoint(1), checkpoint(2), checkpoint(3)], RetentionRule(keep=1))
    assert [(r.step, r.generation, r.reason) for r in removals] == [
        (1, 1, "2 newer verified, keep is 1"),
        (2, 1, "1 newer verified, keep is 1"),
    ]


@pytest.mark.parametrize(
    "wrong",
    [{"keep": 0}, {"keep": -1}, {"keep": 1, "keep_every": 0}, {"keep": 1, "keep_best": ("x", "best")}],
)
def test_hb02_rules_that_make_no_sense_are_refused(wrong) -> None:
    with pytest.raises(ConfigError, match="keep"):
        RetentionRule(**wrong)


facts_of_a_checkpoint = st.builds(
    StoredCheckpoint,
    step=st.integers(0, 30),
    generation=st.integers(1, 3),
    verified=st.booleans(),
    pinned=st.booleans(),
    on_lineage=st.booleans(),
    is_own=st.booleans(),
    metrics=st.tuples(st.tuples(st.just("loss"), st.floats() | st.none())),
)
rules = st.builds(
    RetentionRule,
    keep=st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 10),
    keep_best=st.none() | st.just(("loss", "min")),
    sparse_tail=st.booleans(),
)


@given(st.lists(facts_of_a_checkpoint, max_size=12, unique_by=lambda c: (c.step, c.generation)), rules)
def test_the_newest_verified_checkpoints_are_never_removed(
    stored: list[StoredCheckpoint], rule: RetentionRule
) -> None:
    removed = {(r.step, r.generation) for r in decide_retention(stored, rule)}
    good = sorted((c for c in stored if c.on_lineage and c.verified), key=lambda c: (c.step, c.generation))
    assert not removed & {(c.step, c.generation) for c in good[-rule.keep :]}
    assert not removed & {(c.step, c.generation) for c in stored if c.pinned or not c.is_own}
    assert bool(removed) <= bool(good)


def facts(step: int = 100, **known) -> CadenceFacts:
    usual = {
        "num_measured_steps": 50,
        "step_seconds": 0.5,
        "save_cost_seconds": 0.001,
        "drain_seconds": 1.0,
        "mtbf_seconds": 20_000.0,
    }
    return CadenceFacts(step=step, **(usual | known))


def decided(cadence: Cadence, **known) -> tuple[int, bool]:
    decision, reason = decide_next_save(cadence, facts(**known))
    assert reason
    return decision.step, decision.is_save


@pytest.mark.parametrize(("step", "following"), [(0, 10), (9, 10), (10, 20), (15, 20)])
def test_a_number_of_steps_gives_its_multiples(step: int, following: int) -> None:
    unknown = {
        "step_seconds": None,
        "save_cost_seconds": None,
        "drain_seconds": None,
        "num_measured_steps": 0,
    }
    assert decided(Cadence(steps=10), step=step, **unknown) == (following, True)


def test_a_duration_becomes_steps_by_the_measured_step_time() -> None:
    assert decided(Cadence(seconds=60.0)) == (220, True)
    assert decided(Cadence(seconds=60.0), seconds_since_save=50.0) == (120, True)
    assert decided(Cadence(seconds=60.0), seconds_since_save=70.0) == (101, True)
    assert decided(Cadence(seconds=0.1)) == (101, True)


def test_while_the_step_time_is_uncertain_the_decision_is_put_off() -> None:
    assert decided(Cadence(seconds=60.0), step_seconds=None, num_measured_steps=0) == (101, False)
    assert decided(Cadence(seconds=60.0), num_measured_steps=1) == (102, False)
    assert decided(Cadence(seconds=60.0), num_measured_steps=4) == (105, False)
    assert decided(Cadence(seconds=60.0), num_measured_steps=5) == (220, True)
    assert decided(Cadence(seconds=1.0), num_measured_steps=1) == (102, True)


def test_auto_saves_at_once_to_learn_the_cost() -> None:
    assert decided(Cadence(), step=0, save_cost_seconds=None, step_seconds=None, num_measured_steps=0) == (
        2,
        True,
    )


def test_auto_takes_youngs_interval() -> None:
    # sqrt(2 * 0.001 * 20000) = 6.32 s = 12.6 steps of half a second
    assert decided(Cadence()) == (113, True)


def test_auto_stays_within_its_bounds() -> None:
    assert decided(Cadence(), drain_seconds=10.0) == (140, True)
    assert decided(Cadence(), step_seconds=60.0) == (102, True)
    assert decided(Cadence(), save_cost_seconds=1e4) == (100 + 3600, True)
    assert decided(Cadence(), save_cost_seconds=1e4, drain_seconds=1000.0) == (100 + 4000, True)
    assert decided(Cadence(), save_cost_seconds=0.0, drain_seconds=None) == (102, True)


@given(
    st.integers(0, 10**12),
    st.none() | st.floats(0, 1e6),
    st.none() | st.floats(0, 1e6),
    st.none() | st.floats(0, 1e6),
    st.floats(1e-3, 1e9),
    st.integers(0, 100),
)
def test_a_decision_is_always_ahead(  # noqa: PLR0917
    step, step_seconds, cost, drain, mtbf, measured
) -> None:
    known = CadenceFacts(
        step=step,
        num_measured_steps=measured,
        step_seconds=step_seconds,
        save_cost_seconds=cost,
        drain_seconds=drain,
        mtbf_seconds=mtbf,
    )
    for cadence in (Cadence(), Cadence(seconds=60.0), Cadence(steps=7)):
        assert decide_next_save(cadence, known)[0].step > step


@pytest.mark.parametrize(
    ("value", "cadence"),
    [
        (10, Cadence(steps=10)),
        ("10m", Cadence(seconds=600.0)),
        ("1h30m", Cadence(seconds=5400.0)),
        ("auto", Cadence()),
    ],
)
def test_every_is_read(value, cadence: Cadence) -> None:
    assert parse_every(value) == cadence


@pytest.mark.parametrize("value", [0, -1, True, 1.5, None, "often", "0s"])
def test_every_that_means_nothing_is_refused(value) -> None:
    with pytest.raises(ConfigError):
        parse_every(value)


def test_a_cadence_is_one_thing() -> None:
    with pytest.raises(ConfigError, match="not both"):
        Cadence(steps=1, seconds=1.0)
    assert SaveDecision(step=1, is_save=True) != SaveDecision(step=1, is_save=False)


def test_digits_from_a_command_line_are_steps() -> None:
    assert parse_every("20") == Cadence(steps=20)
