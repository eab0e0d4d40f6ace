"""Names and numbers, and which generation builds on what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.manifest.lineage import trace
from relight.manifest.manifest import Parent
from relight.manifest.names import (
    generation_name,
    image_name,
    parse_generation_name,
    parse_step_dir,
    record_name,
    step_dir,
)


def parent(step: int, generation: int, source: str | None = None) -> Parent:
    return Parent(step=step, generation=generation, source=source)


def test_names_are_these() -> None:
    assert step_dir(1000, 2) == "step-000000001000.g0002"
    assert image_name(7, 1, 3) == "step-000000000007.g0001/rank-00003.safetensors"
    assert record_name(7, 1, 123456) == "step-000000000007.g0001/rank-123456.json"
    assert generation_name(12345) == "generations/g12345.json"


@given(st.integers(0, 10**15), st.integers(0, 10**6))
def test_a_step_directory_is_read_back_as_its_numbers(step: int, generation: int) -> None:
    assert parse_step_dir(step_dir(step, generation)) == (step, generation)
    assert parse_generation_name(generation_name(generation)) == generation


@pytest.mark.parametrize(
    "name",
    [
        "",
        "step-1.g0001",
        "step-000000000001",
        "step-000000000001.g1",
        "step-0000000000001.g0001",
        "step-000000000001.g00001",
        "step-00000000000\u0661.g0001",
        "step-000000000001.g0001\n",
        "step--00000000001.g0001",
        "other",
    ],
)
def test_other_names_are_no_step_directories(name: str) -> None:
    assert parse_step_dir(name) is None
    assert parse_generation_name(name) is None


def test_without_generations_nothing_is_on_the_lineage() -> None:
    assert trace({}).newest is None
    assert not trace({}).holds(1, 1)


def test_all_steps_of_the_newest_count_and_those_of_a_parent_up_to_its_step() -> None:
    lineage = trace({1: None, 2: parent(50, 1), 3: parent(80, 2)})
    assert lineage.newest == 3
    assert [lineage.holds(step, 3) for step in (1, 81, 10**12)] == [True, True, True]
    assert [lineage.holds(step, 2) for step in (51, 80, 81)] == [True, True, False]
    assert [lineage.holds(step, 1) for step in (1, 50, 51)] == [True, True, False]


def test_a_generation_that_was_left_out_does_not_count() -> None:
    lineage = trace({1: None, 2: parent(50, 1), 3: parent(40, 1)})
    assert (lineage.holds(40, 1), lineage.holds(41, 1), lineage.holds(60, 2)) == (True, False, False)


def test_an_older_step_of_a_grandparent_is_limited_by_every_generation_between() -> None:
    lineage = trace({1: None, 2: parent(50, 1), 3: parent(30, 2)})
    assert (lineage.holds(30, 1), lineage.holds(31, 1)) == (True, False)


@pytest.mark.parametrize(
    "parents",
    [
        {1: None, 2: None},
        {1: None, 2: parent(5, 1, source="file:///other")},
        {1: None, 2: parent(5, 2)},
        {1: None, 2: parent(5, 7)},
    ],
)
def test_a_lineage_ends_where_the_run_started_fresh_or_from_elsewhere(parents) -> None:
    lineage = trace(parents)
    assert lineage.holds(1, 2)
    assert not lineage.holds(1, 1)
