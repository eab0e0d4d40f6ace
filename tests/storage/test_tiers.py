"""Tiers as users write them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from relight.errors import ConfigError
from relight.storage.tiers import Tier, parse_tiers, tier_url


def urls(tiers: tuple[Tier, ...]) -> list[str]:
    return [tier.url for tier in tiers]


@pytest.mark.parametrize("spelling", ["{}/runs", "file://{}/runs", "{}/x/../runs", "{}//runs", "{}/runs/"])
def test_every_spelling_of_a_place_is_one_tier(tmp_path: Path, spelling: str) -> None:
    assert tier_url(spelling.format(tmp_path)) == f"file://{tmp_path}/runs"


def test_a_relative_path_is_taken_from_the_working_directory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert urls(parse_tiers("runs/gpt")) == ["ram", f"file://{tmp_path}/runs/gpt"]
    assert urls(parse_tiers(Path("runs"))) == ["ram", f"file://{tmp_path}/runs"]


def test_one_place_gets_memory_in_front_of_it_and_a_list_is_taken_as_it_is(tmp_path: Path) -> None:
    place = Tier(tmp_path, keep=7)
    assert parse_tiers(place) == (Tier("ram"), place)
    assert parse_tiers([place]) == (place,)
    assert parse_tiers(["ram", tmp_path / "a", place], keep=5) == (
        Tier("ram", keep=5),
        Tier(tmp_path / "a", keep=5),
        place,
    )


def test_settings_have_these_defaults_and_cannot_be_changed(tmp_path: Path) -> None:
    tier = Tier(tmp_path)
    assert (tier.every, tier.keep, tier.keep_every, tier.scope, tier.bandwidth) == (1, 3, None, "auto", None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        tier.keep = 5
    assert Tier(tmp_path, bandwidth="200MB/s").bandwidth == 200e6
    assert Tier(tmp_path, bandwidth=10).bandwidth == 10.0


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"every": 0}, "every=0.*1 or more"),
        ({"keep": 0}, "keep=0.*1 or more"),
        ({"keep": True}, "whole number"),
        ({"keep_every": -5}, "keep_every=-5"),
        ({"scope": "global"}, '"auto", "shared" or "node"'),
        ({"bandwidth": 0}, "bytes per second"),
        ({"bandwidth": float("nan")}, "bytes per second"),
        ({"bandwidth": "fast"}, "fast"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        Tier("runs", **settings)


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ("s3://bucket/run", 'a tier is "ram", a directory'),
        ("peer", 'a tier is "ram", a directory'),
        ("", "give a directory"),
        ("ram", "none outlives"),
        (["ram"], "none outlives"),
        ([], "none outlives"),
        (["a", "./a"], "given twice"),
        (["a", "ram"], "put it first"),
        (5, "give a path"),
        ([5], "no tier"),
        (b"runs", "no tier"),
        (None, "give a path"),
    ],
)
def test_tiers_that_make_no_sense_are_refused(value, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        parse_tiers(value)
